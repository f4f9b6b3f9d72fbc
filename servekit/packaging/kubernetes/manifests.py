"""An order as the objects that a cluster is to have, in the order in which they are applied: pods come last."""

from collections.abc import Callable
from typing import Final

from servekit.errors import ConfigError
from servekit.packaging.kubernetes import kserve, policy, workload
from servekit.packaging.kubernetes.kuberay import ray
from servekit.packaging.kubernetes.order import Manifest, Order
from servekit.packaging.kubernetes.overlay import Kind
from servekit.packaging.kubernetes.rollout import rollout
from servekit.packaging.kubernetes.scaling import autoscaler
from servekit.packaging.kubernetes.traffic import routes


def manifests(order: Order) -> list[Manifest]:
    """Return all objects of an app; equal orders have equal ones.

    Raises:
        ConfigError: The overlay has what its kind can't do.
    """
    return [*workload.volumes(order), *_KINDS[order.overlay.kind](order)]


def _deployment(order: Order) -> list[Manifest]:
    runs = {"apiVersion": "apps/v1", "kind": "Deployment", "name": order.name}
    return [workload.service(order), *_around(order, runs), workload.deployment(order)]


def _rollout(order: Order) -> list[Manifest]:
    *beside, runs = rollout(order)
    target = {"apiVersion": runs["apiVersion"], "kind": runs["kind"], "name": order.name}
    return [*beside, *_around(order, target), runs]


def _around(order: Order, runs: Manifest) -> list[Manifest]:
    return [
        policy.disruption(order),
        policy.network(order),
        *policy.monitor(order),
        *routes(order),
        *autoscaler(order, runs),
    ]


def _kserve(order: Order) -> list[Manifest]:
    overlay = order.overlay
    if overlay.monitor or overlay.allow_from or overlay.allow_to:
        raise ConfigError(
            'monitor, allow_from and allow_to: with kind = "kserve" the Services and ports of the '
            "pods are KServe's; write these objects yourself"
        )
    found = [kserve.inference_service(order)]
    return found + ([kserve.inference_graph(order, overlay.graph)] if overlay.graph else [])


_KINDS: Final[dict[Kind, Callable[[Order], list[Manifest]]]] = {
    "deployment": _deployment,
    "rollout": _rollout,
    "kserve": _kserve,
    "ray": ray,
}
