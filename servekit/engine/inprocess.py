"""`local`: a whole graph in this process, through the same codecs, wire, batcher and limits.

For tests and notebooks. Every service is a real replica on one background event loop, joined to its
callers by in-memory connections, so what works here works in processes, and what can't be sent
there can't be sent here. Colocated ones are joined as they are in a process.
"""

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar, cast

from servekit.core.background import loop_in_thread
from servekit.core.call import Call, Handler, Payload, Reply
from servekit.core.job import JOBS
from servekit.errors import NotFound
from servekit.jobs.sqlite import MEMORY, SqliteStore
from servekit.runtime.group import Group
from servekit.runtime.handle import Options, ServiceHandle
from servekit.runtime.replica import Replica
from servekit.spec.app import AppSpec
from servekit.spec.definition import (
    DependencyDefinition,
    EndpointDefinition,
    ServiceDefinition,
    definition,
)
from servekit.spec.describe import describe
from servekit.spec.graph import Dependency, ServiceRef, ref
from servekit.spec.schema import OutputSchema
from servekit.wire import memory
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello

T = TypeVar("T")


@contextmanager
def local(
    target: type[T],
    /,
    *,
    overrides: Mapping[Dependency[Any], object] | None = None,
    args: Mapping[str, Any] | None = None,
) -> Generator[T, None, None]:
    """Run a service and all that it needs in this process.

    Args:
        target: The root service's class.
        overrides: Objects to use in place of dependencies: `{Search.embedder: FakeEmbedder()}`.
            A fake needs only the methods that are called, sync or async.
        args: Keyword arguments of the root's constructor.

    Yields:
        An object with the class's endpoints, as a dependency or a client would have it.

    Raises:
        SpecError: The graph can't work as written.
        SetupError: A constructor or a hook raised.
    """
    with loop_in_thread("servekit-local") as loop:
        graph = _Graph(loop, overrides or {})
        try:
            root = asyncio.run_coroutine_threadsafe(graph.start(target, args or {}), loop).result()
            yield cast("T", root)
        finally:
            asyncio.run_coroutine_threadsafe(graph.stop(), loop).result()


class _Graph:
    """The running services, each joined to its callers by one in-memory connection."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, overrides: Mapping[Dependency[Any], object]
    ) -> None:
        self._loop = loop
        self._fakes = {(o.owner, o.attribute): fake for o, fake in overrides.items()}
        self._closing: list[Group | Replica] = []
        self._connections: list[Connection] = []
        self._handlers: dict[str, Handler] = {}
        self._store: SqliteStore | None = None

    async def start(self, target: type, args: Mapping[str, Any]) -> ServiceHandle:
        root = definition(target)
        if args:
            root = ref(target, name=root.name, args=args).definition
        app = describe(ServiceRef[Any](root))
        if any(service.has_tasks for service in app.services):
            self._store = SqliteStore(MEMORY)
            await self._store.open()
        try:
            await self._start(root, app)
        except BaseException:
            await self.stop()
            raise
        options = Options(retries=0)
        return ServiceHandle(
            root, root.name, self._handlers[root.name], self._loop, options, internal=True
        )

    async def _start(self, found: ServiceDefinition, app: AppSpec) -> None:
        if found.name in self._handlers:
            return
        group = Group(
            found, app.service(found.name), replica_id=f"{found.name}-local", store=self._store
        )
        try:
            await group.start(partial(self._handle, app))
        except BaseException:
            await group.stop()
            raise
        self._closing.append(group)
        replica = group.own
        hello = Hello(service=found.name, replica=replica.id)
        server = Connection(hello, client=False, handler=replica, own_load=replica.load)
        client = Connection(Hello(), client=True)
        await memory.join(client, server)
        self._connections.append(client)
        self._handlers[found.name] = client.call

    async def _handle(
        self, app: AppSpec, service: ServiceDefinition, edge: DependencyDefinition
    ) -> ServiceHandle | None:
        # The class in the MRO that declares the dependency is what its key names.
        owner = next(base for base in service.cls.__mro__ if edge.attribute in vars(base))
        key = (owner, edge.attribute)
        if key in self._fakes:
            handler = await self._fake(self._fakes[key], edge.target, app)
        elif edge.colocate:
            return None
        else:
            await self._start(edge.target, app)
            handler = self._handlers[edge.target.name]
        options = Options(timeout_s=edge.timeout_s, retries=edge.retries)
        return ServiceHandle(edge.target, edge.target.name, handler, self._loop, options)

    async def _fake(self, fake: object, found: ServiceDefinition, app: AppSpec) -> Handler:
        """Return a `Handler` over a fake; what stands for a task runs as jobs of a real replica."""
        handler = fake_handler(fake, found)
        if not (tasks := _tasks(found)):
            return handler
        stands_in = replace(
            found,
            cls=type(found.name, (), {}),
            endpoints={name: _of_fake(fake, task) for name, task in tasks.items()},
            dependencies={},
            models={},
            hooks={},
            args={},
        )
        spec = app.everything()[found.name]
        replica = Replica(stands_in, spec, replica_id=f"{found.name}-local", store=self._store)
        self._closing.append(replica)
        await replica.start({})

        async def handle(call: Call) -> Reply:
            is_task = call.endpoint.partition(JOBS)[0] in tasks
            return await (replica if is_task else handler)(call)

        return handle

    async def stop(self) -> None:
        while self._connections:
            await self._connections.pop(0).close()
        while self._closing:
            await self._closing.pop().stop()
        if self._store is not None:
            await self._store.close()


def _tasks(found: ServiceDefinition) -> dict[str, EndpointDefinition]:
    return {name: e for name, e in found.endpoints.items() if e.task is not None}


def _of_fake(fake: object, task: EndpointDefinition) -> EndpointDefinition:
    """Return a task that runs the fake's method, with the types of the one that it stands for."""

    @wraps(task.fn)
    async def run(_: object, *args: Any, **kwargs: Any) -> Any:
        value = getattr(fake, task.name)(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    return replace(task, fn=run, is_async=True)


def fake_handler(fake: object, service: ServiceDefinition) -> Handler:
    """Return a `Handler` over the methods of any object, with the types of the service it fakes."""

    async def handle(call: Call) -> Reply:
        endpoint = service.endpoints[call.endpoint]
        method = getattr(fake, endpoint.name, None)
        if method is None:
            raise NotFound(f"the fake {fake!r} of {service.name} has no method {endpoint.name!r}")
        reads, writes = endpoint.schemas
        args, kwargs = reads.decode(call.payload, internal=True)
        value = method(*args, **kwargs)
        if inspect.isawaitable(value):
            value = await value
        if endpoint.kind == "stream":
            return Reply(stream=_chunks(value, writes))
        return Reply(writes.encode(value, internal=True))

    return handle


async def _chunks(
    values: Iterable[Any] | AsyncIterable[Any], writes: OutputSchema
) -> AsyncIterator[Payload]:
    if isinstance(values, Iterable):
        for value in values:
            yield writes.encode(value, internal=True)
    else:
        async for value in values:
            yield writes.encode(value, internal=True)
