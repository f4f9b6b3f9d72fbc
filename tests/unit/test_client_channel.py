"""All three clients against servers that refuse, dawdle, break off and lie."""

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

import servekit as sk
from servekit.core.background import background_loop
from servekit.errors import (
    CallError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidOutput,
    Overloaded,
    ReplicaLost,
    ServekitError,
    Unavailable,
)
from servekit.spec.body import pack
from tests.upstream import Upstream, close, http, refusal, reset, stream


@sk.service
class Service:
    @sk.endpoint
    async def double(self, n: int) -> int:
        return 2 * n

    @sk.endpoint(idempotent=True)
    async def again(self, n: int) -> int:
        return 2 * n

    @sk.endpoint(method="GET")
    async def find(self, n: int) -> int:
        return n

    @sk.endpoint
    async def count(self, n: int) -> AsyncIterator[int]:
        yield n


def plain(url, endpoint, n, **settings):
    with sk.Client(url, **settings) as client:
        if endpoint == "count":
            return list(client.stream("count", n=n))
        if endpoint == "find":
            return client.get("find", n=n)
        return client.call(endpoint, n=n, idempotent=endpoint == "again")


def in_loop(url, endpoint, n, **settings):
    async def run():
        async with sk.AsyncClient(url, **settings) as client:
            if endpoint == "count":
                return [chunk async for chunk in client.stream("count", n=n)]
            if endpoint == "find":
                return await client.get("find", n=n)
            return await client.call(endpoint, n=n, idempotent=endpoint == "again")

    return asyncio.run(run())


def typed(url, endpoint, n, **settings):
    with sk.connect(Service, url, **settings) as service:
        method = getattr(service, endpoint)
        if endpoint == "count":
            return list(method.remote(n=n).iter_sync())
        return method.remote(n=n).result(15)


def typed_in_loop(url, endpoint, n, **settings):
    async def run():
        async with sk.connect(Service, url, **settings) as service:
            method = getattr(service, endpoint)
            if endpoint == "count":
                return [chunk async for chunk in method(n=n)]
            return await method(n=n)

    return asyncio.run(run())


@pytest.fixture(params=[plain, in_loop, typed, typed_in_loop])
def ask(request):
    return request.param


OK = http(200, b"4")
BUSY = refusal(Overloaded("full", retry_after_s=0.01, started=False))
IDEMPOTENT = ["again", "find"]


# -- retries


@pytest.mark.parametrize("endpoint", ["double", *IDEMPOTENT])
@pytest.mark.parametrize(
    "first",
    [
        BUSY,
        refusal(Unavailable("none", started=False)),
        http(429, b"slow down", content_type="text/plain"),
        http(429, b"", retry_after="0"),
        http(429, b"", retry_after="soon"),
    ],
)
def test_what_was_refused_unstarted_is_sent_again(ask, endpoint, first):
    with Upstream(first, first, OK) as server:
        assert ask(server.url, endpoint, 2) == 4
        assert len(server.requests) == 3
        assert len({head["x-request-id"] for _, head, _ in server.requests}) == 1
        assert server.connections == 1


@pytest.mark.parametrize("endpoint", IDEMPOTENT)
@pytest.mark.parametrize("first", [close, reset, http(503, b"<html>no backend</html>")])
def test_what_broke_is_sent_again_if_it_is_idempotent(ask, endpoint, first):
    with Upstream(first, OK) as server:
        assert ask(server.url, endpoint, 2) == 4
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (close, ReplicaLost),
        (reset, ReplicaLost),
        (http(503, b"<html>no backend</html>"), Unavailable),
        (b"HTTP/1.1 200 X\r\ncontent-length: 9\r\n", ReplicaLost),
        (b"nonsense\r\n\r\n", ReplicaLost),
    ],
)
def test_what_may_have_run_is_not(ask, first, kind):
    act = first if callable(first) else lambda sock: sock.sendall(first)
    with Upstream(act) as server:
        with pytest.raises(kind):
            ask(server.url, "double", 2)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        refusal(ReplicaLost("gone")),  # the router has tried other replicas
        refusal(Overloaded("deep below", started=True)),
        refusal(sk.errors.ExecutionError("boom")),
        refusal(sk.errors.InvalidInput("wrong")),
        http(502, b"<html>Bad Gateway</html>"),
    ],
)
def test_what_the_server_has_tried_itself_is_final(ask, answer):
    with Upstream(answer) as server:
        with pytest.raises(CallError):
            ask(server.url, "again", 2)
        assert len(server.requests) == 1


