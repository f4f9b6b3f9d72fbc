"""The processes of replicas and gateways: whatever the supervisor asks, whenever, gets an answer."""

import asyncio
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from servekit.engine import child
from servekit.engine.control import Started, StartGateway, StartReplica
from servekit.engine.gateway_worker import GatewayWorker
from servekit.engine.replica_worker import ReplicaWorker
from servekit.engine.table import Table
from servekit.gateway.edge import Edge
from servekit.runtime.group import Group
from servekit.spec.app import AppSpec, ServiceSpec

APP = """
import asyncio

import servekit as sk

may_load = asyncio.Event()


@sk.service
class Slow:
    def __init__(self, unit: str = "s") -> None:
        self.units = [unit]

    @sk.reconfigure
    def measure(self, unit: str) -> None:
        self.units.append(unit)

    @sk.setup
    async def load(self) -> None:
        await may_load.wait()

    @sk.endpoint
    def echo(self, x: int) -> int:
        return x
"""
SLOW = AppSpec(root="Slow", services=(ServiceSpec(name="Slow", target="app:Slow"),))
BODIES = {"table": Table(serial=1), "app": SLOW, "configure": SLOW.services[0]}


@pytest.fixture(autouse=True)
def spared(monkeypatch):
    """Leave this process's garbage collector and import path as they are."""
    monkeypatch.setattr(child, "settle_memory", lambda: None)
    monkeypatch.setattr(sys, "path", sys.path.copy())


async def ask_all(worker: ReplicaWorker | GatewayWorker) -> None:
    """Ask everything that may be asked at any time, and more than once."""
    for verb in worker.verbs.keys() - {"start", "drain"}:
        await worker.verbs[verb](msgspec.msgpack.encode(BODIES.get(verb)))


def start(worker: ReplicaWorker, module: str, folder: Path) -> asyncio.Task[Started]:
    """Order a replica of `Slow`, which loads until its module's `may_load` is set."""
    (folder / f"{module}.py").write_text(APP, "utf-8")
    order = StartReplica(
        ServiceSpec(name="Slow", target=f"{module}:Slow"),
        "Slow-1",
        (str(folder),),
        f"unix:{folder}/slow.sock",
        str(folder),
    )
    return asyncio.create_task(worker.verbs["start"](msgspec.msgpack.encode(order)))


def group_of(worker: ReplicaWorker) -> Group | None:
    """Return what loads, once it does."""
    return worker._host and worker._host._group


async def test_a_replica_answers_in_every_phase_of_its_life(tmp_path, until):
    worker = ReplicaWorker(child.Supervisor())
    await ask_all(worker)
    starting = start(worker, "slow_to_load", tmp_path)
    await until(lambda: group_of(worker) is not None)
    await ask_all(worker)
    sys.modules["slow_to_load"].may_load.set()
    started = await starting
    assert not started.error
    await ask_all(worker)
    assert (await worker._host.health()).ready == ""
    await worker.verbs["drain"](b"")
    await ask_all(worker)
    assert "draining" in (await worker._host.health()).ready
    await worker.stop()
    await ask_all(worker)
    await worker._host.health()


async def test_a_replica_that_is_told_to_leave_while_it_starts_leaves(tmp_path, until):
    worker = ReplicaWorker(child.Supervisor())
    starting = start(worker, "slow_and_unwanted", tmp_path)
    await until(lambda: (group := group_of(worker)) is not None and group._replicas)
    await worker.verbs["drain"](b"")
    await ask_all(worker)
    sys.modules["slow_and_unwanted"].may_load.set()
    await starting
    assert "draining" in (await worker._host.health()).ready
    await worker.stop()


async def test_other_arguments_that_come_while_it_loads_are_taken_behind_that(tmp_path, until):
    worker = ReplicaWorker(child.Supervisor())
    starting = start(worker, "slow_and_configured", tmp_path)
    await until(lambda: (group := group_of(worker)) is not None and group._replicas)
    other = msgspec.structs.replace(SLOW.services[0], args={"unit": "ms"})
    await worker.verbs["configure"](msgspec.msgpack.encode(other))
    sys.modules["slow_and_configured"].may_load.set()
    assert not (await starting).error
    assert group_of(worker).own._instance.units == ["s", "ms"]
    await worker.stop()


async def test_a_gateway_answers_in_every_phase_of_its_life(tmp_path):
    worker = GatewayWorker(child.Supervisor())
    await ask_all(worker)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        order = StartGateway(
            name="gateway-0",
            app=SLOW,
            listener=listener.detach(),
            folder=str(tmp_path),
            table=Table(),
            edge=Edge(),
            drain_s=1.0,
        )
    started = await worker.verbs["start"](msgspec.msgpack.encode(order))
    assert not started.error
    await ask_all(worker)
    await worker.verbs["drain"](b"")
    await ask_all(worker)
    await worker.stop()
    await ask_all(worker)
