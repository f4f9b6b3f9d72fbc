"""Where calls from outside go: weights over apps of a namespace, and copies to one more."""

from servekit.packaging.kubernetes.order import Manifest, Order
from servekit.packaging.kubernetes.overlay import Traffic
from servekit.packaging.kubernetes.rollout import CANARY

_PORT = 80


def routes(order: Order) -> list[Manifest]:
    """Return the routes that the overlay wants."""
    traffic = order.overlay.traffic
    if traffic is None:
        return []
    weights = dict(traffic.weights) or {order.name: 100}
    if order.overlay.kind == "rollout":
        weights[f"{order.name}{CANARY}"] = 0  # Argo moves them
    if traffic.by == "istio":
        spec = _istio(traffic, weights)
        return [order.object("networking.istio.io/v1", "VirtualService", {"spec": spec})]
    spec = _gateway_api(traffic, weights)
    return [order.object("gateway.networking.k8s.io/v1", "HTTPRoute", {"spec": spec})]


def _gateway_api(traffic: Traffic, weights: dict[str, int]) -> Manifest:
    namespace, _, name = traffic.gateway.rpartition("/")
    rule: Manifest = {
        "backendRefs": [
            {"name": app, "port": _PORT, "weight": weight} for app, weight in weights.items()
        ]
    }
    if traffic.mirror:
        copy = {
            "backendRef": {"name": traffic.mirror, "port": _PORT},
            "percent": traffic.mirror_percent,
        }
        rule["filters"] = [{"type": "RequestMirror", "requestMirror": copy}]
    parent = {"name": name, **({"namespace": namespace} if namespace else {})}
    found: Manifest = {"parentRefs": [parent], "rules": [rule]}
    return {**found, "hostnames": list(traffic.hosts)} if traffic.hosts else found


def _istio(traffic: Traffic, weights: dict[str, int]) -> Manifest:
    route: Manifest = {
        "name": "app",
        "route": [
            {"destination": {"host": app, "port": {"number": _PORT}}, "weight": weight}
            for app, weight in weights.items()
        ],
    }
    if traffic.mirror:
        route["mirror"] = {"host": traffic.mirror, "port": {"number": _PORT}}
        route["mirrorPercentage"] = {"value": float(traffic.mirror_percent)}
    return {"hosts": list(traffic.hosts), "gateways": [traffic.gateway], "http": [route]}
