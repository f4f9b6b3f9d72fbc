"""Starts one contender for one workload, and leaves nothing of it behind."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import processes
from benchmarks.contenders import ROOT, Contender, Launch
from benchmarks.workloads import HOST, AnswerError, Workload

START_TIMEOUT = 90.0
STOP_TIMEOUT = 20.0


class StartError(Exception):
    """The server did not come up, or answers wrongly."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running, verified server."""

    url: str
    chunks: int
    start_seconds: float

    def cpu_seconds(self) -> float:
        """CPU time of the whole process tree so far."""
        return sum(processes.descendants().values())


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(contender: Contender, workload: Workload) -> Iterator[Server]:
    """Start the server, wait until it answers rightly, and end all its processes afterwards."""
    scratch = Path(tempfile.mkdtemp(prefix="skb-", dir="/tmp"))  # short: it holds unix sockets
    launch = Launch(workload.name, free_port(), scratch, free_port)
    log = scratch / "server.log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [contender.python, *contender.arguments(launch)],
            cwd=ROOT,
            env=_environment(contender, launch),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        path = contender.paths[workload.name]
        chunks = _await_answer(process, workload, launch.port, path, log)
        started = time.monotonic() - began
        yield Server(f"http://{HOST}:{launch.port}{path}", chunks, started)
    finally:
        _stop(process)
        shutil.rmtree(scratch, ignore_errors=True)


def _environment(contender: Contender, launch: Launch) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in ("HOME", "LANG", "TZ") if name in os.environ}
    path = f"{contender.venv / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    own = {"PATH": path, "TMPDIR": str(launch.scratch)}
    return inherited | own | contender.environment(launch)


def _await_answer(
    process: subprocess.Popen[bytes], workload: Workload, port: int, path: str, log: Path
) -> int:
    deadline = time.monotonic() + START_TIMEOUT
    problem = "no answer"
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return workload.verify(port, path)
        except AnswerError as wrong:  # 404 and 503 are normal while routes are being set up
            problem = str(wrong)
        except (OSError, ValueError) as error:
            problem = repr(error)
        time.sleep(0.2)
    tail = log.read_text(errors="replace")[-2000:]
    raise StartError(f"{problem}\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
    processes.end_all()
