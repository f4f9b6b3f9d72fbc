"""Real sockets: who may connect, and what a hostile client can't do."""

import asyncio
import contextlib
import os
import pickle
import socket
import stat

import pytest

from servekit.core.call import JSON, Call, Payload, Reply
from servekit.errors import ConfigError, ReplicaLost, WireError
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello, Kind, encode
from servekit.wire.sockets import Address, Listener, connect
from tests.calls import make_call

SECRET = b"0123456789abcdef"


def a_call(body: bytes = b"{}") -> Call:
    return make_call("S", "e", Payload(JSON, (body,)), request_id="r")


async def echo(call: Call) -> Reply:
    return Reply(call.payload)


def server(secret: bytes = b""):
    return lambda: Connection(Hello(replica="there"), client=False, handler=echo, secret=secret)


def client(secret: bytes = b""):
    return lambda: Connection(Hello(replica="here"), client=True, secret=secret)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


@contextlib.asynccontextmanager
async def listening(address: str, secret: bytes = b""):
    listener = Listener(Address(address), server(secret))
    await listener.open()
    try:
        yield listener
    finally:
        await listener.close()


async def answers(connection: Connection) -> bool:
    reply = await connection.call(a_call(b"hello"))
    return bytes(reply.payload.segments[0]) == b"hello"


# -- addresses


@pytest.mark.parametrize(
    ("text", "tcp"),
    [
        ("tcp:127.0.0.1:7000", ("127.0.0.1", 7000)),
        ("tcp:[::1]:0", ("::1", 0)),
        ("tcp:host.name:65535", ("host.name", 65535)),
    ],
)
def test_tcp_addresses(text, tcp):
    assert Address(text).tcp == tcp
    assert Address(text).unix is None


def test_unix_addresses():
    assert Address("unix:/run/x/a:b.sock").unix == "/run/x/a:b.sock"


@pytest.mark.parametrize(
    "text", ["", "tcp:", "tcp:host", "tcp::7", "tcp:host:", "tcp:host:x", "udp:h:1"]
)
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match="is no address"):
        _ = Address(text).tcp


# -- unix


async def test_a_unix_socket_is_the_owners_alone_and_goes_with_its_listener(folder):
    path = folder / "a.sock"
    umask = os.umask(0)
    try:
        async with listening(f"unix:{path}") as listener:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert os.umask(0) == 0  # as it was before
            connection = await connect(listener.address, client())
            assert await answers(connection)
            assert len(listener.connections) == 1
        assert not path.exists()
        await connection.lost
    finally:
        os.umask(umask)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o707, 0o740])
async def test_a_folder_that_others_may_enter_is_refused(folder, mode):
    folder.chmod(mode)
    listener = Listener(Address(f"unix:{folder / 'a.sock'}"), server())
    with pytest.raises(ConfigError, match="mode 0700"):
        await listener.open()
    assert list(folder.iterdir()) == []
    await listener.close()


async def test_a_socket_file_that_a_dead_process_left_is_replaced(folder):
    path = folder / "a.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    async with listening(f"unix:{path}") as listener:
        connection = await connect(listener.address, client())
        assert await answers(connection)
        await connection.close()


async def test_nobody_listens(folder):
    with pytest.raises(OSError):
        await connect(Address(f"unix:{folder / 'none.sock'}"), client())


async def test_big_bodies_go_both_ways(folder):
    async with listening(f"unix:{folder / 'a.sock'}") as listener:
        connection = await connect(listener.address, client())
        bodies = [bytes([i]) * (1 << 20) for i in range(8)]
        replies = await asyncio.gather(*(connection.call(a_call(body)) for body in bodies))
        assert all(bytes(r.payload.segments[0]) == b for r, b in zip(replies, bodies, strict=True))
        await connection.close()


async def test_a_closed_connection_is_forgotten(folder, until):
    async with listening(f"unix:{folder / 'a.sock'}") as listener:
        connection = await connect(listener.address, client())
        await connection.close()
        await until(lambda: not listener.connections)


