"""The proxy that tests put between a client and a server: what each fault does, and no more."""

import asyncio
import contextlib
import re
import socket
import threading
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import servekit as sk
from servekit.testing import (
    Bandwidth,
    Corrupt,
    Cut,
    Delay,
    Fault,
    FaultProxy,
    Freeze,
    Refuse,
    Slice,
)
from tests.door import bytes_of


class Server:
    """Sends back what it gets, and notes what it got and how each connection ended."""

    def __init__(self, unix: str = "") -> None:
        self._unix = unix
        self.got = b""
        self.pieces: list[bytes] = []
        self.ends: list[str] = []
        self.address = ""

    async def __aenter__(self):
        if self._unix:
            self._server = await asyncio.start_unix_server(self._serve, self._unix)
            self.address = f"unix:{self._unix}"
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_):
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        try:
            while data := await reader.read(1 << 16):
                self.got += data
                self.pieces.append(data)
                writer.write(data)
                await writer.drain()
            self.ends.append("end")
        except ConnectionError:
            self.ends.append("reset")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def connect(address: str):
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def leave(writer) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def through(data: bytes, *faults: Fault, **where) -> tuple[bytes, Server]:
    """Send bytes through a proxy with faults; returns what came back until the end."""
    async with Server() as server, FaultProxy(server.address) as proxy:
        proxy.apply(*faults, **where)
        reader, writer = await connect(proxy.address)
        writer.write(data)
        writer.write_eof()
        try:
            back = await reader.read(-1)
        finally:
            await leave(writer)
        return back, server


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_without_faults_nothing_changes(kind, tmp_path):
    data = bytes_of(1_000_000)
    async with Server(f"{tmp_path}/s" if kind == "unix" else "") as server:
        async with FaultProxy(server.address) as proxy:
            assert proxy.address.startswith("unix:" if kind == "unix" else "127.0.0.1:")
            reader, writer = await connect(proxy.address)
            writer.write(data)
            assert await reader.readexactly(len(data)) == data
            found = proxy.statistics()
            assert (found.connections, found.open, found.cut) == (1, 1, 0)
            assert found.to_server == found.to_client == len(data)
            writer.write_eof()
            assert await reader.read() == b""
            await leave(writer)
        assert server.ends == ["end"]
        with pytest.raises(OSError):
            await connect(proxy.address)


slow = st.lists(
    st.builds(Delay, st.floats(0, 0.002), st.floats(0, 0.002))
    | st.builds(Slice, st.integers(100, 5000))
    | st.builds(Bandwidth, st.floats(1e6, 1e9))
    | st.builds(Freeze, st.integers(20_001, 1 << 20))
    | st.just(Fault()),
    max_size=4,
)


@given(faults=slow, size=st.integers(0, 20_000))
@settings(max_examples=25)
def test_what_only_slows_changes_no_byte(faults, size):
    data = bytes_of(size)
    back, server = asyncio.run(through(data, *faults))
    assert back == server.got == data


@given(
    faults=st.lists(
        st.builds(Corrupt, st.integers(0, 300), st.binary(max_size=50))
        | st.builds(Slice, st.integers(1, 100)),
        max_size=4,
    )
)
@settings(max_examples=25)
def test_corrupt_bytes_are_where_they_were_said_to_be(faults):
    wanted = bytearray(bytes_of(300))
    for fault in faults:
        if isinstance(fault, Corrupt):
            wanted[fault.at : fault.at + len(fault.data)] = fault.data[: max(0, 300 - fault.at)]
    back, server = asyncio.run(through(bytes_of(300), *faults, toward="server"))
    assert back == server.got == bytes(wanted)


async def test_slices_are_writes_of_their_own(monkeypatch):
    sizes = []
    write = asyncio.StreamWriter.write

    def note(self, data):
        sizes.append(len(data))
        write(self, data)

    monkeypatch.setattr(asyncio.StreamWriter, "write", note)
    await through(bytes_of(10), Slice(3), toward="client")
    assert sizes[-4:] == [3, 3, 3, 1]


async def test_bandwidth_and_delay_take_their_time():
    loop = asyncio.get_running_loop()
    for fault in (Bandwidth(100_000), Delay(0.1), Delay(0.0, jitter_s=0.2)):
        began = loop.time()
        back, _ = await through(bytes_of(12_000), fault, toward="client")
        assert back == bytes_of(12_000)
        assert loop.time() - began > (0.09 if fault.delay_s(Random(1)) in (0, 0.1) else 0)


@pytest.mark.parametrize("toward", ["server", "client"])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("after", [0, 5, 100_000])
async def test_a_cut_is_where_it_was_said_to_be(toward, how, after, until):
    data = bytes_of(200_000)
    async with Server() as server, FaultProxy(server.address) as proxy:
        proxy.apply(Cut(after, how), toward=toward)
        reader, writer = await connect(proxy.address)
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        back, ended = b"", "end"
        try:
            while piece := await reader.read(1 << 16):
                back += piece
        except ConnectionError:
            ended = "reset"
        await leave(writer)
        await until(lambda: not proxy.statistics().open and server.ends)
        passed = server.got if toward == "server" else back
        if how == "reset":  # what is on its way is lost with it
            assert data.startswith(passed)
            assert len(passed) <= after
            assert "reset" in (ended, *server.ends)
        else:
            assert passed == data[:after]
            assert how != "half-close" or toward != "server" or back == passed
        assert proxy.statistics().cut == 1


