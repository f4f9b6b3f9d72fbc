"""Serving on a virtual clock: hours of load in seconds, and the same trace for the same seed.

In: a batch policy, a device and a load. Out: what was offered, served, refused and late, and a hash
of every event. The policy is the production code itself, as a pure state machine; only the device
and the clients are modelled. Times are seconds, latencies are from arrival to completion.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from math import ceil
from random import Random

from servekit.runtime.batcher import Batcher, Decision, Dispatch
from servekit.runtime.queue import Entry
from servekit.spec.policy import BatchPolicy


class Loop:
    """A virtual clock: runs what was scheduled, in order of time, then of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Schedules `event` at `time`, not before now."""
        self._serial += 1
        heappush(self._events, (max(time, self.now), self._serial, event))

    def run(self) -> None:
        """Runs until nothing is scheduled."""
        while self._events:
            self.now, _, event = heappop(self._events)
            event()


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that takes `alpha_s + beta_s * rows` for a batch.

    Attributes:
        alpha_s: Seconds of a batch before its first row.
        beta_s: Seconds per row.
        noise: Standard deviation over mean of a batch's duration (normal, at least half the mean).
        pad_to: Executed sizes, ascending; a smaller batch takes as long as the next one of these.
        slow_at_s: When the device becomes slower.
        slow_factor: By how much, from then on.
    """

    alpha_s: float
    beta_s: float
    noise: float = 0.0
    pad_to: tuple[int, ...] = ()
    slow_at_s: float = 0.0
    slow_factor: float = 1.0

    def duration(self, now: float, rows: int, random: Random) -> float:
        """Seconds that a batch takes which starts now."""
        size = next((size for size in self.pad_to if size >= rows), rows)
        mean = self.alpha_s + self.beta_s * size
        if now >= self.slow_at_s:
            mean *= self.slow_factor
        return mean * max(0.5, random.gauss(1.0, self.noise)) if self.noise else mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Calls that arrive as a Poisson process.

    Attributes:
        rate_per_s: Calls per second.
        duration_s: How long they keep coming; what is on board then is still served.
        deadline_s: Seconds that a caller waits for the answer; None waits for ever.
        rows: Rows of a call.
        on_time_s: Seconds within which an answer counts as on time; None means `deadline_s`.
    """

    rate_per_s: float
    duration_s: float
    deadline_s: float | None = None
    rows: int = 1
    on_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a load.

    Attributes:
        offered: Calls that arrived: `served + refused`.
        served: Calls that were answered.
        on_time: Calls that were answered within their bound; all that were served, if it has none.
        late: Calls that were answered after it.
        refused: Calls that were refused, by reason.
        mean_s: Mean latency of the served calls; 0 if there are none, as for the next ones.
        p50_s: Their median latency.
        p90_s: Their 90th percentile.
        p99_s: Their 99th percentile.
        goodput_per_s: Calls on time per second of load.
        batches: Batches executed.
        mean_batch: Mean rows of a batch.
        max_batch: Rows of the largest batch.
        trace: Hash of all events with their times.
    """

    offered: int
    served: int
    on_time: int
    late: int
    refused: dict[str, int]
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    goodput_per_s: float
    batches: int
    mean_batch: float
    max_batch: int
    trace: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of one call: `latency_s` after its arrival, or refused for `reason`."""

    arrived: float
    latency_s: float
    reason: str | None = None


class Tally:
    """Collects what happens."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.batches: list[tuple[float, int]] = []  # when each was dispatched, and its rows
        self._trace = blake2b(digest_size=16)

    def record(self, kind: bytes, now: float, number: int) -> None:
        """Adds an event to the trace: b"a"rrival, "d"ispatch, "e"nd or "r"efusal, and of what."""
        self._trace.update(kind)
        self._trace.update(struct.pack("<dq", now, number))

    def result(self, load: Load) -> Result:
        """Sums up."""
        bound = load.deadline_s if load.on_time_s is None else load.on_time_s
        served = sorted(answer.latency_s for answer in self.answers if answer.reason is None)
        late = 0 if bound is None else sum(latency > bound + 1e-9 for latency in served)
        rows = [size for _, size in self.batches]
        refused: dict[str, int] = {}
        for answer in self.answers:
            if answer.reason is not None:
                refused[answer.reason] = refused.get(answer.reason, 0) + 1
        return Result(
            offered=len(self.answers),
            served=len(served),
            on_time=len(served) - late,
            late=late,
            refused=refused,
            mean_s=sum(served) / len(served) if served else 0.0,
            p50_s=_percentile(served, 0.50),
            p90_s=_percentile(served, 0.90),
            p99_s=_percentile(served, 0.99),
            goodput_per_s=(len(served) - late) / load.duration_s,
            batches=len(rows),
            mean_batch=sum(rows) / len(rows) if rows else 0.0,
            max_batch=max(rows, default=0),
            trace=self._trace.hexdigest(),
        )


