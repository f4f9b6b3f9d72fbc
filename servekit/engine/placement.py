"""Which GPUs each replica gets: a pure allocator.

A share below 1 goes to the fullest device that still has room for it (best fit), which leaves whole
devices free for those who need them; whole numbers take devices that nobody uses. A slice of a
device (MIG) counts as one, but a process can use only one slice, so two or more are whole devices.
What can't be met is refused with what is there and what was asked; nothing falls back to the CPU.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from servekit.errors import ResourceError

_TOLERANCE = 1e-6  # shares are written as decimals: ten times 0.1 must fill a device


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU.

    Attributes:
        id: As `CUDA_VISIBLE_DEVICES` takes it.
        memory: Bytes; 0 is not known.
        is_slice: It is a part of a device, cut by the driver (MIG).
    """

    id: str
    memory: int = 0
    is_slice: bool = False


Inventory: TypeAlias = tuple[Device, ...]


class Placement:
    """Who holds how much of which device.

    Args:
        inventory: The devices.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._shares: dict[str, dict[str, float]] = {device.id: {} for device in inventory}

    def place(self, replica_id: str, gpu: float) -> tuple[str, ...]:
        """Give a replica its devices.

        Args:
            replica_id: Who asks; must hold nothing yet.
            gpu: A share of one device (0 to 1), or a whole number of them, as `Resources.gpu`.

        Returns:
            Ids of the devices, in the order of the inventory; empty for `gpu=0`.

        Raises:
            ResourceError: There is no room, or the replica has its devices already.
        """
        if any(replica_id in holders for holders in self._shares.values()):
            raise ResourceError(f"{replica_id} has its GPUs already; release them first")
        if gpu < 1:
            chosen = self._fullest_with_room(gpu) if gpu > 0 else ()
        else:
            free = [
                device.id
                for device in self.inventory
                if not self._shares[device.id] and (gpu == 1 or not device.is_slice)
            ]
            chosen = tuple(free[: math.ceil(gpu)])
        if gpu > 0 and len(chosen) < math.ceil(gpu):
            raise ResourceError(
                f"{replica_id} asks gpu={gpu:g}; this machine has {self.describe()}"
            )
        for id_ in chosen:
            self._shares[id_][replica_id] = min(gpu, 1.0)
        return chosen

    def place_all(self, requests: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
        """Place many replicas, or none: the largest first, which packs well.

        Raises:
            ResourceError: They don't all fit; nothing has changed.
        """
        placed: dict[str, tuple[str, ...]] = {}
        try:
            for replica_id, gpu in sorted(requests.items(), key=lambda item: -item[1]):
                placed[replica_id] = self.place(replica_id, gpu)
        except ResourceError:
            for replica_id in placed:
                self.release(replica_id)
            raise
        return {replica_id: placed[replica_id] for replica_id in requests}

    def hand_over(self, holder: str, replica_id: str) -> tuple[str, ...]:
        """Let a replica have what was reserved under another name; returns the devices."""
        for holders in self._shares.values():
            if holder in holders:
                holders[replica_id] = holders.pop(holder)
        return tuple(id_ for id_, holders in self._shares.items() if replica_id in holders)

    def release(self, replica_id: str) -> None:
        """Take back what a replica holds; one that holds nothing changes nothing."""
        for holders in self._shares.values():
            holders.pop(replica_id, None)

    def used(self, device_id: str) -> float:
        """Return the share of a device that is taken, 0 to 1."""
        return math.fsum(self._shares[device_id].values())

    def describe(self) -> str:
        """Return the devices and their use: `1 GPU (0: 40 GiB, 0.5 in use)`."""
        if not self.inventory:
            return "no GPU"
        count = len(self.inventory)
        devices = "; ".join(
            f"{device.id}: "
            + (f"{device.memory / 2**30:.0f} GiB, " if device.memory else "")
            + f"{self.used(device.id):.2g} in use"
            for device in self.inventory
        )
        return f"{count} GPU{'s' if count > 1 else ''} ({devices})"

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return who holds how much of each device."""
        return {id_: dict(holders) for id_, holders in self._shares.items()}

    def _fullest_with_room(self, share: float) -> tuple[str, ...]:
        room = [id_ for id_ in self._shares if self.used(id_) + share <= 1 + _TOLERANCE]
        return (max(room, key=self.used),) if room else ()