@pytest.mark.parametrize("retries", [0, 1, 5])
def test_as_often_as_asked_for(ask, retries):
    with Upstream(BUSY) as server:
        with pytest.raises(Overloaded, match="full"):
            ask(server.url, "double", 2, retries=retries)
        assert len(server.requests) == retries + 1


@pytest.mark.parametrize("after", ["3600", "9" * 400])
def test_a_pause_beyond_the_deadline_is_not_begun(ask, after):
    with Upstream(http(429, b"", retry_after=after)) as server:
        with pytest.raises(Overloaded) as caught:
            ask(server.url, "double", 2, timeout_s=30)
        assert caught.value.retry_after_s == float(after)
        assert len(server.requests) == 1


def test_nobody_there(ask):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(Unavailable, match=f"nothing answers at {url}") as caught:
        ask(url, "double", 2)
    assert not caught.value.started


def test_the_idempotency_of_one_call_is_said_to_the_server():
    with Upstream(OK) as server:
        plain(server.url, "again", 2)
        plain(server.url, "double", 2)
        heads = [head for _, head, _ in server.requests]
    assert heads[0]["idempotency-key"] == heads[0]["x-request-id"]
    assert "idempotency-key" not in heads[1]


# -- deadlines


def test_the_time_left_travels_and_shrinks(ask):
    busy = refusal(Overloaded("full", retry_after_s=0.2, started=False))
    with Upstream(busy, busy, OK) as server:
        ask(server.url, "double", 2, timeout_s=20)
        left = [float(head["x-servekit-timeout"][:-1]) for _, head, _ in server.requests]
    assert 20 >= left[0] > left[1] + 0.19 > left[2] + 0.39


SILENT = b""
TRICKLE_HEAD = b"HTTP/1.1 200 X\r\n"
TRICKLE_BODY = b"HTTP/1.1 200 X\r\ncontent-length: 100\r\ncontent-type: application/json\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "doing"),
    [(SILENT, "did not answer"), (TRICKLE_HEAD, "did not answer"), (TRICKLE_BODY, "being read")],
)
def test_the_deadline_covers_all_of_an_answer(ask, begin, doing):
    """Also if a byte comes now and then, which a limit for each read would let pass."""
    left = threading.Event()

    def trickle(sock):
        sock.sendall(begin)
        try:
            while True:
                if begin:
                    sock.sendall(b"a" if begin is not TRICKLE_HEAD else b"a: b\r\n")
                    time.sleep(0.05)
                elif not sock.recv(1):
                    break
        except OSError:
            pass
        left.set()

    with Upstream(trickle) as server:
        with pytest.raises(DeadlineExceeded, match=doing):
            ask(server.url, "again", 2, timeout_s=0.3)
        assert left.wait(15), "the connection stayed open"
        assert len(server.requests) == 1


def test_the_deadline_covers_a_whole_stream(ask):
    with Upstream() as server:
        server._acts = [server.until_left(stream(b"data: 1\n\n", b"data: 2\n\n"))]
        with pytest.raises(DeadlineExceeded, match="behind 2 chunks"):
            ask(server.url, "count", 2, timeout_s=0.4)
        assert server.left.wait(15)


def test_the_server_says_first_that_time_is_up(ask, monkeypatch):
    monkeypatch.setattr("servekit.client.channel._GRACE_S", 15.0)
    late = refusal(DeadlineExceeded("the deadline passed in the queue", started=False))

    def answer_late(sock):
        time.sleep(0.25)
        sock.sendall(late)

    with Upstream(answer_late) as server, pytest.raises(DeadlineExceeded, match="in the queue"):
        ask(server.url, "double", 2, timeout_s=0.2)


