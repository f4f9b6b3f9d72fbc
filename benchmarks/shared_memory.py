"""`python -m benchmarks.shared_memory`: large segments through the socket, and past it.

Two processes, one unix socket for each way, and the same calls on both in turns, so that a noisy
machine disturbs them alike. Rates are calls per second; CPU is that of both processes, per call.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import uvloop

from servekit.core.call import EMPTY, JSON, Call, Payload, Reply
from servekit.wire import sharing
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, Listener, connect

WAYS = ("socket", "shared")
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}


class SocketOnly(Connection):
    """A connection as it is where memory can't be shared."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._outbox.on_large = None


class Sample(NamedTuple):
    """One round of one cell: calls per second, CPU microseconds per call of each process."""

    rate: float
    caller: float
    callee: float


class Callee:
    """What the other process does with a call."""

    def __init__(self, size: int) -> None:
        self._answer = Payload(JSON, (b"{}", an_array(size)))

    async def __call__(self, call: Call) -> Reply:
        if call.endpoint == "out":
            return Reply(self._answer)
        if call.endpoint == "read":
            np.frombuffer(call.payload.segments[1], np.float32).sum()
        if call.endpoint == "cpu":
            return Reply(Payload(JSON, (repr(time.process_time()).encode(),)))
        return Reply(Payload(JSON, (b"{}",)))


def an_array(size: int) -> memoryview:
    return np.ones(size // 4, np.float32).view(np.uint8).data


def maker(way: str, **settings: object) -> Callable[[], Connection]:
    kind = SocketOnly if way == "socket" else Connection
    return lambda: kind(Hello(), **settings)  # type: ignore[arg-type]


async def serve(folder: str, size: int) -> None:
    """Be the other process, until the first closes its standard input."""
    handler = Callee(size)
    listeners = [
        Listener(Address(f"unix:{folder}/{way}"), maker(way, client=False, handler=handler))
        for way in WAYS
    ]
    for listener in listeners:
        await listener.open()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for listener in listeners:
        await listener.close()


async def ask(connection: Connection, endpoint: str, payload: Payload = EMPTY) -> Reply:
    call = Call("S", endpoint, "request")
    call.payload = payload
    return await connection.call(call)


async def measure(
    connection: Connection, endpoint: str, payload: Payload, at_once: int, seconds: float
) -> Sample:
    """Make calls for some time."""
    count = 0

    async def work() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await ask(connection, endpoint, payload)
            count += 1

    async def callee_cpu() -> float:
        reply = await ask(connection, "cpu")
        assert reply.payload is not None
        return float(bytes(reply.payload.segments[0]))

    before, mine = await callee_cpu(), time.process_time()
    start = time.perf_counter()
    end = start + seconds
    await asyncio.gather(*(work() for _ in range(at_once)))
    took = time.perf_counter() - start
    mine = time.process_time() - mine
    theirs = await callee_cpu() - before
    return Sample(count / took, 1e6 * mine / count, 1e6 * theirs / count)


async def compare(folder: str, size: int, options: argparse.Namespace) -> None:
    """Measure every cell in alternating rounds, and print them."""
    connections = {
        way: await connect(Address(f"unix:{folder}/{way}"), maker(way, client=True)) for way in WAYS
    }
    for way in WAYS:  # arenas are made for the first large segment
        await ask(connections[way], "in", Payload(JSON, (b"{}", an_array(1 << 20))))
    large, small = Payload(JSON, (b"{}", an_array(size))), Payload(JSON, (b"{}",))
    shape = f"{size / 1000:,.0f} KB"
    for endpoint, payload in (("in", large), ("read", large), ("out", small), ("small", small)):
        for at_once in options.at_once:
            samples: dict[str, list[Sample]] = {way: [] for way in WAYS}
            for way in WAYS:
                await measure(connections[way], endpoint, payload, at_once, options.seconds / 4)
            for _ in range(options.rounds):
                for way in WAYS:
                    samples[way].append(
                        await measure(connections[way], endpoint, payload, at_once, options.seconds)
                    )
            pairs = list(zip(samples["socket"], samples["shared"], strict=True))
            cells = [
                "{:>7,.0f}/s {:>4.0f} + {:>3.0f} us".format(
                    *(median(column) for column in zip(*samples[way], strict=True))
                )
                for way in WAYS
            ]
            gain = median(there.rate / here.rate for here, there in pairs)
            cost = median(sum(there[1:]) / sum(here[1:]) for here, there in pairs)
            print(
                f"{shape:>10} {endpoint:<5} {at_once:>2} at once   {'   '.join(cells)}   "
                f"rate x {gain:.2f}, CPU x {cost:.2f}",
                flush=True,
            )
    for connection in connections.values():
        await connection.close()


def main() -> None:
    """Start the other process and compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_memory", description=__doc__)
    add = parser.add_argument
    add("--sizes", nargs="+", type=int, default=[4 * 3 * 224 * 224], help="bytes of an array")
    add("--at-once", nargs="+", type=int, default=[1, 8], help="calls under way")
    add("--rounds", type=int, default=15)
    add("--seconds", type=float, default=0.4, help="of each round")
    add("--from", dest="threshold", type=int, help="share segments from this many bytes")
    add("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threshold is not None:
        sharing.SHARED_FROM = options.threshold  # type: ignore[misc]
    if options.serve:
        uvloop.run(serve(options.serve, options.sizes[0]))
        return
    print("calls/s, CPU of caller + callee per call: socket, then shared memory")
    for size in options.sizes:
        command = [sys.executable, "-m", "benchmarks.shared_memory", "--sizes", str(size)]
        if options.threshold is not None:
            command += ["--from", str(options.threshold)]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o700)
            child = subprocess.Popen(
                [*command, "--serve", folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **_MALLOC},
            )
            assert child.stdout is not None
            child.stdout.readline()
            try:
                uvloop.run(compare(folder, size, options))
            finally:
                child.communicate()


if __name__ == "__main__":
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # as our processes have it
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.shared_memory", *sys.argv[1:]],
            {**os.environ, **_MALLOC},
        )
    main()
