import asyncio
from collections.abc import AsyncIterator, Iterator

import servekit as sk


@sk.service
class Counter:
    @sk.endpoint
    async def count(self, to: int, pause_s: float = 0.0) -> AsyncIterator[int]:
        for number in range(1, to + 1):
            await asyncio.sleep(pause_s)
            if number == 13:
                raise ValueError("unlucky")
            yield number

    @sk.endpoint
    def lines(self, text: str) -> Iterator[str]:
        yield from text.split()

    @sk.endpoint
    async def data(self, size: int) -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * size
