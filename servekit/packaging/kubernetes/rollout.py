"""Argo Rollouts: a new version gets a share of the calls, and more of them while its metrics are good."""

from servekit.packaging.kubernetes.order import Manifest, Order
from servekit.packaging.kubernetes.overlay import Canary
from servekit.packaging.kubernetes.workload import body, service, surge

STABLE = ""
CANARY = "-canary"
_ALL = "-pods"
_API = "argoproj.io/v1alpha1"
_HASH = "rollouts_pod_template_hash"
"""Label of the metrics of one version's pods, as the ServiceMonitor takes it from the pods."""


def rollout(order: Order) -> list[Manifest]:
    """Return a Rollout with the Services of both versions, and what decides whether it goes on."""
    canary = order.overlay.canary or Canary()
    strategy: Manifest = {
        "stableService": f"{order.name}{STABLE}",
        "canaryService": f"{order.name}{CANARY}",
        **surge(order),
        "steps": [step for weight in canary.weights for step in _steps(weight, canary.pause_s)],
    }
    if order.overlay.traffic is not None:
        strategy["trafficRouting"] = _routing(order)
    found = [
        service(order, suffix=STABLE, scraped=False),
        service(order, suffix=CANARY, scraped=False),
        service(order, suffix=_ALL),
    ]
    if canary.prometheus:
        strategy["analysis"] = {
            "templates": [{"templateName": order.name}],
            "startingStep": 1,
            "args": [{"name": "hash", "valueFrom": {"podTemplateHashValue": "Latest"}}],
        }
        found.append(_analysis(order, canary))
    spec = body(order, {"strategy": {"canary": strategy}})
    return [*found, order.object(_API, "Rollout", {"spec": spec})]


def _steps(weight: int, pause_s: int) -> list[Manifest]:
    pause = {"duration": f"{pause_s}s"} if pause_s else {}
    return [{"setWeight": weight}, {"pause": pause}]


def _routing(order: Order) -> Manifest:
    """Return whose routes Argo changes; without any, the number of pods is the share."""
    traffic = order.overlay.traffic
    if traffic is not None and traffic.by == "istio":
        return {"istio": {"virtualService": {"name": order.name, "routes": ["app"]}}}
    route = {"httpRoute": order.name, "namespace": order.overlay.namespace}
    return {"plugins": {"argoproj-labs/gatewayAPI": route}}


def _analysis(order: Order, canary: Canary) -> Manifest:
    pods = f'namespace="{order.overlay.namespace}",{_HASH}="{{{{args.hash}}}}"'
    calls = f"sum(rate(servekit_requests_total{{{pods}}}[2m]))"
    failed = f'sum(rate(servekit_requests_total{{{pods},code=~"5.."}}[2m]))'
    bounds = [("errors", f"{failed} / {calls}", canary.max_error_rate)]
    if canary.max_p99_s is not None:
        histogram = f'servekit_request_seconds_bucket{{{pods},service="{order.app.root}"}}'
        query = f"histogram_quantile(0.99, sum(rate({histogram}[2m])) by (le))"
        bounds.append(("p99", query, canary.max_p99_s))
    metrics = [
        {
            "name": name,
            "interval": "30s",
            "failureLimit": 2,
            "successCondition": f"len(result) == 0 || isNaN(result[0]) || result[0] <= {bound:g}",
            "provider": {"prometheus": {"address": canary.prometheus, "query": query}},
        }
        for name, query, bound in bounds
    ]
    spec = {"args": [{"name": "hash"}], "metrics": metrics}
    return order.object(_API, "AnalysisTemplate", {"spec": spec})
