"""What is to run on a cluster, and what all of its objects have in common."""

import math
from typing import Any

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.kubernetes.overlay import Overlay, check_name
from servekit.packaging.needs import needs_of
from servekit.settings import Settings
from servekit.spec.app import AppSpec

Manifest = dict[str, Any]

NAME = "app.kubernetes.io/name"
MANAGER = "servekit"
_LONGEST = 40
"""Of an app's name, as some objects have more behind it."""

_GATEWAY_BYTES = 256 << 20
"""Memory of the gateway and the supervisor, which no service declares."""

_STOP_MORE_S = 10


class Order(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """An app on a cluster.

    Attributes:
        name: What it is deployed as.
        image: In a registry, best by digest.
        target: The app, as the image names it.
        version: Of the bundle, for people; "" is unknown.
        ray: Version of Ray in the image; "" is none.
        app: The graph.
        overlay: The rest.
    """

    name: str
    image: str
    target: str
    app: AppSpec
    version: str = ""
    ray: str = ""
    overlay: Overlay = Overlay()

    def __post_init__(self) -> None:
        if len(check_name(self.name, "--app")) > _LONGEST:
            raise ConfigError(f"--app {self.name!r}: at most {_LONGEST} characters")
        self._check_placement()
        self._check_secrets()
        self._check_jobs()
        self._check_scaling()

    def _check_placement(self) -> None:
        for service in self.app.services if self.overlay.kind != "ray" else ():
            wanted = service.placement.accelerator
            if wanted and not self.overlay.node_selector:
                raise ConfigError(
                    f"{service.name} asks for accelerator={wanted!r}, and each cluster calls its "
                    "nodes otherwise; say in [node_selector] of the overlay which have it"
                )

    def _check_secrets(self) -> None:
        for name in self.app.image.secret_names:
            if name not in self.overlay.secrets:
                raise ConfigError(
                    f"the app is run with {name}; say in the overlay which Secret has it: "
                    f'[secrets] {name} = {{secret = "…", key = "…"}}'
                )

    def _check_scaling(self) -> None:
        scale = self.overlay.autoscale
        if scale is not None and scale.cpu_percent is not None and not self.cpu:
            raise ConfigError(
                "[autoscale] cpu_percent is of the cores that a pod asks for, and nobody says how "
                "many: cpu = 1.0 in the overlay, or @sk.service(cpu=1)"
            )

    def _check_jobs(self) -> None:
        tasks = [service.name for service in self.app.services if service.has_tasks]
        if not tasks or self.overlay.kind == "ray":
            return
        if self.overlay.replicas > 1 or self.overlay.autoscale or self.overlay.kind != "deployment":
            raise ConfigError(
                f"{tasks[0]} has tasks, whose jobs are in one pod; take replicas = 1 of a "
                "deployment, or make an app of it that others reach by sk.depends(…, url=…)"
            )
        if self.overlay.jobs is None:
            raise ConfigError(
                f"{tasks[0]} has tasks, and jobs end with the pod that has them; say in the overlay "
                'where they are kept: [jobs] size = "1GiB"'
            )

    @property
    def settings(self) -> Settings:
        """The settings that the app in a pod has."""
        return self.overlay.effective()

    @property
    def selector(self) -> dict[str, str]:
        """Labels that its pods have, and no other app's."""
        return {NAME: self.name}

    @property
    def labels(self) -> dict[str, str]:
        """Labels of all its objects."""
        version = {"app.kubernetes.io/version": self.version[:63]} if self.version else {}
        return {**self.selector, **version, "app.kubernetes.io/managed-by": MANAGER}

    @property
    def gpus(self) -> int:
        """Devices of a pod."""
        return needs_of(self.app).gpus if self.overlay.gpus is None else self.overlay.gpus

    @property
    def memory(self) -> str:
        """Memory of a pod; "" if nobody says."""
        declared = needs_of(self.app).memory
        return self.overlay.memory or (str(declared + _GATEWAY_BYTES) if declared else "")

    @property
    def cpu(self) -> float:
        """Cores that a pod asks for."""
        return needs_of(self.app).cpu if self.overlay.cpu is None else self.overlay.cpu

    @property
    def stop_s(self) -> int:
        """How long a pod may take to end."""
        settings = self.settings
        return math.ceil(settings.drain_delay_s + settings.drain_s) + _STOP_MORE_S

    def object(self, version: str, kind: str, body: Manifest, *, suffix: str = "") -> Manifest:
        """Return an object of the app's.

        Args:
            version: Of its API, with the group.
            kind: Of the object.
            body: All but its metadata.
            suffix: Of its name.
        """
        metadata = {
            "name": f"{self.name}{suffix}",
            "namespace": self.overlay.namespace,
            "labels": self.labels,
        }
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}