async def test_draining_takes_no_new_connections(folder, until):
    gate = asyncio.Event()

    async def slow(call: Call) -> Reply:
        await gate.wait()
        return Reply(call.payload)

    address = Address(f"unix:{folder / 'a.sock'}")
    listener = Listener(
        address, lambda: Connection(Hello(replica="there"), client=False, handler=slow)
    )
    await listener.open()
    connection = await connect(address, client())
    old = asyncio.create_task(connection.call(a_call(b"old")))
    await until(lambda: any(c._callee._running for c in listener.connections))
    drained = asyncio.create_task(listener.drain())
    await until(lambda: not connection.usable)
    with pytest.raises(ReplicaLost):
        await connection.call(a_call())
    with pytest.raises(OSError):
        await connect(address, client())
    assert not drained.done()
    gate.set()
    assert bytes((await old).payload.segments[0]) == b"old"
    await drained
    await listener.close()
    await connection.lost


# -- TCP and the secret


async def test_tcp_with_the_secret():
    async with listening("tcp:127.0.0.1:0", SECRET) as listener:
        assert listener.address.tcp[1] > 0
        connection = await connect(listener.address, client(SECRET))
        assert await answers(connection)
        assert connection.peer.replica == "there"
        await connection.close()


async def test_a_peer_without_power_is_missed():
    """Nothing comes from one, not even an end; so both sides have the kernel ask."""
    async with listening("tcp:127.0.0.1:0", SECRET) as listener:
        connection = await connect(listener.address, client(SECRET))
        for side in (connection, *listener.connections):
            sock = side._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000
        await connection.close()


@pytest.mark.parametrize("secret", [b"", b"wrong", SECRET + b"x"])
async def test_tcp_without_it(secret, until, caplog):
    async with listening("tcp:127.0.0.1:0", SECRET) as listener:
        good = await connect(listener.address, client(SECRET))
        with pytest.raises(WireError):
            await connect(listener.address, client(secret))
        assert await answers(good)
        await until(lambda: len(listener.connections) == 1)
        await good.close()


async def test_a_client_refuses_a_server_without_the_secret(caplog):
    async with listening("tcp:127.0.0.1:0") as listener:
        with pytest.raises(WireError):
            await connect(listener.address, client(SECRET))


async def test_a_peer_that_accepts_and_says_nothing():
    quiet = await asyncio.start_server(lambda _r, w: writers.append(w), "127.0.0.1", 0)
    writers: list[asyncio.StreamWriter] = []
    port = quiet.sockets[0].getsockname()[1]
    made: list[Connection] = []

    def make() -> Connection:
        made.append(client(SECRET)())
        return made[-1]

    with pytest.raises(WireError, match="did not answer in"):
        await connect(Address(f"tcp:127.0.0.1:{port}"), make, timeout_s=0.02)
    await made[0].lost  # and the socket is not left open
    quiet.close()
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


# -- garbage


class Exploit:
    def __reduce__(self):
        return os.mkdir, ("pickled",)


GARBAGE = {
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "http": b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "pickle": pickle.dumps(Exploit(), protocol=4),
    "text pickle": pickle.dumps(Exploit(), protocol=0),
    "pickle in a hello": b"".join(encode(Kind.HELLO, 0, pickle.dumps(Exploit()))),
    "pickle in a call": b"".join(encode(Kind.CALL, 1, b"", [pickle.dumps(Exploit())])),
    "random": bytes((i * 7919) % 251 for i in range(5000)),
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_garbage_closes_its_own_connection_and_no_other(
    name, transport, folder, until, monkeypatch, caplog
):
    monkeypatch.chdir(folder)
    address, secret = (
        (f"unix:{folder}/a.sock", b"") if transport == "unix" else ("tcp:127.0.0.1:0", SECRET)
    )
    async with listening(address, secret) as listener:
        good = await connect(listener.address, client(secret))
        if transport == "unix":
            reader, writer = await asyncio.open_unix_connection(listener.address.unix)
        else:
            reader, writer = await asyncio.open_connection(*listener.address.tcp)
        with contextlib.suppress(OSError):
            writer.write(GARBAGE[name])
            await writer.drain()
            await reader.read()  # until it hangs up
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        assert await answers(good)
        await until(lambda: len(listener.connections) == 1)
        await good.close()
    assert not (folder / "pickled").exists()


async def test_half_a_frame_and_then_nothing(folder, until, caplog):
    async with listening(f"unix:{folder}/a.sock") as listener:
        _, writer = await asyncio.open_unix_connection(listener.address.unix)
        writer.write(b"".join(encode(Kind.HELLO, 0, b"x" * 50))[:20])
        await writer.drain()
        await until(lambda: listener.connections)
        writer.close()
        await writer.wait_closed()
        await until(lambda: not listener.connections)
