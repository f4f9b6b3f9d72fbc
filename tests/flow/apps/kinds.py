"""One of each kind of endpoint."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated

import numpy as np
from graph import hold, note
from pydantic import BaseModel, Field

import servekit as sk

Pairs = sk.Array["float32", "N 2"]


class Box(BaseModel):
    width: Annotated[float, Field(gt=0)]
    tags: list[str] = []


@sk.service(prefix="/narrow", limits=sk.Limits(max_ongoing=1, max_queued=1))
class Narrow:
    @sk.endpoint
    def hold(self, name: str) -> str:
        note(f"hold {name}")
        hold(name)
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
    async def double(self, values: Pairs) -> Pairs:
        return values * 2

    @sk.endpoint
    def triple(self, values: Pairs, /) -> Pairs:
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

    @sk.batched(axis=0, max_size=32, max_wait_ms=20)
    def rows(self, values: Pairs) -> Pairs:
        note(f"rows {len(values)}")
        return values * np.float32(2)

    @sk.batched(max_size=8, max_wait_ms=20, bucket_by=lambda text: 1 // (text != "bad"))
    def upper(self, texts: list[str]) -> list[str]:
        return [text.upper() for text in texts]

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
