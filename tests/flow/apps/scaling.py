"""Services whose number of replicas follows the load."""

import asyncio
import os
import time
from pathlib import Path

from graph import hold, note

import servekit as sk


@sk.service(
    replicas=sk.Autoscale(min=1, max=3, target_ongoing=4, down_delay_s=2.0, window_s=10.0),
)
class Grows:
    @sk.endpoint
    async def wait(self, x: int) -> str:
        await asyncio.sleep(0.5)
        return "waited"

    @sk.endpoint
    async def quick(self, x: int) -> str:
        return "quick"


@sk.service(
    replicas=sk.Autoscale(min=0, max=1, down_delay_s=600.0, idle_s=1.0),
    limits=sk.Limits(max_ongoing=1),
)
class Sleeper:
    @sk.endpoint
    async def ask(self, x: int) -> int:
        return x

    @sk.endpoint
    async def hold(self, seconds: float) -> str:
        note("hold")
        await asyncio.sleep(seconds)
        return "held"

    @sk.endpoint(max_concurrency=1)
    def nap(self, name: str) -> str:
        note(f"nap {name}")
        hold(name)
        return name


@sk.service
class Front:
    sleeper = sk.depends(Sleeper)

    @sk.endpoint
    async def ask(self, x: int) -> int:
        return await self.sleeper.ask.remote(x)

    @sk.endpoint
    async def nap(self, name: str) -> str:
        return await self.sleeper.nap.remote(name)

    @sk.endpoint
    async def hold(self, seconds: float) -> str:
        return await self.sleeper.hold.remote(seconds)


def is_first() -> bool:
    """Return whether no replica of this app asked before."""
    mark = Path(f"{os.environ['TRACE']}.first")
    was_there = mark.exists()
    mark.touch()
    return not was_there


@sk.service(replicas=sk.Autoscale(min=0, max=4, target_ongoing=4, idle_s=1.0))
class Slow:
    """Takes its time to start, but for the first."""

    def __init__(self) -> None:
        if not is_first():
            time.sleep(float(os.environ["LOAD_S"]))

    @sk.endpoint
    async def ask(self, x: int) -> int:
        return x


@sk.service(replicas=1)
class SlowTwin(Slow):
    pass


@sk.service
class Lone:
    def __init__(self) -> None:
        if not is_first():
            raise RuntimeError("there can be only one")

    @sk.endpoint
    async def echo(self, x: int) -> int:
        return x


@sk.service(gpu=1)
class OnGpu:
    @sk.endpoint
    async def echo(self, x: int) -> int:
        return x
