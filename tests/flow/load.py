"""Load on an app: an open loop of calls, each of which must be answered once, with its own payload."""

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from tests.flow.harness import PATIENCE_S, Http, Running, show, until


class Outcome(NamedTuple):
    """What a call of a `Load` came to.

    Attributes:
        due: When it was to be sent, on the monotonic clock.
        took_s: From then to its answer, so that a caller that is held up hides nothing.
        lag_s: What of it had passed before it was sent: this process was busy.
        status: Of its answer.
        reason: Of the error; "" if there is none.
        value: Of the answer, if its status is 200.
        version: Who answered.
        replica: Which one.
        retry_after: The header, or "".
    """

    due: float
    took_s: float
    lag_s: float
    status: int
    reason: str
    value: Any
    version: str
    replica: str
    retry_after: str


class Load:
    """An open loop: calls at random times with a mean rate, whatever became of those before.

    Args:
        app: Called.
        path: Of the endpoint.
        rate: Calls a second; may be changed.
        body: From a call's number to its arguments.
        headers: Sent with each call.
        right: Whether an answer's value is that call's own.
        timeout_s: After which a call counts as hanging.

    Attributes:
        answers: By number; several for one number would be a call answered twice.
        broken: Calls whose connection broke, by number.
        ports: The client's port that each call came by, by number.
        free: Connections that wait for a call.
    """

    def __init__(
        self,
        app: Running,
        path: str,
        *,
        rate: float = 100.0,
        body: Callable[[int], object] = lambda number: {"x": number},
        headers: Mapping[str, str] | None = None,
        right: Callable[[int, Any], bool] = lambda number, value: value == number,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        self._app = app
        self._path = path
        self._body = body
        self._headers = dict(headers or {})
        self._right = right
        self._timeout_s = timeout_s
        self._calls: set[asyncio.Task[None]] = set()
        self._sending: asyncio.Task[None] | None = None
        self._sent = 0
        self._rng = random.Random(5)
        self.rate = rate
        self.free: list[Http] = []
        self.answers: dict[int, list[Outcome]] = {}
        self.broken: dict[int, str] = {}
        self.ports: dict[int, int] = {}
        self.hanging: list[int] = []

    async def __aenter__(self) -> Self:
        self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._sending is not None
        self._sending.cancel()
        await asyncio.wait([self._sending])
        if self._calls:
            await asyncio.wait(self._calls)
        for http in self.free:
            await http.close()

    async def _send(self) -> None:
        due = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            while due <= time.monotonic():
                self._sent += 1
                call = asyncio.create_task(self._call(self._sent, due))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
                due += self._rng.expovariate(self.rate)

    async def _call(self, number: int, due: float) -> None:
        lag_s = time.monotonic() - due
        # The one that waited longest, or the server would hang up on some of them as idle.
        http = self.free.pop(0) if self.free else None
        try:
            async with asyncio.timeout(self._timeout_s):
                http = http or await Http.open(self._app.url)
                self.ports[number] = http.port
                body = json.dumps(self._body(number)).encode()
                headers = self._headers | {"x-request-id": f"load-{number}"}
                answer = await http.call("POST", self._path, body=body, headers=headers)
        except TimeoutError:
            self.hanging.append(number)
            if http is not None:
                http.abort()
        except (OSError, EOFError) as error:
            self.broken[number] = repr(error)
            if http is not None:
                http.abort()
        else:
            assert answer.headers["x-request-id"] == f"load-{number}"
            outcome = Outcome(
                due,
                time.monotonic() - due,
                lag_s,
                answer.status,
                "" if answer.status == 200 else answer.reason,
                answer.json if answer.status == 200 else None,
                sys.intern(answer.headers.get("x-servekit-version", "")),
                sys.intern(answer.headers.get("x-servekit-replica", "")),
                answer.headers.get("retry-after", ""),
            )
            self.answers.setdefault(number, []).append(outcome)
            if answer.headers.get("connection") == "close":
                await http.close()
            else:
                self.free.append(http)

    @property
    def underway(self) -> int:
        """Calls that were sent and not answered."""
        return len(self._calls)

    @property
    def answered(self) -> int:
        return len(self.answers)

    def outcomes(self, since: float = 0.0, before: float = math.inf) -> list[Outcome]:
        """Return the answers of the calls that were due in a span of the monotonic clock."""
        return [o for found in self.answers.values() for o in found if since <= o.due < before]

    async def goes_on(self, count: int = 50) -> None:
        """Wait for so many more answers."""
        wanted = self.answered + count
        await until(lambda: self.answered >= wanted, f"{count} more answers")

    def check(self) -> Counter[str]:
        """Prove that each call was answered once, with its own payload; returns the outcomes."""
        assert not self.hanging, f"hanging: {self.hanging[:10]}"
        outcomes: Counter[str] = Counter()
        for number in range(1, self._sent + 1):
            if number in self.broken:
                assert number not in self.answers
                outcomes["broken"] += 1
                continue
            [outcome] = self.answers[number]
            if outcome.status == 200:
                assert self._right(number, outcome.value), f"{number} got {outcome.value!r}"
                outcomes["200"] += 1
            else:
                outcomes[f"{outcome.status} {outcome.reason}"] += 1
        slowest_s = max((outcome.took_s for outcome in self.outcomes()), default=0.0)
        show(f"{outcomes}, slowest {slowest_s:.2f} s")
        return outcomes
