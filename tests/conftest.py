"""What all tests share: Hypothesis settings, coroutine tests on a watched loop, and waiting."""

import asyncio
import inspect
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling, Scheduling

from servekit.core.call import JSON, Payload
from servekit.runtime.replica import Replica
from servekit.spec.app import ServiceSpec
from servekit.spec.definition import definition
from tests.calls import make_call
from tests.examples import examples

# For pytest that tests start: kmock brings a plugin that needs pytest-asyncio, which nothing here does.
os.environ["PYTEST_ADDOPTS"] = "-p no:kmock"

# The same examples on every run, and no verdict by the clock of a busy machine.
settings.register_profile(
    "ci",
    max_examples=examples(100),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


class _ByFile(LoadScopeScheduling):
    """Has the tests of a file run in one process, and all that need a Ray cluster in one, too."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "ray" if file.startswith("tests/ray/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return _ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have those that need a Ray cluster go first: they take the longest."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/ray/"))


GIVE_UP_S = 15.0
"""After which a test that waits for something has failed; none comes near."""


async def _watched(test: Awaitable[None]) -> None:
    """Run a test; whatever its loop complains about, or leaves running, fails it."""
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    async with asyncio.timeout(GIVE_UP_S):
        await test
    for _ in range(20):
        await asyncio.sleep(0)
    assert not complaints
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, "tasks outlived the test"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine functions on a loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(_watched(pyfuncitem.obj(**arguments)))
    return True


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    """Return `await until(condition)`: gives the loop turns, and threads time, until it holds."""

    async def wait(condition: Callable[[], Any]) -> None:
        for turn in range(1_000_000):
            if condition():
                return
            await asyncio.sleep(0 if turn < 50 else 0.001)

    return wait


@pytest.fixture
def until_sync() -> Callable[[Callable[[], Any]], None]:
    """Return `until_sync(condition)`, for tests that run on no loop."""

    def wait(condition: Callable[[], Any]) -> None:
        give_up = time.monotonic() + GIVE_UP_S
        while not condition():
            assert time.monotonic() < give_up, "waited in vain"
            time.sleep(0.001)

    return wait


@pytest.fixture
def start() -> Iterator[Callable[..., Awaitable[Replica]]]:
    """Return `await start(Service)`: a replica that is ready, without the rest of an app."""
    replicas: list[Replica] = []

    async def ready(cls: type, /, **handles: object) -> Replica:
        found = definition(cls)
        spec = ServiceSpec(name=found.name, target="tests:None", limits=found.limits)
        replicas.append(Replica(found, spec, replica_id=f"{found.name}-0"))
        await replicas[-1].start(handles)
        return replicas[-1]

    yield ready
    for replica in replicas:
        replica._threads.close()


@pytest.fixture
def ask() -> Callable[..., Awaitable[Any]]:
    """Return `await ask(handler, endpoint, body)`: the answer's value, or the reply of a stream."""

    async def call(handler: Any, endpoint: str, body: object = None, /, **settings: Any) -> Any:
        document = b"{}" if body is None else json.dumps(body).encode()
        settings.setdefault("request_id", "r-1")
        reply = await handler(make_call("S", endpoint, Payload(JSON, (document,)), **settings))
        if reply.payload is None:
            return reply
        return json.loads(bytes(reply.payload.segments[0]))

    return call
