"""Results that go from one replica to another, and never through their caller."""

import asyncio

import numpy as np
from graph import is_held, note

import servekit as sk

Vector = sk.Array["float32", "n"]


@sk.service(replicas=2)
class Maker:
    @sk.endpoint(idempotent=True)
    async def vector(self, size: int, name: str = "") -> Vector:
        note("made")
        try:
            while name and is_held(name):
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            note("cancelled")
            raise
        return np.arange(size, dtype=np.float32)


@sk.service
class User:
    @sk.endpoint(idempotent=True)
    async def dot(self, left: Vector, right: Vector) -> float:
        return float(left.astype(np.float64) @ right)


@sk.service
class Front:
    maker = sk.depends(Maker)
    user = sk.depends(User)

    @sk.endpoint(idempotent=True)
    async def norm(self, size: int, name: str = "") -> float:
        return await self.user.dot.remote(
            sk.promise(self.maker.vector.remote(size, name)),
            sk.promise(self.maker.vector.remote(size, name)),
        )
