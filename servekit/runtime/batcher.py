"""Adaptive batching: which waiting calls run together, when, and which cannot be served in time.

In: arrivals, completions, cancellations and timers, each with the time at which it happened.
Out: `Dispatch` (run these together now) and `Refuse` (answer this one with an error). Every entry
gets exactly one of them, unless it is cancelled first. The batcher never reads a clock, sleeps or
touches an event loop, so production, property tests and `bench/simulate.py` run the same code. It
belongs to one thread. Times are seconds of a monotonic clock.

The device is never idle while something waits, unless `max_wait_ms` asks for it: the queue fills
while the device works, so batches grow with the load by themselves (natural batching). The
latency model (`runtime/latency.py`) bounds them by the earliest deadline in the batch. Order is
earliest deadline first (Liu and Layland, 1973), which collapses under overload, as it spends the
device on calls that are barely late; hence admission control, and an early drop that keeps the
batch at the size of the highest goodput (Nexus, SOSP 2019, drops early for the same reason).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from math import ceil, exp, expm1, inf
from typing import Final, Literal, NamedTuple, TypeAlias

from servekit.runtime.latency import LatencyModel, SlidingQuantile
from servekit.runtime.queue import Entry, Line, Queue
from servekit.spec.policy import BatchPolicy

_MAX_QUEUED: Final = 1024
_DEFAULT_TARGET_S: Final = 1.0
_STALE_S: Final = 1.0  # after which the latency model proves nothing
_RATE_WINDOW_S: Final = 0.5  # time constant of the arrival rate


Reason: TypeAlias = Literal[
    "queue_full",  # max_queued entries wait already
    "deadline_unreachable",  # it would end too late
    "deadline_passed",  # it expired before its turn came
    "overload",  # dropped early, so that those behind it can be served in time
    "too_large",  # more rows than any batch may have
]


class Dispatch(NamedTuple):
    """Run `entries` together now, then call `complete(now, batch)`."""

    batch: int
    entries: tuple[Entry, ...]


class Refuse(NamedTuple):
    """Answer `entry` with an error; `retry_after_s` is 0 where a retry would not help."""

    entry: Entry
    reason: Reason
    retry_after_s: float


Decision: TypeAlias = Dispatch | Refuse


class BatcherStatistics(NamedTuple):
    """Where a batcher stands; `served` to `rows` count from its start.

    Attributes:
        queued: Entries that wait.
        running_batches: Batches that were dispatched and have not ended.
        running_rows: Rows in them.
        served: Entries of batches that have ended, well or not.
        refused: Entries refused, for any reason.
        cancelled: Entries cancelled while they waited.
        batches: Batches dispatched.
        rows: Rows dispatched, padding not counted.
        alpha_s: Seconds that a batch costs before its first row, as learned.
        beta_s: Seconds per row, as learned.
        capacity_per_s: Rows per second that can be served within the target; None without a
            target, or as long as nothing is known of the latency.
        estimated_wait_s: Seconds until a newcomer would be finished.
    """

    queued: int
    running_batches: int
    running_rows: int
    served: int
    refused: int
    cancelled: int
    batches: int
    rows: int
    alpha_s: float
    beta_s: float
    capacity_per_s: float | None
    estimated_wait_s: float


class _Rate:
    """Rows that arrive per second, as an average that forgets exponentially."""

    __slots__ = ("_count", "_since", "_updated")

    def __init__(self) -> None:
        self._count = 0.0
        self._since = self._updated = -inf

    def add(self, now: float, rows: int) -> None:
        if self._since == -inf:
            self._since = now
        self._count = self._count * exp((self._updated - now) / _RATE_WINDOW_S) + rows
        self._updated = now

    def per_second(self, now: float) -> float:
        """The rate, above 0, corrected for the short time over which it was measured at first."""
        count = self._count * exp((self._updated - now) / _RATE_WINDOW_S)
        age = (now - self._since) / _RATE_WINDOW_S
        seen = 1.0 if age > 10.0 else max(-expm1(-age), 1e-3)
        return count / (_RATE_WINDOW_S * seen) + 1e-9


class _Running(NamedTuple):
    started: float
    expected_end: float
    entries: int
    rows: int
    size: int  # rows with padding
    deadline: float  # the earliest one
    promised: bool  # the upper estimate met it


class Batcher:
    """A pure state machine: events with their time in, decisions out, in the order to act on.

    After each event, the caller acts on the decisions and arranges for `timer` to be called at
    `next_timer`. It must call `complete` exactly once for each `Dispatch`.
    """

    def __init__(self, policy: BatchPolicy, *, profile: Mapping[int, float] | None = None) -> None:
        """Starts idle.

        Args:
            policy: Sizes, bounds and targets.
            profile: Executed rows -> seconds, measured while warming up.
        """
        self._cap = policy.max_size
        self._slots = policy.concurrent_batches
        self._pad_to = policy.pad_to
        self._max_queued = _MAX_QUEUED if policy.max_queued is None else policy.max_queued
        self._max_wait = policy.max_wait_ms / 1000.0
        self._target = None if policy.target_ms is None else policy.target_ms / 1000.0
        self._horizon = _DEFAULT_TARGET_S if self._target is None else self._target
        self._model = LatencyModel(profile, max_rows=self._cap, strictness=policy.strictness)
        self._queue = Queue()
        self._running: dict[int, _Running] = {}
        self._rate = _Rate()
        self._gaps = SlidingQuantile(0.5, 16)
        self._last_arrival = -inf
        self._last_evidence = -inf
        self._now = 0.0
        self._free_at = self._fresh_until = -inf
        self._held_since: float | None = None
        self._next_timer: float | None = None
        self._served = self._refused = self._cancelled = self._batches = self._rows = 0
        self._plan()

    def arrive(self, now: float, entry: Entry) -> list[Decision]:
        """Takes in a call: it runs at once, waits, or is refused.

        Raises:
            ValueError: An entry of this id waits already.
        """
        self._now = entry.arrived = now
        queue = self._queue
        if entry.id in queue:
            raise ValueError(f"entry {entry.id} waits already")
        self._rate.add(now, entry.rows)
        if self._max_wait:
            if self._last_arrival > -inf:
                self._gaps.add(now - self._last_arrival)
            self._last_arrival = now
        if entry.rows > self._cap:
            return [self._refuse(entry, "too_large", 0.0)]
        deadline = entry.deadline
        if deadline is not None and deadline <= now:
            return [self._refuse(entry, "deadline_passed", 0.0)]
        ticket = queue.ticket(entry)
        free = len(self._running) < self._slots
        if queue or not free:
            if len(queue) >= self._max_queued:
                return [self._refuse(entry, "queue_full", self._retry_after(now))]
            if deadline is not None and now <= self._fresh_until:
                finish = self._finish(now, queue.rows_before(ticket), entry.rows)
                if finish > deadline:
                    after = float(ceil(finish - deadline))
                    return [self._refuse(entry, "deadline_unreachable", after)]
        queue.add(ticket)
        return self._advance(now) if free else []

    def complete(self, now: float, batch: int, *, ok: bool = True) -> list[Decision]:
        """A batch has really ended, so its slot is free.

        Args:
            now: When it ended.
            batch: From its `Dispatch`.
            ok: Whether it ran to its end; the duration of a batch that raised teaches nothing.

        Raises:
            KeyError: No such batch is running.
        """
        run = self._running.pop(batch)
        self._now = now
        self._served += run.entries
        if ok:
            self._model.observe(
                run.size, now - run.started, promised=run.promised, missed=now > run.deadline
            )
            self._last_evidence = now
            self._plan()
        ends = [run.expected_end for run in self._running.values()]
        self._fresh_until = max(self._last_evidence, *ends, -inf) + _STALE_S
        self._free_at = -inf
        return self._advance(now)

    def cancel(self, now: float, id: int) -> bool:  # noqa: A002
        """Withdraws an entry that still waits; False if it does not (it runs, or is unknown)."""
        self._now = now
        if not self._queue.discard(id):
            return False
        self._cancelled += 1
        if not self._queue:
            self._held_since = self._next_timer = None
        return True

    def timer(self, now: float) -> list[Decision]:
        """The time `next_timer` has come; harmless at any other time."""
        self._now = now
        return self._advance(now)

    @property
    def next_timer(self) -> float | None:
        """When `timer` must be called at the latest; None while nothing is held back."""
        return self._next_timer

    def estimated_wait(self, now: float) -> float:
        """Seconds until a newcomer of one row, behind all others, would be finished."""
        return self._finish(now, self._queue.rows, 1) - now

    def statistics(self) -> BatcherStatistics:
        """Where the batcher stands, as of its last event."""
        model = self._model
        running = self._running.values()
        known = self._target is not None and model.alpha + model.beta > 0.0
        return BatcherStatistics(
            queued=len(self._queue),
            running_batches=len(running),
            running_rows=sum(run.rows for run in running),
            served=self._served,
            refused=self._refused,
            cancelled=self._cancelled,
            batches=self._batches,
            rows=self._rows,
            alpha_s=model.alpha,
            beta_s=model.beta,
            capacity_per_s=self._slots * self._best / self._best_s if known else None,
            estimated_wait_s=self.estimated_wait(self._now),
        )

    def _advance(self, now: float) -> list[Decision]:
        """Fills the free slots."""
        self._next_timer = None
        decisions: list[Decision] = []
        while self._queue and len(self._running) < self._slots and not self._hold(now):
            self._form(now, decisions)
        return decisions

    def _form(self, now: float, decisions: list[Decision]) -> None:
        """Forms one batch of the first line, or drops heads of it until another line is first.

        Going through the line in order, an entry is refused if it has expired, or if it leaves
        less room than the batch must have to keep up with the load; else it joins, as long as the
        batch meets the earliest deadline in it. The last one is not refused for the sake of
        others, but only if even the expected latency is too long for it. What has just arrived at
        an idle device runs whatever the model says, and so does the probe that is due when nothing
        has been measured for a while: a model that is too pessimistic must see what corrects it.
        """
        line = self._queue.first()
        tickets = line.tickets
        probe = now > self._fresh_until
        rate = self._rate.per_second(now) / self._slots
        members: list[Entry] = []
        rows = dropped = dropped_rows = 0
        limit, earliest = self._cap, inf
        for ticket in tickets:
            rank, deadline, _, entry = ticket
            if dropped and not members and self._queue.overtaken(ticket):
                break  # another key is the most urgent one now
            if deadline < earliest:
                room = self._room(deadline - now)
                reason: Reason | None = None
                if deadline <= now:
                    reason = "deadline_passed"
                elif probe or entry.arrived == now:
                    pass
                elif members or dropped + 1 < len(tickets):
                    waiting = self._waiting(line, rank) - dropped_rows
                    if room < self._need(rate, waiting, deadline - entry.arrived):
                        reason = "overload"
                elif now + self._model.expected(self._size(entry.rows)) > deadline:
                    reason = "deadline_unreachable"
                if reason is not None:
                    decisions.append(self._refuse(entry, reason, self._retry_after(now)))
                    dropped += 1
                    dropped_rows += entry.rows
                    continue
                fits = min(limit, max(room, 1))
                if members and rows + entry.rows > fits:
                    break
                limit, earliest = fits, deadline
            if not members:
                limit = min(limit, self._soft_limit(now, rate, line.rows - dropped_rows, entry))
            elif rows + entry.rows > limit:
                break
            members.append(entry)
            rows += entry.rows
        self._queue.take(line, len(members) + dropped, rows + dropped_rows)
        self._held_since = None
        if members:
            decisions.append(self._dispatch(now, tuple(members), rows, earliest))

    def _dispatch(
        self, now: float, entries: tuple[Entry, ...], rows: int, deadline: float
    ) -> Dispatch:
        size = self._size(rows)
        self._batches += 1
        self._rows += rows
        expected = self._model.expected(size)
        promised = now + self._model.margin * expected <= deadline
        self._running[self._batches] = _Running(
            now, now + expected, len(entries), rows, size, deadline, promised
        )
        self._fresh_until = max(self._fresh_until, now + expected + _STALE_S)
        if len(self._running) == self._slots:
            self._free_at = min([run.expected_end for run in self._running.values()])
        return Dispatch(self._batches, entries)

    def _refuse(self, entry: Entry, reason: Reason, retry_after: float) -> Refuse:
        self._refused += 1
        return Refuse(entry, reason, retry_after)

    def _hold(self, now: float) -> bool:
        """Whether to wait for more rows although a slot is free; sets the timer if so.

        Waiting for one more entry costs all those present a gap each; it saves the fixed cost of
        a batch.
        """
        gap = self._gaps.value
        if not self._max_wait or gap is None:
            return False
        line = self._queue.first()
        head = line.tickets[0][3]
        rows = line.rows
        model = self._model
        if rows >= self._cap or len(self._queue) >= self._max_queued:
            return False
        if (rows + 1) * gap + rows * model.beta >= model.alpha:
            return False
        if self._held_since is None:
            self._held_since = now
        due = inf if head.deadline is None else head.deadline
        if self._target is not None:
            due = min(due, head.arrived + self._target)
        until = min(
            min(self._held_since, head.arrived) + self._max_wait,
            due - model.upper(self._size(rows + 1)),
            self._last_arrival + 3.0 * gap,
        )
        if until <= now:
            return False
        self._next_timer = until
        return True

    def _need(self, rate: float, waiting: int, budget: float) -> int:
        """The rows that a batch must have for the highest goodput.

        That is the size at which the device keeps up with `rate` rows per second. If none does, it
        is the largest size that can both gather and run within the budget.
        """
        model = self._model
        share = rate * model.beta
        keep = ceil(rate * model.alpha / (1.0 - share)) if share < 1.0 else self._cap
        need = min(keep, self._cap, waiting)
        budget = min(budget, self._horizon)
        over = (budget - model.margin * model.alpha) / (1.0 / rate + model.margin * model.beta)
        return self._whole(int(over)) if over < need else self._whole(need)

    def _soft_limit(self, now: float, rate: float, waiting: int, head: Entry) -> int:
        """The largest size that keeps the head within the soft target.

        A target that is lost is no reason to fall behind: what may not be dropped is served with
        the highest throughput then.
        """
        if self._target is None or waiting <= head.rows:
            return self._cap
        room = self._room(head.arrived + self._target - now)
        return room if room >= max(1, self._need(rate, waiting, inf)) else self._cap

    def _finish(self, now: float, before: int, rows: int) -> float:
        """When an entry of `rows` would have ended by the upper estimate, behind `before` rows."""
        best, best_s = self._best, self._best_s
        keys = self._queue.keys
        if keys > 1 and before < best * keys:  # then no key has enough rows for a batch of `best`
            best = max(1, before // keys)
            best_s = self._model.expected(self._size(best))
        size = min(before % best + rows, self._cap)
        if self._pad_to:
            size = self._size(size)
        ahead = before // best * best_s / self._slots
        start = self._free_at if self._free_at > now else now  # noqa: FURB136 - cheaper than max
        return start + ahead + self._model.upper(size)

    def _retry_after(self, now: float) -> float:
        """Whole seconds until all that waits now will have been served, at least 1."""
        return float(max(1, ceil(self.estimated_wait(now))))

    def _waiting(self, line: Line, rank: int) -> int:
        """Rows of `line` that are no less urgent than `rank`: others must not crowd those out."""
        if line.tickets[-1][0] == rank:
            return line.rows
        return line.rows_before((rank + 1, -inf))

    def _size(self, rows: int) -> int:
        """The executed size of a batch of `rows`."""
        return self._pad_to[bisect_left(self._pad_to, rows)] if self._pad_to else rows

    def _whole(self, size: int) -> int:
        """The most rows that can be executed as no more than `size`."""
        if not self._pad_to:
            return size
        index = bisect_right(self._pad_to, size)
        return self._pad_to[index - 1] if index else 0

    def _room(self, budget: float) -> int:
        """The most rows whose batch should end within `budget` seconds; 0 if none."""
        room = self._model.fit(budget, self._cap)
        return self._whole(room) if self._pad_to else room

    def _plan(self) -> None:
        """The size that serves most within the target, when half of it goes by in the queue."""
        model = self._model
        spare = max(0.0, self._horizon / 2.0 - model.alpha)
        best = self._cap if spare > model.beta * self._cap else int(spare / (model.beta or 1.0))
        self._best = max(self._pad_to[0], self._whole(best)) if self._pad_to else max(1, best)
        self._best_s = model.expected(self._best)
