"""Handles: a service somewhere else, with the methods of its class.

A handle's methods have the same form as the class declares (sync or async), and `.remote`, which
starts the call and returns something to await, to wait for, to iterate over, or to cancel. The
deadline, the request id and the trace of the call that is being served travel on by themselves.
"""

import asyncio
from typing import Any

from servekit.core.call import MSGPACK, Call, Handler, Payload, new_request_id, now
from servekit.core.context import CURRENT
from servekit.errors import Cancelled, InvalidInput, suggest
from servekit.runtime.outbound import outbound
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
    ) -> None:
        self._definition = definition
        for endpoint in definition.endpoints.values():
            method = RemoteMethod(endpoint, name, handler, loop, options, internal=internal)
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
    ) -> None:
        self._endpoint = endpoint
        self._service = service
        self._handler = handler
        self._loop = loop
        self._options = options
        self._internal = internal
        self._streams = endpoint.kind == "stream"
        self._timeout_s = options.timeout_s if options.timeout_s is not None else endpoint.timeout_s

    def options(
        self,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
        priority: int = 0,
        affinity_key: str | None = None,
    ) -> "RemoteMethod":
        """Return this method with other settings for its calls; see `Bound.options`."""
        own = self._options
        options = Options(
            timeout_s=own.timeout_s if timeout_s is None else timeout_s,
            retries=own.retries if retries is None else retries,
            priority=priority,
            affinity_key=affinity_key or "",
        )
        return RemoteMethod(
            self._endpoint,
            self._service,
            self._handler,
            self._loop,
            options,
            internal=self._internal,
        )

    def remote(self, *args: Any, **kwargs: Any) -> RemoteCall | RemoteStream:
        """Start a call.

        Raises:
            TypeError: The arguments don't fit the signature.
            Cancelled: The call that is being served has lost its caller.
        """
        call = self._call(args, kwargs)
        if self._streams:
            return RemoteStream(call, self._handler, self._decode, self._loop)
        return RemoteCall(call, self._handler, self._decode, self._loop)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call in the declared form: a coroutine, an async iterator, an iterator, or the value."""
        if self._endpoint.is_async and not self._streams:
            return self._value(self._call(args, kwargs))
        started = self.remote(*args, **kwargs)
        if isinstance(started, RemoteStream):
            return started if self._endpoint.is_async else started.iter_sync()
        return started.result()

    async def _value(self, call: Call) -> Any:
        # Begins when it is awaited, as any coroutine does: cancelled before, it has never run.
        return await RemoteCall(call, self._handler, self._decode, self._loop)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        endpoint, options = self._endpoint, self._options
        chunks = None
        reads = endpoint.schemas[0]
        try:
            accept = "" if self._internal else MSGPACK
            if reads.inbound is not None:
                stream, kwargs = reads.split(args, kwargs)
                chunks, args = outbound(stream, reads.inbound, accept), ()
            payload = reads.encode(args, kwargs, accept=accept)
        except InvalidInput as error:
            raise TypeError(error.message) from error
        call = Call(
            self._service,
            endpoint.name,
            internal=self._internal,
            idempotent=endpoint.idempotent,
            priority=options.priority,
            affinity_key=options.affinity_key,
        )
        call.payload = payload
        call.chunks = chunks
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
        return call

    def _decode(self, payload: Payload) -> Any:
        return self._endpoint.schemas[1].decode(payload)

    def __repr__(self) -> str:
        return f"<remote {self._service}.{self._endpoint.name}>"
