"""`make demo`: serve the pipeline, ask it about real files whose types are known, then push it.

Stays up until Ctrl-C; with `--once` it ends after the answers. Exits with 1 if an answer is wrong or
the server does not start.
"""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from statistics import median, quantiles
from typing import IO

import httpx

ROOT = Path(__file__).parents[2]
SAMPLES = Path(__file__).parent / "samples"
KNOWN = {
    SAMPLES / "access.log.gz": "gzip",
    SAMPLES / "backup.sh": "shell",
    SAMPLES / "chart.png": "png",
    SAMPLES / "chime.wav": "wav",
    SAMPLES / "cities.csv": "csv",
    SAMPLES / "deploy.yaml": "yaml",
    SAMPLES / "hello": "elf",
    SAMPLES / "holiday.jpg": "shell",  # not the picture that it claims to be
    SAMPLES / "invoice.pdf": "pdf",
    SAMPLES / "library.sqlite": "sqlite",
    SAMPLES / "notes.zip": "zip",
    SAMPLES / "page.html": "html",
    SAMPLES / "person.json": "json",
    SAMPLES / "primes.py": "python",
    SAMPLES / "queue.rs": "rust",
    SAMPLES / "rain.xlsx": "xlsx",
    SAMPLES / "report.sql": "sql",
    SAMPLES / "sunset.jpg": "jpeg",
    SAMPLES / "sunset.webp": "webp",
    SAMPLES / "weather.parquet": "parquet",
    ROOT / "Makefile": "makefile",
    ROOT / "pyproject.toml": "toml",
    ROOT / "servekit" / "__init__.py": "python",
}
"""Files and what they are, by how they were made: see README.md."""

PORT = 3000
START_LIMIT_S = 120.0
BURST, CONCURRENCY = 200, 32
RAW = {"content-type": "application/octet-stream"}


