"""Writes like the Python manual, one word at a time: a small language model, streamed.

The model is a table of which words followed which, counted in the language reference that comes
with Python itself. It knows nothing, but has the tone.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pydoc_data.topics import topics
from random import Random

import servekit as sk

ORDER = 2  # words that it looks back


@sk.service
class Writer:
    def __init__(self) -> None:
        self.followers: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for text in topics.values():
            words = re.findall(r"\S*\w\S*", text)
            for at in range(len(words) - ORDER):
                self.followers[tuple(words[at : at + ORDER])].append(words[at + ORDER])
        self.openings = [start for start in self.followers if start[0].istitle()]

    @sk.endpoint
    async def write(
        self, words: int = 60, seed: int | None = None, per_second: float = 50.0
    ) -> AsyncIterator[str]:
        """Write some words, at the pace of a large model; the sleep stands for its work.

        When the reader leaves, the generator is closed where it waits.
        """
        for word in islice(self.words(Random(seed)), words):
            yield f"{word} "
            await asyncio.sleep(1 / per_second)

    def words(self, chance: Random) -> Iterator[str]:
        """Yield words without end, each one that did follow those before it somewhere."""
        while True:
            recent = chance.choice(self.openings)
            yield from recent
            while recent in self.followers:
                follower = chance.choice(self.followers[recent])
                recent = (*recent[1:], follower)
                yield follower
