"""`python -m benchmarks.ray_memory`: what a servekit replica on Ray needs more than a plain one.

One Ray cluster on this machine has both: replicas of an empty Ray Serve deployment, and as many of
servekit's `Sum`. Each has answered requests. USS is what would be free without the process; PSS adds
its part of the pages that it shares with others.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import ray
from ray import serve

from benchmarks import processes
from benchmarks.contenders import ROOT
from benchmarks.server import StartError, free_port
from benchmarks.workloads import WORKLOADS, AnswerError

_SERVEKIT = [sys.executable, "-m", "servekit"]
_START_S = 90.0
_TITLES = {
    "plain": "ray::ServeReplica:plain:Plain",
    "servekit": "ray::ServeReplica:Sum:Sum",
    "gateway": "ray::ServeReplica:Sum:servekit.gateway",
    "controller": "ray::ServeReplica:Sum:servekit.controller",
}
"""How Ray calls the processes; an app's gateway (one per node) and controller are no replicas."""


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=128)
class Plain:
    """A deployment that does next to nothing."""

    async def __call__(self, values: list[float]) -> float:
        """Add the numbers up."""
        return sum(values)


class Memory(NamedTuple):
    """Of one process, in MB."""

    uss: float
    pss: float


def memory(pid: int) -> Memory:
    """Read what the kernel has counted."""
    kb = {
        line.split(":")[0]: int(line.split()[1])
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    }
    uss = kb["Private_Clean"] + kb["Private_Dirty"] + kb["Private_Hugetlb"]
    return Memory(uss * 1024 / 1e6, kb["Pss"] * 1024 / 1e6)


def found() -> dict[str, list[int]]:
    """Pids of the processes below this one, by what they are."""
    pids: dict[str, list[int]] = {name: [] for name in _TITLES}
    for pid in processes.descendants():
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:  # gone in the meantime
            continue
        for name, start in _TITLES.items():
            if title.startswith(start):
                pids[name].append(pid)
    return pids


def ask_plain(replicas: int, requests: int) -> None:
    """Start the plain replicas, and have them answer."""
    handle = serve.run(Plain.options(num_replicas=replicas).bind(), name="plain", route_prefix=None)
    for _ in range(requests):
        handle.remote([1.0, 2.0]).result()


def ask_servekit(port: int, address: str, replicas: int, requests: int) -> None:
    """Wait for servekit's first replica, ask for the others, and have them answer."""
    until(lambda: _answers(port))
    scale = [*_SERVEKIT, "scale", f"Sum={replicas}", "--ray-address", address, "--wait"]
    subprocess.run(scale, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for _ in range(requests):
        WORKLOADS["sum"].verify(port, "/sum")


def until(condition: Callable[[], bool]) -> None:
    """Wait for it.

    Raises:
        StartError: It takes too long.
    """
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            raise StartError("servekit does not answer")
        time.sleep(0.2)


def _answers(port: int) -> bool:
    try:
        WORKLOADS["sum"].verify(port, "/sum")
    except (AnswerError, OSError):
        return False
    return True


def show(pids: dict[str, list[int]], rounds: int) -> None:
    """Print the medians over all processes of a kind, each looked at in several rounds."""
    kinds: dict[str, list[Memory]] = {name: [] for name in pids}
    for _ in range(rounds):
        for name, those in pids.items():
            kinds[name] += [memory(pid) for pid in those]
        time.sleep(1.0)
    medians = {
        name: Memory(*(median(column) for column in zip(*samples, strict=True)))
        for name, samples in kinds.items()
    }
    print(f"{'':<12} {'processes':>9} {'USS MB':>8} {'PSS MB':>8}   USS of each")
    for name, (uss, pss) in medians.items():
        each = " ".join(f"{one.uss:.1f}" for one in kinds[name][-len(pids[name]) :])
        print(f"{name:<12} {len(pids[name]):>9} {uss:>8.1f} {pss:>8.1f}   {each}")
    plain, ours = medians["plain"], medians["servekit"]
    print(f"{'added':<12} {'':>9} {ours.uss - plain.uss:>8.1f} {ours.pss - plain.pss:>8.1f}")


def main() -> None:
    """Run both on one cluster, and compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_memory", description=__doc__)
    add = parser.add_argument
    add("--replicas", type=int, default=3, help="of each (%(default)s)")
    add("--requests", type=int, default=500, help="asked of each before (%(default)s)")
    add("--rounds", type=int, default=5, help="of looking, a second apart (%(default)s)")
    options = parser.parse_args()
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is ended
    with tempfile.TemporaryDirectory(
        prefix="skb-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        os.environ.update(RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0")
        try:
            ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False)
            serve.start(proxy_location="Disabled")
            ask_plain(options.replicas, options.requests)
            address, port = ray.get_runtime_context().gcs_address, free_port()
            target = ["benchmarks.apps.servekit_app:Sum", "--port", str(port)]
            where = ["--engine", "ray", "--ray-address", address, "--drain-delay-s", "0"]
            with subprocess.Popen([*_SERVEKIT, "serve", *target, *where], cwd=ROOT) as served:
                try:
                    ask_servekit(port, address, options.replicas, options.requests)
                    show(found(), options.rounds)
                finally:
                    served.terminate()
            ray.shutdown()
        finally:
            processes.end_all()


if __name__ == "__main__":
    main()
