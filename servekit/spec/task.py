"""`@task`: a method whose calls are jobs in a durable queue."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from servekit.errors import SpecError
from servekit.spec.definition import EndpointDefinition
from servekit.spec.descriptor import TaskEndpoint
from servekit.spec.method import Method
from servekit.spec.place import at
from servekit.spec.policy import TaskPolicy

P = ParamSpec("P")
Y = TypeVar("Y")


class TaskDecorator(Protocol):
    """What `task(...)` returns."""

    @overload
    def __call__(
        self, fn: Callable[Concatenate[Any, P], Coroutine[Any, Any, Y]], /
    ) -> TaskEndpoint[P, Coroutine[Any, Any, Y], Y]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Any, P], Y], /) -> TaskEndpoint[P, Y, Y]: ...


@overload
def task(
    fn: Callable[Concatenate[Any, P], Coroutine[Any, Any, Y]], /
) -> TaskEndpoint[P, Coroutine[Any, Any, Y], Y]: ...
@overload
def task(fn: Callable[Concatenate[Any, P], Y], /) -> TaskEndpoint[P, Y, Y]: ...
@overload
def task(
    *,
    retries: int = ...,
    backoff_s: float = ...,
    timeout_s: float | None = ...,
    ttl_s: float = ...,
    max_concurrency: int = ...,
    max_queued: int = ...,
    path: str | None = ...,
    media_type: str | None = ...,
    internal: bool = ...,
    tags: Sequence[str] = ...,
) -> TaskDecorator: ...
def task(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    retries: int = 3,
    backoff_s: float = 1.0,
    timeout_s: float | None = 3600.0,
    ttl_s: float = 86_400.0,
    max_concurrency: int = 1,
    max_queued: int = 10_000,
    path: str | None = None,
    media_type: str | None = None,
    internal: bool = False,
    tags: Sequence[str] = (),
) -> Any:
    """Run a method's calls as jobs: accepted at once, run later, kept on disk until then.

    A job that was accepted survives the death of any process. **It may run more than once**: when
    the process that runs it dies, another one starts it again, so what it does to the outside must
    bear that. `sk.job()` gives the method the job's id and attempt for the purpose, takes its
    progress, and says when to stop.

    Args:
        fn: The method; `async def`, or `def`, which runs in a thread.
        retries: Attempts after the first, when one raises or its process dies. A `CallError` of
            the caller's kind (4xx) is not tried again.
        backoff_s: Wait before the first of them; it doubles each time, up to 10 minutes, and is
            shortened by up to a half at random.
        timeout_s: Longest time for one attempt; None has no limit.
        ttl_s: How long a finished job and its result are kept, and how long one may be queued.
        max_concurrency: Jobs of this task that run at once in a replica.
        max_queued: Jobs that may be queued in all; more are refused with 429.
        path: Route below the service's prefix; None means `/{method name}`.
        media_type: Media type of a `bytes` or `str` result.
        internal: Callable by other services, but without an HTTP route.
        tags: For the OpenAPI document.
    """

    def decorate(fn: Callable[..., Any]) -> TaskEndpoint[..., Any, Any]:
        found = Method.of(fn, "@sk.task")
        if found.streams:
            raise SpecError(
                f"{found.where}: a @sk.task can't stream; report with sk.job().progress(…), or "
                "make it an @sk.endpoint"
            )
        if isinstance(tags, str):
            raise SpecError(f"{found.where}: tags={tags!r}; write a list, tags=[{tags!r}]")
        with at(found.where):
            policy = TaskPolicy(
                retries=retries,
                backoff_s=backoff_s,
                timeout_s=timeout_s,
                ttl_s=ttl_s,
                max_concurrency=max_concurrency,
                max_queued=max_queued,
            )
        return TaskEndpoint[..., Any, Any](
            EndpointDefinition(
                name=fn.__name__,
                fn=fn,
                kind="task",
                is_async=found.is_async,
                path=found.path(path),
                media_type=media_type or "",
                internal=internal,
                tags=tuple(tags),
                task=policy,
            )
        )

    return decorate if fn is None else decorate(fn)
