"""A Ray cluster for the tests of a file: several nodes on this machine, with GPUs that are only counted."""

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.flow import harness
from tests.flow.conftest import pytest_pyfunc_call

TOKEN = secrets.token_hex(32)


@pytest.fixture(scope="session")
def cluster() -> Iterator["Cluster"]:
    """Start a cluster of one node."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENV.items():
            patch.setenv(name, value)
        made = Cluster()
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module", autouse=True)
def apps_run_there(cluster: "Cluster") -> Iterator[None]:
    """Have the apps of a file's tests run on it."""
    harness.RAY.update(SERVEKIT_ENGINE="ray", SERVEKIT_RAY_ADDRESS=cluster.address)
    yield
    harness.RAY.clear()


ENV = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "RAY_USAGE_STATS_ENABLED": "0",
    # Nodes that are killed are missed at once, and not after half a minute.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


class Cluster:
    """Raylets on this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as Raylets

        self._raylets = Raylets(
            initialize_head=True,
            head_node_args={"num_cpus": 4, "num_gpus": 0, "include_dashboard": False},
        )
        self.address = self._raylets.address

    def add(self, **given):
        """Start another node."""
        node = self._raylets.add_node(num_cpus=2, **given)
        self._raylets.wait_for_nodes()
        return node

    def kill(self, node) -> None:
        """End a node without a word."""
        self._raylets.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._raylets.shutdown()
