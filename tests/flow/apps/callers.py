"""Two services that tell who called."""

from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import servekit as sk


@sk.service
class Below:
    @sk.endpoint
    async def who(self) -> str:
        return sk.context().caller

    @sk.batched(max_size=4)
    def whose(self, items: list[sk.Item[int]]) -> list[str]:
        return [item.ctx.caller for item in items]


@sk.service
class Root:
    below = sk.depends(Below)

    @sk.endpoint
    async def who(self) -> dict[str, str]:
        context = sk.context()
        return {
            "here": context.caller,
            "below": await self.below.who.remote(),
            "batched": await self.below.whose.remote(1),
            "headers": " ".join(sorted(context.headers)),
        }

    @sk.task
    def later(self) -> str:
        return "done"

    @sk.endpoint
    def echo(self, words: list[str]) -> list[str]:
        return words

    @sk.endpoint
    def fail(self) -> None:
        raise ValueError("the password is 1234")

    @sk.endpoint
    async def talk(self, words: AsyncIterator[str]) -> AsyncIterator[str]:
        async for word in words:
            yield f"{sk.context().caller} says {word}"

    @sk.mount_asgi("/web")
    def web(self) -> Starlette:
        async def who(request: Request) -> PlainTextResponse:
            names = " ".join(sorted(request.headers))
            return PlainTextResponse(f"{sk.context().caller} {names}")

        return Starlette(routes=[Route("/who", who, methods=["GET", "POST"])])
