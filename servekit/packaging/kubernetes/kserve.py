"""KServe: the app as the predictor of an InferenceService, and an InferenceGraph over several apps."""

from servekit.errors import ConfigError
from servekit.packaging.kubernetes.order import Manifest, Order
from servekit.packaging.kubernetes.overlay import Graph
from servekit.packaging.kubernetes.pod import labels, pod

_CONTAINER = "kserve-container"
"""KServe looks for a container of this name."""


def inference_service(order: Order) -> Manifest:
    """Return the InferenceService of an app.

    Raises:
        ConfigError: Its mode can't scale so.
    """
    overlay = order.overlay
    spec = pod(order, container=_CONTAINER)
    predictor: Manifest = {"labels": labels(order, spec), **spec, **_scaling(order)}
    if overlay.kserve.canary_percent is not None:
        predictor["canaryTrafficPercent"] = overlay.kserve.canary_percent
    if overlay.annotations:
        predictor["annotations"] = dict(overlay.annotations)
    found = order.object(
        "serving.kserve.io/v1beta1", "InferenceService", {"spec": {"predictor": predictor}}
    )
    mode = {"serving.kserve.io/deploymentMode": overlay.kserve.mode}
    found["metadata"]["annotations"] = mode
    return found


def _scaling(order: Order) -> Manifest:
    scale = order.overlay.autoscale
    if scale is None:
        return {"minReplicas": order.overlay.replicas, "maxReplicas": order.overlay.replicas}
    if scale.by == "keda":
        raise ConfigError('[autoscale]: KServe scales by itself; leave out by = "keda"')
    found: Manifest = {"minReplicas": scale.min, "maxReplicas": scale.max}
    if scale.in_flight is None:
        return {**found, "scaleMetric": "cpu", "scaleTarget": scale.cpu_percent}
    if order.overlay.kserve.mode == "Standard":
        raise ConfigError(
            "[autoscale]: in Standard mode KServe scales by cpu_percent; in_flight needs [kserve] "
            'mode = "Knative"'
        )
    return {**found, "scaleMetric": "concurrency", "scaleTarget": round(scale.in_flight)}


def inference_graph(order: Order, graph: Graph) -> Manifest:
    """Return a graph over apps that KServe calls one after the other, by URL."""
    steps = [
        {
            "serviceUrl": step.url,
            **({"name": step.name} if step.name else {}),
            **({"weight": step.weight} if step.weight is not None else {}),
            **({"condition": step.condition} if step.condition else {}),
            **({"data": step.data} if step.data else {}),
        }
        for step in graph.steps
    ]
    spec = {"nodes": {"root": {"routerType": graph.type, "steps": steps}}}
    return order.object(
        "serving.kserve.io/v1alpha1", "InferenceGraph", {"spec": spec}, suffix="-graph"
    )
