"""Which GPUs this machine has, asked once before anything is placed.

Devices are numbered as nvidia-smi does, by PCI bus; so whoever hands a replica its numbers in
`CUDA_VISIBLE_DEVICES` also sets `CUDA_DEVICE_ORDER=PCI_BUS_ID`, as CUDA's own default order is by
speed.
"""

import subprocess
from collections.abc import Callable, Iterator

from servekit.engine.placement import Device, Inventory

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 3.0


def detect(
    *,
    declared: int | None = None,
    visible: str | None = None,
    query: Callable[[], str] | None = None,
) -> Inventory:
    """Return the GPUs that replicas may use.

    Args:
        declared: Act as if there were so many, of unknown size (`SERVEKIT_GPUS`).
        visible: `CUDA_VISIBLE_DEVICES`; None is all, "" none.
        query: Returns nvidia-smi's CSV, for tests.
    """
    if declared is not None:
        return tuple(Device(id=str(index)) for index in range(declared))
    if visible is not None and not visible.strip():
        return ()
    devices = _parse((query or _nvidia_smi)())
    if visible is None:
        return tuple(device for device, _ in devices)
    return tuple(_select(devices, visible))


def _nvidia_smi() -> str:
    """Return what nvidia-smi prints; "" when it is absent, fails or hangs: then there is no GPU."""
    try:
        return subprocess.run(  # noqa: S603  (a constant command)
            _QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _parse(text: str) -> list[tuple[Device, str]]:
    """Return devices and their UUIDs, from lines like `0, GPU-5e1c…, 40960` (MiB, or `[N/A]`)."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        (Device(id=row[0], memory=int(row[2]) * 2**20 if row[2].isdecimal() else 0), row[1])
        for row in rows
        if len(row) == 3 and row[0].isdecimal()
    ]


def _select(devices: list[tuple[Device, str]], visible: str) -> Iterator[Device]:
    """Yield devices as CUDA would: by index or start of a UUID, up to the first that isn't there.

    Slices of a device (MIG) are taken as they are named: nvidia-smi's query doesn't list them.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    for name in map(str.strip, visible.split(",")):
        if name.startswith("MIG-"):
            yield Device(id=name)
            continue
        found = [
            device
            for device, uuid in devices
            if device.id == name or (name.startswith("GPU-") and uuid.startswith(name))
        ]
        if len(found) != 1:
            return
        yield found[0]
