"""Retries: whether a failed call may be sent once more, and after how long.

In go the errors of attempts and the time, out comes a pause or None; who asks does the waiting and the
sending. A retry must be safe (`may_repeat`), within its call's number and deadline, and within a
budget that all calls share, so that a server in trouble gets little more work, not three times as much.

One layer retries each kind of failure. The gateway's router sends lost calls to another replica, so
what it reports as lost is final here. A client sends again what was refused before it ran, and what
broke on the way to the gateway, which nobody else has seen.
"""

import random
from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import Final, Self

from servekit.errors import CallError

BROKEN: Final = "connection_broken"
"""Reason of an error for a connection that ended before its answer."""
FOREIGN: Final = "foreign_answer"
"""Reason of an error for an answer that servekit did not write, like that of a proxy."""

_BASE_S: Final = 0.01
_LONGEST_S: Final = 1.0
_PATIENCE_S: Final = 60.0


def may_repeat(error: CallError, *, idempotent: bool) -> bool:
    """Return whether a call that failed so may be sent once more.

    What has not run may always. What may have run, only if that does no harm, and only if no server
    reported it: one that did has retried itself, or an overload deep in the graph would come back
    multiplied by every layer above it (Beyer et al., Site Reliability Engineering, chapter 22).
    """
    if not error.retryable or not error.started:
        return error.retryable
    return idempotent and error.reason in (BROKEN, FOREIGN)


class RetryBudget:
    """How many calls may be in their second or a later attempt at once: a share of all under way.

    As Envoy's retry budget, with its defaults. Safe in any thread.

    Args:
        share: Of the calls under way.
        floor: Allowed even if the share is less.

    Attributes:
        active: Calls under way.
        retrying: Those of them that have been sent again, or are about to be.
    """

    __slots__ = ("_floor", "_lock", "_share", "active", "retrying")

    def __init__(self, share: float = 0.2, floor: int = 3) -> None:
        self._share = share
        self._floor = floor
        self._lock = Lock()
        self.active = 0
        self.retrying = 0

    def enter(self) -> None:
        """Count a call that begins."""
        with self._lock:
            self.active += 1

    def leave(self, *, retried: bool) -> None:
        """Count a call that has ended."""
        with self._lock:
            self.active -= 1
            self.retrying -= retried

    def take(self) -> bool:
        """Let one more call be sent again, if there is room for it."""
        with self._lock:
            if self.retrying >= max(self._floor, self._share * self.active):
                return False
            self.retrying += 1
            return True


class Attempts:
    """The attempts of one call; in the budget from `with` to its end.

    Args:
        budget: Shared with other calls.
        retries: Attempts after the first.
        idempotent: Running the call twice does no harm.
        deadline: Absolute, in seconds; no attempt begins later. None is for ever.
        jitter: Returns a number from 0 to below 1.
    """

    __slots__ = ("_budget", "_deadline", "_idempotent", "_jitter", "_left", "_pause_s", "_retried")

    def __init__(
        self,
        budget: RetryBudget,
        *,
        retries: int,
        idempotent: bool,
        deadline: float | None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._budget = budget
        self._left = retries
        self._idempotent = idempotent
        self._deadline = deadline
        self._jitter = jitter
        self._pause_s = _BASE_S
        self._retried = False

    def pause(self, error: CallError, now: float) -> float | None:
        """Return for how many seconds to wait before the next attempt, or None: the error is final.

        Exponential with full jitter (Brooker, "Exponential Backoff And Jitter", 2015), behind what
        the server asked for.

        Args:
            error: Ended the latest attempt.
            now: On the deadline's clock.
        """
        if self._left <= 0 or not may_repeat(error, idempotent=self._idempotent):
            return None
        pause = max(0.0, error.retry_after_s or 0.0) + self._jitter() * self._pause_s
        latest = now + _PATIENCE_S if self._deadline is None else self._deadline
        if not now + pause < latest:
            return None
        if not self._retried and not self._budget.take():
            return None
        self._retried = True
        self._left -= 1
        self._pause_s = min(2 * self._pause_s, _LONGEST_S)
        return pause

    def __enter__(self) -> Self:
        self._budget.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._budget.leave(retried=self._retried)
