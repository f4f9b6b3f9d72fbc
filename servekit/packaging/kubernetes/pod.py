"""The pod that runs a whole graph: one container, any user, a root that is read only."""

import hashlib
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any, Final

import msgspec

from servekit.core.units import parse_bytes
from servekit.packaging.containerize import PORT
from servekit.packaging.kubernetes.order import Manifest, Order
from servekit.packaging.kubernetes.overlay import Claim

REVISION: Final = "servekit.io/revision"
USER: Final = 65532
_JOBS: Final = "/jobs"
_MODELS: Final = "/models"
_PROBE_S: Final = 2
_UNREADY: Final = 2
"""Probes in a row that must fail before a pod gets no calls; well within `drain_delay_s`."""


def template(order: Order) -> Manifest:
    """Return the template of the app's pods."""
    spec = pod(order)
    metadata: Manifest = {"labels": labels(order, spec)}
    if order.overlay.annotations:
        metadata["annotations"] = dict(order.overlay.annotations)
    return {"metadata": metadata, "spec": spec}


def labels(order: Order, spec: Manifest) -> dict[str, str]:
    """Return the labels of pods; the digest of what they are tells new ones from old ones."""
    digest = hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()[:8]
    return {**order.overlay.labels, **order.labels, REVISION: digest}


def pod(order: Order, *, container: str = "servekit") -> Manifest:
    """Return a pod.

    Args:
        order: What runs in it.
        container: What the container is called.
    """
    overlay = order.overlay
    found: Manifest = {
        "terminationGracePeriodSeconds": order.stop_s,
        "enableServiceLinks": False,  # their variables would look like servekit's own
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(order, container)],
        "volumes": _volumes(order),
        **where(order),
    }
    if overlay.models is not None:
        found["initContainers"] = [_fetch(order)]
    return found


def where(order: Order) -> Manifest:
    """Return which nodes a pod may be on, as whom it runs, and who lets it have its image."""
    overlay = order.overlay
    services = order.app.services if overlay.kind != "ray" else ()  # Ray sees to its own labels
    selector = {name: text for one in services for name, text in one.placement.labels.items()}
    selector |= overlay.node_selector
    found: Manifest = {"automountServiceAccountToken": bool(overlay.service_account)}
    if overlay.service_account:
        found["serviceAccountName"] = overlay.service_account
    if overlay.pull_secrets:
        found["imagePullSecrets"] = [{"name": name} for name in overlay.pull_secrets]
    if selector:
        found["nodeSelector"] = selector
    if overlay.tolerations:
        found["tolerations"] = [
            {
                "key": one.key,
                "operator": "Equal" if one.value else "Exists",
                **({"value": one.value} if one.value else {}),
                **({"effect": one.effect} if one.effect else {}),
            }
            for one in overlay.tolerations
        ]
    if overlay.kind in ("deployment", "rollout"):
        found["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": order.selector},
            }
        ]
    return found


def _container(order: Order, name: str) -> Manifest:
    settings = order.settings
    probes = {
        "startupProbe": ("/startupz", max(1, round(settings.start_timeout_s / _PROBE_S))),
        "readinessProbe": ("/readyz", _UNREADY),
    }
    scheme = "HTTPS" if settings.tls_cert else "HTTP"
    given: Manifest = {
        "name": name,
        "image": order.image,
        "args": ["serve", order.target],
        "env": environment(order),
        "ports": [{"containerPort": PORT, "name": "http", "protocol": "TCP"}],
        "resources": _resources(order),
        "securityContext": _CONFINED,
        "volumeMounts": _mounts(order),
    }
    found = {name: value for name, value in given.items() if value}
    for probe, (path, failures) in probes.items():
        found[probe] = {
            "httpGet": {"path": path, "port": PORT, "scheme": scheme},
            "periodSeconds": _PROBE_S,
            "timeoutSeconds": _PROBE_S,
            "failureThreshold": failures,
        }
    found["livenessProbe"] = {
        "httpGet": {"path": "/livez", "port": PORT, "scheme": scheme},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "failureThreshold": 3,
    }
    return found


def _fetch(order: Order) -> Manifest:
    """Return what fetches the models that the image does not have."""
    return {
        "name": "models",
        "image": order.image,
        "args": ["models", "pull", order.target],
        "env": environment(order),
        "resources": {
            kind: {name: amount for name, amount in amounts.items() if "/" not in name}
            for kind, amounts in _resources(order).items()
        },
        "securityContext": _CONFINED,
        "volumeMounts": _mounts(order),
    }


def environment(order: Order) -> list[Manifest]:
    """Return the variables of a container, beside those of its image."""
    overlay = order.overlay
    variables = overlay.variables()
    if overlay.jobs is not None:
        variables["SERVEKIT_JOBS_DIR"] = _JOBS
    if overlay.models is not None:
        variables |= {"SERVEKIT_MODELS_DIR": _MODELS, "SERVEKIT_OFFLINE": "false"}
    found: list[Manifest] = [{"name": name, "value": text} for name, text in variables.items()]
    return found + [
        {
            "name": name,
            "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}},
        }
        for name, one in overlay.secrets.items()
    ]


def _resources(order: Order) -> Manifest:
    """Return what the container asks for. Cores have no limit: those that idle are free to take."""
    requests: dict[str, str] = {"cpu": f"{order.cpu:g}"} if order.cpu else {}
    limits: dict[str, str] = {}
    if order.memory:
        limits["memory"] = quantity(order.memory)
    if order.gpus:
        limits[order.overlay.gpu_resource] = str(order.gpus)
    found = {"requests": {**requests, **limits}, "limits": limits}
    return {kind: amounts for kind, amounts in found.items() if amounts}


def _volumes(order: Order) -> list[Manifest]:
    overlay = order.overlay
    found: list[Manifest] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(overlay.shm)}},
    ]
    for name, claim in claims(order).items():
        there = claim.claim or f"{order.name}-{name}"
        found.append({"name": name, "persistentVolumeClaim": {"claimName": there}})
    return found + [
        {"name": f"files-{number}", "projected": {"sources": sources, "defaultMode": 0o440}}
        for number, sources in enumerate(_files(order).values())
    ]


def _mounts(order: Order) -> list[Manifest]:
    places = {"tmp": "/tmp", "shm": "/dev/shm"}  # noqa: S108
    places |= {name: f"/{name}" for name in claims(order)}
    found: list[Manifest] = [{"name": name, "mountPath": path} for name, path in places.items()]
    return found + [
        {"name": f"files-{number}", "mountPath": folder, "readOnly": True}
        for number, folder in enumerate(_files(order))
    ]


def _files(order: Order) -> dict[str, list[Manifest]]:
    """Return the files from Secrets, by folder: a mount of a single file would not follow changes."""
    files = sorted((PurePosixPath(path), one) for path, one in order.overlay.files.items())
    return {
        str(folder): [
            {"secret": {"name": one.secret, "items": [{"key": one.key, "path": path.name}]}}
            for path, one in inner
        ]
        for folder, inner in groupby(files, key=lambda item: item[0].parent)
    }


def claims(order: Order) -> dict[str, Claim]:
    """Return the persistent volumes of the pods, by what they are for."""
    wanted = {"models": order.overlay.models, "jobs": order.overlay.jobs}
    return {name: claim for name, claim in wanted.items() if claim is not None}


def quantity(size: str) -> str:
    """Return a size as Kubernetes writes it."""
    count = parse_bytes(size, where="size")
    for power, unit in ((3, "Gi"), (2, "Mi")):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{unit}"
    return str(count)


_CONFINED: Final[dict[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
