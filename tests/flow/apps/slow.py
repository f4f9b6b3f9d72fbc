"""Work that takes its time, and services that fail or dawdle while they start."""

import asyncio
import os
import time
from collections.abc import AsyncIterator

from graph import hold, note

import servekit as sk


@sk.service(limits=sk.Limits(timeout_s=None))
class Slow:
    @sk.endpoint
    def sync(self, seconds: float) -> str:
        note("sync")
        time.sleep(seconds)
        return "done"

    @sk.endpoint
    def hold(self, name: str) -> str:
        note("hold")
        hold(name)
        return name

    @sk.endpoint
    async def later(self, seconds: float) -> str:
        note("later")
        await asyncio.sleep(seconds)
        return "done"

    @sk.endpoint
    async def ticks(self, count: int, every_s: float) -> AsyncIterator[int]:
        note("ticks")
        for number in range(count):
            yield number
            await asyncio.sleep(every_s)

    @sk.teardown
    def say_goodbye(self) -> None:
        note("teardown")


@sk.service
class Loads:
    def __init__(self) -> None:
        note("loading")
        time.sleep(float(os.environ.get("LOAD_S", "600")))

    @sk.endpoint
    async def echo(self, x: int) -> int:
        return x


@sk.service
class Raises:
    @sk.setup
    def prepare(self) -> None:
        note("setup")
        raise RuntimeError("the weights are not there")

    @sk.endpoint
    async def echo(self, x: int) -> int:
        return x


@sk.service
class RaisesBesideSlow:
    loads = sk.depends(Loads)
    raises = sk.depends(Raises)

    @sk.endpoint
    async def echo(self, x: int) -> int:
        return x


@sk.service(gpu=2)
class WantsGpus:
    def __init__(self) -> None:
        note("started")

    @sk.endpoint
    async def echo(self, x: int) -> int:
        return x
