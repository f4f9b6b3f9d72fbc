"""What a cluster was made to have, kept there: all state there is, in one ConfigMap for each app."""

from typing import Self

import msgspec

from servekit.packaging.kubernetes.api import Cluster, Ref
from servekit.packaging.kubernetes.order import MANAGER, NAME, Manifest

LABEL = "servekit.io/record"
_SUFFIX = "-servekit"
_KEY = "record.json"


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """One deploy: its image, its pods' label, and its objects.

    Attributes:
        image: In a registry.
        objects: In the order in which they are applied.
    """

    image: str
    objects: list[Manifest]

    def refs(self) -> dict[Ref, Manifest]:
        """Return the objects by what they are called."""
        return {Ref.of(one): one for one in self.objects}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What an app has now, and had before.

    Attributes:
        name: Of the app.
        namespace: Where it is.
        now: The latest deploy.
        before: That which `rollback` goes back to.
    """

    name: str
    namespace: str
    now: Revision
    before: Revision | None = None

    @classmethod
    def read(cls, cluster: Cluster, namespace: str, name: str) -> Self | None:
        """Return the record of an app, if there is one."""
        found = cluster.get(_ref(namespace, name))
        return None if found is None else msgspec.json.decode(found["data"][_KEY], type=cls)

    @classmethod
    def all(cls, cluster: Cluster, namespace: str) -> list[Self]:
        """Return the records of all apps of a namespace."""
        found = cluster.labelled("v1", "ConfigMap", namespace, {LABEL: "true"})
        records = [msgspec.json.decode(one["data"][_KEY], type=cls) for one in found]
        return sorted(records, key=lambda record: record.name)

    def write(self, cluster: Cluster) -> None:
        """Keep it on the cluster."""
        ref = _ref(self.namespace, self.name)
        labels = {NAME: self.name, "app.kubernetes.io/managed-by": MANAGER, LABEL: "true"}
        metadata = {"name": ref.name, "namespace": ref.namespace, "labels": labels}
        cluster.apply(
            {
                "apiVersion": ref.version,
                "kind": ref.kind,
                "metadata": metadata,
                "data": {_KEY: msgspec.json.encode(self).decode()},
            }
        )

    def delete(self, cluster: Cluster) -> None:
        """Forget the app."""
        cluster.delete(_ref(self.namespace, self.name))


def _ref(namespace: str, name: str) -> Ref:
    return Ref("v1", "ConfigMap", namespace, f"{name}{_SUFFIX}")
