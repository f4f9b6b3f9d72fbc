"""What an app's code does not say about a cluster: a TOML file, checked when it is read.

The checks raise ValueError, to which msgspec adds the table that it is about.
"""

import re
import tomllib
from pathlib import Path
from typing import Literal, Self

import msgspec

from servekit.core.units import parse_bytes
from servekit.errors import ConfigError
from servekit.settings import Settings

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_LONGEST = 63


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the overlay."""


class Key(_Part, frozen=True, kw_only=True):
    """One key of a Secret that is on the cluster."""

    secret: str
    key: str


class Claim(_Part, frozen=True, kw_only=True):
    """A persistent volume: one that is there, or a new one of a size.

    Attributes:
        claim: Name of a PersistentVolumeClaim; "" makes one.
        size: Of the new one, like `"50GiB"`.
        storage_class: Of the new one; "" is the cluster's default.
        access: Of the new one. Pods on several nodes need `ReadWriteMany`.
    """

    claim: str = ""
    size: str = ""
    storage_class: str = ""
    access: Literal["ReadWriteOnce", "ReadWriteMany"] = "ReadWriteOnce"

    def __post_init__(self) -> None:
        if bool(self.claim) == bool(self.size):
            raise ValueError("a volume needs either claim=, one that is there, or size=")
        parse_bytes(self.size or 0, where="size")


class Toleration(_Part, frozen=True, kw_only=True):
    """A taint that the pods tolerate; with a value it must be equal, without one it must exist."""

    key: str
    value: str = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute", ""] = ""


class Autoscale(_Part, frozen=True, kw_only=True):
    """How many pods there are, by load.

    Attributes:
        by: A HorizontalPodAutoscaler, or KEDA's ScaledObject.
        min: Fewest pods; 0 needs KEDA and `wake_query`, or Knative.
        max: Most pods.
        cpu_percent: Of what a pod asks for, that it should use.
        in_flight: Calls of the root service that one pod should have. A HorizontalPodAutoscaler asks
            the cluster's custom metrics for `servekit_in_flight`; KEDA asks `prometheus`, and counts
            calls that wait, too.
        prometheus: URL, for KEDA.
        wake_query: For KEDA: a query that is above 0 when there are calls for an app without pods,
            as only what stands before it can know.
        down_s: Seconds that the load must stay low before pods are removed.
    """

    by: Literal["hpa", "keda"] = "hpa"
    min: int = 1
    max: int
    cpu_percent: int | None = None
    in_flight: float | None = None
    prometheus: str = ""
    wake_query: str = ""
    down_s: int = 300

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max or self.max < 1:
            raise ValueError(f"min={self.min}, max={self.max}: need 0 <= min <= max and max >= 1")
        if self.cpu_percent is None and self.in_flight is None:
            raise ValueError("say what is measured: cpu_percent or in_flight")
        if self.in_flight is not None and self.in_flight <= 0:
            raise ValueError(f"in_flight={self.in_flight:g}: must be above 0")
        if self.cpu_percent is not None and not 1 <= self.cpu_percent <= 1000:
            raise ValueError(f"cpu_percent={self.cpu_percent}: must be from 1 to 1000")
        keda = self.by == "keda"
        if not keda and (self.prometheus or self.wake_query):
            raise ValueError('prometheus and wake_query are for by = "keda"')
        if keda and (self.in_flight is not None or self.wake_query) and not self.prometheus:
            raise ValueError("prometheus is missing: the URL where KEDA asks")


class Canary(_Part, frozen=True, kw_only=True):
    """How a new version takes over from the old one.

    Attributes:
        weights: Percent of the calls, step by step; all of them come last by themselves.
        pause_s: How long each step lasts; 0 waits for `kubectl argo rollouts promote`.
        prometheus: URL where the metrics of the new pods are asked; "" looks at none.
        max_error_rate: Share of answers with 5xx above which the old version is back.
        max_p99_s: The same for the 99th percentile of the time of a call; None has no bound.
    """

    weights: tuple[int, ...] = (10, 50)
    pause_s: int = 300
    prometheus: str = ""
    max_error_rate: float = 0.01
    max_p99_s: float | None = None

    def __post_init__(self) -> None:
        rising = list(self.weights) == sorted(set(self.weights))
        if not rising or not all(0 < weight < 100 for weight in self.weights):
            raise ValueError(f"weights={list(self.weights)}: percents that rise, from 1 to 99")
        if not 0 <= self.max_error_rate <= 1:
            raise ValueError(f"max_error_rate={self.max_error_rate:g}: a share, from 0 to 1")


class Traffic(_Part, frozen=True, kw_only=True):
    """What comes from outside, and to which apps it goes.

    Attributes:
        by: Whose routes: the Gateway API's, or Istio's.
        gateway: Name of the gateway, as `NAME` or `NAMESPACE/NAME`.
        hosts: Names that callers use.
        weights: Percent by the name of an app in this namespace; none is all to this one.
        mirror: An app that gets a copy of the calls, whose answers nobody sees.
        mirror_percent: Of the calls.
    """

    by: Literal["gateway-api", "istio"]
    gateway: str
    hosts: tuple[str, ...] = ()
    weights: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    mirror: str = ""
    mirror_percent: int = 100

    def __post_init__(self) -> None:
        if self.weights and sum(self.weights.values()) != 100:
            raise ValueError(f"weights={self.weights}: percents, 100 in all")
        if any(weight < 0 for weight in self.weights.values()):
            raise ValueError(f"weights={self.weights}: must be 0 or more")
        if not 0 < self.mirror_percent <= 100:
            raise ValueError(f"mirror_percent={self.mirror_percent}: must be from 1 to 100")
        if self.by == "istio" and not self.hosts:
            raise ValueError("hosts is missing: the names that callers use")


class KServe(_Part, frozen=True, kw_only=True):
    """How KServe runs the app.

    Attributes:
        mode: Plain Deployments, or Knative, which scales to zero.
        canary_percent: With Knative: of the calls, that the new revision gets.
    """

    mode: Literal["Standard", "Knative"] = "Standard"
    canary_percent: int | None = None

    def __post_init__(self) -> None:
        if self.canary_percent is None:
            return
        if self.mode != "Knative":
            raise ValueError('canary_percent is for mode = "Knative"')
        if not 0 <= self.canary_percent <= 100:
            raise ValueError(f"canary_percent={self.canary_percent}: must be from 0 to 100")


class Step(_Part, frozen=True, kw_only=True):
    """One app of an InferenceGraph.

    Attributes:
        url: Of its endpoint.
        name: For people.
        weight: Percent of the calls, of a Splitter.
        condition: In GJSON: of a Switch; of a Sequence, when to go on.
        data: `$request` or `$response`: what the step gets, of a Sequence.
    """

    url: str
    name: str = ""
    weight: int | None = None
    condition: str = ""
    data: str = ""


class Graph(_Part, frozen=True, kw_only=True):
    """KServe's InferenceGraph over apps that are reached by URL, beside this one."""

    type: Literal["Sequence", "Splitter", "Ensemble", "Switch"]
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("steps is empty")
        weights = [step.weight or 0 for step in self.steps]
        if self.type == "Splitter" and sum(weights) != 100:
            raise ValueError(f"the weights of a Splitter are 100 in all, and not {sum(weights)}")


