"""What the debug page shows: everything that a person asks first about a running app.

It holds no payload, no header and no credential. Names come from outside, so the page must treat
all of it as text.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

import msgspec

from servekit.core.call import now
from servekit.gateway.exchange import Exchange
from servekit.gateway.http import Failure, Gateway
from servekit.gateway.protocol import HttpProtocol
from servekit.version import __version__

_MAX_RUNNING: Final = 100


class RunningRequest(msgspec.Struct, frozen=True):
    """A request that is being answered.

    Attributes:
        age_s: Seconds since its turn came; None for what is no endpoint.
    """

    route: str
    age_s: float | None
    caller: str
    request_id: str


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    servekit: str
    gateway: str
    at: float
    app: object
    connections: int
    websockets: int
    tasks: int
    running: int
    oldest: list[RunningRequest]
    errors: list[Failure]
    settings: Mapping[str, str]


class Debug:
    """Looks at one gateway and its app.

    Args:
        name: Of this gateway, one of several perhaps.
        gateway: Knows the latest failures.
        connections: Returns the clients' connections of now.
        app: Returns the state of all services, as `servekit status` has it; None if it is not known.
        settings: Of the process, with secrets masked.
    """

    def __init__(
        self,
        name: str,
        gateway: Gateway,
        connections: Callable[[], Iterable[object]],
        app: Callable[[], Awaitable[object]],
        settings: Mapping[str, str],
    ) -> None:
        self._name = name
        self._gateway = gateway
        self._connections = connections
        self._app = app
        self._settings = settings

    async def document(self) -> bytes:
        """Return it as JSON: long-running requests first, the latest errors first."""
        app = await self._app()
        connections = list(self._connections())
        http = [c for c in connections if isinstance(c, HttpProtocol)]
        at = now()
        running = [_described(c.running, at) for c in http if c.running is not None]
        running.sort(key=lambda request: -(request.age_s or 0.0))
        return msgspec.json.encode(
            _Document(
                servekit=__version__,
                gateway=self._name,
                at=time.time(),
                app=app,
                connections=len(connections),
                websockets=len(connections) - len(http),
                tasks=len(asyncio.all_tasks()),
                running=len(running),
                oldest=running[:_MAX_RUNNING],
                errors=list(reversed(self._gateway.failures)),
                settings=self._settings,
            )
        )


def _described(cycle: Exchange | str, at: float) -> RunningRequest:
    if isinstance(cycle, str):
        return RunningRequest(cycle, None, "", "")
    route = cycle.route or next(iter(cycle.methods.values()))
    age_s = at - cycle.started if cycle.started else 0.0
    return RunningRequest(route.path, age_s, cycle.caller, cycle.request_id)
