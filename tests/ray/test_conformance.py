"""What an app does on this machine it does on Ray: tests of `tests/flow`, run there."""

import asyncio

import pytest

from tests.flow.harness import Running, show
from tests.flow.test_http import *  # noqa: F403


@pytest.fixture(scope="module")
def app(cluster):
    running = Running("kinds.py:Http")
    try:
        asyncio.run(running.ready())
        yield running
    finally:
        show("\n".join(running.lines[-40:]))
        asyncio.run(running.close())