class NotStartedError(Exception):
    """The server ended, or was not ready in time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="end after the answers")
    once = parser.parse_args().once
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    say(bold("servekit demo: what is this file?"))
    say(f"Magika's model behind two services; {len(KNOWN)} files that it gets as bare bytes.\n")
    if port != PORT:
        say(f"Port {PORT} is taken, so this is port {port}.")
    stopped = threading.Event()

    def stop(*_: object) -> None:
        stopped.set()  # as well, since a library may swallow the exception
        raise KeyboardInterrupt

    # SIGTERM ends us like Ctrl-C does, so that the server never outlives the demo.
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    with tempfile.NamedTemporaryFile("w+", prefix="servekit-demo-", suffix=".log") as log:
        try:
            with serving(port, log) as server, httpx.Client(base_url=url, timeout=30) as client:
                took_s = wait_until_ready(client, server)
                say(f"Ready on {url} after {took_s:.1f} s.\n")
                wrong = ask(client)
                if wrong == 0:
                    asyncio.run(burst(url))
                if not once:
                    invite(url, log.name)
                    while not stopped.wait(0.2):
                        if server.poll() is not None:
                            raise NotStartedError("the server ended by itself")
                    raise KeyboardInterrupt
        except NotStartedError as error:
            say(f"{red('Failed')}: {error}. Its log:\n")
            say("".join(Path(log.name).read_text().splitlines(keepends=True)[-40:]))
            return 1
        except KeyboardInterrupt:
            say("\nStopped.")
            return 0
    return 1 if wrong else 0


@contextlib.contextmanager
def serving(port: int, log: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `servekit serve` in a process group of its own, where Ctrl-C reaches it through us."""
    target = f"{Path(__file__).parent / 'app.py'}:FileType"
    command = [sys.executable, "-m", "servekit", "serve", target, "--port", str(port)]
    server = subprocess.Popen(
        command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        yield server
    finally:
        server.send_signal(signal.SIGINT)  # like Ctrl-C; SIGTERM would wait for balancers
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> float:
    """Ask `/readyz` until it says yes; return how long that took in seconds."""
    started = time.monotonic()
    while time.monotonic() - started < START_LIMIT_S:
        if server.poll() is not None:
            raise NotStartedError(f"the server ended with code {server.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if client.get("/readyz").is_success:
                return time.monotonic() - started
        time.sleep(0.05)
    raise NotStartedError(f"the server was not ready after {START_LIMIT_S:.0f} s")


def ask(client: httpx.Client) -> int:
    """Ask about every known file, one after the other; return how many answers are wrong."""
    say(dim(f"{'file':22}{'answer':10}{'score':>7}  {'right':5}{'ms':>8}"))
    wrong = 0
    for path, truth in KNOWN.items():
        data = path.read_bytes()
        sent = time.perf_counter()
        response = client.post("/identify", content=data, headers=RAW)
        took_ms = (time.perf_counter() - sent) * 1000
        if response.is_success:
            label, score = response.json()["label"], response.json()["score"]
        else:
            label, score = f"HTTP {response.status_code}", 0.0
        right = label == truth
        wrong += not right
        mark = "yes  " if right else red("NO   ")
        name = path.relative_to(SAMPLES if SAMPLES in path.parents else ROOT)
        note = "" if right else f"  is {truth}"
        say(f"{name!s:22}{label:10}{score:7.3f}  {mark}{took_ms:8.1f}{note}")
    say(bold(f"{len(KNOWN) - wrong} of {len(KNOWN)} right.") + "\n")
    return wrong


async def burst(url: str) -> None:
    """Send many files at once, and print what came of it."""
    files = [path.read_bytes() for path in KNOWN]
    waiting = iter(islice(cycle(files), BURST))
    seconds: list[float] = []
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client:

        async def send_while_any() -> None:
            for data in waiting:
                sent = time.perf_counter()
                response = await client.post("/identify", content=data, headers=RAW)
                response.raise_for_status()
                seconds.append(time.perf_counter() - sent)

        before = await batches(client)
        started = time.perf_counter()
        async with asyncio.TaskGroup() as senders:
            for _ in range(CONCURRENCY):
                senders.create_task(send_while_any())
        took_s = time.perf_counter() - started
        after = await batches(client)
    runs, rows = after[0] - before[0], after[1] - before[1]
    say(bold(f"{BURST} requests, {CONCURRENCY} at a time:"))
    say(f"  throughput  {BURST / took_s:7.0f} requests/s")
    say(f"  P50         {median(seconds) * 1000:7.1f} ms")
    say(f"  P99         {quantiles(seconds, n=100)[98] * 1000:7.1f} ms")
    say(f"  batch size  {rows / max(runs, 1):7.1f} files on average, in {runs:.0f} batches\n")


async def batches(client: httpx.AsyncClient) -> tuple[float, float]:
    """Return how many batches the model has run, and how many files were in them."""
    figures = (await client.get("/metrics")).text
    count, total = (
        sum(
            map(
                float,
                re.findall(rf"^servekit_batch_size_{kind}{{.*}} (\S+)$", figures, re.MULTILINE),
            )
        )
        for kind in ("count", "sum")
    )
    return count, total


def invite(url: str, log: str) -> None:
    """Print what to try next."""
    say("Try your own files:")
    say(f"  curl -H 'content-type: application/octet-stream' --data-binary @FILE {url}/identify")
    say(f"API docs  {url}/docs")
    say(f"Metrics   {url}/metrics")
    say(f"Log       {log}")
    say("Ctrl-C ends it.")


def free_port() -> int:
    """Return port 3000, or another one if that is taken."""
    for port in (PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                bound: int = probe.getsockname()[1]
                return bound
    raise NotStartedError("there is no free port on 127.0.0.1")


# ---- words, with colour where a person reads them

COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ


def say(text: str) -> None:
    print(text, flush=True)


def styled(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if COLOUR else text


def bold(text: str) -> str:
    return styled(text, 1)


def dim(text: str) -> str:
    return styled(text, 2)


def red(text: str) -> str:
    return styled(text, 31)


if __name__ == "__main__":
    sys.exit(main())