def test_a_deadline_that_is_over_before_the_call(ask):
    with Upstream(OK) as server:
        with pytest.raises(DeadlineExceeded, match="before the call was sent") as caught:
            ask(server.url, "double", 2, timeout_s=-1)
        assert not caught.value.started
        assert not server.requests


# -- answers


def test_a_redirect_is_an_error_and_not_followed(ask):
    with Upstream(http(307, location="http://127.0.0.1:1/elsewhere")) as server:
        with pytest.raises(CallError, match="elsewhere"):
            ask(server.url, "again", 2)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"\xc1", "application/msgpack"),
        (b"\x93\x01", "application/msgpack"),
        (pack(np.zeros(3))[:-4], "application/msgpack"),
        (b"{", "application/json"),
        (b"\xff", "application/json"),
        (b"\x93NUMPY", "application/x-npy"),
    ],
)
def test_an_answer_that_is_not_what_it_says(ask, body, content_type):
    with (
        Upstream(http(200, body, content_type=content_type)) as server,
        pytest.raises((InvalidOutput, sk.errors.UnsupportedMedia)),
    ):
        ask(server.url, "double", 2)


def test_an_answer_in_a_broken_coding(ask):
    with (
        Upstream(http(200, b"no gzip", content_encoding="gzip")) as server,
        pytest.raises(ReplicaLost, match="DecodingError"),
    ):
        ask(server.url, "double", 2)


@pytest.mark.parametrize(
    ("parts", "good"),
    [
        ((b"data: 1\n\n", b"data: 2\n"), [1]),
        ((b"data: 1\n\nda",), [1]),
        ((b"event: error\ndata: {}\n\n",), []),
        ((), []),
    ],
)
def test_a_stream_that_breaks_off(parts, good):
    act = stream(*parts)
    with Upstream(lambda sock: sock.sendall(act)) as server:
        got = []
        with sk.Client(server.url) as client, pytest.raises(CallError):
            got.extend(client.stream("count", n=1))
        assert got == good
        assert len(server.requests) == 1


def test_a_stream_s_error_comes_behind_its_chunks(ask):
    document = msgspec.json.encode({"error": Overloaded("enough").details()})
    body = b"data: 1\n\ndata: 2\n\nevent: error\ndata: " + document + b"\n\n"
    with Upstream(lambda sock: sock.sendall(stream(body))) as server:
        with pytest.raises(Overloaded, match="enough"):
            ask(server.url, "count", 1)
        assert len(server.requests) == 1


def test_a_refused_stream_is_asked_for_again(ask):
    whole = stream(b"data: 1\n\nevent: end\ndata: \n\n")
    with Upstream(BUSY, lambda sock: sock.sendall(whole)) as server:
        assert ask(server.url, "count", 1) == [1]


def test_another_version_of_the_service_is_told_once(caplog):
    with (
        Upstream(http(200, b"4", x_servekit_version="8")) as server,
        sk.connect(Service, server.url) as service,
    ):
        for _ in range(3):
            assert service.double.remote(n=2).result(15) == 4
    [record] = [record for record in caplog.records if record.name == "servekit.client"]
    assert "another version" in record.getMessage()
    assert "server=8 client=1" in record.getMessage()


# -- leaving


def test_leaving_a_stream_s_loop_hangs_up():
    with Upstream() as server:
        server._acts = [server.until_left(stream(b"data: 1\n\n"))]
        with sk.Client(server.url) as client:
            for chunk in client.stream("count", n=1):
                assert chunk == 1
                break
            assert server.left.wait(15)


def test_dropping_a_stream_hangs_up():
    with Upstream() as server:
        server._acts = [server.until_left(stream(b"data: 1\n\n"))]
        with sk.connect(Service, server.url) as service:
            chunks = service.count(n=1)
            assert asyncio.run(anext(chunks)) == 1
            del chunks
            gc.collect()
            assert server.left.wait(15)


async def test_leaving_an_async_stream_s_loop_hangs_up():
    with Upstream() as server:
        server._acts = [server.until_left(stream(b"data: 1\n\n"))]
        async with sk.AsyncClient(server.url) as client:
            async for chunk in client.stream("count", n=1):
                assert chunk == 1
                break
            assert await asyncio.to_thread(server.left.wait, 15)


