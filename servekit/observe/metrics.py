"""Counters, gauges and histograms that cost a fraction of a microsecond.

Each process keeps one `Metrics`: families of series, told apart by label values. The hot path
binds a series once (`family.labels(...)`) and keeps it; from then on `inc`, `set` and `observe` are
a few bytecodes on plain attributes. There are no locks: a series belongs to one thread, the event
loop's.

`snapshot()` gives a process's figures as plain data that travels over the wire; `merge` adds those
of many processes, `Aggregate` does so without forgetting the ones that ended, and `render` writes
the Prometheus text format.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

import msgspec

from servekit.errors import SpecError

if TYPE_CHECKING:
    from prometheus_client import Metric

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

OTHER = "other"
"""Label value of the series that takes what comes after a family is full."""

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One series at one moment.

    Attributes:
        labels: Label values, in the order of the family's label names.
        value: The figure; of a histogram, the sum of all observations.
        counts: Of a histogram: observations per bucket, not cumulative; the last has no bound.
    """

    labels: tuple[str, ...]
    value: float
    counts: tuple[int, ...] = ()


class FamilySnapshot(msgspec.Struct, array_like=True, frozen=True):
    """All series of one name at one moment.

    Attributes:
        bounds: Of a histogram: inclusive upper bounds of its buckets, without the infinite one.
    """

    name: str
    doc: str
    kind: Kind
    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    samples: tuple[Sample, ...]


Snapshot: TypeAlias = tuple[FamilySnapshot, ...]


class Counter:
    """A total that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`, which is 0 or more."""
        self.value += amount

    def sample(self, labels: tuple[str, ...]) -> Sample:
        """Return the figure as plain data."""
        return Sample(labels, self.value)


class Gauge:
    """A figure that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        """Replace the figure."""
        self.value = value

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        self.value += amount

    def dec(self, amount: float = 1.0) -> None:
        """Subtract `amount`."""
        self.value -= amount

    def sample(self, labels: tuple[str, ...]) -> Sample:
        """Return the figure as plain data."""
        return Sample(labels, self.value)


class Histogram:
    """How observations spread over fixed buckets; a value on a bound belongs to the lower one."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def sample(self, labels: tuple[str, ...]) -> Sample:
        """Return the figures as plain data."""
        return Sample(labels, self.sum, tuple(self.counts))


Series = TypeVar("Series", bound=Counter | Gauge | Histogram)


class Family(Generic[Series]):
    """All series of one name.

    Attributes:
        name: Name of the metric.
        label_names: What tells its series apart.
    """

    def __init__(
        self, name: str, label_names: tuple[str, ...], make: Callable[[], Series], max_series: int
    ) -> None:
        self.name = name
        self.label_names = label_names
        self._names = frozenset(label_names)
        self._make = make
        self._max_series = max_series
        self._series: dict[tuple[str, ...], Series] = {}

    def labels(self, **values: object) -> Series:
        """Return the series with these label values, to be kept and used.

        Once the family has as many series as it may, new ones share a single series with every
        label set to `"other"`: labels that come from outside can't exhaust memory.

        Raises:
            SpecError: The names are not exactly the family's.
        """
        if values.keys() != self._names:
            raise SpecError(f"{self.name}: labels are {list(self.label_names)}, not {list(values)}")
        key = tuple([str(values[name]) for name in self.label_names])
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= self._max_series:
                key = (OTHER,) * len(key)
            series = self._series.setdefault(key, self._make())
        return series

    def __len__(self) -> int:
        return len(self._series)

    def samples(self, suffix: tuple[str, ...] = ()) -> tuple[Sample, ...]:
        """Return all series as plain data, with `suffix` behind their label values."""
        return tuple([series.sample(key + suffix) for key, series in self._series.items()])


