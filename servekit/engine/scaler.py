"""How many replicas a service should have: a pure state machine after Knative's autoscaler.

The caller reports the load at each tick and gets the wanted number back; nothing here knows clocks,
processes or sockets. The load is counted in replicas: calls on board over the target of one, or
the rate over what one can do, whichever is more.

- **Stable**: the mean of `window_s`, rounded up, is what is wanted.
- **Panic**: when the mean of its last tenth reaches twice the capacity there is, that mean counts
  too, and the number only grows until a whole window has passed without such a peak.
- **Delays**: what is wanted has to stay above (or below) what there is for `up_delay_s` (or
  `down_delay_s`), time that nobody watched not included, and then the mildest of it counts.
- **Zero**: the last replica goes when there was no call at all for `idle_s`, also in a panic; the
  first call after that wakes it at once.

Starting replicas count as capacity. The figures of a dead reporter are the caller's to drop.

Source: Knative Serving, `pkg/autoscaler/scaling/autoscaler.go` and the KPA documentation.
"""

import math
from collections import deque

import msgspec

from servekit.spec.policy import Autoscale

PANIC_SHARE = 0.1  # of the window
PANIC_AT = 2.0  # times the capacity
MAX_UP = 1000  # times the replicas, in one tick
MAX_DOWN = 2


class ScalerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the scaler sees.

    Attributes:
        desired: Its last answer.
        stable: Mean load over the stable window, in replicas.
        panic: Mean load over the panic window, in replicas.
        panicking: Whether the number only grows for now.
    """

    desired: int
    stable: float
    panic: float
    panicking: bool


class Scaler:
    """Follows the load of one service.

    Args:
        policy: Bounds and delays.
        target: Calls on board that one replica should have, above 0.
    """

    def __init__(self, policy: Autoscale, *, target: float) -> None:
        self._policy = policy
        self._idle_s = policy.down_delay_s if policy.idle_s is None else policy.idle_s
        self._target = target
        self._stable = _Mean(policy.window_s)
        self._panic = _Mean(policy.window_s * PANIC_SHARE)
        self._highest = _Highest(policy.down_delay_s)
        self._lowest = _Highest(policy.up_delay_s)  # of negated numbers
        self._panic_until = -math.inf
        self._awake_until = -math.inf
        self._last_tick = -math.inf
        self._desired = policy.start

    def observe(
        self,
        now: float,
        *,
        ongoing: float,
        rate_per_s: float = 0.0,
        capacity_per_s: float | None = None,
        replicas: int,
    ) -> int:
        """Take the load of this tick and return how many replicas there should be.

        Constant time. Never raises: a figure that is not finite counts as none.

        Args:
            now: Seconds on a clock that doesn't go back.
            ongoing: Calls on board in all replicas, and waiting for one.
            rate_per_s: Calls that are answered per second.
            capacity_per_s: Calls per second that one replica can do; None or 0 is not known.
            replicas: Replicas running and starting.
        """
        loads = [ongoing / self._target, rate_per_s / capacity_per_s if capacity_per_s else 0.0]
        load = max((x for x in loads if 0 < x < math.inf), default=0.0)
        if now - self._last_tick > self._policy.window_s:
            # Nobody watched, so what there is was right until now.
            self._highest.add(now, replicas)
            self._lowest.add(now, -replicas)
            if replicas:
                self._stay_awake(now)
        self._last_tick = now
        if load or rate_per_s > 0:  # short calls come and go between two ticks
            self._stay_awake(now)

        wanted = max(1, _ceil(self._stable.add(now, load)))
        panic = self._panic.add(now, load)
        if panic >= PANIC_AT * max(1, replicas):
            self._panic_until = now + self._policy.window_s
        panicking = now < self._panic_until
        if panicking:
            wanted = max(wanted, _ceil(panic))

        high = self._highest.add(now, wanted)
        low = -self._lowest.add(now, -wanted)
        wanted = max(low, replicas, self._desired)
        if not panicking:
            wanted = min(wanted, high)
        wanted = min(max(wanted, replicas // MAX_DOWN), max(1, replicas) * MAX_UP)
        if wanted <= 1:
            wanted = 0 if replicas <= 1 and now > self._awake_until else 1
        self._desired = min(max(wanted, self._policy.min), self._policy.max)
        return self._desired

    def wake(self, now: float) -> int:
        """Take the first call while there is no replica, and return how many there should be."""
        self._stay_awake(now)
        self._desired = max(1, self._desired)
        return self._desired

    def statistics(self) -> ScalerStatistics:
        """Return what the scaler saw at the last tick."""
        return ScalerStatistics(
            desired=self._desired,
            stable=self._stable.mean,
            panic=self._panic.mean,
            panicking=self._last_tick < self._panic_until,
        )

    def _stay_awake(self, now: float) -> None:
        self._awake_until = now + self._idle_s


class _Mean:
    """Mean of the last seconds, from buckets of one second each in a ring.

    Every second with a value weighs the same, however many ticks were in it; one without is
    unknown, not zero.
    """

    def __init__(self, span_s: float) -> None:
        self._seconds = [-1] * math.ceil(span_s)
        self._sums = [0.0] * len(self._seconds)
        self._counts = [0] * len(self._seconds)
        self.mean = 0.0

    def add(self, now: float, value: float) -> float:
        second = math.floor(now)
        slot = second % len(self._seconds)
        if self._seconds[slot] != second:
            self._seconds[slot], self._sums[slot], self._counts[slot] = second, 0.0, 0
        self._sums[slot] += value
        self._counts[slot] += 1
        oldest = second - len(self._seconds)
        means = [
            total / count
            for at, total, count in zip(self._seconds, self._sums, self._counts, strict=True)
            if at > oldest and count
        ]
        self.mean = math.fsum(means) / len(means)
        return self.mean


class _Highest:
    """Highest number of the last seconds, from a queue that only descends; amortised O(1).

    Source: Lemire, "Streaming maximum-minimum filter using no more than three comparisons per
    element", 2006.
    """

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._queue: deque[tuple[float, int]] = deque()

    def add(self, now: float, value: int) -> int:
        while self._queue and self._queue[-1][1] <= value:
            self._queue.pop()
        self._queue.append((now, value))
        while len(self._queue) > 1 and self._queue[0][0] <= now - self._span_s:
            self._queue.popleft()
        return self._queue[0][1]


def _ceil(load: float) -> int:
    return math.ceil(load - 1e-9)  # a mean of 2 that comes out as 2.0000000001 wants 2
