"""Whether an object that was applied is there, is not yet, or will not be, by its status."""

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from servekit.packaging.kubernetes.order import Manifest

_STUCK: Final = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
"""Why a container waits, when waiting does not help; the first attempts have been made by then."""


class Health(NamedTuple):
    """How an object is: ready, or failed, and what is said about it."""

    ready: bool
    failed: bool = False
    why: str = ""


class Stuck(NamedTuple):
    """A container that does not start: of which pod, and why."""

    pod: str
    container: str
    why: str
    restarts: int


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str = ""
    reason: str = ""
    message: str = ""


class _Status(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the kinds below say of themselves."""

    observed_generation: int | str | None = None
    conditions: list[_Condition] | None = None
    replicas: int = 0
    updated_replicas: int = 0
    available_replicas: int = 0
    phase: str = ""
    message: str = ""

    def condition(self, kind: str) -> _Condition:
        """Return a condition; one that was not heard of is neither true nor false."""
        none = _Condition(kind)
        return next((one for one in self.conditions or () if one.type == kind), none)


class _Waiting(msgspec.Struct, frozen=True):
    reason: str = ""
    message: str = ""


class _State(msgspec.Struct, frozen=True):
    waiting: _Waiting | None = None


class _Container(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    state: _State = _State()
    restart_count: int = 0


class _PodStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    phase: str = ""
    conditions: list[_Condition] | None = None
    init_container_statuses: list[_Container] | None = None
    container_statuses: list[_Container] | None = None


def health(found: Manifest) -> Health:
    """Return how an object is; one of a kind without a status is ready at once."""
    check = _CHECKS.get(found["kind"])
    if check is None:
        return Health(ready=True)
    status = msgspec.convert(found.get("status") or {}, _Status)
    generation = found["metadata"].get("generation")
    seen = status.observed_generation
    if seen is not None and str(seen) != str(generation):  # Argo's is text
        return Health(ready=False, why="the cluster has not looked at it yet")
    return check(found, status)


def stuck(pod: Manifest) -> Stuck | None:
    """Return what keeps a pod from starting, if it is nothing that passes."""
    status = msgspec.convert(pod.get("status") or {}, _PodStatus)
    for one in [*(status.init_container_statuses or ()), *(status.container_statuses or ())]:
        waiting = one.state.waiting
        if waiting is not None and waiting.reason in _STUCK:
            why = f"{waiting.reason}: {waiting.message}".removesuffix(": ")
            return Stuck(pod["metadata"]["name"], one.name, why, one.restart_count)
    return None


def pod_state(pod: Manifest) -> str:
    """Return how a pod is, in a word: `ready`, `leaving`, or its phase."""
    if pod["metadata"].get("deletionTimestamp"):
        return "leaving"
    status = msgspec.convert(pod.get("status") or {}, _PodStatus)
    ready = any(one.type == "Ready" and one.status == "True" for one in status.conditions or ())
    return "ready" if ready else status.phase.lower()


def _deployment(found: Manifest, status: _Status) -> Health:
    progress = status.condition("Progressing")
    if progress.reason == "ProgressDeadlineExceeded":
        return Health(ready=False, failed=True, why=progress.message)
    wanted: int = found["spec"].get("replicas", 1)
    new = status.updated_replicas
    ready = new >= wanted and status.replicas == new and status.available_replicas >= wanted
    have = min(new, status.available_replicas)
    return Health(ready=ready, why=f"{have} of {wanted} pods are new and ready")


def _rollout(_: Manifest, status: _Status) -> Health:
    why = status.message or status.phase or "it has no phase yet"
    ready = status.phase in ("Healthy", "Paused")
    return Health(ready=ready, failed=status.phase == "Degraded", why=why)


def _inference_service(_: Manifest, status: _Status) -> Health:
    found = status.condition("Ready")
    return Health(ready=found.status == "True", why=found.message)


def _job(_: Manifest, status: _Status) -> Health:
    failed = status.condition("Failed")
    return Health(
        ready=status.condition("Complete").status == "True",
        failed=failed.status == "True",
        why=failed.message,
    )


_CHECKS: Final[dict[str, Callable[[Manifest, _Status], Health]]] = {
    "Deployment": _deployment,
    "InferenceService": _inference_service,
    "Job": _job,
    "Rollout": _rollout,
}
