"""What runs plain pods: a Deployment, the Service before it, and its volumes."""

import math

from servekit.packaging.containerize import PORT
from servekit.packaging.kubernetes.order import Manifest, Order
from servekit.packaging.kubernetes.pod import claims, quantity, template

SCRAPED = "servekit.io/metrics"
"""Label of the Service whose pods are asked for metrics."""

_START_MORE_S = 120
"""Beyond what an app takes to start: to find a node, and to fetch the image."""


def deployment(order: Order) -> Manifest:
    """Return the Deployment of an app."""
    spec = body(order, {"strategy": _strategy(order)})
    return order.object("apps/v1", "Deployment", {"spec": spec})


def body(order: Order, strategy: Manifest) -> Manifest:
    """Return what a Deployment or a Rollout is, with its strategy."""
    fixed = {"replicas": order.overlay.replicas} if order.overlay.autoscale is None else {}
    return {
        **fixed,  # else the number is the autoscaler's
        "selector": {"matchLabels": order.selector},
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": math.ceil(order.settings.start_timeout_s) + _START_MORE_S,
        **strategy,
        "template": template(order),
    }


def surge(order: Order) -> Manifest:
    """Return how many pods there are beside the old ones, and how many may miss."""
    extra = order.overlay.surge
    return {"maxSurge": extra, "maxUnavailable": 0 if extra else 1}


def _strategy(order: Order) -> Manifest:
    if order.overlay.jobs is not None:  # two pods would share the queue's file
        return {"type": "Recreate"}
    return {"type": "RollingUpdate", "rollingUpdate": surge(order)}


def service(order: Order, *, suffix: str = "", scraped: bool = True) -> Manifest:
    """Return a Service of the app's pods.

    Args:
        order: The app.
        suffix: Of its name.
        scraped: Its pods are asked for metrics.
    """
    port = {"name": "http", "port": 80, "targetPort": PORT, "protocol": "TCP"}
    body = {"spec": {"selector": order.selector, "ports": [{**port, "appProtocol": "http"}]}}
    found = order.object("v1", "Service", body, suffix=suffix)
    if scraped:
        found["metadata"]["labels"] = {**order.labels, SCRAPED: "true"}
    return found


def volumes(order: Order) -> list[Manifest]:
    """Return the claims of volumes that are not there yet."""
    found: list[Manifest] = []
    for name, claim in claims(order).items():
        if claim.claim:
            continue
        spec: Manifest = {
            "accessModes": [claim.access],
            "resources": {"requests": {"storage": quantity(claim.size)}},
        }
        if claim.storage_class:
            spec["storageClassName"] = claim.storage_class
        found.append(order.object("v1", "PersistentVolumeClaim", {"spec": spec}, suffix=f"-{name}"))
    return found
