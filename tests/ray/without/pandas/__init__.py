"""Is not there for the apps of these tests; see `PATH` in `tests/ray/conftest.py`."""

raise ImportError(__doc__)
