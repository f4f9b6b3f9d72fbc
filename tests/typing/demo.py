"""A user's file. `test_typing.py` checks that type checkers object to the lines marked `# E:` alone."""

# pyright: strict

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, assert_type

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

import servekit as sk

F32 = NDArray[np.float32]


class Doc(BaseModel):
    text: str


class Hit(BaseModel):
    id: int
    score: float


@sk.service(gpu=0.5, replicas=sk.Autoscale(min=1, max=4, target_ongoing=8))
class Embedder:
    def __init__(self, size: int = 4) -> None:
        self.size = size

    @sk.setup
    def load(self) -> None:
        self.zeros = np.zeros(self.size, np.float32)

    @sk.setup(order=1)
    async def compile(self) -> None: ...

    @sk.warmup
    def warm(self) -> None:
        assert_type(self.embed(Doc(text="x")), F32)

    @sk.batched(max_size=32, max_wait_ms=4)
    def embed(self, docs: list[Doc]) -> list[F32]:
        return [self.zeros for _ in docs]

    @sk.batched(max_size=8, axis=0)
    def project(self, x: Annotated[F32, sk.Array["float32", "N 4"]]) -> F32:
        return x

    @sk.batched(max_size=8)
    async def tagged(self, items: list[sk.Item[Doc]]) -> list[str | sk.ItemError]:
        return [i.value.text + i.ctx.request_id for i in items]

    @sk.batched(max_size=8, isolate=True)
    async def compare(self, left: list[str], right: list[int]) -> list[bool]:
        return [len(a) == b for a, b in zip(left, right, strict=True)]

    @sk.endpoint
    def dim(self) -> int:
        return self.size


@sk.service
class LLM:
    @sk.endpoint(path="/v1/generate")
    async def generate(self, prompt: str, *, max_tokens: int = 16) -> AsyncIterator[str]:
        for _ in range(max_tokens):
            yield prompt

    @sk.endpoint
    def lines(self, prompt: str) -> Iterator[bytes]:
        yield prompt.encode()

    @sk.endpoint
    async def score(self, prompt: str, k: int = 1) -> float:
        return float(len(prompt) * k)


@sk.service
class Reports:
    @sk.task(retries=3, backoff_s=1.0, timeout_s=3600, ttl_s=86_400, max_concurrency=2)
    async def render(self, query: str, pages: int = 10) -> list[Hit]:
        job = sk.job()
        assert_type(job.id, str)
        for page in range(pages):
            job.progress(page / pages, "rendering", {"page": page})
            if job.cancelled:
                break
        job.progress("half")  # E: a fraction is a number
        return [Hit(id=job.attempt, score=0.0)]

    @sk.task
    def archive(self, doc: Doc) -> bytes:
        return doc.text.encode()

    @sk.task
    async def copy(self, doc: Doc) -> Doc:
        return doc


@sk.service(prefix="/search")
class Search:
    reports = sk.depends(Reports)
    emb = sk.depends(Embedder)
    big = sk.depends(sk.ref(Embedder, name="embedder-big", gpu=1).configure(args={"size": 8}))
    llm = sk.depends(LLM, timeout_s=20)

    @sk.endpoint
    async def query(self, doc: Doc, k: int = 3) -> list[Hit]:
        a, b = await asyncio.gather(self.emb.embed.remote(doc), self.big.embed.remote(doc))
        assert_type(a, F32)
        assert_type(b, F32)
        assert_type(await self.emb.project.remote(a), F32)
        assert_type(await self.emb.tagged(doc), str)
        assert_type(await self.emb.compare.remote("x", 1), bool)
        ahead = sk.promise(self.emb.embed.remote(doc))
        assert_type(ahead, F32)
        assert_type(await self.emb.project.remote(ahead), F32)
        s = await self.llm.score(doc.text, k=2)
        assert_type(s, float)
        async for token in self.llm.generate.remote(doc.text, max_tokens=3):
            assert_type(token, str)
        for line in self.llm.lines.remote(doc.text).iter_sync():
            assert_type(line, bytes)
        n = self.emb.dim()
        assert_type(n, int)
        fast = self.llm.score.options(timeout_s=1, priority=2)
        assert_type(await fast.remote(doc.text), float)
        assert_type(await self.reports.render.remote("x", pages=3), list[Hit])
        assert_type(await self.reports.copy(doc), Doc)
        assert_type(self.reports.archive(doc), bytes)
        job = await self.reports.render.keyed("order-7").submit("x")
        assert_type(job.id, str)
        assert_type(await job, list[Hit])
        assert_type((await job.status()).attempt, int)
        async for event in job.events():
            assert_type(event.number, int)
        await self.reports.render.submit(query=3)  # E: wrong type
        await self.reports.archive.submit()  # E: an argument is missing
        await self.emb.dim.submit()  # E: no task
        self.emb.embed.remote("oops")  # E: wrong type
        await self.llm.score(doc.text, kk=2)  # E: wrong keyword
        await self.emb.nope.remote()  # E: no such attribute
        sk.depends(3)  # E: no class
        return [Hit(id=n, score=s)][:k]


@sk.service(colocate=True)  # E: no such option
class Other: ...


@sk.service
class Special(Embedder):  # a service is usable as a base class
    @sk.endpoint
    def twice(self) -> int:
        return 2 * self.dim()


def uses(e: Embedder) -> int:  # and as a type
    return e.dim()


uses(Special(size=3))

with sk.local(Search, overrides={Search.emb: object()}) as search:
    out = asyncio.run(search.query(Doc(text="x")))
    assert_type(out, list[Hit])
with sk.connect(Search, "http://localhost:3000") as c:
    hits = c.query.remote(Doc(text="x"), k=2).result(timeout=5)
    assert_type(hits, list[Hit])
with sk.local(Reports) as reports:
    archive = reports.archive.submit(Doc(text="x")).result(timeout=5)
    assert_type(archive.result(timeout=5), bytes)
    status = archive.cancel().result()
    assert_type(status.id, str)
