"""From an order to Ray Serve's deployments: one per service, one gateway per node, a controller.

Serve starts a deployment's replicas anew when its version changes and only then, so the version is
a digest of what would make a running replica differ. `version` is no public option of Serve any
more, but what its own declarative deploys use; `tests/ray/test_contracts.py` watches it.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from ray import serve
from ray.serve import Application, Deployment, RunTarget
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from servekit.engine.numbers import default_target
from servekit.engine.ray.gateway import RayGateway
from servekit.engine.ray.hook import Follower
from servekit.engine.ray.orders import (
    CONTROLLER,
    GATEWAY,
    AppOrder,
    GatewayOrder,
    ReplicaOrder,
    Revision,
    pack,
)
from servekit.engine.ray.replica import RayReplica
from servekit.jobs.sqlite import FILE
from servekit.spec.app import AppSpec, ServiceSpec
from servekit.spec.policy import Autoscale
from servekit.version import __version__

SMALL_CPU: Final = 0.01
"""Cores of a replica that asks for none: next to nothing, but not on nodes that offer none."""
_GRACE_S = 5.0
_STARTS = 2
"""Failures in a row after which a roll has failed."""


def deploy(
    order: AppOrder,
    controller: type,
    *,
    nodes: Sequence[str],
    before: Revision | None = None,
    held: Collection[str] = (),
) -> None:
    """Tell Ray Serve what is wanted; returns at once.

    Args:
        order: The app.
        controller: What Serve makes its controller of, `RayController`.
        nodes: Ids of the nodes that are to have a gateway.
        before: What runs.
        held: Services that stay as they are there, or are not there yet.
    """
    app = application(order, controller, nodes=nodes, before=before, held=held)
    serve.run_many(
        [RunTarget(app, name=order.common.app, route_prefix=None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def application(
    order: AppOrder,
    controller: type,
    *,
    nodes: Sequence[str],
    before: Revision | None = None,
    held: Collection[str] = (),
) -> Application:
    """Return an app as Ray Serve takes it; see `deploy`."""
    current = order.current
    parts = [
        _replica(order, spec, current) for spec in current.app.services if spec.name not in held
    ]
    if held and before is not None:
        there = {spec.name for spec in current.app.services} - set(held)
        parts += [
            _replica(order, spec, before) for spec in before.app.services if spec.name not in there
        ]
    parts += [_gateway(order, node, len(nodes)) for node in nodes]
    return _deployment(
        controller,
        order,
        name=CONTROLLER,
        version=__version__,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "runtime_env": order.common.runtime_env},
    ).bind(pack(order), *parts)


def stages(app: AppSpec, before: AppSpec) -> list[list[str]]:
    """Return which services differ from what runs, in the order in which they are replaced.

    What is called goes before those that call it, so a caller never is newer than what it calls.
    """
    old = {spec.name: version_of(spec) for spec in before.services}
    depths: dict[str, int] = {}
    found: dict[int, list[str]] = {}
    for spec in app.services:  # dependencies first
        called = [edge.service for one in spec.together for edge in one.dependencies]
        depth = depths[spec.name] = 1 + max((depths.get(name, 0) for name in called), default=0)
        if old.get(spec.name) != version_of(spec):
            found.setdefault(depth, []).append(spec.name)
    return [found[depth] for depth in sorted(found)]


def services(order: AppOrder) -> dict[str, bool]:
    """Return all services that have replicas, and whether they may sleep."""
    found: dict[str, bool] = {}
    for spec in order.current.app.services:
        policy = order.replicas(spec)
        found[spec.name] = isinstance(policy, Autoscale) and policy.min == 0
    return found


def version_of(spec: ServiceSpec) -> str:
    """Return what changes when running replicas of a service have to be replaced."""
    return f"{__version__}-{spec.process_revision}"


def gateway_name(node: str) -> str:
    """Return the name of a node's gateway deployment."""
    return f"{GATEWAY}{node[:12]}"


