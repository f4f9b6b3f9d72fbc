"""`@endpoint`: a method becomes callable from outside its process."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from servekit.errors import SpecError
from servekit.spec.definition import EndpointDefinition
from servekit.spec.descriptor import Endpoint, EndpointDescriptor, StreamEndpoint
from servekit.spec.method import Method

P = ParamSpec("P")
Y = TypeVar("Y")


class EndpointDecorator(Protocol):
    """What `endpoint(...)` returns: each form of method to its own descriptor."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self,
        fn: Callable[Concatenate[Any, P], AsyncIterator[Y]],  # pyright: ignore[reportOverlappingOverload]
        /,
    ) -> StreamEndpoint[P, AsyncIterator[Y], Y]: ...
    @overload
    def __call__(
        self, fn: Callable[Concatenate[Any, P], Coroutine[Any, Any, Y]], /
    ) -> Endpoint[P, Coroutine[Any, Any, Y], Y]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, fn: Callable[Concatenate[Any, P], Iterator[Y]], /
    ) -> StreamEndpoint[P, Iterator[Y], Y]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Any, P], Y], /) -> Endpoint[P, Y, Y]: ...


@overload
def endpoint(  # type: ignore[overload-overlap]
    fn: Callable[Concatenate[Any, P], AsyncIterator[Y]],  # pyright: ignore[reportOverlappingOverload]
    /,
) -> StreamEndpoint[P, AsyncIterator[Y], Y]: ...
@overload
def endpoint(
    fn: Callable[Concatenate[Any, P], Coroutine[Any, Any, Y]], /
) -> Endpoint[P, Coroutine[Any, Any, Y], Y]: ...
@overload
def endpoint(  # type: ignore[overload-overlap]
    fn: Callable[Concatenate[Any, P], Iterator[Y]], /
) -> StreamEndpoint[P, Iterator[Y], Y]: ...
@overload
def endpoint(fn: Callable[Concatenate[Any, P], Y], /) -> Endpoint[P, Y, Y]: ...
@overload
def endpoint(
    *,
    path: str | None = ...,
    method: Literal["GET", "POST"] = ...,
    max_concurrency: int | None = ...,
    timeout_s: float | None = ...,
    media_type: str | None = ...,
    internal: bool = ...,
    tags: Sequence[str] = ...,
    idempotent: bool | None = ...,
) -> EndpointDecorator: ...
def endpoint(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    path: str | None = None,
    method: Literal["GET", "POST"] = "POST",
    max_concurrency: int | None = None,
    timeout_s: float | None = None,
    media_type: str | None = None,
    internal: bool = False,
    tags: Sequence[str] = (),
    idempotent: bool | None = None,
) -> Any:
    """Make a method callable from outside its process; generators stream.

    Args:
        fn: The method.
        path: Route below the service's prefix; None means `/{method name}`.
        method: HTTP method; GET takes its parameters, plain scalars, from the query.
        max_concurrency: Calls that run at once in a replica; None takes the service's limit.
        timeout_s: Deadline of a call that came without one; None takes the service's.
        media_type: Media type of a `bytes` or `str` answer.
        internal: Callable by other services, but without an HTTP route.
        tags: For the OpenAPI document.
        idempotent: May be run twice, so a lost call is sent again; None means only GET.
    """

    def decorate(fn: Callable[..., Any]) -> EndpointDescriptor:
        found = Method.of(fn, "@sk.endpoint")
        if method not in ("GET", "POST"):
            raise SpecError(f"{found.where}: method={method!r}; write 'GET' or 'POST'")
        if max_concurrency is not None and max_concurrency < 1:
            raise SpecError(f"{found.where}: max_concurrency={max_concurrency}; must be 1 or more")
        if isinstance(tags, str):
            raise SpecError(f"{found.where}: tags={tags!r}; write a list, tags=[{tags!r}]")
        descriptor = StreamEndpoint[..., Any, Any] if found.streams else Endpoint[..., Any, Any]
        return descriptor(
            EndpointDefinition(
                name=fn.__name__,
                fn=fn,
                kind="stream" if found.streams else "unary",
                is_async=found.is_async,
                path=found.path(path),
                method=method,
                timeout_s=found.timeout(timeout_s),
                max_concurrency=max_concurrency,
                media_type=media_type or "",
                internal=internal,
                tags=tuple(tags),
                idempotent=method == "GET" if idempotent is None else idempotent,
            )
        )

    return decorate if fn is None else decorate(fn)
