"""Handles: a service somewhere else, with the methods of its class.

A handle's methods have the same form as the class declares (sync or async), and `.remote`, which
starts the call and returns something to await, to wait for, to iterate over, or to cancel. The
deadline, the request id and the trace of the call that is being served travel on by themselves.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self

from servekit.core.call import MSGPACK, Call, Handler, Payload, new_request_id, now
from servekit.core.context import CURRENT
from servekit.errors import Cancelled, InvalidInput, suggest
from servekit.runtime.outbound import outbound
from servekit.runtime.promise import among, pass_on
from servekit.runtime.remote import RemoteCall, RemoteStream
from servekit.spec.definition import EndpointDefinition, ServiceDefinition


class Options:
    """Settings of one handle's calls; see `Bound.options`."""

    __slots__ = ("affinity_key", "priority", "retries", "timeout_s")

    def __init__(
        self,
        *,
        timeout_s: float | None = None,
        retries: int = 2,
        priority: int = 0,
        affinity_key: str = "",
    ) -> None:
        self.timeout_s = timeout_s
        self.retries = retries
        self.priority = priority
        self.affinity_key = affinity_key


class ServiceHandle:
    """A running service, seen from outside.

    Args:
        definition: The service's class, for its types.
        name: Its name in the app.
        handler: Answers its calls.
        loop: Where the handler runs.
        options: Settings of its calls.
        internal: Whether the caller is a part of the app.
        pipelines: Whether those who answer make the calls that come as arguments; see `promise.py`.
        colocated: Whether the handler is in this process: it takes arguments as they are.
    """

    def __init__(
        self,
        definition: ServiceDefinition,
        name: str,
        handler: Handler,
        loop: asyncio.AbstractEventLoop,
        options: Options,
        *,
        internal: bool = True,
        pipelines: bool = False,
        colocated: bool = False,
    ) -> None:
        self._definition = definition
        for endpoint in definition.endpoints.values():
            kind = RemoteMethod
            if endpoint.task is not None:
                from servekit.runtime.remote_job import RemoteTask  # noqa: PLC0415  (builds on this)

                kind = RemoteTask
            method = kind(
                endpoint,
                name,
                handler,
                loop,
                options,
                internal=internal,
                pipelines=pipelines,
                colocated=colocated,
            )
            setattr(self, endpoint.name, method)

    def __getattr__(self, name: str) -> Any:
        known = list(self._definition.endpoints)
        raise AttributeError(
            f"{self._definition.name} has no endpoint {name!r}.{suggest(name, known)}",
            name=name,
            obj=self,
        )

    def __repr__(self) -> str:
        return f"<handle of {self._definition.name}>"


class RemoteMethod:
    """One endpoint of a service somewhere else."""

    def __init__(
        self,
        endpoint: EndpointDefinition,
        service: str,
        handler: Handler,
        loop: asyncio.AbstractEventLoop,
        options: Options,
        *,
        internal: bool,
        pipelines: bool,
        colocated: bool,
    ) -> None:
        self._endpoint = endpoint
        self._service = service
        self._handler = handler
        self._loop = loop
        self._options = options
        self._internal = internal
        self._accept = "" if internal else MSGPACK
        self._pipelines = pipelines
        self._colocated = colocated
        self._streams = endpoint.kind == "stream"
        self._timeout_s = options.timeout_s if options.timeout_s is not None else endpoint.timeout_s

    def options(
        self,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
        priority: int = 0,
        affinity_key: str | None = None,
    ) -> Self:
        """Return this method with other settings for its calls; see `Bound.options`."""
        own = self._options
        options = Options(
            timeout_s=own.timeout_s if timeout_s is None else timeout_s,
            retries=own.retries if retries is None else retries,
            priority=priority,
            affinity_key=affinity_key or "",
        )
        return type(self)(
            self._endpoint,
            self._service,
            self._handler,
            self._loop,
            options,
            internal=self._internal,
            pipelines=self._pipelines,
            colocated=self._colocated,
        )

    def remote(self, *args: Any, **kwargs: Any) -> RemoteCall | RemoteStream:
        """Start a call.

        Raises:
            TypeError: The arguments don't fit the signature.
            Cancelled: The call that is being served has lost its caller.
        """
        call, handler = self._call(args, kwargs)
        if self._streams:
            decode = _as_it_is if self._colocated else self._decode
            return RemoteStream(call, handler, decode, self._loop)
        return RemoteCall(call, handler, self._decode, self._loop)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call in the declared form: a coroutine, an async iterator, an iterator, or the value."""
        if self._endpoint.is_async and not self._streams:
            return self._value(*self._call(args, kwargs))
        started = self.remote(*args, **kwargs)
        if isinstance(started, RemoteStream):
            return started if self._endpoint.is_async else started.iter_sync()
        return started.result()

    async def _value(self, call: Call, handler: Handler) -> Any:
        # Begins when it is awaited, as any coroutine does: cancelled before, it has never run.
        return await RemoteCall(call, handler, self._decode, self._loop)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Handler]:
        """Return a call with these arguments, and what answers it."""
        endpoint, options = self._endpoint, self._options
        call = Call(
            self._service,
            endpoint.name,
            internal=self._internal,
            idempotent=endpoint.idempotent,
            priority=options.priority,
            affinity_key=options.affinity_key,
        )
        handler = self._handler
        reads = endpoint.schemas[0]
        try:
            if reads.inbound is not None:
                (stream, kwargs), args = reads.split(args, kwargs), ()
                form = None if self._colocated else self._accept
                call.chunks = outbound(stream, reads.inbound, form, self._loop)
            if among(args, kwargs):
                handler = pass_on(
                    call, reads, args, kwargs, handler, self._fill, travels=self._pipelines
                )
            else:
                self._fill(call, args, kwargs)
        except InvalidInput as error:
            raise TypeError(error.message) from error
        call.retries = options.retries
        deadline = None if self._timeout_s is None else now() + self._timeout_s
        context = CURRENT.get()
        if context is None:
            call.request_id = new_request_id()
        else:
            if context.cancelled:
                raise Cancelled("the caller of the call that is being served has left")
            served = context.call
            call.request_id = served.request_id
            call.traceparent = served.traceparent
            call.headers = served.headers
            call.caller = served.caller
            if served.deadline is not None and (deadline is None or served.deadline < deadline):
                deadline = served.deadline
        call.deadline = deadline
        return call, handler

    def _fill(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Give a call its arguments."""
        reads = self._endpoint.schemas[0]
        if self._colocated:
            call.arguments = reads.bind(args, kwargs)
        else:
            call.payload = reads.encode(args, kwargs, accept=self._accept)

    def _decode(self, payload: Payload) -> Any:
        return self._endpoint.schemas[1].decode(payload)

    def __repr__(self) -> str:
        return f"<remote {self._service}.{self._endpoint.name}>"


def _as_it_is(value: Any) -> Any:
    return value