def _replica(order: AppOrder, spec: ServiceSpec, revision: Revision) -> Application:
    told = ReplicaOrder(
        common=order.common,
        spec=spec,
        code=revision.code,
        services=services(order),
        jobs=str(Path(order.jobs) / FILE) if spec.has_tasks else "",
    )
    policy = order.replicas(spec)
    scaling = {"num_replicas": policy} if isinstance(policy, int) else _autoscaling(spec, policy)
    return _deployment(
        RayReplica,
        order,
        name=spec.name,
        version=version_of(spec),
        ray_actor_options=actor_options(spec)
        | {"runtime_env": runtime_env(spec, order.common.runtime_env)},
        max_surge_percent=0 if spec.name in order.crowded else 100,
        **_bundles(spec),
        **scaling,
    ).bind(pack(told))


def actor_options(spec: ServiceSpec) -> dict[str, Any]:
    """Return what a replica asks of Ray, as `ray_actor_options`; its `runtime_env` is apart."""
    needs, place = spec.needs, spec.placement
    options: dict[str, Any] = {
        "num_cpus": needs.cpu or SMALL_CPU,
        "num_gpus": needs.gpu,
        "memory": needs.memory,
        "accelerator_type": place.accelerator,
        "resources": place.resources,
        "label_selector": place.labels,
    }
    return {name: value for name, value in options.items() if value}


def runtime_env(spec: ServiceSpec, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of a replica's process, over that of the app's processes."""
    env: dict[str, Any] = {**common, **spec.placement.runtime_env}
    if variables := {**common.get("env_vars", {}), **spec.environment}:
        env["env_vars"] = variables
    if spec.placement.python:
        env["py_executable"] = spec.placement.python
    return env


def _bundles(spec: ServiceSpec) -> dict[str, Any]:
    if not spec.placement.bundles:
        return {}
    return {
        "placement_group_bundles": list(spec.placement.bundles),
        "placement_group_strategy": spec.placement.strategy,
    }


def _autoscaling(spec: ServiceSpec, policy: Autoscale) -> dict[str, Any]:
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=policy.min,
            max_replicas=policy.max,
            initial_replicas=policy.start,
            # The scaler has its own patience.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            metrics_interval_s=0.5,
            look_back_period_s=2.0,
            policy=AutoscalingPolicy(
                policy_function="servekit.engine.ray.policy:Policy",
                policy_kwargs={
                    "policy": msgspec.to_builtins(policy),
                    "target": policy.target_ongoing or default_target(spec),
                },
            ),
        )
    }


def _gateway(order: AppOrder, node: str, workers: int) -> Application:
    name = gateway_name(node)
    told = GatewayOrder(
        common=order.common,
        name=name,
        app=order.current.app,
        front=order.front,
        services=services(order),
        workers=workers,
    )
    how = hashlib.sha256(pack(order.front)).hexdigest()[:12]
    return _deployment(
        RayGateway,
        order,
        name=name,
        version=f"{__version__}-{how}",
        num_replicas=1,
        ray_actor_options={
            "num_cpus": 0,
            "label_selector": {"ray.io/node-id": node},
            "runtime_env": order.common.runtime_env,
        },
        max_surge_percent=100,
    ).bind(pack(told))


def _deployment(
    cls: type, order: AppOrder, *, name: str, version: str, **options: Any
) -> Deployment:
    deployment = cast("Deployment", serve.deployment(cls))
    return deployment.options(
        name=name,
        max_ongoing_requests=1000,
        health_check_period_s=2.0,
        health_check_timeout_s=5.0,
        graceful_shutdown_wait_loop_s=0.05,
        graceful_shutdown_timeout_s=order.common.drain_s + order.front.drain_delay_s + _GRACE_S,
        max_constructor_retry_count=_STARTS,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        request_router_config=RequestRouterConfig(
            request_router_class=cast("Any", Follower),
            request_router_kwargs={"app": order.common.app, "deployment": name},
        ),
        version=version,
        _internal=True,
        **options,
    )
