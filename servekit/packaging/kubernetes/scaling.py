"""How many pods there are: a HorizontalPodAutoscaler, or KEDA's ScaledObject, which goes to zero."""

from servekit.packaging.kubernetes.order import Manifest, Order
from servekit.packaging.kubernetes.overlay import Autoscale


def autoscaler(order: Order, target: Manifest) -> list[Manifest]:
    """Return what scales an app, if the overlay wants that.

    Args:
        order: The app.
        target: What is scaled: its API version, kind and name.
    """
    scale = order.overlay.autoscale
    if scale is None:
        return []
    if scale.by == "keda":
        return [
            order.object("keda.sh/v1alpha1", "ScaledObject", {"spec": _keda(order, scale, target)})
        ]
    spec: Manifest = {
        "scaleTargetRef": target,
        "minReplicas": scale.min,
        "maxReplicas": scale.max,
        "metrics": _metrics(order, scale),
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": scale.down_s}},
    }
    return [order.object("autoscaling/v2", "HorizontalPodAutoscaler", {"spec": spec})]


def _metrics(order: Order, scale: Autoscale) -> list[Manifest]:
    found: list[Manifest] = []
    if scale.cpu_percent is not None:
        target = {"type": "Utilization", "averageUtilization": scale.cpu_percent}
        found.append({"type": "Resource", "resource": {"name": "cpu", "target": target}})
    if scale.in_flight is not None:
        root = {"matchLabels": {"service": order.app.root}}
        found.append(
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": "servekit_in_flight", "selector": root},
                    "target": {"type": "AverageValue", "averageValue": f"{scale.in_flight:g}"},
                },
            }
        )
    return found


def _keda(order: Order, scale: Autoscale, target: Manifest) -> Manifest:
    triggers: list[Manifest] = []
    if scale.cpu_percent is not None:
        value = {"value": str(scale.cpu_percent)}
        triggers.append({"type": "cpu", "metricType": "Utilization", "metadata": value})
    if scale.in_flight is not None:
        which = f'{{namespace="{order.overlay.namespace}",job="{order.name}",service="{order.app.root}"}}'
        load = f"sum(servekit_in_flight{which}) + sum(servekit_queued{which})"
        triggers.append(_prometheus(scale, load, threshold=scale.in_flight))
    if scale.wake_query:
        triggers.append(_prometheus(scale, f"clamp_max({scale.wake_query}, 1)", threshold=1))
    return {
        "scaleTargetRef": target,
        "minReplicaCount": scale.min,
        "maxReplicaCount": scale.max,
        "cooldownPeriod": scale.down_s,
        "advanced": {
            "horizontalPodAutoscalerConfig": {
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": scale.down_s}}
            }
        },
        "triggers": triggers,
    }


def _prometheus(scale: Autoscale, query: str, *, threshold: float) -> Manifest:
    """Return a trigger; KEDA wants all of its values as text."""
    metadata = {
        "serverAddress": scale.prometheus,
        "query": query,
        "threshold": f"{threshold:g}",
        "activationThreshold": "0",
    }
    return {"type": "prometheus", "metadata": metadata}
