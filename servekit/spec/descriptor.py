"""Endpoints as callers see them: descriptors that keep a method's type and add `.remote`.

A plain instance runs the function itself. Handles (a bound dependency, `sk.local`, `sk.connect`)
are objects of other classes with the shape of these, which is what type checkers see.
"""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

from servekit.core.context import CURRENT, RequestContext
from servekit.core.job import JobEvent, JobStatus
from servekit.errors import InvalidOutput, ServekitError
from servekit.spec.definition import EndpointDefinition
from servekit.spec.item import Item, ItemError

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
V_co = TypeVar("V_co", covariant=True)


class Call(Awaitable[V_co], Protocol[V_co]):
    """A remote call under way."""

    def result(self, timeout: float | None = ...) -> V_co:
        """Wait for the answer, on a thread that runs no event loop."""
        ...

    def cancel(self) -> bool:
        """Stop the work, wherever it is; False when it is done already."""
        ...

    @property
    def request_id(self) -> str:
        """The id under which logs and traces have the call."""
        ...


class Stream(AsyncIterable[V_co], Protocol[V_co]):
    """A remote call that answers many times; closing it cancels the work behind it."""

    def __aiter__(self) -> AsyncIterator[V_co]: ...

    async def __anext__(self) -> V_co: ...

    def iter_sync(self) -> Iterator[V_co]:
        """Iterate on a thread that runs no event loop."""
        ...

    async def aclose(self) -> None:
        """Stop reading."""
        ...

    def cancel(self) -> bool:
        """Stop the work, wherever it is; False when it is done already."""
        ...


class Job(Awaitable[V_co], Protocol[V_co]):
    """A job that was submitted; awaiting it waits for its result.

    Whoever has its id and its task can have it again; losing this object changes nothing.
    """

    @property
    def id(self) -> str:
        """The job's id, 32 hex digits."""
        ...

    def result(self, timeout: float | None = ...) -> V_co:
        """Wait for the result, on a thread that runs no event loop.

        Raises:
            TimeoutError: It is not there after `timeout` seconds.
            CallError: The job failed; `Conflict` if it was cancelled or has expired.
        """
        ...

    def status(self) -> Call[JobStatus]:
        """Ask where it is."""
        ...

    def cancel(self) -> Call[JobStatus]:
        """Drop it if it is queued, else ask it to stop."""
        ...

    def retry(self) -> Call[JobStatus]:
        """Queue it again, if it failed, was cancelled or has expired."""
        ...

    def events(self) -> Stream[JobEvent]:
        """Read its changes of status and progress, from the first on, to the end of the job."""
        ...


