"""A model whose capacity is that of its slots: what measures it needs the machine's cores."""

import time
from collections.abc import AsyncIterator

import servekit as sk


@sk.service(replicas=2, limits=sk.Limits(max_ongoing=16, max_queued=32, max_body="8MiB"))
class Model:
    @sk.endpoint(idempotent=True)
    def label(self, x: int) -> int:
        time.sleep(0.12)
        return x

    @sk.endpoint(max_concurrency=1000)
    async def flood(self) -> AsyncIterator[str]:
        while True:
            yield "x" * 10_000

    @sk.batched(max_size=16, max_queued=64, target_ms=400)
    def batch(self, xs: list[int]) -> list[int]:
        time.sleep(0.1 + 0.005 * len(xs))
        return xs