async def test_a_frozen_connection_goes_on_when_it_is_healed():
    async with Server() as server, FaultProxy(server.address) as proxy:
        reader, writer = await connect(proxy.address)
        with proxy.apply(Freeze(after=3), toward="server"):
            writer.write(b"abcdef")
            writer.write_eof()
            assert await reader.readexactly(3) == b"abc"
            await asyncio.sleep(0.05)
            assert server.got == b"abc"
            assert not server.ends
        assert await reader.read() == b"def"
        await leave(writer)


async def test_faults_of_several_applies_compose_and_are_removed_one_by_one():
    async with Server() as server, FaultProxy(server.address) as proxy:
        first = proxy.apply(Corrupt(0, b"X"), toward="server")
        proxy.apply(Corrupt(1, b"Y"), toward="client")
        proxy.apply(Slice(1))

        async def ask() -> bytes:
            reader, writer = await connect(proxy.address)
            writer.write(b"abc")
            back = await reader.readexactly(3)
            await leave(writer)
            return back

        assert await ask() == b"XYc"
        first.remove()
        first.remove()
        assert await ask() == b"aYc"
        proxy.heal()
        assert await ask() == b"abc"


@pytest.mark.parametrize(("on", "old", "new"), [("all", 1, 1), ("new", 0, 1), ("running", 1, 0)])
async def test_new_and_running_connections(on, old, new, until):
    async with Server() as server, FaultProxy(server.address) as proxy:

        async def is_cut(reader, writer) -> bool:
            try:
                writer.write(b"x")
                return not await reader.read(1)
            except ConnectionError:
                return True

        before = await connect(proxy.address)
        assert not await is_cut(*before)
        proxy.apply(Cut(how="close"), on=on)
        after = await connect(proxy.address)
        assert await is_cut(*before) == bool(old)
        assert await is_cut(*after) == bool(new)
        for _, writer in (before, after):
            await leave(writer)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_refused_connections(kind, tmp_path):
    """New ones find nobody, as with a server that is down; open ones go on; then all is as before."""
    path = f"{tmp_path}/s" if kind == "unix" else ""
    async with Server(path) as server, FaultProxy(server.address) as proxy:
        address = proxy.address
        reader, writer = await connect(address)
        for _ in range(2):
            with proxy.apply(Refuse()):
                with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
                    await connect(address)
                writer.write(b"on")
                assert await reader.readexactly(2) == b"on"
            _, other = await connect(address)
            await leave(other)
        await leave(writer)
        assert proxy.address == address
        assert proxy.statistics().connections == 3


async def test_a_reset_of_either_side_reaches_the_other(until):
    async with Server() as server, FaultProxy(server.address) as proxy:
        reader, writer = await connect(proxy.address)
        writer.write(b"hello")
        await reader.readexactly(5)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()
        await until(lambda: server.ends)
        assert server.ends == ["reset"]


async def test_a_server_that_is_not_there(until):
    async with Server() as server:
        address = server.address
    async with FaultProxy(address) as proxy:
        reader, writer = await connect(proxy.address)
        with pytest.raises(ConnectionError):
            if await reader.read() == b"":
                raise ConnectionResetError
        await leave(writer)
        await until(lambda: proxy.statistics().unreached == 1)
        assert proxy.statistics().open == 0


def test_the_sync_face():
    """It has a loop of its own, and faults are applied from the test's thread."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock:
                    while data := sock.recv(100):
                        sock.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    host, port = listener.getsockname()
    with FaultProxy(f"http://{host}:{port}/v1") as proxy:
        assert re.fullmatch(r"http://127.0.0.1:\d+/v1", proxy.url)
        own = int(proxy.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", own)) as client:
            client.sendall(b"abc")
            assert client.recv(3) == b"abc"
            with proxy.apply(Corrupt(3, b"?"), toward="client"):
                client.sendall(b"d")
                assert client.recv(1) == b"?"
            with proxy.apply(Cut()):
                assert client.recv(1) == b""
        assert proxy.statistics().connections == 1
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", own)):
        pass
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.mark.parametrize("target", ["", "nowhere", "http://", "host:port", "host:99999999", ":80"])
def test_a_target_that_is_no_address(target):
    with pytest.raises(sk.errors.ConfigError, match=r"write http://HOST:PORT, HOST:PORT or unix:"):
        FaultProxy(target)


@pytest.mark.parametrize("make", [lambda: Slice(0), lambda: Bandwidth(0), lambda: Bandwidth(-1)])
def test_faults_that_mean_nothing(make):
    with pytest.raises(sk.errors.ConfigError, match="need a"):
        make()
