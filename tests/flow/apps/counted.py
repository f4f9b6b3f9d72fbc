"""A service whose figures are checked."""

import time

from graph import hold, note

import servekit as sk


@sk.service
class Inner:
    @sk.batched(max_size=8)
    def label(self, xs: list[int]) -> list[int]:
        time.sleep(0.01)
        return xs


@sk.service(replicas=2)
class Counted:
    inner = sk.depends(Inner)

    @sk.endpoint(idempotent=True)
    async def echo(self, x: int) -> int:
        return x

    @sk.endpoint
    async def far(self, x: int) -> int:
        return await self.inner.label.remote(x)

    @sk.endpoint
    async def boom(self) -> int:
        raise ValueError("secret")

    @sk.endpoint
    def hold(self, name: str) -> str:
        note("hold")
        hold(name)
        return name
