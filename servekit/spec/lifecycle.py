"""Lifecycle decorators: methods that servekit calls at a moment of a replica's life.

Each returns the function itself, tagged, so a hook stays a plain method::

    on_build → __init__ → setup → warmup → ready, live, reconfigure (again and again) → teardown
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from servekit.errors import SpecError
from servekit.spec.definition import HookKind
from servekit.spec.place import place

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "__servekit_hook__"


@dataclass(frozen=True)
class Hook:
    """What a tagged function is for."""

    kind: HookKind
    order: int = 0


def hook_of(value: object) -> Hook | None:
    """Return the tag of a function, or None."""
    found = getattr(value, _ATTRIBUTE, None)
    return found if isinstance(found, Hook) else None


@overload
def setup(fn: F, /) -> F: ...
@overload
def setup(*, order: int = ...) -> Callable[[F], F]: ...
def setup(fn: Callable[..., Any] | None = None, /, *, order: int = 0) -> Any:
    """Run after `__init__`, in the replica, with its devices; may be async.

    Args:
        fn: The method.
        order: Lower goes first; equal ones run as they are written, base classes first.
    """
    hook = Hook("setup", order)
    return _tagged(hook) if fn is None else _tag(fn, hook)


def warmup(fn: F, /) -> F:
    """Run after all `setup`, before the replica is ready: push representative inputs through."""
    return _tag(fn, Hook("warmup"))


def ready(fn: F, /) -> F:
    """Decide again and again whether calls may come: returning False or raising says no."""
    return _tag(fn, Hook("ready"))


def live(fn: F, /) -> F:
    """Decide again and again whether the replica works: returning False or raising restarts it."""
    return _tag(fn, Hook("live"))


def reconfigure(fn: F, /) -> F:
    """Take other values of some of the constructor's arguments, while calls go on.

    A change of the `args` that it names starts no new replica: it is called in each that runs, by
    name, with all of its parameters, as soon as one of them has another value. A plain method runs
    in a thread of its own. What it raises takes the whole change back, by another call of it.
    """
    return _tag(fn, Hook("reconfigure"))


def teardown(fn: F, /) -> F:
    """Run once the last call is done; several run in the reverse order, subclasses first."""
    return _tag(fn, Hook("teardown"))


def on_build(fn: F, /) -> F:
    """Run in `servekit build`, to make files that the bundle should contain; may be async.

    It runs in the bundle's code and environment, on an object whose `__init__` has not run, and which
    has its models. What it writes beside its module goes along.
    """
    return _tag(fn, Hook("on_build"))


def _tagged(hook: Hook) -> Callable[[F], F]:
    def decorate(fn: F) -> F:
        return _tag(fn, hook)

    return decorate


def _tag(fn: F, hook: Hook) -> F:
    _check(fn, hook)
    setattr(fn, _ATTRIBUTE, hook)
    return fn


def _check(fn: Callable[..., Any], hook: Hook) -> None:
    where, decorator = place(fn), f"@sk.{hook.kind}"
    if not inspect.isfunction(fn):
        raise SpecError(f"{decorator} on {where}: decorate a plain method, `def …(self)`")
    other = hook_of(fn)
    if other is not None:
        raise SpecError(
            f"{where}: is @sk.{other.kind} already, so it can't be {decorator} too; "
            "write one method for each"
        )
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise SpecError(f"{where}: {decorator} can't be a generator; do the work without `yield`")
    if hook.kind == "reconfigure":
        _check_parameters(fn, where)
        return
    required = [
        p.name
        for p in inspect.signature(fn).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) != 1:
        raise SpecError(
            f"{where}({', '.join(required)}): {decorator} is called with `self` alone; "
            "give every other parameter a default, or set it in __init__"
        )


def _check_parameters(fn: Callable[..., Any], where: str) -> None:
    parameters = [*inspect.signature(fn).parameters.values()][1:]
    if not parameters or any(
        p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters
    ):
        raise SpecError(
            f"{where}: @sk.reconfigure takes some of the constructor's parameters, by their names; "
            "write them out, like `def …(self, threshold: float)`"
        )
