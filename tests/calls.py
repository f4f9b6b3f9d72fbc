"""Calls as the tests make them: what is set beside a call's header stands with the rest."""

from typing import Any

from servekit.core.call import EMPTY, Call, Payload


def make_call(
    service: str,
    endpoint: str,
    payload: Payload = EMPTY,
    *,
    deadline: float | None = None,
    retries: int = 2,
    **fields: Any,
) -> Call:
    """Return a call; `fields` are those of its header."""
    call = Call(service, endpoint, **fields)
    call.payload, call.deadline, call.retries = payload, deadline, retries
    return call
