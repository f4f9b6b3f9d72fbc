"""One of each kind of endpoint."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated

import numpy as np
import servekit as sk
from graph import note
from pydantic import BaseModel, Field


class Box(BaseModel):
    width: Annotated[float, Field(gt=0)]
    tags: list[str] = []


@sk.service(prefix="/narrow", limits=sk.Limits(max_ongoing=1, max_queued=1))
class Narrow:
    @sk.endpoint
    def hold(self, name: str) -> str:
        note(f"hold {name}")
        deadline = time.monotonic() + 60
        while not os.path.exists(f"{os.environ['TRACE']}.{name}") and time.monotonic() < deadline:
            time.sleep(0.01)
        return name


@sk.service(version="7", limits=sk.Limits(max_body="1MiB"))
class Http:
    narrow = sk.depends(Narrow)

    @sk.endpoint
    async def area(self, box: Box, times: int = 1) -> float:
        return box.width * times

    @sk.endpoint
    async def whole(self, values: list[int], /) -> int:
        return sum(values)

    @sk.endpoint
    async def double(self, values: sk.Array["float32", "N 2"]) -> sk.Array["float32", "N 2"]:
        return values * 2

    @sk.endpoint
    def triple(self, values: sk.Array["float32", "N 2"], /) -> sk.Array["float32", "N 2"]:
        return np.asarray(values) * np.float32(3)

    @sk.endpoint
    async def reverse(self, data: bytes, /) -> bytes:
        return data[::-1]

    @sk.endpoint(method="GET", path="/greet")
    async def greet(self, name: str, times: int = 1) -> str:
        return " ".join([f"hello {name}"] * times)

    @sk.endpoint
    async def count(self, upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            await asyncio.sleep(0)
            yield number

    @sk.endpoint
    def count_sync(self, upto: int) -> Iterator[int]:
        yield from range(upto)

    @sk.endpoint
    async def fails_at(self, chunk: int) -> AsyncIterator[int]:
        for number in range(chunk + 1):
            if number == chunk:
                raise sk.errors.InvalidInput("no more") if chunk == 0 else ValueError("secret")
            yield number

    @sk.batched(max_size=8, max_wait_ms=20)
    def root(self, xs: list[float]) -> list[float | sk.ItemError]:
        return [x**0.5 if x >= 0 else sk.ItemError(sk.errors.InvalidInput(f"{x} < 0")) for x in xs]

    @sk.batched(max_size=8, max_wait_ms=20)
    def who(self, xs: list[sk.Item[int]]) -> list[str]:
        return [f"{x.value} {x.ctx.request_id} {x.ctx.headers['x-name']}" for x in xs]

    @sk.endpoint
    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    @sk.endpoint
    def boom(self) -> str:
        raise ValueError("secret")

    @sk.endpoint
    async def nan(self) -> float:
        return float("nan")
