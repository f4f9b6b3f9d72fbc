"""The client's one way to a gateway: pooled connections, deadlines over all attempts, retries.

An attempt is cut off when its call's deadline passes, whatever it is doing: waiting for a connection,
sending, or reading. What is cut off, cancelled or dropped closes its connection, which is how the
server learns to stop the work.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Final, TypeVar

import httpx

from servekit.client.exchange import EventReader, failure, unreachable
from servekit.client.request import Outgoing
from servekit.core.call import Payload, now
from servekit.errors import CallError, Cancelled, ConfigError, DeadlineExceeded, ServekitError
from servekit.resilience.retry import Attempts, RetryBudget

T = TypeVar("T")

_CONNECT_S: Final = 5.0
_GRACE_S: Final = 0.25  # the server says itself that time is up, and where; this is for its silence
_LIMITS: Final = httpx.Limits(
    max_connections=256,
    max_keepalive_connections=256,
    keepalive_expiry=30.0,  # the gateway's is 75 s: none is used in the moment when it hangs up
)


class Channel:
    """Sends calls to one gateway, from one event loop.

    Args:
        url: Where it listens, like `http://127.0.0.1:3000`.
        token: Sent as a bearer token.

    Raises:
        ConfigError: That is no such URL.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{url!r} is no URL of a gateway; write one like http://127.0.0.1:3000"
            )
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http: httpx.AsyncClient | None = None
        self._budget = RetryBudget()
        self._limits: set[asyncio.Timeout] = set()
        self._idle: asyncio.Event | None = None

    async def send(self, call: Outgoing, *, stream: bool = False) -> httpx.Response:
        """Send a call, again if need be, and return its good answer.

        Args:
            call: What to send.
            stream: Leave the answer's body to `batches`; else it is read whole.

        Raises:
            CallError: As the server raised it in the last attempt, or because it was not reached.
            ServekitError: The channel is closed.
        """
        if self._idle is not None:
            raise ServekitError(f"the client of {self.url} is closed")
        with Attempts(
            self._budget,
            retries=call.retries,
            idempotent=call.idempotent,
            deadline=call.deadline,
        ) as attempts:
            while True:
                try:
                    return await self._attempt(call, stream=stream)
                except CallError as error:
                    pause = attempts.pause(error, now())
                    if pause is None:
                        raise
                await self._in_time(asyncio.sleep(pause), None, "")

    async def _attempt(self, call: Outgoing, *, stream: bool) -> httpx.Response:
        left = None
        if call.deadline is not None and (left := call.deadline - now()) <= 0:
            raise DeadlineExceeded("the deadline passed before the call was sent", started=False)
        http = self._http
        if http is None:
            with_tls = self.url.startswith("https:")  # reading the certificates takes 60 ms
            http = self._http = httpx.AsyncClient(
                headers=self._headers, limits=_LIMITS, verify=with_tls
            )
        connect_s = _CONNECT_S if left is None else min(_CONNECT_S, left)
        request = http.build_request(
            call.method,
            self.url + call.path,
            content=call.content or None,
            headers=call.headers_now(),
            timeout=httpx.Timeout(None, connect=connect_s, pool=left),
        )
        response = await self._in_time(
            http.send(request, stream=True), call.deadline, f"{self.url} did not answer"
        )
        if not (stream and response.is_success):
            reading = f"the answer of {self.url} was being read"
            body = await self._in_time(response.aread(), call.deadline, reading)
            if not response.is_success:
                raise failure(response.status_code, body, response.headers)
        return response

    async def batches(
        self, response: httpx.Response, deadline: float | None
    ) -> AsyncGenerator[list[Payload], None]:
        """Yield the chunks of a stream, those that came together in one list.

        Raises:
            CallError: As the server raised it, or because the stream broke off.
        """
        reader = EventReader()
        parts = response.aiter_bytes()
        count = 0
        try:
            while True:
                reading = f"the stream of {self.url} went on, behind {count} chunks"
                data = await self._in_time(anext(parts, None), deadline, reading)
                if data is None:
                    reader.end()
                    return
                error = None
                batch: list[Payload] = []
                try:
                    for chunk in reader.feed(data):
                        batch.append(chunk)  # noqa: PERF402  (those before an error are good)
                except CallError as raised:
                    error = raised
                count += len(batch)
                if batch:
                    yield batch
                if error is not None:
                    raise error
        finally:
            await response.aclose()

    async def _in_time(self, work: Awaitable[T], deadline: float | None, doing: str) -> T:
        """Wait for work until shortly behind a deadline, or until the channel is closed.

        Raises:
            DeadlineExceeded: It passed; the message says what was being done.
            Cancelled: The channel was closed.
            CallError: The connection failed.
        """
        limit = asyncio.timeout(None if deadline is None else deadline - now() + _GRACE_S)
        if self._idle is not None:
            limit = asyncio.timeout(0)
        self._limits.add(limit)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if self._idle is not None:
                raise Cancelled("the client was closed while the call ran") from None
            raise DeadlineExceeded(f"the deadline passed while {doing}") from None
        except httpx.RequestError as error:
            if self._idle is not None:
                raise Cancelled("the client was closed while the call ran") from None
            raise unreachable(error, self.url) from error
        finally:
            self._limits.discard(limit)
            if self._idle is not None and not self._limits:
                self._idle.set()

    async def close(self) -> None:
        """End the calls that run, as cancelled, and close all connections."""
        if self._idle is None:
            self._idle = asyncio.Event()
            for limit in self._limits:
                if not limit.expired():
                    limit.reschedule(0.0)
            if self._limits:
                await self._idle.wait()
            if self._http is not None:
                await self._http.aclose()
