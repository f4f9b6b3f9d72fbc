"""Who runs where: a pipeline of stages that share GPUs, with one stage in the root's own process.

No stage computes anything on a GPU; each tells which devices it was given, and in which process it
is. `SERVEKIT_GPUS=2` makes servekit place them as on a machine with two.
"""

import asyncio
import os
from dataclasses import dataclass

import servekit as sk


@dataclass
class Place:
    """Where a stage runs."""

    stage: str
    devices: str
    pid: int


def here(stage: object) -> Place:
    devices = os.environ["CUDA_VISIBLE_DEVICES"]
    return Place(type(stage).__name__, devices, os.getpid())


@sk.service(gpu=0.5)
class Detect:
    """Small: two of its kind fit on one device."""

    @sk.endpoint
    def where(self) -> Place:
        return here(self)


@sk.service(gpu=0.5)
class Read:
    """As small, so it shares that device."""

    @sk.endpoint
    def where(self) -> Place:
        return here(self)


@sk.service(gpu=1, memory="64MiB")
class Describe:
    """Large: it has a device to itself, and says how much of the machine's memory it needs."""

    @sk.endpoint
    def where(self) -> Place:
        return here(self)


@sk.service
class Clean:
    """Cheap: a process of its own would cost more than it does."""

    @sk.endpoint
    async def where(self) -> Place:
        return here(self)


@sk.service
class Pipeline:
    clean = sk.depends(Clean, colocate=True)
    detect = sk.depends(Detect)
    read = sk.depends(Read)
    describe = sk.depends(Describe)

    @sk.endpoint
    async def where(self) -> list[Place]:
        """Ask each stage of the pipeline where it runs."""
        stages = (self.clean, self.detect, self.read, self.describe)
        return [here(self), *await asyncio.gather(*(stage.where.remote() for stage in stages))]
