"""What one container or pod must have to start a whole app."""

from typing import NamedTuple

from servekit.engine.numbers import initial
from servekit.spec.app import AppSpec


class Needs(NamedTuple):
    """GPUs, cores and bytes of memory; 0 is what nobody declared."""

    gpus: int
    cpu: float
    memory: int


def needs_of(app: AppSpec) -> Needs:
    """Return what the replicas of an app need together, as many of them as it starts with."""
    replicas = [service.needs for service in app.services for _ in range(initial(service.replicas))]
    return Needs(
        gpus=_devices([one.gpu for one in replicas]),
        cpu=sum(one.cpu for one in replicas),
        memory=sum(one.memory for one in replicas),
    )


def _devices(shares: list[float]) -> int:
    """Return how many devices hold shares, of which none is on two: the largest first, as they are placed."""
    whole = sum(round(share) for share in shares if share >= 1)
    free: list[float] = []
    for share in sorted((share for share in shares if 0 < share < 1), reverse=True):
        fits = next((i for i, room in enumerate(free) if room >= share - 1e-9), None)
        if fits is None:
            free.append(1.0 - share)
        else:
            free[fits] -= share
    return whole + len(free)