class Workers(_Part, frozen=True, kw_only=True):
    """A group of equal pods of a Ray cluster.

    Attributes:
        name: Of the group.
        min: Fewest pods.
        max: Most pods; Ray's autoscaler adds them.
        cpu: Cores of each.
        memory: Of each, like `"32GiB"`.
        gpu: Devices of each.
        labels: Ray's labels of the nodes, for `Placement(labels=…)`.
        gateway: Each has a gateway; their number is fixed.
    """

    name: str
    min: int = 1
    max: int = 0
    cpu: float = 4.0
    memory: str = "8GiB"
    gpu: int = 0
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    gateway: bool = False

    def __post_init__(self) -> None:
        parse_bytes(self.memory, where="memory")
        if self.min < 0 or (self.max and self.max < self.min):
            raise ValueError(f"min={self.min}, max={self.max}: need 0 <= min <= max")
        if self.gateway and (self.min < 1 or self.max not in (0, self.min)):
            raise ValueError(
                f"{self.name}: a pod with a gateway is never idle, so their number is fixed; give "
                "min alone, 1 or more"
            )

    @property
    def most(self) -> int:
        """Most pods."""
        return self.max or self.min


class Ray(_Part, frozen=True, kw_only=True):
    """A cluster of KubeRay's.

    Attributes:
        token: The Secret that has Ray's token.
        groups: Its workers; one group has the gateways.
    """

    token: Key
    groups: tuple[Workers, ...] = (Workers(name="workers", min=2, gateway=True),)

    def __post_init__(self) -> None:
        if sum(group.gateway for group in self.groups) != 1:
            raise ValueError("exactly one group has gateway = true")


class Destination(_Part, frozen=True, kw_only=True):
    """Where pods may connect to: addresses, and a port of theirs; 0 is every one."""

    cidr: str
    port: int = 0


class Monitor(_Part, frozen=True, kw_only=True):
    """Have Prometheus collect the metrics, by the Prometheus operator.

    Attributes:
        interval_s: How often.
        credential: The API key that `/metrics` asks for, if the app has keys.
        labels: That the operator chooses ServiceMonitors by.
    """

    interval_s: int = 15
    credential: Key | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])


Kind = Literal["deployment", "rollout", "kserve", "ray"]


