"""Drives wrk against a server and reads its figures."""

import json
import os
import resource
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.server import Server
from benchmarks.workloads import Workload

SCRIPT = Path(__file__).parent / "request.lua"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one cell in one round."""

    requests_per_second: float
    p50_ms: float
    p99_ms: float
    errors: int
    cpu_seconds: float
    cpu_us_per_request: float
    foreign_cores: float
    """Cores that neither the server nor wrk kept busy: how noisy the machine was."""

    @property
    def valid(self) -> bool:
        """Whether every answer was a success."""
        return self.errors == 0 and self.requests_per_second > 0


def require_wrk() -> None:
    """Exit with a hint when wrk is missing."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is missing; install it with: apt-get install wrk")


def measure(
    server: Server, workload: Workload, connections: int, warm_up: float, seconds: float
) -> Sample:
    """Load the server for `seconds`, after a warm-up at the same number of connections."""
    with tempfile.NamedTemporaryFile(prefix="skb-body-") as body:
        body.write(workload.body)
        body.flush()
        _wrk(server, workload, connections, warm_up, body.name)
        cpu_before, busy_before, wrk_before = server.cpu_seconds(), _busy(), _wrk_cpu()
        result = _wrk(server, workload, connections, seconds, body.name)
        cpu = server.cpu_seconds() - cpu_before
        foreign = _busy() - busy_before - cpu - (_wrk_cpu() - wrk_before)
    requests = result["requests"]
    return Sample(
        requests_per_second=requests / (result["micros"] / 1e6),
        p50_ms=result["p50"] / 1e3,
        p99_ms=result["p99"] / 1e3,
        errors=result["status"] + result["socket"] + result["timeout"],
        cpu_seconds=round(cpu, 2),
        cpu_us_per_request=cpu * 1e6 / requests if requests else 0.0,
        foreign_cores=round(max(0.0, foreign) / (result["micros"] / 1e6), 2),
    )


def _busy() -> float:
    """Seconds that all cores together have worked since boot."""
    user, nice, system, _, _, irq, softirq = Path("/proc/stat").read_text().split()[1:8]
    ticks = sum(map(int, (user, nice, system, irq, softirq)))
    return ticks / os.sysconf("SC_CLK_TCK")


def _wrk_cpu() -> float:
    """CPU seconds of finished children, which under load are wrk alone."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _wrk(
    server: Server, workload: Workload, connections: int, seconds: float, body: str
) -> dict[str, int]:
    options = [
        "-t1",
        f"-c{connections}",
        f"-d{max(1, round(seconds))}s",
        "--latency",
        "--timeout",
        "30s",
    ]
    script = ["-s", str(SCRIPT), server.url, "--", body, workload.content_type]
    done = subprocess.run(
        ["wrk", *options, *script],
        check=True,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    figures: dict[str, int] = json.loads(line.removeprefix("RESULT "))
    return figures
