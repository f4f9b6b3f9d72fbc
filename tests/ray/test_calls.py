"""Callers that leave and deadlines that pass, on Ray: what `tests/flow/test_cancellation.py` asks."""

import pytest

from tests.flow.harness import of_a_file
from tests.flow.test_cancellation import *


@pytest.fixture(scope="module")
def app():
    yield from of_a_file("leaving.py:Outer")
