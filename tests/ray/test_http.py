"""Through the door, on Ray: what `tests/flow/test_http.py` asks of this machine."""

import asyncio

import pytest

from tests.flow.harness import Running, show
from tests.flow.test_http import *


@pytest.fixture(scope="module")
def app():
    running = Running("kinds.py:Http")
    try:
        asyncio.run(running.ready())
        yield running
    finally:
        show("\n".join(running.lines[-40:]))
        asyncio.run(running.close())
