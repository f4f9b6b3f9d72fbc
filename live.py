from collections.abc import AsyncIterator, Iterator

import servekit as sk


@sk.service
class Live:
    @sk.endpoint
    async def chat(self, messages: AsyncIterator[str], name: str = "you") -> AsyncIterator[str]:
        async for message in messages:
            yield f"{name} said {message}"

    @sk.endpoint
    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])

    @sk.endpoint
    def size(self, audio: Iterator[bytes]) -> int:
        return sum(len(piece) for piece in audio)
