"""Through the door, on Ray: what `tests/flow/test_http.py` asks of this machine."""

import pytest

from tests.flow.harness import of_a_file
from tests.flow.test_http import *


@pytest.fixture(scope="module")
def app():
    yield from of_a_file("kinds.py:Http")
