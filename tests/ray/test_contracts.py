"""What we use of Ray that is alpha or not public: when one of these fails, read its release notes.

Tried with Ray 2.60.0. A new minor version goes into `pyproject.toml` when all of `tests/ray` passes.
"""

import inspect
from importlib.metadata import version

import pytest


@pytest.fixture(scope="module", autouse=True)
def apps_run_there():
    """Need no cluster."""


def parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_version_is_one_that_was_tried():
    assert version("ray") == "2.60.0"


def test_a_router_is_told_of_replicas_and_their_metadata():
    from ray.serve.request_router import RequestRouter, RunningReplica

    from servekit.engine.ray.hook import Follower

    assert parameters(RequestRouter.update_replicas) == {"self", "replicas"}
    assert {"initialize_state", "choose_replicas"} <= set(dir(RequestRouter))
    assert {"replica_metadata", "node_id", "replica_id"} <= set(dir(RunningReplica))
    assert not inspect.isabstract(Follower)


def test_a_deployment_keeps_its_version():
    from ray import serve

    deployment = serve.deployment(object).options(name="x", version="7", _internal=True)
    assert deployment.version == "7"


def test_what_is_pickled_of_the_hook_and_the_policy_holds_no_state():
    """Ray pickles both by value, module globals included, each time that it describes an app."""
    import cloudpickle

    from servekit.engine.ray import hook, policy

    for module, cls in ((hook, hook.Follower), (policy, policy.Policy)):
        cloudpickle.register_pickle_by_value(module)
        try:
            assert len(cloudpickle.dumps(cls)) < 20_000
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def test_who_comes_by_way_of_a_ray_client_is_known():
    from ray.util.client import ray as client

    assert client.is_connected() is False


def test_the_policy_s_context_has_what_it_reads():
    from ray.serve.config import AutoscalingContext

    assert {"total_num_requests", "raw_metrics"} <= set(dir(AutoscalingContext))
    assert "target_num_replicas" in parameters(AutoscalingContext)


def test_the_policy_never_raises():
    from types import SimpleNamespace

    from servekit.engine.ray.policy import Policy

    policy = Policy(policy={"min": 0, "max": 3}, target=4.0)
    broken = SimpleNamespace(target_num_replicas=2)
    assert policy(broken) == (2, {})


def test_the_policy_follows_its_figures():
    import time
    from types import SimpleNamespace

    from servekit.engine.ray.policy import CAPACITY, FINISHED, ONGOING, Policy

    def points(*values):
        return [
            SimpleNamespace(timestamp=time.time() - len(values) + 1 + n, value=value)
            for n, value in enumerate(values)
        ]

    def context(ongoing: float, age_s: float = 0.0, replicas: int = 1):
        figures = {ONGOING: {"a": points(ongoing)}, FINISHED: {"a": points(10, 20)}, CAPACITY: {}}
        for point in figures[ONGOING]["a"]:
            point.timestamp -= age_s
        return SimpleNamespace(
            target_num_replicas=replicas, total_num_requests=0, raw_metrics=figures
        )

    policy = Policy(policy={"min": 0, "max": 3}, target=4.0)
    assert policy(context(12.0)) == (3, {})
    stale = Policy(policy={"min": 0, "max": 3}, target=4.0)
    assert stale(context(12.0, age_s=10.0)) == (1, {})


def test_nodes_that_drain_are_known():
    from ray._private.state import GlobalState

    assert parameters(GlobalState.get_draining_nodes) == {"self"}


def test_options_make_a_handle_follow():
    from ray.serve.handle import DeploymentHandle

    source = inspect.getsource(DeploymentHandle._options)
    assert "self._init()" in source
