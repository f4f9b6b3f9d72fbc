"""The HTTP protocol on real sockets and loops: whatever a client does, its answers stay in step."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from servekit.core.call import BINARY, Payload, Reply
from tests.door import (
    HEAD,
    Client,
    Door,
    bytes_of,
    chunked,
    chunks,
    get,
    head,
    loop,  # noqa: F401  (each test runs on either loop)
    post,
    turns,
)

# -- requests in a row

ALIKE = {  # requests, with the method that they seem to have, and the status and body they get
    "post": (post(b'{"n":1}'), "", 200, b'{"n":1}'),
    "empty": (post(b""), "", 200, b""),
    "chunked": (chunked(b"ab", b"c" * 20), "", 200, b"ab" + b"c" * 20),
    "no chunks": (chunked(), "", 200, b""),
    "get": (get("text=a%20b&n=1"), "", 200, b'{"text":"a b","n":"1"}'),
    "absolute": (head("POST http://h/%65cho HTTP/1.1", "Content-Length: 1") + b"x", "", 200, b"x"),
    "stream": (post(b"xyz", "/tokens"), "", 200, b"data: x\n\ndata: yz\n\nevent: end\ndata: \n\n"),
    "method": (head("DELETE /echo HTTP/1.1", "content-length: 5") + b"12345", "", 405, None),
    "head": (head("HEAD /find?text=a HTTP/1.1"), "HEAD", 405, b""),
    "page": (head("GET /page?q=1 HTTP/1.1"), "", 200, b"GET?q=1 0"),
    "page post": (post(b"12345678", "/page"), "", 200, b"POST? 8"),
    "page chunked": (chunked(b"ab", b"c", path="/page"), "", 200, b"POST? 3"),
    "page head": (head("HEAD /page HTTP/1.1"), "HEAD", 200, b""),
    "nothing": (post(b"123", "/nothing?"), "", 404, b"POST? 3"),
}


async def in_pieces(names: list[str], cuts: list[int]) -> None:
    data = b"".join(ALIKE[name][0] for name in names)
    async with Door() as door:
        client = await door.connect()
        await client.send(data, cuts=[cut % len(data) for cut in cuts])
        for name in names:
            _, method, status, body = ALIKE[name]
            answer = await client.answer(method)
            assert answer.status == status, name
            assert answer.headers.get("connection") is None
            assert body is None or answer.body == body, name
        await client.lives()


@given(
    st.lists(st.sampled_from(sorted(ALIKE)), min_size=1, max_size=4),
    st.lists(st.integers(0, 1000), max_size=12),
)
@example(sorted(ALIKE), [])
@example(sorted(ALIKE, reverse=True), list(range(1000)))
@settings(max_examples=60)
def test_requests_in_pieces_have_their_answers_in_order(names, cuts):
    asyncio.run(in_pieces(names, cuts))


async def test_a_request_waits_for_those_before_it():
    async with Door() as door:
        door.reply = "hold"
        client = await door.connect()
        await client.send(post(b"1") + post(b"2") + head("GET /page HTTP/1.1"))
        await turns(50)
        assert len(door.calls) == 1
        door.go_on.set()
        assert [(await client.answer()).body for _ in range(3)] == [b"1", b"2", b"GET? 0"]


async def test_answers_have_the_servers_headers():
    async with Door() as door:
        client = await door.connect()
        for date in ("today", "tomorrow"):
            door.state.default_headers = [(b"date", date.encode())]
            assert (await client.ask(post())).headers["date"] == date
            assert (await client.ask(head("GET /page HTTP/1.1"))).headers["date"] == date


# -- the ends of connections


@pytest.mark.parametrize(
    "request_", [post, partial(post, b"12", "/tokens"), partial(post, b"", "/page")]
)
async def test_a_client_that_wants_no_more_is_hung_up_on(request_):
    async with Door() as door:
        client = await door.connect()
        await client.send(request_() + request_())  # it may still say so behind others
        for _ in range(2):
            assert "connection" not in (await client.answer()).headers
        answer = await client.ask(request_().replace(b"host: h", b"connection: close"))
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.rest() == b""


async def test_what_comes_behind_the_last_request_is_dropped():
    async with Door() as door:
        client = await door.connect()
        answer = await client.ask(post(b"1", "/echo", "connection: close") + post(b"2"))
        assert (answer.status, answer.body) == (200, b"1")
        assert await client.rest() == b""


async def test_http_1_0():
    async with Door() as door:
        old = post(b"abc", "/echo", "connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0")
        client = await door.connect()
        answer = await client.ask(old)
        assert (answer.status, answer.body) == (200, b"abc")
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b""
        client = await door.connect()
        answer = await client.ask(old.replace(b"/echo", b"/tokens"))
        assert "transfer-encoding" not in answer.headers
        assert answer.body == b"data: a\n\ndata: bc\n\nevent: end\ndata: \n\n"


async def test_a_protocol_that_nobody_speaks_here_is_not_taken_up():
    async with Door() as door:
        client = await door.connect()
        offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c")
        answer = await client.ask(post(b"1", "/echo", *offer))
        assert (answer.status, answer.body) == (200, b"1")
        await client.lives()


@pytest.mark.parametrize("path", ["/echo", "/tokens"])
async def test_a_server_that_shuts_down_answers_first(until, path):
    async with Door() as door:
        door.reply = "hold"
        client = await door.connect()
        await client.send(post(b"12", path))
        await until(lambda: door.calls)
        client.protocol.shutdown()
        door.go_on.set()
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.rest() == b""


async def test_a_server_that_shuts_down_takes_the_upload_that_has_begun(until):
    async with Door() as door:
        body = bytes_of(600_000)
        client = await door.connect()
        await client.send(post(body)[:100_000])
        await until(lambda: door.state.tasks)
        client.protocol.shutdown()
        answer = await client.ask(post(body)[100_000:])
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert door.bodies == [body]
        assert await client.rest() == b""


async def test_a_server_that_shuts_down_leaves_an_idle_connection():
    async with Door() as door:
        client = await door.connect()
        await client.lives()
        client.protocol.shutdown()
        assert await client.rest() == b""


PAGE = head("GET /page HTTP/1.1")


@pytest.mark.parametrize("request_", [post(b"1"), PAGE])
@pytest.mark.parametrize("known", [False, True], ids=["new", "kept"])
async def test_a_server_that_shuts_down_reads_the_request_that_is_on_its_way(
    until, known, request_
):
    async with Door() as door:
        client = await door.connect()
        if known:
            await client.lives()
        await client.send(request_[:10])
        await until(lambda: client.protocol._in_head)
        door.leave()
        client.protocol.shutdown()
        await turns(5)
        answer = await client.ask(request_[10:])
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.rest() == b""


@pytest.mark.parametrize("asks", [True, False])
async def test_a_server_that_shuts_down_waits_a_little_for_who_has_just_connected(asks):
    async with Door() as door:
        client = await door.connect()
        door.leave()
        client.protocol.shutdown()
        await turns(5)
        if asks:
            answer = await client.ask(PAGE)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.rest() == b""


@pytest.mark.parametrize("request_", [post(b"1"), PAGE, post(b"12", "/tokens"), post(b"", "/no")])
async def test_a_server_that_is_about_to_leave_answers_and_says_so(request_):
    """A connection that was idle has one more answer, and then goes elsewhere."""
    async with Door() as door:
        client, other = await door.connect(), await door.connect()
        await client.lives()
        door.leave()
        for asking in (client, other):
            answer = await asking.ask(request_)
            assert answer.status == (404 if b"/no" in request_ else 200)
            assert answer.headers["connection"] == "close"
            assert await asking.rest() == b""


@pytest.mark.parametrize("behind", [b"", post(b"3"), PAGE])
async def test_the_last_answer_that_is_due_is_the_connections_last(until, behind):
    """What was in line before the server was about to leave is answered, too."""
    async with Door() as door:
        door.reply = "hold"
        client = await door.connect()
        await client.send(post(b"12") + behind)
        await until(lambda: door.calls)
        await turns(5)
        door.leave()
        door.go_on.set()
        answers = [await client.answer() for _ in range(2 if behind else 1)]
        assert [answer.status for answer in answers] == [200] * len(answers)
        closes = [answer.headers.get("connection") for answer in answers]
        assert closes == [*[None] * (len(answers) - 1), "close"]
        assert await client.rest() == b""


async def test_work_that_is_cut_off_is_answered(until):
    """When the time to drain is over: an error with a status, within a stream as an event."""
    async with Door() as door:
        door.reply = "hold"
        client = await door.connect()
        await client.send(post())
        await until(lambda: door.calls)
        client.protocol.shutdown()
        door.cut()
        answer = await client.answer()
        assert (answer.status, answer.code) == (503, "unavailable")
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b""
        assert door.cancelled == 1
        assert door.counted() == {"503": 1}


@pytest.mark.parametrize("raw", [False, True])
async def test_a_stream_that_is_cut_off_says_so(until, raw):
    async with Door() as door:
        door.stream = endless()
        client = await door.connect()
        accept = "accept: application/octet-stream" if raw else "accept: */*"
        await client.send(post(b"1", "/tokens", accept))
        await until(lambda: door.calls)
        await turns(20)
        door.cut()
        if raw:
            with pytest.raises(EOFError):
                await client.answer()
        else:
            events = (await client.answer()).body.split(b"\n\n")
            assert events[0] == b"data: 1"
            assert events[-2].startswith(b"event: error\n")
            assert b'"shutdown"' in events[-2]


async def test_a_stream_that_is_cut_off_while_it_closes_has_no_second_answer(until):
    async with Door() as door:
        door.stream = Reluctant()
        client = await door.connect()
        await client.send(post(b"1", "/tokens"))
        await until(lambda: door.stream.closing)
        door.cut()
        rest = await client.rest()
        assert rest.count(b"HTTP/1.1") == 1
        assert not rest.endswith(b"0\r\n\r\n")


class Reluctant:
    """A stream that ends, and whose close does not."""

    closing = False

    def __aiter__(self) -> "Reluctant":
        return self

    async def __anext__(self) -> Payload:
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closing = True
        await asyncio.get_running_loop().create_future()


async def endless() -> AsyncIterator[Payload]:
    yield Payload(BINARY, (b"1",))
    await asyncio.get_running_loop().create_future()


# -- clients that leave


async def test_a_client_that_leaves_ends_its_call(until):
    async with Door() as door:
        door.reply = "hold"
        client = await door.connect()
        await client.send(post())
        await until(lambda: door.calls)
        client.leave()
        await until(lambda: not door.state.tasks)
        assert door.cancelled == 1
        assert door.counted() == {"499": 1}


@pytest.mark.parametrize("behind", [post(), head("GET /page HTTP/1.1"), post()[:-1]])
async def test_a_connection_that_is_lost_with_requests_in_line_ends_its_call(until, behind):
    async with Door() as door:
        door.reply = "hold"
        client = await door.connect()
        await client.send(post() + behind)
        await until(lambda: door.calls)
        client.protocol.transport.abort()
        await until(lambda: not door.state.connections)
        await turns(10)
        door.go_on.set()
        await until(lambda: not door.state.tasks)
        assert len(door.calls) == 1
        assert door.cancelled == 1


@pytest.mark.parametrize("behind", [post(), head("GET /page HTTP/1.1") * 3, post(b"2") * 100])
async def test_a_client_that_leaves_with_requests_in_line_ends_its_call(until, behind):
    """Nothing is written meanwhile, so only who reads on behind the first can see it."""
    async with Door() as door:
        door.reply = "hold"
        client = await door.connect()
        await client.send(post() + behind)
        await until(lambda: door.calls)
        await client.send(behind)
        await turns(5)
        client.leave()
        await until(lambda: not door.state.tasks)
        assert door.cancelled == len(door.calls) == 1
        assert not door.state.connections


async def test_what_is_read_behind_a_request_has_an_end(until):
    async with Door() as door:
        door.reply = "hold"
        client = await door.connect()
        sending = asyncio.create_task(client.send(post(b"1") * 6000))
        await until(lambda: client.protocol.flow.read_paused)
        await turns(1000)
        assert len(client.protocol.pipeline) < 3000
        door.go_on.set()
        longest = 0
        for _ in range(6000):
            assert (await client.answer()).body == b"1"
            longest = max(longest, len(client.protocol.pipeline))
        assert longest < 3000
        await sending


@pytest.mark.parametrize("size", [10, 70_000, 600_000])
async def test_a_client_that_leaves_while_it_sends_makes_no_call(until, size):
    async with Door() as door:
        client = await door.connect()
        await client.send(post(bytes_of(size))[:-1])
        await until(lambda: door.state.tasks)
        client.leave()
        await until(lambda: not door.state.tasks)
        assert door.calls == []
        assert door.counted() == {"499": 1}


# -- heads that are too large, and what is no HTTP


@pytest.mark.parametrize(
    "large",
    [
        head(f"GET /find?text={'x' * HEAD} HTTP/1.1"),
        head(f"GET /page?text={'x' * HEAD} HTTP/1.1"),
        head("GET /find HTTP/1.1", f"x-large: {'x' * HEAD}"),
        head("GET /find HTTP/1.1", f"{'x' * HEAD}: large"),
        head("GET /find HTTP/1.1", *(f"x-{number}: {'x' * 90}" for number in range(700))),
        head("GET /find HTTP/1.1", *(f"x-{number}: x" for number in range(257))),
        head("GET /page HTTP/1.1", *("x: x" for _ in range(257))),
        head(f"GET /{'x' * HEAD}")[:-4],
        head("GET /page HTTP/1.1", f"x-large: {'x' * HEAD}")[:-4],
    ],
)
@pytest.mark.parametrize("step", [100_000, 5_000])
@pytest.mark.parametrize("first", [0, 1, 600_000])
async def test_a_head_that_is_too_large_is_refused(large, step, first):
    async with Door() as door:
        client = await door.connect()
        if first:
            await client.send(post(bytes_of(first)))
            assert (await client.answer()).status == 200
        await client.send(large, cuts=range(step, len(large), step))
        answer = await client.answer()
        assert (answer.status, answer.code) == (431, "head_too_large")
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b""
        assert len(door.calls) == bool(first)


async def test_a_head_that_is_large_enough():
    async with Door() as door:
        client = await door.connect()
        many = [f"x-{number}: {'x' * 240}" for number in range(254)]
        assert (await client.ask(post(b"1", "/echo", *many))).status == 200
        data = post(bytes_of(600_000), "/echo", f"x-large: {'x' * (HEAD - 200)}")
        for _ in range(2):
            assert (await client.ask(data)).status == 200
        await client.lives()


async def test_a_large_head_behind_a_large_body(until):
    async with Door() as door:
        client = await door.connect()
        await client.send(post(bytes_of(600_000)) + head("GET / HTTP/1.1", f"x: {'x' * HEAD}"))
        assert [(await client.answer()).status for _ in range(2)] == [200, 431]
        assert await client.rest() == b""


async def test_the_fields_behind_a_body_are_part_of_the_limit(until):
    async with Door() as door:
        client = await door.connect()
        await client.send(chunked(b"body")[:-2])
        for number in range(200):
            await client.send(head(f"x-{number}: {'x' * 10_000}")[:-2])
            await turns(3)
        await client.send(b"\r\n")
        assert (await client.answer()).status in (400, 413, 431)
        assert await client.rest() == b""


async def test_the_fields_behind_a_body_are_no_headers():
    """A proxy in front may have taken a header away that must not come back this way."""
    async with Door() as door:
        client = await door.connect()
        data = chunked(b"body")[:-2] + head("x-request-id: evil", "x-user: evil")
        assert (await client.ask(data)).headers["x-request-id"] != "evil"
        assert b"evil" not in door.calls[0].headers
        await client.lives()


MALFORMED = [
    b"nonsense\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /find HTTP/9.9\r\n\r\n",
    b"GET /find\xff HTTP/1.1\r\n\r\n",
    b"GET nowhere:1 HTTP/1.1\r\n\r\n",
    b"CONNECT host:443 HTTP/1.1\r\n\r\n",
    head("POST /echo HTTP/1.1", "content-length: x"),
    head("POST /echo HTTP/1.1", "content-length: -1"),
    head("POST /echo HTTP/1.1", "content-length: 1", "content-length: 2"),
    head("POST /echo HTTP/1.1", "content-length: 1", "transfer-encoding: chunked"),
    head("POST /echo HTTP/1.1", "transfer-encoding: chunked") + b"x\r\n",
    head("POST /echo HTTP/1.1", "x-a : b"),
    head("POST /echo HTTP/1.1", "x-a: \x00"),
    head("POST /page HTTP/1.1", "transfer-encoding: chunked") + b"5\r\n123456\r\n",
]


@pytest.mark.parametrize("data", MALFORMED)
@pytest.mark.parametrize("before", [None, b"1", bytes_of(70_000)])
async def test_what_is_no_http_is_refused(data, before):
    async with Door() as door:
        client = await door.connect()
        if before is not None:
            assert (await client.ask(post(before))).status == 200
        answer = await client.ask(data)
        assert (answer.status, answer.code) == (400, "bad_request")
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b""
        assert len(door.calls) == (before is not None)


@pytest.mark.parametrize("data", [MALFORMED[0], head("GET / HTTP/1.1", f"x: {'x' * HEAD}")])
@pytest.mark.parametrize("size", [1, 70_000])
async def test_a_refusal_is_not_taken_for_the_answer_to_an_earlier_request(until, data, size):
    async with Door() as door:
        door.reply = "hold"
        client = await door.connect()
        await client.send(post(bytes_of(size)) + data)
        await until(lambda: door.calls or not door.state.connections)
        await turns(20)
        door.go_on.set()
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, bytes_of(size)[:100])
        assert (await client.answer()).status in (400, 431)
        assert await client.rest() == b""


# -- idle connections


class Clock:
    """A loop whose time stands still until `go` moves it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = 1000.0
        self._timers: list[tuple[float, object]] = []

    def __getattr__(self, name: str):
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._time

    def call_later(self, seconds: float, callback) -> asyncio.Handle:
        handle = asyncio.Handle(callback, (), self._loop)
        self._timers.append((self._time + seconds, handle))
        return handle

    def go(self, seconds: float) -> None:
        until = self._time + seconds
        while due := [timer for timer in self._timers if timer[0] <= until]:
            timer = min(due, key=lambda timer: timer[0])
            self._timers.remove(timer)
            self._time = timer[0]
            if not timer[1].cancelled():
                timer[1]._run()
        self._time = until


