"""Services whose callers leave, or have little time."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

from graph import hold, note

import servekit as sk


@sk.service
class Inner:
    @sk.batched(max_size=16)
    def label(self, xs: list[int]) -> list[str]:
        time.sleep(0.03)
        return [f"label {x}" for x in xs]

    @sk.endpoint
    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"


@sk.service(prefix="/single", limits=sk.Limits(max_ongoing=1))
class Single:
    @sk.endpoint
    def hold(self, name: str) -> str:
        note(f"hold {name}")
        hold(name)
        return name


@sk.service(limits=sk.Limits(max_ongoing=1000))
class Outer:
    inner = sk.depends(Inner)
    single = sk.depends(Single)

    @sk.batched(max_size=16, target_ms=1000)
    def label(self, xs: list[int]) -> list[str]:
        time.sleep(0.05)
        return [f"label {x}" for x in xs]

    @sk.endpoint
    async def far(self, x: int) -> str:
        return await self.inner.label.remote(x)

    @sk.endpoint
    async def far_wait(self, seconds: float) -> str:
        return await self.inner.wait.remote(seconds)

    @sk.endpoint
    async def tokens(self, count: int) -> AsyncIterator[int]:
        try:
            for number in range(count):
                yield number
                await asyncio.sleep(0.02)
        finally:
            note("tokens closed")

    @sk.endpoint
    def tokens_sync(self, count: int) -> Iterator[int]:
        try:
            for number in range(count):
                yield number
                time.sleep(0.02)
        finally:
            note("tokens_sync closed")

    @sk.batched(max_size=4)
    def late(self, items: list[sk.Item[int]]) -> list[int]:
        remaining = [item.ctx.remaining() for item in items]
        for item, left in zip(items, remaining, strict=True):
            note(f"ran {item.value} {left}")
        time.sleep(0.01)
        return [item.value for item in items]
