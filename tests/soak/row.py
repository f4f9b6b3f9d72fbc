"""Rows of the table of figures, and the marks that they must reach."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """One figure, and what it must be.

    Attributes:
        figure: What was measured.
        value: What came out.
        wanted: The pass mark.
        ok: Whether it was reached.
        timing: A machine with other things to do may miss it, so `make test` doesn't insist.
    """

    figure: str
    value: str
    wanted: str
    ok: bool
    timing: bool = False


def at_most(
    figure: str, value: float, limit: float, unit: str = "", *, timing: bool = False
) -> Mark:
    return Mark(figure, _text(value, unit), f"≤ {_text(limit, unit)}", value <= limit, timing)


def at_least(
    figure: str, value: float, limit: float, unit: str = "", *, timing: bool = False
) -> Mark:
    return Mark(figure, _text(value, unit), f"≥ {_text(limit, unit)}", value >= limit, timing)


def exactly(figure: str, value: object, wanted: object) -> Mark:
    return Mark(figure, str(value), str(wanted), value == wanted)


def _text(value: float, unit: str) -> str:
    number = str(value) if isinstance(value, int) else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    assert ordered, "nothing was measured"
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)]


Measure = Callable[..., Awaitable[list[Mark]]]


@dataclass(frozen=True)
class Row:
    """One test of the table.

    Attributes:
        title: As in the table.
        measure: Runs it.
        quick: Its size when there is a minute.
        full: Its size when there is time.
    """

    title: str
    measure: Measure
    quick: Mapping[str, Any]
    full: Mapping[str, Any]


ROWS: dict[str, Row] = {}
"""All rows, by name."""


def row(
    title: str, *, quick: Mapping[str, Any] | None = None, full: Mapping[str, Any] | None = None
) -> Callable[[Measure], Measure]:
    """Make a coroutine function, from its size to marks, a row of the table."""

    def take(measure: Measure) -> Measure:
        name = measure.__name__.replace("_", "-")
        ROWS[name] = Row(title, measure, quick or {}, full or quick or {})
        return measure

    return take
