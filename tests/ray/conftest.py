"""A Ray cluster for the tests of a file: several nodes on this machine, with GPUs that are only counted."""

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow import harness
from tests.flow.conftest import pytest_pyfunc_call

_FORGIVEN = ("ResourceWarning", "DeprecationWarning", "pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Forgive what Ray's own code leaves open, and what it still uses."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for kind in _FORGIVEN:
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


@pytest.fixture(scope="session")
def cluster() -> Iterator["Cluster"]:
    """Start a cluster of one node."""
    made = Cluster()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def apps_run_there(cluster: "Cluster") -> Iterator[None]:
    """Have the apps of a file's tests run on it; the nodes that the file added go with it."""
    harness.RAY.update(SERVEKIT_ENGINE="ray", SERVEKIT_RAY_ADDRESS=cluster.address, PYTHONPATH=PATH)
    yield
    harness.RAY.clear()
    cluster.shrink()


ENV = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Each command that comes along would have as many processes started as a node has cores.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Nodes that are killed are missed at once, and not after half a minute.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}
PATH = os.pathsep.join([str(harness.ROOT), str(Path(__file__).parent / "without")])
"""Where they import from. Ray Serve imports pandas where there is one: a seventh of a replica's start."""


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATH)
        yield


# Ray reads them once in a process, when the first test of whatever kind touches it.
os.environ.update(ENV)


class Cluster:
    """Raylets on this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as Raylets

        with _environment():
            self._raylets = Raylets(
                initialize_head=True,
                head_node_args={
                    "num_cpus": 4,
                    "num_gpus": 0,
                    "include_dashboard": False,
                    "labels": {"door": "yes"},
                },
            )
        self.address = self._raylets.address

    def add(self, **given):
        """Start another node."""
        with _environment():
            node = self._raylets.add_node(num_cpus=2, **given)
        self._raylets.wait_for_nodes()
        return node

    def shrink(self) -> None:
        """End all nodes but the first."""
        for node in self._raylets.list_all_nodes():
            if node is not self._raylets.head_node:
                self.kill(node)

    def size(self) -> int:
        """Return the number of nodes."""
        return len(self._raylets.list_all_nodes())

    def kill(self, node) -> None:
        """End a node without a word, if it is there."""
        if node in self._raylets.list_all_nodes():
            self._raylets.remove_node(node, allow_graceful=False)

    def drain(self, node) -> None:
        """Ask a node's work to go elsewhere, as an autoscaler does before it takes it away."""
        reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test")
        subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
                *("--address", self.address, "--node-id", node.node_id),
                *reason,
                *("--deadline-remaining-seconds", "60"),
            ],
            check=True,
            capture_output=True,
        )

    def controller(self) -> int:
        """Return the pid of Ray Serve's controller."""
        own = {
            info.process.pid
            for node in self._raylets.list_all_nodes()
            for info in node.all_processes["raylet"]
        }
        [pid] = [
            int(process.name)
            for process in Path("/proc").iterdir()
            if process.name.isdecimal()
            and _read(process / "cmdline").startswith("ray::ServeController")
            and raylet_of(int(process.name)) in own
        ]
        return pid

    def close(self) -> None:
        self._raylets.shutdown()


def raylet_of(pid: int) -> int:
    """Return the pid of the raylet that a worker belongs to; 0 for other processes."""
    pairs = (pair.partition("=") for pair in _read(Path(f"/proc/{pid}/environ")).split("\0"))
    return next((int(value) for name, _, value in pairs if name == "RAY_RAYLET_PID"), 0)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
