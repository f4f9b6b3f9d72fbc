"""`@batched`: a method written for many callers at once, called by each as if alone."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar, overload

from servekit.errors import SpecError
from servekit.spec.definition import EndpointDefinition
from servekit.spec.descriptor import Endpoint, EndpointDescriptor
from servekit.spec.item import Item, ItemError
from servekit.spec.method import Method
from servekit.spec.place import at
from servekit.spec.policy import BatchPolicy

X = TypeVar("X")
X2 = TypeVar("X2")
Y = TypeVar("Y")


class BatchedDecorator(Protocol):
    """What `batched(...)` returns: `list[X] -> list[Y]` becomes `X -> Y`."""

    @overload
    def __call__(
        self,
        fn: Callable[[Any, list[Item[X]]], Coroutine[Any, Any, Sequence[Y | ItemError]]],
        /,
    ) -> Endpoint[[X], Coroutine[Any, Any, Y], Y]: ...
    @overload
    def __call__(
        self, fn: Callable[[Any, list[Item[X]]], Sequence[Y | ItemError]], /
    ) -> Endpoint[[X], Y, Y]: ...
    @overload
    def __call__(
        self, fn: Callable[[Any, list[X]], Coroutine[Any, Any, Sequence[Y | ItemError]]], /
    ) -> Endpoint[[X], Coroutine[Any, Any, Y], Y]: ...
    @overload
    def __call__(
        self, fn: Callable[[Any, list[X]], Sequence[Y | ItemError]], /
    ) -> Endpoint[[X], Y, Y]: ...
    @overload
    def __call__(
        self,
        fn: Callable[[Any, list[X], list[X2]], Coroutine[Any, Any, Sequence[Y | ItemError]]],
        /,
    ) -> Endpoint[[X, X2], Coroutine[Any, Any, Y], Y]: ...
    @overload
    def __call__(
        self, fn: Callable[[Any, list[X], list[X2]], Sequence[Y | ItemError]], /
    ) -> Endpoint[[X, X2], Y, Y]: ...


class AxisDecorator(Protocol):
    """What `batched(axis=...)` returns: array in, array out, so the type stays as it is."""

    @overload
    def __call__(
        self, fn: Callable[[Any, X], Coroutine[Any, Any, Y]], /
    ) -> Endpoint[[X], Coroutine[Any, Any, Y], Y]: ...
    @overload
    def __call__(self, fn: Callable[[Any, X], Y], /) -> Endpoint[[X], Y, Y]: ...


@overload
def batched(
    *,
    max_size: int,
    max_wait_ms: float = ...,
    target_ms: float | None = ...,
    max_queued: int | None = ...,
    concurrent_batches: int = ...,
    size_of: Callable[[Any], int] | None = ...,
    bucket_by: Callable[[Any], object] | None = ...,
    pad_to: Sequence[int] = ...,
    isolate: bool = ...,
    strictness: float = ...,
    path: str | None = ...,
    timeout_s: float | None = ...,
    internal: bool = ...,
    idempotent: bool = ...,
) -> BatchedDecorator: ...
@overload
def batched(
    *,
    axis: int,
    max_size: int,
    max_wait_ms: float = ...,
    target_ms: float | None = ...,
    max_queued: int | None = ...,
    concurrent_batches: int = ...,
    bucket_by: Callable[[Any], object] | None = ...,
    pad_to: Sequence[int] = ...,
    isolate: bool = ...,
    strictness: float = ...,
    path: str | None = ...,
    timeout_s: float | None = ...,
    internal: bool = ...,
    idempotent: bool = ...,
) -> AxisDecorator: ...
def batched(
    *,
    max_size: int,
    max_wait_ms: float = 0.0,
    target_ms: float | None = None,
    max_queued: int | None = None,
    concurrent_batches: int = 1,
    size_of: Callable[[Any], int] | None = None,
    bucket_by: Callable[[Any], object] | None = None,
    pad_to: Sequence[int] = (),
    isolate: bool = False,
    strictness: float = 2.0,
    axis: int | None = None,
    path: str | None = None,
    timeout_s: float | None = None,
    internal: bool = False,
    idempotent: bool = True,
) -> Any:
    """Merge the calls of many callers: written `list[X] -> list[Y]`, called `X -> Y`.

    With `list[Item[X]]` each element brings its caller's context; an `ItemError` among the results
    fails its caller alone. With `axis=` arrays are concatenated along that axis, and the result is
    cut back into the callers' parts.

    Args:
        max_size: Most rows in one executed batch.
        max_wait_ms: Longest time to hold a batch for more rows; 0 never holds.
        target_ms: Soft target for queue and run.
        max_queued: Calls that may wait; None means 1024.
        concurrent_batches: Batches that run at once in a replica.
        size_of: Rows that one item counts for; None counts 1.
        bucket_by: Only items with an equal key share a batch.
        pad_to: Sizes that executed batches are padded to, ascending up to `max_size`.
        isolate: When a batch raises, split it and retry, so that only the bad item fails.
        strictness: 1 to 3: higher refuses more and misses fewer deadlines.
        axis: Concatenate arrays along this axis; None passes lists.
        path: Route below the service's prefix; None means `/{method name}`.
        timeout_s: Deadline of a call that came without one; None takes the service's.
        internal: Callable by other services, but without an HTTP route.
        idempotent: May be run twice, so a lost call is sent again.
    """

    def decorate(fn: Callable[..., Any]) -> EndpointDescriptor:
        found = Method.of(fn, "@sk.batched")
        if found.streams:
            raise SpecError(
                f"{found.where}: @sk.batched can't stream; return one result for each item, "
                "or make it an @sk.endpoint"
            )
        if not found.parameters:
            raise SpecError(
                f"{found.where}: @sk.batched needs a parameter for the items: "
                "`(self, items: list[X]) -> list[Y]`"
            )
        if axis is not None and size_of is not None:
            raise SpecError(f"{found.where}: size_of= is for lists; with axis= rows are counted")
        with at(found.where):
            policy = BatchPolicy(
                max_size=max_size,
                max_wait_ms=max_wait_ms,
                target_ms=target_ms,
                max_queued=max_queued,
                concurrent_batches=concurrent_batches,
                axis=axis,
                pad_to=tuple(pad_to),
                isolate=isolate,
                strictness=strictness,
            )
        return Endpoint[..., Any, Any](
            EndpointDefinition(
                name=fn.__name__,
                fn=fn,
                kind="batched",
                is_async=found.is_async,
                path=found.path(path),
                timeout_s=found.timeout(timeout_s),
                internal=internal,
                idempotent=idempotent,
                batch=policy,
                size_of=size_of,
                bucket_by=bucket_by,
            )
        )

    return decorate
