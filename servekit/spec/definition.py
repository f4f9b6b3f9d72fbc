"""What the decorators found: one service with its endpoints, dependencies and hooks.

Definitions hold live objects (classes, functions), so they stay in the process that imported the
app. `spec/describe.py` turns them into an `AppSpec`, which is plain data.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from servekit.errors import SpecError, suggest
from servekit.spec.app import Kind
from servekit.spec.container import Image
from servekit.spec.item import Item
from servekit.spec.model import Model
from servekit.spec.place import place
from servekit.spec.policy import Autoscale, BatchPolicy, Limits, Placement, Resources, TaskPolicy

if TYPE_CHECKING:
    from servekit.spec.schema import InputSchema, OutputSchema

HookKind: TypeAlias = Literal[
    "on_build", "setup", "warmup", "ready", "live", "reconfigure", "teardown"
]

RESERVED = frozenset(
    {
        "/debug",
        "/debug.json",
        "/docs",
        "/livez",
        "/metrics",
        "/openapi.json",
        "/playground",
        "/readyz",
        "/startupz",
    }
)
"""Routes that every app has."""

ROUTE = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9_.~:@-]+)+")
"""Routes as authors may write them: no parameters, no `..`, nothing that needs quoting."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")

ATTRIBUTE = "__servekit_service__"
"""Where a class keeps its definition."""


