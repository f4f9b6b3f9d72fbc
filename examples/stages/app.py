"""Three kinds of stages: one with GPUs, one with a core, and one in the root's own process.

Nothing here computes on a GPU: `Embed` makes a vector of counts, one for each word, by hashing. What
is shown is where the stages run. The same file runs on this machine and on a Ray cluster.
"""

import asyncio
import math
import os
from dataclasses import dataclass
from zlib import crc32

import servekit as sk

SIZE = 64


@dataclass
class Place:
    """Where a stage ran."""

    stage: str
    devices: str
    pid: int


@dataclass
class Embedded:
    vector: list[float]
    place: Place


@dataclass
class Ranked:
    scores: list[float]
    place: Place


@dataclass
class Answer:
    """The texts, the nearest first, and where each stage ran."""

    texts: list[str]
    places: list[Place]


def here(stage: object) -> Place:
    devices = os.environ["CUDA_VISIBLE_DEVICES"]
    return Place(type(stage).__name__, devices, os.getpid())


@sk.service
class Tokenize:
    """Cheap: a process of its own would cost more than it does."""

    @sk.endpoint
    async def words(self, text: str) -> tuple[list[str], Place]:
        return text.lower().split(), here(self)


@sk.service(gpu=0.5, replicas=2)
class Embed:
    """Half a GPU each, so the two share a device; calls come in batches."""

    @sk.batched(max_size=16)
    def vector(self, texts: list[list[str]]) -> list[Embedded]:
        return [Embedded(self.count(words), here(self)) for words in texts]

    def count(self, words: list[str]) -> list[float]:
        counts = [0.0] * SIZE
        for word in words:
            counts[crc32(word.encode()) % SIZE] += 1
        length = math.hypot(*counts) or 1.0
        return [count / length for count in counts]


@sk.service(cpu=1)
class Rank:
    """A core of its own, and no GPU to see."""

    @sk.endpoint
    def rank(self, query: list[float], vectors: list[list[float]]) -> Ranked:
        scores = [sum(a * b for a, b in zip(query, vector, strict=True)) for vector in vectors]
        return Ranked(scores, here(self))


@sk.service
class Search:
    tokenize = sk.depends(Tokenize, colocate=True)
    embed = sk.depends(Embed)
    rank = sk.depends(Rank)

    @sk.endpoint(idempotent=True)
    async def search(self, query: str, texts: list[str]) -> Answer:
        """Sort texts by how many words they share with a query."""
        tokens = [await self.tokenize.words.remote(text) for text in (query, *texts)]
        embedding = (self.embed.vector.remote(words) for words, _ in tokens)
        embedded = await asyncio.gather(*embedding)
        first, *others = (one.vector for one in embedded)
        ranked = await self.rank.rank.remote(first, others)
        pairs = sorted(zip(ranked.scores, texts, strict=True), reverse=True)
        stages = [here(self), tokens[0][1], *(one.place for one in embedded), ranked.place]
        places = {(place.stage, place.pid): place for place in stages}
        return Answer([text for _, text in pairs], [places[key] for key in places])