class _Bound(Generic[P, R_co]):
    __slots__ = ("_call", "_where")

    def __init__(self, call: Callable[P, R_co], where: str) -> None:
        self._call = call
        self._where = where

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function itself, here and now, in its declared form (sync or async)."""
        return self._call(*args, **kwargs)

    def options(
        self,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
        priority: int = 0,
        affinity_key: str | None = None,
    ) -> Self:
        """Return the handle with other settings for its calls.

        Args:
            timeout_s: Deadline; None takes the endpoint's.
            retries: Attempts after the first; None takes the dependency's.
            priority: Higher goes first.
            affinity_key: Calls with the same key prefer the same replica.
        """
        del timeout_s, retries, priority, affinity_key
        raise self._no_handle("options")

    def _no_handle(self, method: str) -> ServekitError:
        return ServekitError(
            f"{self._where}.{method}() needs a handle, and this is a plain instance: take one from "
            f"sk.depends, sk.local or sk.connect, or call {self._where}(...) itself"
        )

    def __repr__(self) -> str:
        return f"<endpoint {self._where}>"


class Bound(_Bound[P, R_co], Generic[P, R_co, V_co]):
    """An endpoint of one instance or handle, that answers once."""

    __slots__ = ()

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Call[V_co]:
        """Start the call in a replica; await it, or take `.result()`."""
        del args, kwargs
        raise self._no_handle("remote")


class BoundTask(_Bound[P, R_co], Generic[P, R_co, V_co]):
    """A task of one instance or handle: its calls are jobs."""

    __slots__ = ()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Call[Job[V_co]]:
        """Queue a job; what is awaited, or taken as `.result()`, is the job as soon as it is kept."""
        del args, kwargs
        raise self._no_handle("submit")

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Call[V_co]:
        """Queue a job and wait for its result; leaving the wait leaves the job as it is."""
        del args, kwargs
        raise self._no_handle("remote")

    def keyed(self, idempotency_key: str) -> Self:
        """Return the handle with a key: of the submissions with one key only the first is kept."""
        del idempotency_key
        raise self._no_handle("keyed")


class BoundStream(_Bound[P, R_co], Generic[P, R_co, V_co]):
    """An endpoint of one instance or handle, that answers many times."""

    __slots__ = ()

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Stream[V_co]:
        """Start the call in a replica; iterate over it."""
        del args, kwargs
        raise self._no_handle("remote")


class EndpointDescriptor:
    """What `@endpoint`, `@batched` and `@task` leave in the class; `definition` says what they found."""

    def __init__(self, definition: EndpointDefinition) -> None:
        self.definition = definition
        update_wrapper(cast("Callable[..., Any]", self), definition.fn)

    def named(self, attribute: str) -> EndpointDefinition:
        """Return the definition under the name that the class gives it."""
        path = self.definition.path or f"/{attribute}"
        return replace(self.definition, name=attribute, path=path)

    def _bind(self, obj: object) -> Callable[..., Any]:
        definition = self.definition
        if definition.batch is not None and definition.batch.axis is None:
            return partial(_batch_of_one, definition, obj)
        return MethodType(definition.fn, obj)

    def __repr__(self) -> str:
        return f"<endpoint {self.definition.where}>"


class Endpoint(EndpointDescriptor, Generic[P, R_co, V_co]):
    """A method that answers once: `R_co` to a plain call, `V_co` to a remote one."""

    @overload
    def __get__(self, obj: None, owner: type[Any] | None = ..., /) -> Self: ...
    @overload
    def __get__(self, obj: object, owner: type[Any] | None = ..., /) -> Bound[P, R_co, V_co]: ...
    def __get__(self, obj: object, owner: type[Any] | None = None, /) -> Any:
        if obj is None:
            return self
        return Bound[P, R_co, V_co](self._bind(obj), self.definition.where)


class StreamEndpoint(EndpointDescriptor, Generic[P, R_co, V_co]):
    """A method that answers many times, with a `V_co` each."""

    @overload
    def __get__(self, obj: None, owner: type[Any] | None = ..., /) -> Self: ...
    @overload
    def __get__(
        self, obj: object, owner: type[Any] | None = ..., /
    ) -> BoundStream[P, R_co, V_co]: ...
    def __get__(self, obj: object, owner: type[Any] | None = None, /) -> Any:
        if obj is None:
            return self
        return BoundStream[P, R_co, V_co](self._bind(obj), self.definition.where)


class TaskEndpoint(EndpointDescriptor, Generic[P, R_co, V_co]):
    """A method that runs as a job, whose result is a `V_co`."""

    @overload
    def __get__(self, obj: None, owner: type[Any] | None = ..., /) -> Self: ...
    @overload
    def __get__(
        self, obj: object, owner: type[Any] | None = ..., /
    ) -> BoundTask[P, R_co, V_co]: ...
    def __get__(self, obj: object, owner: type[Any] | None = None, /) -> Any:
        if obj is None:
            return self
        return BoundTask[P, R_co, V_co](self._bind(obj), self.definition.where)


def _batch_of_one(definition: EndpointDefinition, obj: object, *args: Any) -> Any:
    if definition.wants_items:
        context = CURRENT.get() or RequestContext()
        args = tuple(Item(arg, context) for arg in args)
    outcome = definition.fn(obj, *([arg] for arg in args))
    return _awaited(definition, outcome) if definition.is_async else _only(definition, outcome)


async def _awaited(definition: EndpointDefinition, outcome: Awaitable[Any]) -> Any:
    return _only(definition, await outcome)


def _only(definition: EndpointDefinition, results: Any) -> Any:
    if len(results) != 1:
        raise InvalidOutput(
            f"{definition.where} returned {len(results)} results for 1 item; "
            "return one for each item, in the same order"
        )
    (result,) = results
    if isinstance(result, ItemError):
        raise result.error
    return result
