"""KubeRay: a RayCluster whose pods have the app's image, and the Job that deploys the app on it.

KubeRay does not roll the pods of a cluster, so another image is another cluster, beside the old one. The
Service turns to it when the app is ready there, and the old one goes.

No RayService: what it writes to Ray Serve, and what an app's own controller writes, would undo each other.
"""

import hashlib
from typing import Any

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.containerize import PORT, PYTHON
from servekit.packaging.kubernetes.order import Manifest, Order
from servekit.packaging.kubernetes.overlay import Ray, Workers
from servekit.packaging.kubernetes.pod import environment, quantity, where

_DOOR = "servekit.io/gateway"
_HEAD_CPU = 2
_HEAD_MEMORY = "8GiB"
_CLIENT_PORT = 10001
_PROBE = {"httpGet": {"path": "/readyz", "port": PORT}, "periodSeconds": 2, "failureThreshold": 2}


def ray(order: Order) -> list[Manifest]:
    """Return a cluster, what reaches its gateways, and what deploys the app.

    Raises:
        ConfigError: The image has no Ray.
    """
    found = order.overlay.ray
    if found is None or not order.ray:
        raise ConfigError(
            f"{order.name}: the image has no Ray; add servekit[ray] to what the app depends on"
        )
    cluster = _cluster(order, found)
    name = cluster["metadata"]["name"]
    return [
        _network(order, name),
        cluster,
        _job(order, found, name),
        order.object("v1", "Service", {"spec": _service(name)}),
    ]


def _cluster(order: Order, ray: Ray) -> Manifest:
    head = {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},  # noqa: S104
        "template": _template(
            order, ray, "ray-head", cpu=_HEAD_CPU, memory=_HEAD_MEMORY, gpu=0, door=False
        ),
    }
    spec = {
        "rayVersion": order.ray,
        "enableInTreeAutoscaling": any(group.most > group.min for group in ray.groups),
        "autoscalerOptions": {"idleTimeoutSeconds": 300, "env": _token(ray)},
        "headGroupSpec": head,
        "workerGroupSpecs": [_group(order, ray, group) for group in ray.groups],
    }
    return order.object("ray.io/v1", "RayCluster", {"spec": spec}, suffix=f"-{_digest(spec)}")


def _group(order: Order, ray: Ray, group: Workers) -> Manifest:
    labels = {**group.labels, **({_DOOR: "true"} if group.gateway else {})}
    return {
        "groupName": group.name,
        "replicas": group.min,
        "minReplicas": group.min,
        "maxReplicas": group.most,
        "rayStartParams": {},
        **({"labels": labels} if labels else {}),
        "template": _template(
            order,
            ray,
            "ray-worker",
            cpu=group.cpu,
            memory=group.memory,
            gpu=group.gpu,
            door=group.gateway,
        ),
    }


def _template(
    order: Order, ray: Ray, name: str, *, cpu: float, memory: str, gpu: int, door: bool
) -> Manifest:
    amounts = {"cpu": f"{cpu:g}", "memory": quantity(memory)}
    if gpu:
        amounts[order.overlay.gpu_resource] = str(gpu)
    container: Manifest = {
        "name": name,
        "image": order.image,
        "env": [*environment(order), *_token(ray)],
        "resources": {"limits": amounts, "requests": amounts},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if door:
        container["ports"] = [{"containerPort": PORT, "name": "gateway"}]
        container["readinessProbe"] = _PROBE
    spec = {
        "terminationGracePeriodSeconds": order.stop_s + _RAY_DRAINS_S,
        "containers": [container],
        **where(order),
    }
    metadata: Manifest = {"labels": {**order.overlay.labels, **order.labels}}
    if order.overlay.annotations:
        metadata["annotations"] = dict(order.overlay.annotations)
    return {"metadata": metadata, "spec": spec}


def _token(ray: Ray) -> list[dict[str, Any]]:
    reference = {"name": ray.token.secret, "key": ray.token.key}
    return [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": reference}},
    ]


def _service(cluster: str) -> Manifest:
    selector = {"ray.io/cluster": cluster, "ray.io/node-type": "worker", _DOOR: "true"}
    return {"selector": selector, "ports": [{"name": "http", "port": 80, "targetPort": PORT}]}


def _network(order: Order, cluster: str) -> Manifest:
    """Return the policy: all ports within a cluster, the gateways' for callers, one for the Job."""
    callers: Manifest = {"ports": [{"protocol": "TCP", "port": PORT}]}
    if order.overlay.allow_from:
        pods = {"podSelector": {"matchLabels": dict(order.overlay.allow_from)}}
        callers["from"] = [{"namespaceSelector": {}, **pods}]
    own = {"ray.io/cluster": cluster}
    job = {
        "from": [{"podSelector": {"matchLabels": _job_labels(order)}}],
        "ports": [{"protocol": "TCP", "port": _CLIENT_PORT}],
    }
    spec = {
        "podSelector": {"matchLabels": own},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": own}}]}, callers, job],
    }
    suffix = cluster.removeprefix(order.name)
    return order.object("networking.k8s.io/v1", "NetworkPolicy", {"spec": spec}, suffix=suffix)


def _job(order: Order, ray: Ray, cluster: str) -> Manifest:
    """Return what deploys this very app; another one is another Job, as a Job does not change."""
    place = {
        "SERVEKIT_RAY_ADDRESS": f"ray://{cluster}-head-svc:{_CLIENT_PORT}",
        "SERVEKIT_GATEWAY_NODES": f"{_DOOR}=true",
    }
    container = {
        "name": "deploy",
        "image": order.image,
        "command": [PYTHON, "-m", "servekit", "deploy", order.target],
        "args": ["--target", "ray", "--app", order.name, "--host", "0.0.0.0"],  # noqa: S104
        "env": [
            *environment(order),
            *_token(ray),
            *({"name": name, "value": value} for name, value in place.items()),
        ],
    }
    spec = {"restartPolicy": "Never", "containers": [container], **where(order)}
    job = {
        "backoffLimit": 6,  # the cluster is not there at once
        "template": {"metadata": {"labels": {**order.labels, **_job_labels(order)}}, "spec": spec},
    }
    return order.object("batch/v1", "Job", {"spec": job}, suffix=f"-deploy-{_digest(job)}")


def _job_labels(order: Order) -> dict[str, str]:
    return {"servekit.io/deploys": order.name}


def _digest(spec: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()[:8]


_RAY_DRAINS_S = 30
"""What Ray itself waits for the replicas of a node that ends."""
