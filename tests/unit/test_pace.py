"""How fast a replica says that it is."""

import pytest

from servekit.runtime.meter import Pace


def test_the_first_call_is_no_measure():
    """It loads libraries and fills caches: the second alone says more."""
    pace = Pace()
    pace.ran(3.0, 1)
    assert pace.unit_s == 3.0
    pace.ran(0.1, 1)
    assert pace.unit_s == 0.1
    pace.ran(1.1, 1)
    assert pace.unit_s == pytest.approx(0.2)


def test_work_that_is_shared_counts_in_parts():
    pace = Pace()
    for _ in range(3):
        pace.ran(0.8, 4)
    assert pace.unit_s == pytest.approx(0.2)
    pace.ran(0.2, 0.5)
    assert pace.unit_s == pytest.approx(0.2)