@pytest.mark.parametrize("kind", ["async", "typed"])
async def test_cancelling_a_call_hangs_up(kind, until):
    with Upstream() as server:
        server._acts = [server.until_left()]
        async with sk.AsyncClient(server.url) as client, sk.connect(Service, server.url) as typed:
            work = client.call("double", n=1) if kind == "async" else typed.double(n=1)
            task = asyncio.create_task(work)
            await until(lambda: server.requests)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.left.wait, 15)


# -- connections, threads, closing


def test_connections_are_kept():
    with Upstream(OK) as server, sk.connect(Service, server.url) as service:
        for _ in range(20):
            assert service.double.remote(n=2).result(15) == 4
        assert server.connections == 1


def test_many_threads_share_a_client():
    with Upstream(OK) as server, sk.Client(server.url) as client:
        got = []

        def work():
            got.extend(client.call("double", n=2) for _ in range(20))

        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert got == [4] * 320
        assert server.connections <= 16


@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_closing_ends_what_runs_as_cancelled(kind, until_sync):
    with Upstream() as server:
        server._acts = [server.until_left()]
        outcome = []
        opened = sk.Client(server.url) if kind == "plain" else sk.connect(Service, server.url)
        with opened as client:

            def work():
                try:
                    if kind == "plain":
                        client.call("double", n=1)
                    else:
                        client.double.remote(n=1).result(15)
                except Exception as error:
                    outcome.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            until_sync(lambda: server.requests)
        thread.join(15)
        assert [type(error) for error in outcome] == [Cancelled]
        assert server.left.wait(15)
        with pytest.raises(ServekitError, match="closed"):
            client.call("x") if kind == "plain" else client.double.remote(n=1).result(5)


async def test_closing_an_async_client_ends_what_runs(until):
    with Upstream() as server:
        server._acts = [server.until_left()]
        client = sk.AsyncClient(server.url)
        calls = [asyncio.create_task(client.call("double", n=1)) for _ in range(5)]
        await until(lambda: len(server.requests) == 5)
        await client.close()
        got = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in got] == [Cancelled] * 5


def test_a_client_that_is_dropped_closes_its_connections():
    with Upstream() as server:
        server._acts = [OK, server.until_left()]
        client = sk.Client(server.url)
        client.call("double", n=2)
        del client
        gc.collect()
        assert server.connections == 1
        for thread in server._threads[1:]:
            thread.join(15)  # until the client has hung up
            assert not thread.is_alive()


@pytest.mark.parametrize("url", ["", "127.0.0.1:3000", "ftp://h", "unix:/x"])
def test_a_url_that_is_none(url):
    for make in (sk.Client, sk.AsyncClient, lambda url: sk.connect(Service, url)):
        with pytest.raises(ConfigError, match="http://127.0.0.1:3000"):
            make(url)


async def test_connecting_does_not_block_the_loop():
    """Entering sends nothing; leaving waits for the calls that it ends on another loop's thread."""
    with Upstream() as server:
        server._acts = [server.until_left()]
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        async with sk.connect(Service, server.url) as service:
            call = service.double.remote(n=1)
            while not server.requests:
                await asyncio.sleep(0.001)
            before = ticks
        assert ticks > before
        with pytest.raises(Cancelled):
            await call
        ticking.cancel()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # that a process with threads forks
def test_in_a_forked_child_a_client_has_connections_of_its_own():
    with (
        Upstream(OK) as server,
        sk.Client(server.url) as client,
        sk.connect(Service, server.url) as service,
    ):
        assert client.call("double", n=2) == 4
        reading, writing = os.pipe()
        if not (pid := os.fork()):  # pragma: no cover  (the child)
            said = b""
            try:
                said = b"%d " % client.call("double", n=2)
                service.double.remote(n=2).result(5)
            except ServekitError as error:
                said += str(error).encode()
            finally:
                os.write(writing, said)
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        assert said.startswith(b"4 this handle was made before a fork")
        assert service.double.remote(n=2).result(15) == 4
        assert client.call("double", n=2) == 4
        assert server.connections == 3


def test_one_loop_serves_the_whole_process():
    assert background_loop() is background_loop()
    assert background_loop().is_running()
