"""`@mount_asgi`: a method that makes a Starlette, FastAPI or other ASGI app, served beside the endpoints."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from servekit.errors import SpecError
from servekit.spec.definition import MountDefinition
from servekit.spec.method import Method

F = TypeVar("F", bound=Callable[[Any], Any])

_ATTRIBUTE = "__servekit_mount__"


def mount_asgi(path: str) -> Callable[[F], F]:
    """Serve the ASGI app that a method returns below a path, from the service's replicas.

    The method is called once in each replica, after `__init__` and `setup`; so the app's handlers
    may use `self`, with its models and dependencies. Bodies stream both ways, WebSockets and
    background tasks work, and the app's lifespan is that of the replica.

    Args:
        path: Below the service's prefix; the app sees it as its `root_path`. Endpoints and
            servekit's own pages come first, so `"/"` takes what is left.

    Raises:
        SpecError: The path can't be used, or the method takes arguments.
    """

    def decorate(fn: F) -> F:
        found = Method.of(fn, "@sk.mount_asgi")
        if found.parameters or inspect.iscoroutinefunction(fn):
            raise SpecError(
                f"{found.where}: @sk.mount_asgi is for a plain `def {fn.__name__}(self)` that "
                "returns the app"
            )
        mount = MountDefinition(name=fn.__name__, fn=fn, path=found.path(path) or "/")
        setattr(fn, _ATTRIBUTE, mount)
        return fn

    return decorate


def mount_of(value: object) -> MountDefinition | None:
    """Return what `@mount_asgi` left on a function, or None."""
    found = getattr(value, _ATTRIBUTE, None)
    return found if isinstance(found, MountDefinition) else None
