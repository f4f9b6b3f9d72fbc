"""What a decorated method's own code says: its form and parameters, and whether it can work."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_origin

from servekit.errors import SpecError
from servekit.spec.definition import ROUTE
from servekit.spec.lifecycle import hook_of
from servekit.spec.place import place

_ASYNC_ITERATORS = {"AsyncIterator", "AsyncGenerator"}
_ITERATORS = {"Iterator", "Generator"} | _ASYNC_ITERATORS


@dataclass(frozen=True)
class Method:
    """A method that can become an endpoint.

    Attributes:
        where: `Class.method`.
        parameters: Names behind `self`.
        is_async: Runs on the event loop.
        streams: Answers many times.
    """

    where: str
    parameters: tuple[str, ...]
    is_async: bool
    streams: bool

    @classmethod
    def of(cls, fn: Callable[..., Any], decorator: str) -> "Method":
        """Look at a function.

        Raises:
            SpecError: It is no plain method with a `self`.
        """
        where = place(fn)
        kind = type(fn).__name__
        if kind in ("staticmethod", "classmethod"):
            raise SpecError(
                f"{where}: is a {kind}; an endpoint belongs to an instance, "
                "so write `def …(self, …)`"
            )
        if not inspect.isfunction(fn):
            raise SpecError(
                f"{decorator} on {where}: decorate a plain method, once; this is a {kind}"
            )
        hook = hook_of(fn)
        if hook is not None:
            raise SpecError(
                f"{where}: is @sk.{hook.kind}, so it can't be {decorator} too; "
                "write one method for each"
            )
        first, *rest = inspect.signature(fn).parameters.values() or (None,)
        if first is None or _is_no_self(first):
            raise SpecError(f"{where}: has no `self`; write `def {fn.__name__}(self, …)`")
        is_coroutine = inspect.iscoroutinefunction(fn)
        is_generator = inspect.isgeneratorfunction(fn)
        is_async_generator = inspect.isasyncgenfunction(fn)
        returns = _outer_name(fn.__annotations__.get("return"))
        if is_coroutine and returns in _ITERATORS:
            raise SpecError(
                f"{where}: an `async def` that returns {returns} without `yield` is no stream; "
                "write `yield` in it, or plain `def`"
            )
        if returns in ("Iterable", "AsyncIterable"):
            raise SpecError(
                f"{where}: returns {returns}; write Iterator[X] or AsyncIterator[X] to stream, "
                "or list[X] to answer at once"
            )
        return cls(
            where=where,
            parameters=tuple(p.name for p in rest),
            is_async=is_coroutine or is_async_generator or returns in _ASYNC_ITERATORS,
            streams=is_generator or is_async_generator or returns in _ITERATORS,
        )

    def path(self, path: str | None) -> str:
        """Check a route below the prefix; "" stands for `/{method name}`."""
        if path not in (None, "/") and ROUTE.fullmatch(path) is None:
            raise SpecError(
                f"{self.where}: path={path!r}; a path looks like '/v1/generate': it starts with "
                "'/', doesn't end with one, and has no parameters"
            )
        return path or ""

    def timeout(self, timeout_s: float | None) -> float | None:
        """Check a deadline."""
        if timeout_s is not None and timeout_s <= 0:
            raise SpecError(f"{self.where}: timeout_s={timeout_s}; must be above 0, or None")
        return timeout_s


def _is_no_self(parameter: inspect.Parameter) -> bool:
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        return True
    # People name it `this` or annotate `self: Self`, but an annotated other name is an input.
    return parameter.name != "self" and parameter.annotation is not parameter.empty


def _outer_name(annotation: object) -> str:
    """`"Iterator"` for `Iterator[str]`, also when it is still text, as forward references are."""
    if isinstance(annotation, str):
        return annotation.partition("[")[0].strip().rpartition(".")[2]
    return str(getattr(get_origin(annotation) or annotation, "__name__", ""))
