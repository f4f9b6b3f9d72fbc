"""A listening socket outlives the gateway that bound it, with the connections in its queue."""

import asyncio
import socket

import pytest

from servekit.engine.front import bind
from servekit.engine.handover import Door, listen

HOST = "127.0.0.1"


@pytest.fixture
def free_port():
    with bind(HOST, 0) as listener:
        return listener.getsockname()[1]


async def test_who_waits_in_the_queue_is_taken_by_the_next(tmp_path, free_port):
    first = listen(tmp_path, HOST, free_port)
    door = Door(first, tmp_path / "one", f"{HOST}:{free_port}")
    with socket.create_connection((HOST, free_port)) as client:
        second = await asyncio.to_thread(listen, tmp_path, HOST, free_port)
        assert second.fileno() != first.fileno()
        assert not second.getblocking()
        door.close()
        first.close()
        accepted, _ = second.accept()
        with accepted:
            accepted.sendall(b"taken")
        assert client.recv(10) == b"taken"
    assert not [*tmp_path.iterdir()]
    second.close()


async def test_another_address_gets_a_socket_of_its_own(tmp_path, free_port):
    first = listen(tmp_path, HOST, free_port)
    door = Door(first, tmp_path / "one", f"{HOST}:{free_port}")
    with bind(HOST, 0) as found:
        other = found.getsockname()[1]
    second = await asyncio.to_thread(listen, tmp_path, HOST, other)
    assert second.getsockname()[1] == other
    door.close()
    first.close()
    second.close()


async def test_who_was_killed_hands_over_nothing(tmp_path, free_port):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead-door.sock"))
    listener = listen(tmp_path, HOST, free_port)
    assert listener.getsockname() == (HOST, free_port)
    listener.close()
