"""Tasks that take their time, fail, block, and say when they run."""

import asyncio
import os
import time

import numpy as np
from graph import note

import servekit as sk


@sk.service
class Jobs:
    @sk.task(retries=5, backoff_s=0.1, max_concurrency=3)
    async def steps(self, count: int, every_s: float = 0.05) -> int:
        job = sk.job()
        note(f"{job.id} {job.attempt} {os.getpid()}")
        for step in range(count):
            job.progress(step / count, f"step {step}")
            await asyncio.sleep(every_s)
        return job.attempt

    @sk.task(retries=0)
    def block(self, seconds: float) -> str:
        note(f"block {sk.job().id}")
        until = time.monotonic() + seconds
        while time.monotonic() < until and not sk.job().cancelled:
            time.sleep(0.01)
        note(f"blocked {sk.job().cancelled}")
        return "done"

    @sk.task(retries=2, backoff_s=0.2)
    async def fail(self, times: int) -> int:
        if sk.job().attempt <= times:
            raise ValueError("a secret")
        return sk.job().attempt

    @sk.task(retries=1, backoff_s=0.0)
    async def poison(self) -> None:
        note(f"poison {sk.job().attempt}")
        os.kill(os.getpid(), 9)

    @sk.task
    async def array(self, n: int) -> np.ndarray:
        return np.arange(n, dtype=np.float32)


@sk.service(replicas=sk.Autoscale(min=0, max=1, down_delay_s=1.0))
class Sleeper:
    @sk.task(retries=1, backoff_s=6.0)
    async def twice(self, n: int) -> int:
        note(f"twice {sk.job().attempt}")
        if sk.job().attempt == 1:
            raise ValueError("once more")
        return 2 * n


@sk.service
class Front:
    sleeper = sk.depends(Sleeper)

    @sk.endpoint
    async def start(self, n: int) -> str:
        return (await self.sleeper.twice.submit(n)).id
