"""How long a batch will take, learned while serving.

In: the size and duration of every finished batch, and the profile measured while warming up.
Out: the expected latency of a size, an upper estimate of it, and the largest size that fits a
budget of time. It refuses to forget: the shape of the profile stays in the fit for ever, so a
long run of near-constant sizes cannot tilt the line. Sizes are executed rows, times are seconds.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from math import ceil, log2
from typing import Final, TypeAlias

# Without a profile, a batch is assumed to cost as much as 8 of its rows before its first row.
_DEFAULT_OVERHEAD_ROWS: Final = 8.0

_DECAY: Final = 0.5 ** (1 / 200)  # a sample's weight halves in 200 batches
_BUCKET_SAMPLES: Final = 30.0  # so that one frequent size cannot outvote all the others
_ANCHOR_WEIGHT: Final = 4.0  # of all the profile's points together, in samples
_OUTLIER: Final = 4.0  # a duration counts for at most this many times the expected one
_SHORTEST: Final = 1e-6  # seconds; 1/y**2 of anything shorter would drown the other samples
_RESIDUAL_MIN: Final = 0.03
_RESIDUAL_MAX: Final = 1.0


class SlidingQuantile:
    """The nearest-rank `q` quantile of the last `size` values, in O(log size) comparisons each.

    Attributes:
        value: The quantile; None as long as there are no values.
    """

    __slots__ = ("_q", "_recent", "_size", "_sorted", "value")

    def __init__(self, q: float, size: int) -> None:
        self._q = q
        self._size = size
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self.value: float | None = None

    def add(self, value: float) -> float:
        """Takes in `value`, drops the oldest if there are too many, and returns the quantile."""
        ordered, recent = self._sorted, self._recent
        recent.append(value)
        if len(recent) > self._size:
            del ordered[bisect_left(ordered, recent.popleft())]
        insort(ordered, value)
        self.value = ordered[ceil(self._q * len(ordered)) - 1]
        return self.value


# The sufficient statistics of a weighted straight-line fit: the sums of w, wx, wxx, wy and wxy.
_Sums: TypeAlias = tuple[float, float, float, float, float]


def _point(x: float, y: float, samples: float) -> _Sums:
    """One point, weighted by `1/y**2`, so that relative errors count: noise grows with size."""
    w = samples / (y * y)
    wx = w * x
    return w, wx, wx * x, w * y, wx * y


def _line(w: float, wx: float, wxx: float, wy: float, wxy: float) -> tuple[float, float]:
    """The `(alpha, beta)` with the least squares, neither negative; flat for a single size."""
    determinant = w * wxx - wx * wx
    numerator = w * wxy - wx * wy
    if numerator <= 0.0 or determinant <= 1e-12 * w * wxx:
        return wy / w, 0.0
    beta = numerator / determinant
    alpha = (wy - beta * wx) / w
    if alpha <= 0.0:
        return 0.0, wxy / wxx
    return alpha, beta


class _Bucket:
    """The batches of about one size, as their weight and their mean."""

    __slots__ = ("at", "point", "samples", "x", "y")

    def __init__(self) -> None:
        self.samples = self.x = self.y = 0.0
        self.point: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # what it adds to the sums
        self.at = 0  # the number of the batch that came last


class LatencyModel:
    """Expected latency `alpha + beta * rows`, and an upper estimate of it.

    The line is fitted by least squares over half-octave buckets of the batch size, which forget
    (half-life 200 batches), together with the points of the warm-up profile, which never do.
    Only the shape of the profile is trusted: it is rescaled by the median of the last 32 ratios of
    observed to profiled latency. The upper estimate is `margin` times the expectation, with
    `margin = 1 + k * m`: `m` is the 98th percentile of the last 128 relative residuals, and `k`
    grows by a tenth after each broken promise and shrinks by half a percent after each kept one.

    Attributes:
        alpha: Seconds that a batch costs before its first row; 0 until anything is known.
        beta: Seconds per row; 0 until anything is known.
        margin: Upper estimate over expectation, at least 1.
    """

    __slots__ = (
        "_anchor",
        "_batches",
        "_buckets",
        "_k",
        "_k_max",
        "_k_min",
        "_ratios",
        "_residuals",
        "_shape",
        "_sums",
        "alpha",
        "beta",
        "margin",
    )

    def __init__(
        self, profile: Mapping[int, float] | None, *, max_rows: int, strictness: float
    ) -> None:
        """Starts from `profile` (rows -> seconds), or from a mere guess of its shape.

        `strictness` is the initial `k`, which then stays within a factor of it: [1, 3] for 2.
        """
        points = {rows: seconds for rows, seconds in (profile or {}).items() if seconds > 0.0}
        known = bool(points)
        if len(points) < 2:
            rows, seconds = next(iter(points.items()), (1, 1.0))
            per_row = seconds / (_DEFAULT_OVERHEAD_ROWS + rows)
            points = {
                size: per_row * (_DEFAULT_OVERHEAD_ROWS + size) for size in (1, max(2, max_rows))
            }
        weight = _ANCHOR_WEIGHT / len(points)
        anchors = [_point(rows, seconds, weight) for rows, seconds in points.items()]
        w, wx, wxx, wy, wxy = map(sum, zip(*anchors, strict=True))
        self._anchor: _Sums = (w, wx, wxx, wy, wxy)
        self._shape = _line(*self._anchor)
        self.alpha, self.beta = self._shape if known else (0.0, 0.0)
        self._sums: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._buckets: dict[int, _Bucket] = {}
        self._batches = 0
        self._ratios = SlidingQuantile(0.5, 32)
        self._residuals = SlidingQuantile(0.98, 128)
        self._k = strictness
        self._k_min, self._k_max = strictness / 2, strictness * 3 / 2
        self.margin = 1.0 + self._k * _RESIDUAL_MIN

    def expected(self, rows: int) -> float:
        """Seconds that a batch of `rows` takes."""
        return self.alpha + self.beta * rows

    def upper(self, rows: int) -> float:
        """Seconds within which a batch of `rows` should end."""
        return self.margin * (self.alpha + self.beta * rows)

    def fit(self, budget_s: float, most: int) -> int:
        """The largest size, at most `most`, whose upper estimate fits the budget; 0 if none."""
        spare = budget_s / self.margin - self.alpha
        if spare < self.beta:
            return 0 if spare < 0.0 or self.beta > 0.0 else most
        # The addend absorbs rounding: a size's own upper estimate must fit that size.
        return most if spare >= self.beta * most else int(spare / self.beta + 1e-9)

    def observe(self, rows: int, seconds: float, *, promised: bool, missed: bool) -> None:
        """Learns from a batch of `rows` that took `seconds`, in a few microseconds.

        Args:
            rows: The executed size.
            seconds: From dispatch to completion.
            promised: The upper estimate met every deadline in the batch, so its outcome says
                whether `k` is right; a batch that was late from the start does not.
            missed: A deadline in the batch passed before it ended.
        """
        seconds = max(seconds, _SHORTEST)
        alpha, beta = self._shape
        scale = self._ratios.add(seconds / (alpha + beta * rows))
        if promised:
            k = self._k * (1.1 if missed else 0.995)
            self._k = min(max(k, self._k_min), self._k_max)
        expected = self.alpha + self.beta * rows
        if expected > 0.0:
            m = self._residuals.add(seconds / expected - 1.0)
            self.margin = 1.0 + self._k * min(max(m, _RESIDUAL_MIN), _RESIDUAL_MAX)
            seconds = min(seconds, _OUTLIER * expected)
        self._fit(rows, seconds, scale)

    def _fit(self, rows: int, seconds: float, scale: float) -> None:
        """Refits the line: only one bucket changes, so its old point is swapped for the new one.

        Rounding errors of the swap decay like everything else in the sums.
        """
        self._batches += 1
        index = round(2.0 * log2(rows))
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = _Bucket()
        age = _DECAY ** (self._batches - bucket.at)
        v, vx, vxx, vy, vxy = bucket.point
        samples = min(bucket.samples * age + 1.0, _BUCKET_SAMPLES)
        bucket.samples = samples
        bucket.x += (rows - bucket.x) / samples
        bucket.y += (seconds - bucket.y) / samples
        bucket.at = self._batches
        bucket.point = u, ux, uxx, uy, uxy = _point(bucket.x, bucket.y, samples)
        w, wx, wxx, wy, wxy = self._sums
        w = w * _DECAY - v * age + u
        wx = wx * _DECAY - vx * age + ux
        wxx = wxx * _DECAY - vxx * age + uxx
        wy = wy * _DECAY - vy * age + uy
        wxy = wxy * _DECAY - vxy * age + uxy
        self._sums = w, wx, wxx, wy, wxy
        # Points scaled by s weigh 1/s**2 as much, which makes rescaling the anchor five products.
        inverse = 1.0 / scale
        square = inverse * inverse
        a, ax, axx, ay, axy = self._anchor
        self.alpha, self.beta = _line(
            w + a * square,
            wx + ax * square,
            wxx + axx * square,
            wy + ay * inverse,
            wxy + axy * inverse,
        )
