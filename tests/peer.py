"""`python -m tests.peer serve|call PATH`: the other process, for tests that need two.

`serve` answers every call with the arrays it came with, back to front, and keeps those of the
endpoint "keep". `call` calls for ever, with arrays that it checks in the answers.
"""

import asyncio
import sys

from servekit.core.call import JSON, Call, Payload, Reply
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, Listener, connect
from tests.calls import make_call

SIZE = 300_000


class Mirror:
    """Answers with the segments it got, back to front."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    async def __call__(self, call: Call) -> Reply:
        document, *arrays = call.payload.segments
        if call.endpoint == "keep":
            self.kept += arrays
        return Reply(Payload(JSON, (document, *arrays[::-1])))


async def serve(path: str) -> None:
    """Listen, and say so."""
    mirror = Mirror()
    listener = Listener(
        Address(f"unix:{path}"), lambda: Connection(Hello(), client=False, handler=mirror)
    )
    await listener.open()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await listener.close()


async def call(path: str) -> None:
    """Call, four at a time."""
    connection = await connect(Address(f"unix:{path}"), lambda: Connection(Hello(), client=True))

    async def work(seed: int) -> None:
        arrays = [bytes([seed + i]) * SIZE for i in range(2)]
        for _ in range(1_000_000):
            payload = Payload(JSON, (b"{}", *arrays))
            reply = await connection.call(make_call("S", "e", payload))
            assert reply.payload is not None
            assert list(reply.payload.segments[1:]) == arrays[::-1]

    print("ready", flush=True)
    await asyncio.gather(*map(work, range(4)))


if __name__ == "__main__":
    asyncio.run({"serve": serve, "call": call}[sys.argv[1]](sys.argv[2]))
