"""servekit: model serving at scale, from typed Python classes.

::

    import servekit as sk

    @sk.service
    class Embedder:
        @sk.batched(max_size=64)
        def embed(self, texts: list[str]) -> list[Vector]: ...

    @sk.service(prefix="/search")
    class Search:
        embedder = sk.depends(Embedder)

        @sk.endpoint
        async def query(self, text: str) -> list[Hit]:
            vector = await self.embedder.embed.remote(text)
            ...

`servekit serve app:Search` runs it; `sk.local` runs it in a test; `sk.connect` calls it.
"""

import importlib
from typing import TYPE_CHECKING

from servekit import errors
from servekit.core.context import current as context
from servekit.core.job import running_job as job
from servekit.spec.array import Array
from servekit.spec.batched import batched
from servekit.spec.container import Image
from servekit.spec.endpoint import endpoint
from servekit.spec.file import File
from servekit.spec.graph import depends, ref
from servekit.spec.item import Item, ItemError
from servekit.spec.lifecycle import live, on_build, ready, reconfigure, setup, teardown, warmup
from servekit.spec.model import model
from servekit.spec.mount import mount_asgi
from servekit.spec.policy import Autoscale, Limits, Placement
from servekit.spec.promise import promise
from servekit.spec.service import service
from servekit.spec.task import task
from servekit.version import __version__

if TYPE_CHECKING:
    from servekit.client import AsyncClient, Client, connect
    from servekit.engine.deploy import deploy
    from servekit.engine.inprocess import local

__all__ = [
    "Array",
    "AsyncClient",
    "Autoscale",
    "Client",
    "File",
    "Image",
    "Item",
    "ItemError",
    "Limits",
    "Placement",
    "__version__",
    "batched",
    "connect",
    "context",
    "depends",
    "deploy",
    "endpoint",
    "errors",
    "job",
    "live",
    "local",
    "model",
    "mount_asgi",
    "on_build",
    "promise",
    "ready",
    "reconfigure",
    "ref",
    "service",
    "setup",
    "task",
    "teardown",
    "warmup",
]

_LAZY = {
    "AsyncClient": "servekit.client",
    "Client": "servekit.client",
    "connect": "servekit.client",
    "deploy": "servekit.engine.deploy",
    "local": "servekit.engine.inprocess",
}
"""Names whose modules bring an event loop along, which describing a service doesn't need."""


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'servekit' has no attribute {name!r}", name=name)
    value: object = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