class Metrics:
    """The figures of one process.

    Args:
        replica: Id of this process, for gauges that are kept apart when snapshots are merged.
        max_series: Most series in a family, before the one for `"other"`.
    """

    def __init__(self, *, replica: str = "", max_series: int = 500) -> None:
        self.replica = replica
        self._max_series = max_series
        self._heads: dict[str, FamilySnapshot] = {}
        self._families: dict[str, Family[Counter] | Family[Gauge] | Family[Histogram]] = {}

    def counter(self, name: str, doc: str, labels: Sequence[str] = ()) -> Family[Counter]:
        """Define a counter, whose name ends in `_total`.

        Raises:
            SpecError: The name is taken, or it or a label is no legal one.
        """
        if not name.endswith("_total"):
            raise SpecError(f"counter {name!r}: write {name + '_total'!r}, as Prometheus wants it")
        family = Family(name, tuple(labels), Counter, self._max_series)
        self._define(family, FamilySnapshot(name, doc, "counter", tuple(labels), (), ()))
        return family

    def gauge(
        self, name: str, doc: str, labels: Sequence[str] = (), *, per_replica: bool = False
    ) -> Family[Gauge]:
        """Define a gauge.

        Args:
            name: Its name.
            doc: What it says, one sentence.
            labels: Names of its labels.
            per_replica: Keep those of different processes apart by a label `replica`; otherwise
                they are added.

        Raises:
            SpecError: The name is taken, or it or a label is no legal one.
        """
        family = Family(name, tuple(labels), Gauge, self._max_series)
        names = (*labels, "replica") if per_replica else tuple(labels)
        self._define(family, FamilySnapshot(name, doc, "gauge", names, (), ()))
        return family

    def histogram(
        self, name: str, doc: str, labels: Sequence[str] = (), *, bounds: Sequence[float]
    ) -> Family[Histogram]:
        """Define a histogram with buckets up to each of `bounds`, and one for what is above.

        Raises:
            SpecError: The name is taken, it or a label is no legal one, or bounds don't ascend.
        """
        edges = tuple(float(bound) for bound in bounds)
        if not edges or not all(a < b for a, b in pairwise((-math.inf, *edges, math.inf))):
            raise SpecError(f"histogram {name!r}: bounds must ascend, not {list(bounds)}")
        family = Family(name, tuple(labels), lambda: Histogram(edges), self._max_series)
        self._define(family, FamilySnapshot(name, doc, "histogram", tuple(labels), edges, ()))
        return family

    def _define(
        self, family: Family[Counter] | Family[Gauge] | Family[Histogram], head: FamilySnapshot
    ) -> None:
        if head.name in self._heads:
            raise SpecError(f"metric {head.name!r} is defined twice")
        if not _METRIC_NAME.fullmatch(head.name):
            raise SpecError(f"metric {head.name!r}: letters, digits, _ and : only")
        for label in head.labels:
            if not _LABEL_NAME.fullmatch(label) or label == "le" or head.labels.count(label) > 1:
                raise SpecError(f"metric {head.name!r}: {label!r} can't be a label here")
        self._heads[head.name] = head
        self._families[head.name] = family

    def snapshot(self) -> Snapshot:
        """Return all figures as plain data; families without series are left out."""
        return tuple(
            msgspec.structs.replace(
                head,
                samples=family.samples(
                    (self.replica,) * (len(head.labels) - len(family.label_names))
                ),
            )
            for head, family in zip(self._heads.values(), self._families.values(), strict=True)
            if len(family)
        )

    def statistics(self) -> dict[str, int]:
        """Return the number of series per family."""
        return {name: len(family) for name, family in self._families.items()}


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Add the figures of many processes, series by series.

    Gauges that were defined `per_replica` differ in a label, so they stay apart. Where processes
    disagree about a family's kind, labels or buckets, the first one seen decides and the others'
    are left out: a sum of unlike things would be wrong, and an error would hide all the rest.
    """
    heads: dict[str, FamilySnapshot] = {}
    series: dict[str, dict[tuple[str, ...], Sample]] = {}
    for family in (family for snapshot in snapshots for family in snapshot):
        head = heads.setdefault(family.name, family)
        if _shape(head) != _shape(family):
            continue
        merged = series.setdefault(family.name, {})
        for sample in family.samples:
            known = merged.get(sample.labels)
            merged[sample.labels] = sample if known is None else _add(known, sample)
    return tuple(
        msgspec.structs.replace(head, samples=tuple(series[name].values()))
        for name, head in heads.items()
    )


def _shape(family: FamilySnapshot) -> tuple[Kind, tuple[str, ...], tuple[float, ...]]:
    return family.kind, family.labels, family.bounds


def _add(a: Sample, b: Sample) -> Sample:
    counts = tuple([m + n for m, n in zip(a.counts, b.counts, strict=True)])
    return Sample(a.labels, a.value + b.value, counts)


class Aggregate:
    """The figures of many processes, with totals that don't fall when one of them ends.

    Prometheus takes a falling counter for a restart and reads the whole remainder as new, so the
    counters and histograms of processes that ended are carried on. Their gauges are dropped.
    """

    def __init__(self) -> None:
        self._live: dict[str, Snapshot] = {}
        self._ended: Snapshot = ()

    def put(self, source: str, snapshot: Snapshot) -> None:
        """Take the latest figures of a process; `source` names one run of it, never reused."""
        self._live[source] = snapshot

    def retire(self, source: str) -> None:
        """Carry on the totals of a process that ended; an unknown one changes nothing."""
        totals = tuple(f for f in self._live.pop(source, ()) if f.kind != "gauge")
        self._ended = merge((totals, self._ended))

    def snapshot(self) -> Snapshot:
        """Return the merged figures."""
        # Live ones first: where shapes differ, what runs now decides.
        return merge((*self._live.values(), self._ended))

    def statistics(self) -> dict[str, int]:
        """Return the number of live sources and of series."""
        return {
            "sources": len(self._live),
            "series": sum(len(family.samples) for family in self.snapshot()),
        }


def render(snapshot: Snapshot) -> str:
    """Write a snapshot in the Prometheus text format 0.0.4."""
    # Only the process that answers /metrics pays for the import.
    from prometheus_client import generate_latest  # noqa: PLC0415
    from prometheus_client.registry import Collector  # noqa: PLC0415

    class Exposition(Collector):
        def collect(self) -> "Iterator[Metric]":
            return map(_metric, snapshot)

    return generate_latest(Exposition()).decode()


def _metric(family: FamilySnapshot) -> "Metric":
    from prometheus_client import core  # noqa: PLC0415

    if family.kind == "histogram":
        histogram = core.HistogramMetricFamily(family.name, family.doc, labels=family.labels)
        edges = [*map(str, family.bounds), "+Inf"]
        for sample in family.samples:
            buckets = list(zip(edges, accumulate(sample.counts), strict=True))
            histogram.add_metric(sample.labels, buckets, sample.value)
        return histogram
    make = core.CounterMetricFamily if family.kind == "counter" else core.GaugeMetricFamily
    metric = make(family.name, family.doc, labels=family.labels)
    for sample in family.samples:
        metric.add_metric(sample.labels, sample.value)
    return metric
