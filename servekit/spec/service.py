"""`@service`: a class becomes a service, and stays the class that it was."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_args, overload

from servekit.core.units import parse_bytes
from servekit.errors import SpecError
from servekit.spec.container import Image
from servekit.spec.definition import (
    ATTRIBUTE,
    EndpointDefinition,
    HookKind,
    MountDefinition,
    ServiceDefinition,
)
from servekit.spec.descriptor import EndpointDescriptor
from servekit.spec.graph import Dependency
from servekit.spec.lifecycle import hook_of
from servekit.spec.model import Model
from servekit.spec.mount import mount_of
from servekit.spec.place import at, place
from servekit.spec.policy import Autoscale, Limits, Placement, Resources

T = TypeVar("T")

_WRAPPERS: dict[type, str] = {staticmethod: "__func__", classmethod: "__func__", property: "fget"}


@overload
def service(cls: type[T], /) -> type[T]: ...
@overload
def service(
    *,
    name: str | None = ...,
    prefix: str | None = ...,
    replicas: int | Autoscale = ...,
    gpu: float = ...,
    cpu: float = ...,
    memory: str | int | None = ...,
    placement: Placement | None = ...,
    limits: Limits | None = ...,
    env: Mapping[str, str] | None = ...,
    version: str = ...,
    image: Image | None = ...,
) -> Callable[[type[T]], type[T]]: ...
def service(
    cls: type | None = None,
    /,
    *,
    name: str | None = None,
    prefix: str | None = None,
    replicas: int | Autoscale = 1,
    gpu: float = 0.0,
    cpu: float = 0.0,
    memory: str | int | None = None,
    placement: Placement | None = None,
    limits: Limits | None = None,
    env: Mapping[str, str] | None = None,
    version: str = "1",
    image: Image | None = None,
) -> Any:
    """Make a class a service; the class itself is returned, and nothing starts.

    Args:
        cls: The class.
        name: Unique name in the app; None takes the class's.
        prefix: Route prefix like `"/search"`; None has HTTP routes only as the root of an app.
        replicas: A number, or a policy.
        gpu: Devices for one replica: below 1 shares one, whole numbers take that many.
        cpu: Cores that one replica keeps busy; more than there are is a warning.
        memory: Memory of one replica: bytes, or text like `"4GiB"`. More than there is is refused.
        placement: Where on a cluster a replica may be.
        limits: Bounds of its queues; None takes the defaults of `Limits`.
        env: Environment variables of its replicas.
        version: Label of this version.
        image: What the container has besides, of an app that it is the root of.

    Raises:
        SpecError: The class can't be served as written; the message names the place and the fix.
    """

    def decorate(cls: type) -> type:
        if not inspect.isclass(cls):
            raise SpecError(f"@sk.service on {cls!r}: decorate a class")
        if ATTRIBUTE in vars(cls):
            raise SpecError(f"{place(cls)}: is decorated with @sk.service twice")
        members = _members(cls)
        with at(place(cls)):
            resources = Resources(
                gpu=float(gpu),
                cpu=float(cpu),
                memory=0 if memory is None else parse_bytes(memory, where="memory"),
            )
        found = ServiceDefinition(
            cls=cls,
            name=cls.__name__ if name is None else name,
            prefix=prefix,
            replicas=replicas,
            resources=resources,
            placement=placement or Placement(),
            limits=limits or Limits(),
            env=dict(env or {}),
            args={},
            version=version,
            image=image,
            endpoints=_endpoints(cls, members),
            mounts=_mounts(members),
            dependencies={
                attribute: value.named(attribute)
                for attribute, value in members.items()
                if isinstance(value, Dependency)
            },
            models={name: value for name, value in members.items() if isinstance(value, Model)},
            hooks=_hooks(members),
        )
        setattr(cls, ATTRIBUTE, found)
        return cls

    return decorate if cls is None else decorate(cls)


def _members(cls: type) -> dict[str, object]:
    """Return the class's attributes as they are seen from outside, base classes first."""
    members: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            where = f"{place(base)}.{attribute}"
            if _is_declared(_wrapped(value)):
                raise SpecError(
                    f"{where}: is a {type(value).__name__} around a decorated method; "
                    "write a plain method, `def …(self, …)`"
                )
            before = members.get(attribute)
            if _is_declared(before) and value is not None and not _is_declared(value):
                raise SpecError(
                    f"{where}: replaces a decorated method of a base class without a decorator; "
                    f"decorate it too, or write `{attribute} = None` to drop it"
                )
            members[attribute] = value
    return members


def _wrapped(value: object) -> object:
    name = _WRAPPERS.get(type(value))
    return None if name is None else getattr(value, name)


def _is_declared(value: object) -> bool:
    return (
        isinstance(value, EndpointDescriptor)
        or hook_of(value) is not None
        or mount_of(value) is not None
    )


def _endpoints(cls: type, members: Mapping[str, object]) -> dict[str, EndpointDefinition]:
    endpoints: dict[str, EndpointDefinition] = {}
    for attribute, value in members.items():
        if isinstance(value, EndpointDescriptor):
            if attribute.startswith("_"):
                raise SpecError(
                    f"{place(cls)}.{attribute}: an endpoint's name can't start with '_'; "
                    "rename the method, or drop the decorator if nobody should call it"
                )
            endpoints[attribute] = value.named(attribute)
    return endpoints


def _mounts(members: Mapping[str, object]) -> dict[str, MountDefinition]:
    found = {name: mount for name, value in members.items() if (mount := mount_of(value))}
    mounts = {name: replace(mount, name=name) for name, mount in found.items()}
    for name, mount in mounts.items():
        for other in mounts.values():
            if other.path == mount.path and other is not mount:
                raise SpecError(
                    f"{place(mount.fn)} and {place(other.fn)} are mounted at the same path "
                    f"{mount.path!r}; give {name} another one"
                )
    return mounts


def _hooks(members: Mapping[str, object]) -> dict[HookKind, tuple[Callable[..., Any], ...]]:
    tagged = [(hook, fn) for fn in members.values() if callable(fn) and (hook := hook_of(fn))]
    hooks: dict[HookKind, tuple[Callable[..., Any], ...]] = {}
    for kind in get_args(HookKind):
        found = [(hook.order, fn) for hook, fn in tagged if hook.kind == kind]
        found.sort(key=lambda pair: pair[0])
        functions = tuple(fn for _, fn in found)
        # What was set up last is torn down first.
        hooks[kind] = functions[::-1] if kind == "teardown" else functions
    return hooks
