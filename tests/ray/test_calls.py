"""Callers that leave and deadlines that pass, on Ray: what `tests/flow/test_cancellation.py` asks."""

import asyncio

import pytest

from tests.flow.harness import Running, show
from tests.flow.test_cancellation import *


@pytest.fixture(scope="module")
def app():
    running = Running("leaving.py:Outer")
    try:
        asyncio.run(running.ready())
        yield running
    finally:
        show("\n".join(running.lines[-40:]))
        asyncio.run(running.close())