class Replica:
    """A batcher in front of a device that runs up to `concurrent_batches` at once."""

    def __init__(
        self, loop: Loop, batcher: Batcher, device: Device, tally: Tally, random: Random
    ) -> None:
        self._loop = loop
        self._batcher = batcher
        self._device = device
        self._tally = tally
        self._random = random
        self._timer: float | None = None

    def call(self, entry: Entry) -> None:
        """Takes in a call that arrives now."""
        now = self._loop.now
        self._tally.record(b"a", now, entry.id)
        self._act(self._batcher.arrive(now, entry))

    def _act(self, decisions: list[Decision]) -> None:
        now = self._loop.now
        for decision in decisions:
            if isinstance(decision, Dispatch):
                self._start(decision)
            else:
                entry = decision.entry
                self._tally.record(b"r", now, entry.id)
                self._tally.answers.append(
                    Answer(entry.arrived, now - entry.arrived, decision.reason)
                )
        timer = self._batcher.next_timer
        if timer is not None and timer != self._timer:
            self._timer = timer
            self._loop.at(timer, self._wake)

    def _start(self, dispatch: Dispatch) -> None:
        now = self._loop.now
        rows = sum(entry.rows for entry in dispatch.entries)
        self._tally.batches.append((now, rows))
        self._tally.record(b"d", now, dispatch.batch)
        duration = self._device.duration(now, rows, self._random)
        self._loop.at(now + duration, lambda: self._end(dispatch))

    def _end(self, dispatch: Dispatch) -> None:
        now = self._loop.now
        self._tally.record(b"e", now, dispatch.batch)
        for entry in dispatch.entries:
            self._tally.answers.append(Answer(entry.arrived, now - entry.arrived))
        self._act(self._batcher.complete(now, dispatch.batch))

    def _wake(self) -> None:
        # A timer that has been moved meanwhile still rings at its old time; then it is not due.
        if self._batcher.next_timer == self._loop.now:
            self._timer = None
            self._act(self._batcher.timer(self._loop.now))


class Clients:
    """Independent clients: each arrival schedules the next one."""

    def __init__(
        self, loop: Loop, load: Load, random: Random, call: Callable[[Entry], None]
    ) -> None:
        self._loop = loop
        self._load = load
        self._random = random
        self._call = call
        self._count = 0
        self._schedule()

    def _schedule(self) -> None:
        time = self._loop.now + self._random.expovariate(self._load.rate_per_s)
        if time < self._load.duration_s:
            self._loop.at(time, self._arrive)

    def _arrive(self) -> None:
        load, now = self._load, self._loop.now
        self._count += 1
        deadline = None if load.deadline_s is None else now + load.deadline_s
        self._call(Entry(self._count, rows=load.rows, deadline=deadline))
        self._schedule()


def simulate(
    policy: BatchPolicy,
    device: Device,
    load: Load,
    *,
    seed: int = 0,
    profile: Mapping[int, float] | None = None,
) -> Result:
    """Serves `load` by one replica.

    Args:
        policy: The batcher's settings.
        device: What executes the batches.
        load: What arrives.
        seed: Decides arrivals and noise; equal arguments give equal results.
        profile: Rows -> seconds, which the batcher is told as its warm-up profile.
    """
    return observe(policy, device, load, seed=seed, profile=profile).result(load)


def observe(
    policy: BatchPolicy,
    device: Device,
    load: Load,
    *,
    seed: int = 0,
    profile: Mapping[int, float] | None = None,
) -> Tally:
    """Like `simulate`, but returns every answer and batch, for questions of when."""
    loop, tally = Loop(), Tally()
    # Arrivals and noise have a source each, so that two policies meet the same arrivals.
    arrivals, noise = Random(f"arrivals {seed}"), Random(f"noise {seed}")  # noqa: S311
    replica = Replica(loop, Batcher(policy, profile=profile), device, tally, noise)
    Clients(loop, load, arrivals, replica.call)
    loop.run()
    return tally


def _percentile(ordered: list[float], q: float) -> float:
    return ordered[max(0, ceil(q * len(ordered)) - 1)] if ordered else 0.0
