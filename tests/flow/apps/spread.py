"""Services that a Ray cluster spreads over its nodes: those that have some `model`."""

import servekit as sk

ONE_A_NODE = sk.Placement(resources={"model": 1.5})


@sk.service(replicas=2, placement=ONE_A_NODE)
class Child:
    @sk.endpoint(idempotent=True)
    async def echo(self, x: int) -> int:
        return x


@sk.service
class Root:
    child = sk.depends(Child)

    @sk.endpoint(idempotent=True)
    async def echo(self, x: int) -> int:
        return await self.child.echo.remote(x)


@sk.service(replicas=3, placement=sk.Placement(resources={"model": 1}))
class Three:
    @sk.endpoint(idempotent=True)
    async def echo(self, x: int) -> int:
        return x
