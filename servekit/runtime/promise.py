"""Calls as arguments of calls (promise pipelining): the callee makes them, and has the results at first hand.

The inner calls travel within the outer one, and the replica that takes it makes them, so a result goes
from where it is made to where it is used. A call that can't travel, as it runs already or goes another
way, is waited for here, and its value is sent as any other.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from servekit.core.aio import together
from servekit.core.call import Buffer, Call, Handler, Payload, Reply, now
from servekit.errors import BadRequest
from servekit.runtime.remote import RemoteCall
from servekit.spec.schema import InputSchema


class _Promise(msgspec.Struct, array_like=True, frozen=True):
    """One inner call: for which parameter, and what is not in a call's own header."""

    parameter: str
    call: Call
    content_type: str
    segments: int
    timeout_s: float | None
    retries: int


_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(list[_Promise]).decode


def among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an argument is a call under way."""
    return RemoteCall in map(type, args) or RemoteCall in map(type, kwargs.values())


def pass_on(
    call: Call,
    reads: InputSchema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    handler: Handler,
    fill: Callable[[Call, Sequence[Any], Mapping[str, Any]], None],
    *,
    travels: bool,
) -> Handler:
    """Give a call its arguments, of which some are calls under way.

    Args:
        call: The outer call.
        reads: What its endpoint takes.
        args: As for a plain call.
        kwargs: The same.
        handler: Answers it.
        fill: Gives a call arguments among which there are no calls.
        travels: Those who answer make the calls that come with a call.

    Returns:
        What answers the outer call.

    Raises:
        InvalidInput: The arguments don't fit the signature.
    """
    inner = [value for value in (*args, *kwargs.values()) if isinstance(value, RemoteCall)]
    ahead: dict[RemoteCall, Call] = {}
    if travels:
        ahead = {one: found for one in inner if (found := one.hand_over(handler)) is not None}
    if len(ahead) == len(inner):
        _enclose(call, reads, args, kwargs, ahead)
        return handler

    async def had(value: Any) -> Any:
        return await value if isinstance(value, RemoteCall) and value not in ahead else value

    async def wait_and_call(call: Call) -> Reply:
        values = [await had(value) for value in args]
        named = {name: await had(value) for name, value in kwargs.items()}
        if ahead:
            _enclose(call, reads, values, named, ahead)
        else:
            fill(call, values, named)
        return await handler(call)

    return wait_and_call


def _enclose(
    call: Call,
    reads: InputSchema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ahead: Mapping[RemoteCall, Call],
) -> None:
    """Give a call its arguments, some as calls for the callee to make."""
    given = reads.by_name(args, kwargs)
    inner = {n: ahead[given.pop(n)] for n in [*given] if isinstance(given[n], RemoteCall)}
    payload = reads.encode_part(given, later=inner)
    segments: list[Buffer] = [*payload.segments]
    promises: list[_Promise] = []
    for name, promised in inner.items():
        promises.append(
            _Promise(
                name,
                promised,
                promised.payload.content_type,
                len(promised.payload.segments),
                promised.remaining(),
                promised.retries,
            )
        )
        segments += promised.payload.segments
    call.payload = Payload(payload.content_type, segments)
    call.promises = _pack(promises)
    call.idempotent = call.idempotent and all(found.idempotent for found in inner.values())


def _disclose(call: Call) -> dict[str, Call]:
    try:
        promises = _unpack(call.promises)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"promises: {error}", started=False) from None
    segments = call.payload.segments
    at = len(segments) - sum(p.segments for p in promises)
    if at < 1 or any(p.segments < 1 for p in promises):
        raise BadRequest("promises: they have more segments than there are", started=False)
    call.payload = Payload(call.payload.content_type, segments[:at])
    call.promises = b""
    found: dict[str, Call] = {}
    for p in promises:
        inner = p.call
        inner.payload = Payload(p.content_type, segments[at : at + p.segments])
        inner.deadline = None if p.timeout_s is None else now() + p.timeout_s
        inner.retries = p.retries
        found[p.parameter] = inner
        at += p.segments
    return found


async def fulfil(call: Call, reads: InputSchema, handler: Handler) -> bool:
    """Make the calls that come with a call, side by side, and put their values among its arguments.

    Returns:
        Whether they may all be made again.

    Raises:
        CallError: One failed, or its value is none for its parameter.
    """
    inner = _disclose(call)
    repeatable = all(promised.idempotent for promised in inner.values())
    values: dict[str, Payload] = {}

    async def make(name: str, promised: Call) -> None:
        reply = await handler(promised)
        if reply.payload is None:
            await reply.aclose()
            raise BadRequest(f"{promised.service}.{promised.endpoint} answered a stream")
        values[name] = reply.payload

    makers = [make(name, promised) for name, promised in inner.items()]
    await (makers[0] if len(makers) == 1 else together(*makers))
    call.payload = reads.complete(call.payload, values)
    return repeatable
