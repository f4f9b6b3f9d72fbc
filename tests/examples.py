"""How many examples property tests try: `EXAMPLES=50 make test` tries 50 times as many."""

import os

VARIABLE = "EXAMPLES"
_TIMES = int(os.environ.get(VARIABLE, "1"))


def examples(count: int) -> int:
    """Return the examples for a test that usually tries `count`."""
    return count * _TIMES
