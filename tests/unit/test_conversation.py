"""Input that streams through the clients: what goes, what comes, and how it ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import servekit as sk
from servekit.errors import (
    CallError,
    Cancelled,
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    NotFound,
    PayloadTooLarge,
    Unavailable,
)
from tests.serving import Served, served

Vector = sk.Array["float32", "n"]


@sk.service
class Talks:
    def __init__(self) -> None:
        self.ended: list[str] = []

    @sk.endpoint
    async def echo(self, words: AsyncIterator[str], lang: str = "en") -> AsyncIterator[str]:
        how = "cancelled"
        try:
            async for word in words:
                if word == "boom":
                    raise ValueError("secret")
                yield f"{lang}:{word}"
            how = "end"
        finally:
            self.ended.append(how)

    @sk.endpoint
    async def total(self, numbers: AsyncIterator[int], *, start: int = 0) -> int:
        async for number in numbers:
            start += number
        return start

    @sk.endpoint
    def size(self, parts: Iterator[bytes]) -> int:
        return sum(len(part) for part in parts)

    @sk.endpoint
    async def back(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for part in parts:
            yield part[::-1]

    @sk.endpoint
    async def double(self, vectors: AsyncIterator[Vector]) -> AsyncIterator[Vector]:
        async for vector in vectors:
            yield 2 * vector

    @sk.endpoint(timeout_s=0.3)
    async def hurried(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])

    @sk.endpoint
    async def plain(self, number: int) -> int:
        return number


async def three() -> AsyncIterator[int]:
    for number in (1, 2, 3):
        await asyncio.sleep(0)
        yield number


async def never() -> AsyncIterator[int]:
    yield 1
    await asyncio.get_running_loop().create_future()


@contextlib.asynccontextmanager
async def talking() -> AsyncIterator[tuple[Served, Any, sk.AsyncClient]]:
    """Serve it, with a typed and an untyped client on this loop."""
    async with served(Talks) as app:
        url = f"http://{app.address}"
        async with sk.connect(Talks, url) as typed, sk.AsyncClient(url) as untyped:
            yield app, typed, untyped


# -- what goes and comes


async def test_an_answer_comes_before_the_next_value_is_sent():
    async with talking() as (_, typed, untyped):
        for stream in (
            lambda words: typed.echo.remote(words, lang="de"),
            lambda words: untyped.stream("echo", words, lang="de"),
        ):
            queue: asyncio.Queue[str | None] = asyncio.Queue()

            async def words(queue: asyncio.Queue[str | None] = queue) -> AsyncIterator[str]:
                while (word := await queue.get()) is not None:
                    yield word

            answers = stream(words())
            for word in ("a", "ü", ""):
                queue.put_nowait(word)
                assert await anext(answers) == f"de:{word}"
            queue.put_nowait(None)
            assert [answer async for answer in answers] == []


async def test_one_answer_to_all_of_it():
    async with talking() as (_, typed, untyped):
        assert await typed.total.remote(three(), start=10) == 16
        assert await typed.total(three()) == 6
        assert await untyped.call("total", three(), start=10) == 16
        assert await untyped.call("total", iter(())) == 0


async def test_bytes_and_arrays():
    async with talking() as (_, typed, untyped):
        parts = [b"ab", b"\x00" * 70_000]
        assert await typed.size.remote(iter(parts)) == 70_002
        assert await untyped.call("size", iter(parts)) == 70_002
        assert [part async for part in typed.back.remote(iter(parts))] == [b"ba", parts[1]]
        assert [part async for part in untyped.stream("back", iter(parts))] == [b"ba", parts[1]]
        vectors = [np.ones(3, np.float32), np.ones(50_000, np.float32)]
        doubled = [vector async for vector in typed.double.remote(iter(vectors))]
        assert [(vector.dtype, vector.sum()) for vector in doubled] == [
            ("float32", 6),
            ("float32", 1e5),
        ]


async def test_in_plain_code():
    async with served(Talks) as app:
        url = f"http://{app.address}"

        def use() -> None:
            with sk.connect(Talks, url) as typed, sk.Client(url) as untyped:
                assert list(typed.echo.remote(iter("ab")).iter_sync()) == ["en:a", "en:b"]
                assert typed.total.remote(iter((1, 2)), start=1).result() == 4
                assert typed.size(iter([b"abc"])) == 3
                assert list(untyped.stream("echo", iter("ab"), lang="fr")) == ["fr:a", "fr:b"]
                assert untyped.call("total", iter((1, 2)), start=1) == 4

        await asyncio.to_thread(use)


async def test_more_than_fits_anywhere():
    """20 MB each way, of which nobody holds all."""
    async with talking() as (_, typed, _untyped):
        count = 0
        async for part in typed.back.remote(b"x" * 100_000 for _ in range(200)):
            count += len(part)
        assert count == 20_000_000


# -- how it ends


async def test_errors_of_the_server():
    async with talking() as (app, typed, untyped):
        with pytest.raises(InvalidInput, match="number"):
            await untyped.call("total", iter([1, "two"]))
        with pytest.raises(InvalidInput, match="start"):
            await untyped.call("total", iter([1]), start="x")
        with pytest.raises(ExecutionError):
            _ = [word async for word in typed.echo.remote(iter(["a", "boom"]))]
        with pytest.raises(DeadlineExceeded):
            await typed.hurried.remote(never())
        with pytest.raises(NotFound):
            await untyped.call("nowhere", iter([1]))
        with pytest.raises(CallError):
            await untyped.call("plain", iter([1]))
        with pytest.raises(PayloadTooLarge, match="one message"):
            await typed.size.remote(iter([b"x" * (17 << 20)]))
        await app.idle()


async def test_an_iterator_that_raises_ends_the_call_with_that():
    async def broken() -> AsyncIterator[str]:
        yield "a"
        raise LookupError("my own")

    async with talking() as (app, typed, untyped):
        with pytest.raises(LookupError, match="my own"):
            _ = [word async for word in typed.echo.remote(broken())]
        with pytest.raises(LookupError, match="my own"):
            _ = [word async for word in untyped.stream("echo", broken())]
        await app.idle()


async def test_what_would_end_the_input_is_refused():
    async with talking() as (app, typed, _):
        with pytest.raises(InvalidInput, match="empty"):
            await typed.size.remote(iter([b"a", b""]))
        await app.idle()


async def test_leaving_ends_both_generators(until):
    closed: list[str] = []

    async def words() -> AsyncIterator[str]:
        try:
            while True:
                yield "a"
                await asyncio.sleep(0.01)
        finally:
            closed.append("mine")

    async with talking() as (app, typed, untyped):
        answers = typed.echo.remote(words())
        assert await anext(answers) == "en:a"
        await answers.aclose()
        async with contextlib.aclosing(untyped.stream("echo", words())) as others:
            assert await anext(others) == "en:a"
        await until(lambda: closed == ["mine", "mine"])
        await app.idle()


async def test_cancelling_and_closing(until):
    async with served(Talks) as app:
        client = sk.AsyncClient(f"http://{app.address}")
        work = [asyncio.ensure_future(client.call("total", never())) for _ in range(2)]
        await until(lambda: app.replica.load().ongoing == 2)
        work[0].cancel()
        await until(lambda: app.replica.load().ongoing == 1)
        await client.close()
        with pytest.raises(Cancelled):
            await work[1]
        await app.idle()


async def test_the_deadline_of_the_caller():
    async with talking() as (app, typed, untyped):
        with pytest.raises(DeadlineExceeded):
            await typed.total.options(timeout_s=0.3).remote(never())
        with pytest.raises(DeadlineExceeded):
            await untyped.call("total", never(), timeout_s=0.3)
        await app.idle()


async def test_nobody_there():
    async with sk.AsyncClient("http://127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match="nothing answers") as caught:
            await client.call("total", three())
        assert not caught.value.started
