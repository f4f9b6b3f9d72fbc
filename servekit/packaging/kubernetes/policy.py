"""What guards an app: against evictions of too many pods, against connections, and who watches it."""

from servekit.packaging.containerize import PORT
from servekit.packaging.kubernetes.order import NAME, Manifest, Order
from servekit.packaging.kubernetes.workload import SCRAPED

_DNS = {"ports": [{"protocol": kind, "port": 53} for kind in ("UDP", "TCP")]}


def disruption(order: Order) -> Manifest:
    """Return what keeps a drain of nodes from ending several pods at once."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": order.selector}}
    return order.object("policy/v1", "PodDisruptionBudget", {"spec": spec})


def network(order: Order) -> Manifest:
    """Return who may connect to the pods, at their port only, and where they may connect to."""
    overlay = order.overlay
    incoming: Manifest = {"ports": [{"protocol": "TCP", "port": PORT}]}
    if overlay.allow_from:
        pods = {"podSelector": {"matchLabels": dict(overlay.allow_from)}}
        incoming["from"] = [{"namespaceSelector": {}, **pods}]
    spec: Manifest = {
        "podSelector": {"matchLabels": order.selector},
        "policyTypes": ["Ingress"],
        "ingress": [incoming],
    }
    if overlay.allow_to:
        spec["policyTypes"] = ["Ingress", "Egress"]
        spec["egress"] = [_DNS] + [
            {
                "to": [{"ipBlock": {"cidr": one.cidr}}],
                **({"ports": [{"protocol": "TCP", "port": one.port}]} if one.port else {}),
            }
            for one in overlay.allow_to
        ]
    return order.object("networking.k8s.io/v1", "NetworkPolicy", {"spec": spec})


def monitor(order: Order) -> list[Manifest]:
    """Return what has Prometheus collect the metrics, if the overlay wants that."""
    wanted = order.overlay.monitor
    if wanted is None:
        return []
    endpoint: Manifest = {
        "port": "http",
        "path": "/metrics",
        "interval": f"{wanted.interval_s}s",
        "honorLabels": True,  # `service` is a service of the graph, not Kubernetes's
    }
    if order.settings.tls_cert:
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    if wanted.credential is not None:
        reference = {"name": wanted.credential.secret, "key": wanted.credential.key}
        endpoint["authorization"] = {"type": "Bearer", "credentials": reference}
    spec = {
        "jobLabel": NAME,
        "selector": {"matchLabels": {**order.selector, SCRAPED: "true"}},
        "podTargetLabels": ["rollouts-pod-template-hash"],
        "endpoints": [endpoint],
    }
    found = order.object("monitoring.coreos.com/v1", "ServiceMonitor", {"spec": spec})
    found["metadata"]["labels"] = {**wanted.labels, **order.labels}
    return [found]
