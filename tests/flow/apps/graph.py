"""A pipeline of two services, for faults under load."""

import os
import time
from pathlib import Path

import servekit as sk


def note(text: str) -> None:
    """Write a line into the test's trace."""
    with Path(os.environ["TRACE"]).open("ab", buffering=0) as trace:
        trace.write(f"{text}\n".encode())


def is_held(name: str) -> bool:
    """Return whether the test has not let `name` go yet (`Running.let_go`)."""
    return not Path(f"{os.environ['TRACE']}.{name}").exists()


def hold(name: str) -> None:
    """Return when the test lets `name` go."""
    while is_held(name):
        time.sleep(0.01)


@sk.service(replicas=2)
class Child:
    @sk.batched(max_size=16)
    def echo(self, xs: list[int]) -> list[int]:
        time.sleep(0.005)
        return xs


@sk.service(replicas=2)
class Root:
    child = sk.depends(Child)

    @sk.endpoint(idempotent=True)
    async def echo(self, x: int) -> int:
        return await self.child.echo.remote(x)

    @sk.endpoint
    def once(self, x: int) -> int:
        note(f"once {x}")
        time.sleep(0.05)
        return x

    @sk.endpoint
    async def block(self, seconds: float) -> None:
        note("block")
        time.sleep(seconds)  # on the event loop: what a service must not do


@sk.service
class LoneChild(Child):
    pass


@sk.service
class LoneRoot:
    child = sk.depends(LoneChild)

    @sk.endpoint(idempotent=True)
    async def echo(self, x: int) -> int:
        return await self.child.echo.remote(x)