class Overlay(_Part, frozen=True, kw_only=True):
    """Everything that a cluster must be told; all of it may be left out.

    Attributes:
        kind: A Deployment; a Rollout of Argo's; an InferenceService of KServe's; a RayCluster.
        namespace: Of all objects.
        replicas: Pods, each with the whole graph, if nothing scales them.
        surge: Pods beside the old ones while new ones take over; 0 ends an old one first, where
            there is no room.
        cpu: Cores that a pod asks for; None is what its services declare.
        memory: Of a pod, like `"8GiB"`; "" is what its services declare, if they do.
        gpus: Devices of a pod; None is what its services declare.
        gpu_resource: What the cluster calls a device.
        shm: Shared memory of a pod.
        node_selector: Labels that a node must have.
        tolerations: Taints that pods tolerate.
        labels: Of the pods.
        annotations: Of the pods.
        service_account: Whose rights the pods have; "" is nobody's, and no token is mounted.
        pull_secrets: Secrets of the image's registry.
        settings: servekit's, like `gateway_workers = 2`.
        secrets: Environment variables, each from a key of a Secret.
        files: Files, each from a key of a Secret.
        models: Where models are kept that the image does not have; fetched before the app starts.
        jobs: Where jobs are kept.
        allow_from: Labels of the pods that may call; none is everybody.
        allow_to: Where the pods may connect to, beside the cluster's DNS; none is everywhere.
    """

    kind: Kind = "deployment"
    namespace: str = "default"
    replicas: int = 1
    surge: int = 1
    cpu: float | None = None
    memory: str = ""
    gpus: int | None = None
    gpu_resource: str = "nvidia.com/gpu"
    shm: str = "1GiB"
    node_selector: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    tolerations: tuple[Toleration, ...] = ()
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    annotations: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    service_account: str = ""
    pull_secrets: tuple[str, ...] = ()
    settings: dict[str, str | int | float | bool] = msgspec.field(
        default_factory=dict[str, str | int | float | bool]
    )
    secrets: dict[str, Key] = msgspec.field(default_factory=dict[str, Key])
    files: dict[str, Key] = msgspec.field(default_factory=dict[str, Key])
    models: Claim | None = None
    jobs: Claim | None = None
    autoscale: Autoscale | None = None
    canary: Canary | None = None
    traffic: Traffic | None = None
    kserve: KServe = KServe()
    graph: Graph | None = None
    ray: Ray | None = None
    monitor: Monitor | None = None
    allow_from: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    allow_to: tuple[Destination, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.namespace, "namespace")
        parse_bytes(self.memory or 0, where="memory")
        parse_bytes(self.shm, where="shm")
        if self.replicas < 1:
            raise ValueError(
                f"replicas={self.replicas}: must be 1 or more; [autoscale] goes to zero"
            )
        if self.surge < 0:
            raise ValueError(f"surge={self.surge}: must be 0 or more")
        for path in self.files:
            if not path.startswith("/") or path.endswith("/"):
                raise ValueError(f"files: {path!r} is no absolute path of a file")
        for name in ("host", "port", "jobs_dir", "models_dir", "cache_dir"):
            if name in self.settings:
                raise ValueError(f"settings: {name} is the image's own")
        self._check_kind()
        self.effective()

    def _check_kind(self) -> None:
        if self.canary and self.kind != "rollout":
            raise ValueError('[canary] is for kind = "rollout"')
        if self.ray and self.kind != "ray":
            raise ValueError('[ray] is for kind = "ray"')
        if self.kind == "ray" and self.ray is None:
            raise ValueError("[ray] is missing: token is the Secret that has Ray's token")
        if self.kind == "ray" and self.surge != 1:
            raise ValueError(f"surge={self.surge}: a new Ray cluster starts beside the old one")
        if self.graph and self.kind != "kserve":
            raise ValueError('[graph] is for kind = "kserve"')
        if self.kind == "kserve" and self.traffic:
            raise ValueError('[traffic]: with kind = "kserve" KServe makes the routes')
        if self.kind == "ray" and self.autoscale:
            raise ValueError(
                "[autoscale]: on Ray sk.Autoscale scales, and [[ray.groups]] say where"
            )
        knative = self.kind == "kserve" and self.kserve.mode == "Knative"
        if self.autoscale and not (self.autoscale.min or self.autoscale.wake_query or knative):
            raise ValueError(
                '[autoscale] min=0: no pod can tell that a call waits for it; say by = "keda" and '
                "a wake_query, such as the rate of calls at the ingress"
            )

    def effective(self) -> Settings:
        """Return the settings that the app in a pod has.

        Raises:
            ConfigError: One is unknown, or has a value that can't be used.
        """
        return Settings.load(Path("/"), self.variables())

    def variables(self) -> dict[str, str]:
        """Return the settings as variables of the environment."""
        return {
            f"SERVEKIT_{name.upper()}": str(value).lower()
            if isinstance(value, bool)
            else str(value)
            for name, value in self.settings.items()
        }

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            ConfigError: It can't be read, or has what can't be used; the message names the place.
        """
        try:
            return msgspec.convert(tomllib.loads(path.read_text("utf-8")), cls)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except (ValueError, msgspec.MsgspecError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from None


def check_name(name: str, what: str) -> str:
    """Return a name that Kubernetes takes.

    Raises:
        ConfigError: It takes none such.
    """
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise ConfigError(
            f"{what}={name!r}: need lower-case letters, digits and '-' between them, at most "
            f"{_LONGEST} of them"
        )
    return name
