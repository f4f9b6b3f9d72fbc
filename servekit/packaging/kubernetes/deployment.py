"""An app on a cluster: deploy, look, roll back, end."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

from servekit.errors import ConfigError, SetupError
from servekit.packaging.kubernetes.api import Cluster, Ref
from servekit.packaging.kubernetes.health import health, pod_state, stuck
from servekit.packaging.kubernetes.order import NAME, Manifest
from servekit.packaging.kubernetes.pod import REVISION
from servekit.packaging.kubernetes.record import Record, Revision

_POLL_S = 1.0
_TAIL = 40
"""Lines of a container's log that an error shows."""

_RESTARTS = 2
"""Crashes of a container after which there is no more waiting."""

_KEPT = "PersistentVolumeClaim"
"""What has data is not deleted with an app."""


class Plan(NamedTuple):
    """What a deploy changes."""

    new: list[Ref]
    changed: list[Ref]
    same: list[Ref]
    gone: list[Ref]


class PodState(NamedTuple):
    """A pod, for people."""

    name: str
    state: str
    image: str


class Deployment:
    """One app on a cluster.

    Args:
        cluster: Where.
        namespace: Where in it.
        name: What the app is deployed as.
    """

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self._cluster = cluster
        self.namespace = namespace
        self.name = name

    def record(self) -> Record | None:
        """Return what the app has, if it is there."""
        return Record.read(self._cluster, self.namespace, self.name)

    def plan(self, wanted: Revision) -> Plan:
        """Return what would change."""
        record = self.record()
        old = record.now.refs() if record else {}
        new = wanted.refs()
        return Plan(
            new=[ref for ref in new if ref not in old],
            changed=[ref for ref in new if ref in old and new[ref] != old[ref]],
            same=[ref for ref in new if ref in old and new[ref] == old[ref]],
            gone=[ref for ref in old if ref not in new and ref.kind != _KEPT],
        )

    def carry_out(
        self, wanted: Revision, *, timeout_s: float, told: Callable[[str], None] = lambda _: None
    ) -> None:
        """Have the cluster have a revision, object by object, and remove what it has no more.

        What runs pods is waited for until it is ready, before the next object is applied.

        Raises:
            ConfigError: The cluster refuses something.
            SetupError: It does not become ready, or the cluster can't be reached. What was there
                before is applied again.
        """
        record = self.record()
        before = record.now if record else None
        if record and before and before.objects == wanted.objects:
            before = record.before  # the same again is no step that one could go back
        kept = Record(name=self.name, namespace=self.namespace, now=wanted, before=before)
        kept.write(self._cluster)
        try:
            for one in wanted.objects:
                told(f"applying {Ref.of(one).title}")
                self._cluster.apply(one)
                self._until_ready(Ref.of(one), wanted, timeout_s, told)
        except BaseException:
            if record:
                told("going back")
                self._go_back(record, wanted)
            raise
        if record:
            self._remove(record.now, wanted)

    def _go_back(self, record: Record, wanted: Revision) -> None:
        record.write(self._cluster)
        for one in record.now.objects:
            self._cluster.apply(one)
        self._remove(wanted, record.now)

    def _remove(self, old: Revision, new: Revision) -> None:
        """Delete what one revision has and another has not."""
        for ref in old.refs().keys() - new.refs().keys():
            if ref.kind != _KEPT:
                self._cluster.delete(ref)

    def _until_ready(
        self, ref: Ref, revision: Revision, timeout_s: float, told: Callable[[str], None]
    ) -> None:
        give_up = time.monotonic() + timeout_s
        while True:
            found = self._cluster.get(ref)
            if found is None:
                raise SetupError(f"{ref.title} was deleted while it was waited for")
            state = health(found)
            if state.ready:
                return
            told(f"waiting for {ref.title}: {state.why}" if state.why else f"waiting: {ref.title}")
            if state.failed:
                self._fail(ref, revision, state.why)
            if self._is_stuck(revision):
                self._fail(ref, revision, "a pod does not start")
            if time.monotonic() > give_up:
                self._fail(ref, revision, f"is not ready after {timeout_s:g} s: {state.why}")
            time.sleep(_POLL_S)

    def pods(self, revision: Revision | None = None) -> list[Manifest]:
        """Return the app's pods: all, or those of a revision."""
        labels = {NAME: self.name}
        if revision is not None:
            labels |= {REVISION: found} if (found := _label(revision)) else {}
        return self._cluster.labelled("v1", "Pod", self.namespace, labels)

    def states(self) -> list[PodState]:
        """Return how the app's pods are."""
        found: list[PodState] = []
        for pod in self.pods():
            why = stuck(pod)
            state = why.why if why else pod_state(pod)
            image = pod["spec"]["containers"][0]["image"]
            found.append(PodState(pod["metadata"]["name"], state, image))
        return found

    def _is_stuck(self, revision: Revision) -> bool:
        found = [why for pod in self.pods(revision) if (why := stuck(pod))]
        return any(
            one.restarts >= _RESTARTS or not one.why.startswith("CrashLoopBackOff") for one in found
        )

    def _fail(self, ref: Ref, revision: Revision, why: str) -> NoReturn:
        raise SetupError(f"{ref.title}: {why}", trace="\n".join(self._evidence(ref, revision)))

    def _evidence(self, ref: Ref, revision: Revision) -> Iterator[str]:
        """Yield what the cluster says of an object and of pods that do not start, and their logs."""
        yield from (f"{ref.title}: {text}" for text in self._cluster.events(ref))
        for pod in self.pods(revision):
            name = pod["metadata"]["name"]
            there = Ref("v1", "Pod", self.namespace, name)
            yield from (f"{there.title}: {text}" for text in self._cluster.events(there))
            if found := stuck(pod):
                yield f"{there.title}, container {found.container}: {found.why}"
                crashed = found.restarts > 0
                yield from self._cluster.logs(
                    there, container=found.container, tail=_TAIL, previous=crashed
                )
            elif pod_state(pod) == "failed":
                yield from self._cluster.logs(there, tail=_TAIL)

    def logs(self) -> Iterator[tuple[str, str]]:
        """Yield pods and the lines that they have printed."""
        for pod in self.pods():
            name = pod["metadata"]["name"]
            for line in self._cluster.logs(Ref("v1", "Pod", self.namespace, name)):
                yield name, line

    def rollback(self, *, timeout_s: float, told: Callable[[str], None]) -> Revision:
        """Have what was there before the last deploy.

        Raises:
            ConfigError: There was nothing.
        """
        record = self.record()
        if record is None or record.before is None:
            raise ConfigError(f"{self.name}: nothing ran before what runs now")
        self.carry_out(record.before, timeout_s=timeout_s, told=told)
        return record.before

    def delete(self) -> list[Ref]:
        """End the app; returns what is kept, as it has data."""
        record = self.record()
        if record is None:
            return []
        refs = record.now.refs()
        for ref in refs:
            if ref.kind != _KEPT:
                self._cluster.delete(ref)
        record.delete(self._cluster)
        return [ref for ref in refs if ref.kind == _KEPT]


def _label(revision: Revision) -> str:
    """Return the label of a revision's pods; "" where something else makes them."""
    for one in revision.objects:
        spec = one.get("spec") or {}
        template = spec.get("template", {}).get("metadata") or spec.get("predictor") or {}
        if found := template.get("labels", {}).get(REVISION):
            return str(found)
    return ""
