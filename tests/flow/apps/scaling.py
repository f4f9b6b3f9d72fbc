"""Services whose number of replicas follows the load."""

import asyncio
import time

import servekit as sk


@sk.service(
    replicas=sk.Autoscale(min=1, max=3, target_ongoing=4, down_delay_s=2.0),
)
class Grows:
    @sk.endpoint
    async def wait(self, x: int) -> str:
        await asyncio.sleep(0.5)
        return "waited"

    @sk.endpoint
    async def quick(self, x: int) -> str:
        return "quick"


@sk.service(replicas=sk.Autoscale(min=0, max=2, target_ongoing=4, down_delay_s=1.0))
class Sleeper:
    @sk.endpoint
    async def ask(self, x: int) -> int:
        return x

    @sk.endpoint(max_concurrency=1)
    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "napped"


@sk.service
class Front:
    sleeper = sk.depends(Sleeper)

    @sk.endpoint
    async def ask(self, x: int) -> int:
        return await self.sleeper.ask.remote(x)

    @sk.endpoint
    async def nap(self, seconds: float) -> str:
        return await self.sleeper.nap.remote(seconds)