async def watched(door: Door) -> tuple[Client, Clock]:
    client, clock = await door.connect(), Clock()
    protocol = client.protocol
    protocol.timeout_keep_alive_task.cancel()  # it is the real loop's
    protocol.timeout_keep_alive_task, protocol.loop = None, clock
    await client.lives()
    return client, clock


async def test_an_idle_connection_is_closed():
    async with Door(keep_alive_s=10) as door:
        client, clock = await watched(door)
        clock.go(9)
        await client.lives()
        clock.go(9)  # the timer of the first request fires, but it had another
        await client.lives()
        clock.go(9.9)
        await client.lives()
        clock.go(10.1)
        assert await client.rest() == b""


async def test_an_idle_connection_is_closed_by_the_loops_own_clock():
    async with Door(keep_alive_s=0.01) as door:
        client = await door.connect()
        await client.lives()
        assert await client.rest() == b""


@pytest.mark.parametrize("path", ["/echo", "/tokens"])
async def test_a_busy_connection_is_not_closed(until, path):
    async with Door(keep_alive_s=10) as door:
        client, clock = await watched(door)
        door.reply = "hold"
        await client.send(post(b"12", path))
        await until(lambda: len(door.calls) == 2)
        clock.go(100)
        door.go_on.set()
        assert (await client.answer()).status == 200
        clock.go(9)
        await client.lives()
        clock.go(10.1)
        assert await client.rest() == b""


