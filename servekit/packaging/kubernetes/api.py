"""A cluster's API, as much as a deployment needs: server-side apply, look, delete, logs, events.

Through the official client's own `DynamicClient`, which takes objects of any kind.
"""

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from servekit.errors import ConfigError, SetupError
from servekit.packaging.kubernetes.order import MANAGER, Manifest

if TYPE_CHECKING:
    from kubernetes.client.api_client import ApiClient
    from kubernetes.dynamic.resource import Resource

_TIMEOUT_S: Final = 30.0

_PLURALS: Final = {
    "NetworkPolicy": "networkpolicies",
}
"""Those that are not the kind in lower case and an s."""

_OPERATORS: Final = {
    "argoproj.io": "Argo Rollouts",
    "gateway.networking.k8s.io": "the Gateway API",
    "keda.sh": "KEDA",
    "monitoring.coreos.com": "the Prometheus operator",
    "networking.istio.io": "Istio",
    "ray.io": "KubeRay",
    "serving.kserve.io": "KServe",
}


class Ref(NamedTuple):
    """Which object; in a namespace, as all of ours are."""

    version: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, found: Manifest) -> Self:
        """Return what an object is called."""
        metadata = found["metadata"]
        return cls(found["apiVersion"], found["kind"], metadata["namespace"], metadata["name"])

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.kind} {self.name}"


class Cluster:
    """A cluster.

    Args:
        client: Of the official package.
    """

    def __init__(self, client: "ApiClient") -> None:
        from kubernetes.dynamic import DynamicClient  # noqa: PLC0415

        self._dynamic = DynamicClient(client, discoverer=_nothing)
        self._client = client

    @classmethod
    def connect(cls, context: str = "") -> Self:
        """Return the cluster of a kubeconfig's context, or that in which this process runs.

        Raises:
            ConfigError: There is none, or the official client is not installed.
        """
        try:
            from kubernetes import config  # noqa: PLC0415
            from kubernetes.client.api_client import ApiClient  # noqa: PLC0415
            from kubernetes.client.configuration import Configuration  # noqa: PLC0415
        except ImportError:
            raise ConfigError(
                "this needs the Kubernetes client: pip install 'servekit[kubernetes]'"
            ) from None
        configuration = Configuration()
        try:
            config.load_kube_config(context=context or None, client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            try:
                config.load_incluster_config(client_configuration=configuration)
            except config.ConfigException:
                raise ConfigError(f"no Kubernetes cluster is configured: {error}") from None
        configuration.retries = 2
        return cls(ApiClient(configuration))

    def get(self, ref: Ref) -> Manifest | None:
        """Return an object, or None if there is none."""
        try:
            return self._call(self._dynamic.get, ref)
        except _AbsentError:
            return None

    def apply(self, wanted: Manifest) -> Manifest:
        """Have an object be as wanted, what others own of it apart.

        Raises:
            ConfigError: The cluster knows no such kind, or refuses the object.
            SetupError: The cluster can't be reached, or does not let us.
        """
        ref = Ref.of(wanted)
        try:
            return self._call(
                self._dynamic.server_side_apply,
                ref,
                body=wanted,
                field_manager=MANAGER,
                force_conflicts=True,
            )
        except _AbsentError as error:
            raise _unknown(ref, error) from None

    def delete(self, ref: Ref) -> None:
        """End an object and all that is because of it; none is fine."""
        try:
            self._call(self._dynamic.delete, ref, body={"propagationPolicy": "Background"})
        except _AbsentError:
            return

    def labelled(
        self, version: str, kind: str, namespace: str, labels: Mapping[str, str]
    ) -> list[Manifest]:
        """Return objects that have labels."""
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        there = Ref(version, kind, namespace, "")
        found = self._call(self._dynamic.get, there, label_selector=selector)
        return list(found.get("items") or ())

    def events(self, ref: Ref) -> list[str]:
        """Return what the cluster says of an object, the latest last."""
        which = f"involvedObject.kind={ref.kind},involvedObject.name={ref.name}"
        there = Ref("v1", "Event", ref.namespace, "")
        found = self._call(self._dynamic.get, there, field_selector=which).get("items") or ()
        said = sorted(found, key=_when)
        return [f"{event.get('reason', '')}: {event.get('message', '')}" for event in said]

    def logs(
        self, pod: Ref, *, container: str = "", tail: int = 0, previous: bool = False
    ) -> list[str]:
        """Return lines that a pod has printed; none if there is nothing to be had.

        Args:
            pod: Which.
            container: Of the pod; "" is its only one.
            tail: The last lines; 0 is all.
            previous: Before it was started again.
        """
        from kubernetes.client.exceptions import ApiException  # noqa: PLC0415

        asked = {"container": container, "tailLines": tail, "previous": str(previous).lower()}
        path = f"{_resource(pod).path(name=pod.name, namespace=pod.namespace)}/log"
        query = [(name, value) for name, value in asked.items() if value]
        try:
            found = self._dynamic.request(
                "get", path, query_params=query, serialize=False, _request_timeout=_TIMEOUT_S
            )
        except ApiException:  # it has not started, or has left
            return []
        return list(found.data.decode(errors="replace").splitlines())

    def _call(self, verb: Callable[..., Any], ref: Ref, **more: Any) -> Manifest:
        from kubernetes.client.exceptions import ApiException  # noqa: PLC0415
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        if ref.name:
            more["name"] = ref.name
        try:
            found = verb(
                _resource(ref), namespace=ref.namespace, _request_timeout=_TIMEOUT_S, **more
            )
        except ApiException as error:
            raise _failure(ref, error) from None
        except HTTPError as error:
            raise SetupError(f"the cluster can't be reached: {error}") from None
        return dict(found.to_dict())


def _when(event: Manifest) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


class _AbsentError(Exception):
    """There is no such object, or no such kind."""


def _nothing(*_: object) -> None:
    """Discover nothing: the kinds are known, and no file has to keep what was found."""


def _resource(ref: Ref) -> "Resource":
    from kubernetes.dynamic.resource import Resource  # noqa: PLC0415

    group, _, version = ref.version.rpartition("/")
    return Resource(
        prefix="apis" if group else "api",
        group=group,
        api_version=version,
        kind=ref.kind,
        name=_PLURALS.get(ref.kind, f"{ref.kind.lower()}s"),
        namespaced=True,
        verbs=[],
    )


def _failure(ref: Ref, error: Any) -> Exception:
    try:
        said = str(json.loads(error.body)["message"])
    except (KeyError, TypeError, ValueError):  # it is a proxy's, say
        said = str(error.reason)
    if error.status == HTTPStatus.NOT_FOUND:
        return _AbsentError(said)
    if error.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        return ConfigError(f"{ref.title}: the cluster refuses it: {said}")
    return SetupError(f"{ref.title}: {said}")


def _unknown(ref: Ref, error: Exception) -> ConfigError:
    """Return why an apply did not find what it makes: the namespace or the kind is not there."""
    operator = _OPERATORS.get(ref.version.partition("/")[0])
    if operator is None or "namespaces" in str(error):
        return ConfigError(f"{ref.title}: there is no namespace {ref.namespace!r} on the cluster")
    return ConfigError(
        f"{ref.title}: the cluster knows no {ref.kind} ({ref.version}); install {operator} there, or "
        "leave it out of the overlay"
    )