@dataclass(frozen=True, kw_only=True)
class EndpointDefinition:
    """One endpoint; see `EndpointSpec` for the fields that it shares with it.

    Attributes:
        fn: The plain function.
        size_of: Rows that one item counts for; None counts 1.
        bucket_by: Items are merged only with items of an equal key.
    """

    name: str
    fn: Callable[..., Any]
    kind: Kind
    is_async: bool
    path: str
    method: Literal["GET", "POST"] = "POST"
    timeout_s: float | None = None
    max_concurrency: int | None = None
    media_type: str = ""
    internal: bool = False
    tags: tuple[str, ...] = ()
    idempotent: bool = False
    batch: BatchPolicy | None = None
    task: TaskPolicy | None = None
    size_of: Callable[[Any], int] | None = None
    bucket_by: Callable[[Any], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what another process makes again, and can't be pickled."""
        return {name: value for name, value in vars(self).items() if name != "schemas"}

    @property
    def where(self) -> str:
        """`Class.method`, as the author wrote it."""
        return place(self.fn)

    @property
    def routes(self) -> tuple[str, ...]:
        """Paths below the service's prefix that lead here."""
        if self.internal:
            return ()
        if self.kind == "batched":
            return self.path, f"{self.path.rstrip('/')}/batch"
        if self.kind == "task":
            return self.path, f"{self.path.rstrip('/')}/jobs"
        return (self.path,)

    @cached_property
    def schemas(self) -> tuple["InputSchema", "OutputSchema"]:
        """How bodies become arguments, and results become bodies."""
        # Loads pydantic, which declaring a service should not have to wait for.
        from servekit.spec.schema import endpoint_schemas  # noqa: PLC0415

        batched: Literal["list", "axis"] | None = None
        if self.batch is not None:
            batched = "list" if self.batch.axis is None else "axis"
        return endpoint_schemas(self.fn, where=self.where, batched=batched)

    @cached_property
    def wants_items(self) -> bool:
        """The batch is a `list[Item[X]]`: each element brings its own request context."""
        if self.batch is None or self.batch.axis is not None:
            return False
        try:
            hints = get_type_hints(self.fn)
        except NameError as error:
            raise SpecError(
                f"{self.where}: its annotations can't be read ({error}); "
                "import the name at module level"
            ) from error
        _, items, *_ = inspect.signature(self.fn).parameters
        (element,) = get_args(hints.get(items)) or (None,)
        return Item in (element, get_origin(element))


@dataclass(frozen=True, kw_only=True)
class MountDefinition:
    """An ASGI app that `fn` returns, below `path`."""

    name: str
    fn: Callable[[Any], Any]
    path: str


@dataclass(frozen=True, kw_only=True)
class DependencyDefinition:
    """One edge of the graph: `attribute` of the owner is a handle to `target`."""

    attribute: str
    target: "ServiceDefinition"
    timeout_s: float | None = None
    retries: int = 1
    colocate: bool = False


def parameters(hook: Callable[..., Any]) -> tuple[str, ...]:
    """Return what a hook takes besides the instance."""
    return tuple(inspect.signature(hook).parameters)[1:]


@dataclass(frozen=True, kw_only=True)
class ServiceDefinition:
    """One service: a class, how it runs, and what was found in it.

    Attributes:
        prefix: Route prefix; None has routes only as the root of an app, where it means `""`.
        args: Keyword arguments of the constructor.
        image: What the container has of an app that it is the root of.
        endpoints: By name, base classes first.
        mounts: By name, base classes first.
        dependencies: By attribute, base classes first.
        models: By attribute, base classes first.
        hooks: Functions that take the instance, by kind, in the order in which they run.
    """

    cls: type
    name: str
    prefix: str | None
    replicas: int | Autoscale
    resources: Resources
    placement: Placement
    limits: Limits
    env: Mapping[str, str]
    args: Mapping[str, Any]
    version: str
    image: Image | None
    endpoints: Mapping[str, EndpointDefinition]
    mounts: Mapping[str, MountDefinition]
    dependencies: Mapping[str, DependencyDefinition]
    models: Mapping[str, Model]
    hooks: Mapping[HookKind, tuple[Callable[..., Any], ...]]

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise SpecError(
                f"{self.where}: name={self.name!r}; a name has up to 63 letters, digits, "
                "'_' and '-', and starts with a letter"
            )
        if self.prefix and ROUTE.fullmatch(self.prefix) is None:
            raise SpecError(
                f"{self.where}: prefix={self.prefix!r}; a prefix looks like '/search': it starts "
                "with '/' and doesn't end with one. The root's is ''"
            )
        if isinstance(self.replicas, int) and self.replicas < 1:
            raise SpecError(
                f"{self.where}: replicas={self.replicas}; must be 1 or more. A service that may "
                "sleep has replicas=sk.Autoscale(min=0, max=…)"
            )
        for key, value in self.env.items():
            if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SpecError(f"{self.where}: env[{key!r}]={value!r}; write it as text")
        self.routes  # noqa: B018  (finds paths that clash)
        taken = inspect.signature(self.cls).parameters
        for hook in self.hooks.get("reconfigure", ()):
            for name in parameters(hook):
                if name not in taken:
                    raise SpecError(
                        f"{place(hook)}: @sk.reconfigure takes {name!r}, which the constructor of "
                        f"{self.name} doesn't.{suggest(name, list(taken))}"
                    )

    @property
    def where(self) -> str:
        """The class's name, as the author wrote it."""
        return place(self.cls)

    @property
    def tunable(self) -> tuple[str, ...]:
        """The arguments of the constructor that a running replica takes other values of."""
        names = {name for hook in self.hooks.get("reconfigure", ()) for name in parameters(hook)}
        return tuple(sorted(names))

    @property
    def routes(self) -> dict[str, EndpointDefinition]:
        """HTTP paths and the endpoints behind them, if the service gets routes.

        Raises:
            SpecError: Two endpoints share a path, or one is servekit's own.
        """
        routes: dict[str, EndpointDefinition] = {}
        for mount in self.mounts.values():
            if mount.path in RESERVED and not self.prefix:
                raise SpecError(
                    f"{place(mount.fn)}: {mount.path!r} is a page of servekit itself; "
                    "mount the app elsewhere"
                )
        for endpoint in self.endpoints.values():
            for route in ((self.prefix or "") + path for path in endpoint.routes):
                if route in RESERVED:
                    raise SpecError(
                        f"{endpoint.where}: {route!r} is a page of servekit itself; "
                        "give the endpoint another path="
                    )
                other = routes.setdefault(route, endpoint)
                if other is not endpoint:
                    raise SpecError(
                        f"{endpoint.where} and {other.where} have the same path {route!r}; "
                        "give one another path="
                    )
        return routes


def definition(cls: type) -> ServiceDefinition:
    """Return the definition of exactly this class; a subclass needs `@sk.service` of its own.

    Raises:
        SpecError: It is no service; the message says what to do.
    """
    if not isinstance(cls, type):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(f"{cls!r} is no class; give a class decorated with @sk.service")
    found = vars(cls).get(ATTRIBUTE)
    if isinstance(found, ServiceDefinition):
        return found
    base = next((b for b in cls.__mro__ if ATTRIBUTE in vars(b)), None)
    why = f", it only inherits from {place(base)}" if base else ""
    raise SpecError(f"{place(cls)} is no service{why}; decorate the class with @sk.service")
