"""Two services that tell who called."""

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

    @sk.endpoint
    def fail(self) -> None:
        raise ValueError("the password is 1234")