@pytest.mark.parametrize("size", [10, 600_000])
async def test_a_connection_whose_body_is_on_its_way_is_not_closed(until, size):
    async with Door(keep_alive_s=5) as door:
        client, clock = await watched(door)
        data = post(bytes_of(size))
        await client.send(data[: -size // 2])
        await until(lambda: door.state.tasks)
        clock.go(9)
        assert (await client.ask(data[-size // 2 :])).status == 200
        clock.go(5.1)
        assert await client.rest() == b""


@pytest.mark.parametrize("request_", [post(b"123", "/find"), post(b"1", "/echo", "traceparent: x")])
async def test_bytes_behind_the_answer_do_not_keep_a_connection_for_ever(until, request_):
    """A body that was refused, or the empty line that some clients send behind theirs."""
    async with Door(keep_alive_s=10) as door:
        client, clock = await watched(door)
        request_ += b"\r\n"
        await client.ask(request_[:-3] if b"/find" in request_ else request_[:-2])
        await client.send(request_[-3:] if b"/find" in request_ else request_[-2:])
        await turns(10)
        clock.go(10.1)
        clock.go(10.1)
        assert client.protocol.transport.is_closing()
        assert await client.rest() == b""


async def test_a_connection_that_never_asks_is_closed():
    async with Door(keep_alive_s=0.01) as door:
        client = await door.connect()
        assert await client.rest() == b""


# -- slow clients


@pytest.mark.parametrize("parts", [(b"GET /find?",), (b"GET ", b"/find", b"?text=a HTTP/1.1\r\n")])
async def test_a_head_that_takes_too_long_is_refused(parts):
    async with Door() as door:
        client, clock = await watched(door)
        for part in parts:
            await client.send(part)
            await turns(5)
            clock.go(3)
        clock.go(10.1 - 3 * len(parts))
        answer = await client.answer()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert await client.rest() == b""


async def test_heads_that_come_slowly_but_in_time():
    async with Door() as door:
        client, clock = await watched(door)
        for _ in range(3):
            request_ = get("still=here")
            await client.send(request_[:9])
            await turns(5)
            clock.go(9)
            assert (await client.ask(request_[9:])).status == 200


@pytest.mark.parametrize("size", [20_000, 600_000])
@pytest.mark.parametrize("coded", [False, True])
async def test_a_body_that_comes_too_slowly_is_refused(until, size, coded):
    async with Door() as door:
        client, clock = await watched(door)
        data = chunked(bytes_of(size)) if coded else post(bytes_of(size))
        await client.send(data[: -size // 2])
        await until(lambda: client.protocol.sender.watches)
        for _ in range(3):
            await client.send(data[:1000])
            await turns(10)
            clock.go(10.1)
        answer = await client.answer()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert await client.rest() == b""
        assert len(door.calls) == 1
        assert door.counted() == {"200": 1, "499": 1}


@pytest.mark.parametrize("coded", [False, True])
async def test_a_body_may_take_long_when_it_keeps_coming(until, coded):
    async with Door() as door:
        client, clock = await watched(door)
        body = bytes_of(600_000)
        data = chunked(body) if coded else post(body)
        for begin in range(0, len(data), 60_000):
            await client.send(data[begin : begin + 60_000])
            await until(
                lambda end=begin + 60_000: client.protocol.sender.received >= min(end, len(data))
            )
            clock.go(9.9)
        assert (await client.answer()).body == body[:100]
        await client.lives()


async def test_a_client_that_is_kept_waiting_is_not_blamed_for_it(until):
    """The second request's body waits in line, as nobody reads it."""
    async with Door() as door:
        client, clock = await watched(door)
        door.reply = "hold"
        data = post(b"1" * 100) + post(b"2" * 600_000)
        sending = asyncio.create_task(client.send(data))
        await until(lambda: client.protocol.flow.read_paused)
        clock.go(100)
        door.go_on.set()
        assert (await client.answer()).body == b"1" * 100
        assert (await client.answer()).body == b"2" * 100
        await sending


async def test_a_client_in_line_that_stops_sending_is_refused_in_its_turn(until):
    """What it has sent so far is read at once, so it is not this side that keeps it waiting."""
    async with Door() as door:
        client, clock = await watched(door)
        door.reply = "hold"
        await client.send((post(b"1" * 100) + post(b"2" * 100))[:-50])
        await until(lambda: client.protocol.pipeline)
        await turns(5)
        clock.go(10.1)
        door.go_on.set()
        assert (await client.answer()).body == b"1" * 100
        assert (await client.answer()).code == "request_timeout"
        assert await client.rest() == b""


@pytest.mark.parametrize("kind", ["whole", "many", "stream"])
async def test_a_client_that_does_not_read_is_hung_up_on(until, kind):
    """One that is slow is not: it has read its 20 KiB whenever it is looked at."""
    async with Door() as door:
        client, clock = await watched(door)
        answer = bytes_of(16 << 20)
        if kind == "stream":
            door.stream = chunks(*[answer[:100_000]] * 160)
            await client.send(post(b"12", "/tokens"))
        else:
            size = len(answer) if kind == "whole" else 200_000
            door.reply = Reply(Payload(BINARY, (answer[:size],)))
            await client.send(post(b"1") * (len(answer) // size))
        flow = client.protocol.flow
        await until(lambda: flow.write_paused)
        for _ in range(3):
            left = client.protocol.transport.get_write_buffer_size()
            await client.take(1 << 20)
            await until(lambda left=left: client.protocol.transport.get_write_buffer_size() != left)
            await until(lambda: flow.write_paused)
            clock.go(19.9)
            assert not client.protocol.transport.is_closing()
        clock.go(40.1)
        await until(lambda: not door.state.connections)
        assert len(await client.rest()) < len(answer) // 2


async def test_a_client_that_goes_on_sending_what_was_refused_is_hung_up_on(until):
    async with Door() as door:
        client, clock = await watched(door)
        assert (await client.ask(post(b"1" * 100, "/find")[:-50])).status == 405
        clock.go(10.1)
        assert await client.rest() == b""
