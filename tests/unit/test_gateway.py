"""The gateway against a handler and a wire of the test's own: requests in, calls and bytes out."""

import asyncio
import enum
from collections.abc import AsyncIterator
from typing import Final, Literal

import httptools
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import servekit as sk
from servekit.core.call import BINARY, JSON, MSGPACK, Buffer, Call, Payload, Reply, now
from servekit.errors import (
    CallError,
    InvalidInput,
    NotFound,
    Overloaded,
    Unavailable,
)
from servekit.gateway.bodies import Bodies
from servekit.gateway.exchange import Exchange
from servekit.gateway.http import Gateway
from servekit.gateway.request import query_document
from servekit.observe.families import Families
from servekit.observe.metrics import Metrics
from servekit.spec.describe import describe


class Color(enum.IntEnum):
    RED = 1
    BLUE = 2


@sk.service
class Below:
    @sk.endpoint
    def hidden(self) -> int:
        return 1


@sk.service(limits=sk.Limits(max_body=1000, timeout_s=30), version="7")
class App:
    below = sk.depends(Below)

    @sk.endpoint
    async def f(self, n: int) -> int:
        return n

    @sk.endpoint(timeout_s=5, idempotent=True)
    async def quick(self, n: int) -> int:
        return n

    @sk.endpoint(method="GET")
    async def find(
        self,
        text: str,
        n: int = 0,
        x: float = 0.0,
        flag: bool = False,
        maybe: int | None = None,
        name: str | None = None,
        mode: Literal["a", "b"] = "a",
        color: Color = Color.RED,
    ) -> str:
        return text

    @sk.batched(max_size=4)
    def many(self, xs: list[int]) -> list[int]:
        return xs

    @sk.endpoint
    async def tokens(self, n: int) -> AsyncIterator[str]:
        yield ""

    @sk.endpoint(path="/")
    async def root(self) -> int:
        return 1

    @sk.endpoint(internal=True)
    async def secret(self) -> int:
        return 1


@sk.service(limits=sk.Limits(timeout_s=None))
class Endless:
    @sk.endpoint
    async def f(self, n: int) -> int:
        return n


SPEC = describe(App)


LEAVES: Final = object()
"""In place of a part of a body: the client hangs up."""

STALLS: Final = object()
"""In place of a part of a body: nothing more comes."""


class Wire:
    """A connection that keeps what is written; nobody reads behind it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.kept_alive: list[bool] = []
        self.aborted = False
        self.share = Bodies(1 << 20).share

    def write(self, data: Buffer) -> None:
        self.written.append(bytes(data))

    def status_line(self, status: int) -> bytes:
        return b"HTTP/1.1 %d Text\r\n" % status

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def answered(self, *, keep_alive: bool) -> None:
        self.kept_alive.append(keep_alive)

    def abort(self, *, at_once: bool) -> None:
        self.aborted = True


class Client:
    """One gateway, its handler's calls, and what it sends."""

    def __init__(self, spec=SPEC) -> None:
        self.calls: list[Call] = []
        self.reply: object = None
        self.metrics = Metrics()
        self.gateway = Gateway(self._handle, Families(self.metrics))
        self.gateway.serve(spec)
        self.wire = Wire()

    async def _handle(self, call: Call) -> Reply:
        self.calls.append(call)
        if isinstance(self.reply, Exception):
            raise self.reply
        if callable(self.reply):
            return await self.reply(call)
        return self.reply or Reply(Payload(JSON, (b"7",)), version="7", replica="App-0")

    async def request(
        self, url="/f", body=(b'{"n": 1}',), *, method="POST", http10=False, **headers
    ) -> None:
        """Make a request; a body of one part is here with its head, of more it comes in turns."""
        methods, query = self.gateway.find(url.encode("latin-1"))
        assert methods is not None, f"{url} is no endpoint"
        raw = [(k.replace("_", "-").encode(), v.encode("latin-1")) for k, v in headers.items()]
        self.wire = Wire()
        self.exchange = Exchange(
            self.wire,
            methods,
            method.encode(),
            query,
            raw,
            http10=http10,
            keep_alive=not http10,
            expects="expect" in headers,
        )
        task = self.exchange.task = asyncio.create_task(self.gateway.answer(self.exchange))
        for part in body:
            if len(body) > 1:
                await asyncio.sleep(0)
            if part is LEAVES:
                self.exchange.leave()
            elif part is not STALLS:
                self.exchange.feed(part)
        if STALLS not in body and LEAVES not in body:
            self.exchange.end()
        await task

    @property
    def call(self) -> Call:
        return self.calls[-1]

    @property
    def status(self) -> int:
        return int(self.wire.written[0].split()[1])

    @property
    def headers(self) -> dict[str, str]:
        head, _, _ = self.wire.written[0].partition(b"\r\n\r\n")
        lines = [line.partition(": ") for line in head.decode("latin-1").split("\r\n")[1:]]
        headers = {name: value for name, _, value in lines}
        assert len(headers) == len(lines)
        return headers

    @property
    def chunks(self) -> list[bytes]:
        """The parts of a chunked answer; the last one is empty if it has an end."""
        assert self.headers["transfer-encoding"] == "chunked"
        rest = b"".join(self.wire.written).partition(b"\r\n\r\n")[2]
        chunks = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            chunks.append(rest[: int(size, 16)])
            assert rest[len(chunks[-1]) :][:2] == b"\r\n"
            rest = rest[len(chunks[-1]) + 2 :]
        assert b"" not in chunks[:-1]
        return chunks

    @property
    def body(self) -> bytes:
        if "transfer-encoding" in self.headers:
            return b"".join(self.chunks)
        return b"".join(self.wire.written).partition(b"\r\n\r\n")[2]

    @property
    def ended(self) -> bool:
        """The answer is whole, and its connection knows it."""
        if "transfer-encoding" in self.headers:
            ended = self.chunks[-1:] == [b""]
        else:
            ended = len(self.body) == int(self.headers["content-length"])
        assert len(self.wire.kept_alive) == ended
        return ended

    @property
    def error(self) -> dict:
        return msgspec.json.decode(self.body)["error"]

    def counted(self, family: str = "servekit_requests_total") -> dict[tuple[str, ...], float]:
        found = [f for f in self.metrics.snapshot() if f.name == family]
        return {sample.labels: sample.value for f in found for sample in f.samples}


@pytest.fixture
def client():
    return Client()


# -- from a request to a call


async def test_a_request_becomes_a_call(client):
    before = now()
    await client.request(
        content_type="application/msgpack",
        accept="application/msgpack, */*;q=0.1",
        x_request_id="abc-123",
        x_servekit_timeout="250ms",
        x_servekit_affinity="user 7",
        traceparent="00-trace",
        idempotency_key="k",
        x_tenant="t",
    )
    call = client.call
    assert (call.service, call.endpoint, call.request_id) == ("App", "f", "abc-123")
    assert call.payload.content_type == MSGPACK
    assert [bytes(s) for s in call.payload.segments] == [b'{"n": 1}']
    assert call.accept == "application/msgpack, */*;q=0.1"
    assert call.affinity_key == "user 7"
    assert call.traceparent == "00-trace"
    assert call.idempotent
    assert not call.internal
    assert before + 0.25 <= call.deadline <= now() + 0.25
    headers = dict(msgspec.msgpack.decode(call.headers))
    assert headers[b"x-tenant"] == b"t"
    assert headers[b"x-request-id"] == b"abc-123"


async def test_a_request_without_headers_has_the_endpoints_settings(client):
    before = now()
    await client.request()
    call = client.call
    assert before + 30 <= call.deadline <= now() + 30
    assert call.payload.content_type == ""
    assert not call.idempotent
    await client.request("/quick")
    assert client.call.deadline <= now() + 5
    assert client.call.idempotent


async def test_ids_are_made_where_there_is_none(client):
    ids = set()
    for _ in range(100):
        await client.request()
        assert client.headers["x-request-id"] == client.call.request_id
        ids.add(client.call.request_id)
    assert len(ids) == 100


@pytest.mark.parametrize("id_", ["", "x" * 129, "a\nb", "a\x1bb", "\xe9", "a\x00", "a\x7f"])
async def test_an_id_that_could_do_harm_is_replaced(client, id_):
    await client.request(x_request_id=id_)
    assert client.status == 200
    assert client.call.request_id != id_
    assert client.call.request_id.isalnum()
    assert client.headers["x-request-id"] == client.call.request_id


async def test_a_long_id_that_is_harmless_is_kept(client):
    await client.request(x_request_id="x" * 128)
    assert client.call.request_id == "x" * 128


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5),
        ("5s", 5),
        ("250ms", 0.25),
        ("1.5s", 1.5),
        ("0.25m", 15),
        ("1h", 30),
        ("40s", 30),
        ("999999999", 30),
    ],
)
async def test_a_timeout_may_only_shorten(client, text, seconds):
    before = now()
    await client.request(x_servekit_timeout=text)
    assert client.status == 200
    assert before + seconds <= client.call.deadline <= now() + seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0s",
        "-5",
        "-5s",
        "soon",
        "5 parsecs",
        "nan",
        "inf",
        "1e3",
        "9" * 400 + "s",
        "9" * 400,
    ],
)
@pytest.mark.parametrize("service", [App, Endless])
async def test_what_is_no_timeout(text, service):
    client = Client(describe(service))
    await client.request(x_servekit_timeout=text)
    if client.status == 200:  # more than all the time in the world is no mistake where it is capped
        assert client.call.deadline <= now() + 30
    else:
        assert client.status == 400
        assert "x-servekit-timeout" in client.error["message"]
        assert client.calls == []


async def test_no_timeout_at_all():
    client = Client(describe(Endless))
    await client.request()
    assert client.call.deadline is None
    await client.request(x_servekit_timeout="2s")
    assert client.call.deadline is not None


# -- bodies


async def test_a_body_in_pieces(client):
    await client.request(body=(b'{"n"', b"", b": 1", b"}"))
    assert [bytes(s) for s in client.call.payload.segments] == [b'{"n": 1}']


async def test_a_body_of_the_largest_size(client):
    await client.request(body=(b"x" * 1000,), content_length="1000")
    await client.request(body=(b"x" * 600, b"x" * 400))
    assert len(client.calls) == 2


@pytest.mark.parametrize(
    "body",
    [
        (b"x" * 1001,),
        (b"x" * 600, b"x" * 401),
        (b"x" * 2000, b"", b""),
        (b"",) * 3 + (b"x" * 1001,),
        (b"x" * 1001, b""),
    ],
)
@pytest.mark.parametrize("length", [None, "10"])
async def test_a_body_that_grows_too_large(client, body, length):
    headers = {} if length is None else {"content_length": length}
    await client.request(body=body, **headers)
    assert client.status == 413
    assert client.error["code"] == "payload_too_large"
    assert client.calls == []


async def test_a_body_that_says_that_it_is_too_large_is_not_even_read(client):
    await client.request(body=(STALLS,), content_length="1001")
    assert client.status == 413
    assert client.calls == []


@pytest.mark.parametrize("length", ["x", "-1", "", "1.5", "0x10", "\xb2"])
async def test_a_length_that_is_none_is_the_clients_mistake(client, length):
    await client.request(content_length=length)
    assert client.status == 400
    assert client.calls == []


async def test_a_length_of_thousands_of_digits(client):
    await client.request(content_length="9" * 5000)
    assert client.status == 413


@pytest.mark.parametrize("body", [(b"", LEAVES), (b"half", LEAVES), (b"half", b"more", LEAVES)])
async def test_a_client_that_leaves_while_it_sends(client, body):
    await client.request(body=body)
    assert client.calls == []
    assert client.wire.written == []
    assert [labels[-1] for labels in client.counted()] == ["499"]


async def test_a_client_that_leaves_before_its_turn_is_counted_too(client):
    await client.request(body=(LEAVES,))
    assert client.calls == []
    assert client.wire.written == []
    assert [labels[-1] for labels in client.counted()] == ["499"]


async def test_the_rest_of_a_refused_body_is_dropped(client):
    await client.request(body=(b"x" * 1001, b"y" * 500, b"z" * 500))
    assert client.status == 413
    assert client.ended
    assert client.calls == []


@pytest.mark.parametrize("body", [(b"{}",), (b"{", b"}")])
@pytest.mark.parametrize("expects", [True, False])
async def test_a_client_that_waits_to_send_is_asked_for_its_body_once(client, body, expects):
    await client.request(body=body, **({"expect": "100-continue"} if expects else {}))
    asked = [w for w in client.wire.written if w == b"HTTP/1.1 100 Continue\r\n\r\n"]
    assert len(asked) == (expects and len(body) > 1)
    assert bytes(client.call.payload.segments[0]) == b"{}"


async def test_a_body_that_is_refused_is_not_asked_for(client):
    await client.request(body=(STALLS,), content_length="1001", expect="100-continue")
    assert client.status == 413  # the first that was written


# -- routes


async def test_routes(client):
    for path, endpoint in [
        ("/f", "f"),
        ("/many", "many"),
        ("/many/batch", "many/batch"),
        ("/", "root"),
    ]:
        await client.request(path)
        assert client.call.endpoint == endpoint


@pytest.mark.parametrize(
    ("url", "endpoint", "query"),
    [
        (b"/f?a=1&b=%20", "f", b"a=1&b=%20"),
        (b"/f?", "f", b""),
        (b"/f?/../x??", "f", b"/../x??"),
        (b"/f#part", "f", b""),
        (b"/%66", "f", b""),
        (b"/%6D%61ny%2fbatch?x", "many/batch", b"x"),
        (b"http://host/f", "f", b""),
        (b"http://host:80/f?q", "f", b"q"),
        (b"http://host/", "root", b""),
        (b"/?q", "root", b"q"),
    ],
)
def test_a_path_may_be_written_in_many_ways(client, url, endpoint, query):
    methods, found = client.gateway.find(url)
    assert methods[b"POST"].endpoint == endpoint
    assert found == query


@pytest.mark.parametrize(
    "path", ["/nothing", "/f/", "/F", "/hidden", "/secret", "/f/batch", "/../f", "//f", "/f%3Fq"]
)
@pytest.mark.parametrize("query", [b"", b"a=1"])
def test_what_is_no_endpoint_is_left_to_the_rest(client, path, query):
    url = path.encode() + (b"?" + query if query else b"")
    assert client.gateway.find(url) == (None, query)
    assert client.gateway.find(b"http://host" + url) == (None, query)


def test_a_server_as_a_whole_is_no_endpoint(client):
    assert client.gateway.find(b"*") == (None, b"")


@pytest.mark.parametrize("url", [b"", b"?", b"/\xff", b"host:443", b"http://"])
def test_what_is_no_url(client, url):
    with pytest.raises(httptools.HttpParserError):
        client.gateway.find(url)


@pytest.mark.parametrize(
    ("path", "method", "allow"),
    [("/f", "GET", "POST"), ("/find", "POST", "GET"), ("/f", "DELETE", "POST")],
)
async def test_another_method(client, path, method, allow):
    await client.request(path, method=method)
    assert client.status == 405
    assert client.headers["allow"] == allow
    assert client.error["code"] == "method_not_allowed"
    assert client.calls == []


@pytest.mark.parametrize("path", ["/f", "/f?q=1", "/find", "/tokens"])
async def test_an_endpoint_has_no_head(client, path):
    await client.request(path, (), method="HEAD")
    assert client.status == 405
    assert client.headers["allow"] in ("POST", "GET")
    assert int(client.headers["content-length"]) > 0
    assert client.body == b""
    assert client.wire.kept_alive == [True]


async def test_a_new_app_takes_over_at_once(client):
    client.gateway.serve(describe(Endless))
    assert client.gateway.find(b"/quick") == (None, b"")
    await client.request("/f")
    assert client.call.service == "Endless"


# -- GET


async def find(client, query: str):
    await client.request(f"/find?{query}", (), method="GET")
    assert client.status == 200
    return msgspec.json.decode(client.call.payload.segments[0])


@pytest.mark.parametrize(
    ("query", "document"),
    [
        ("text=a", {"text": "a"}),
        ("text=5&n=5&x=5", {"text": "5", "n": 5, "x": 5}),
        ("text=true&flag=true", {"text": "true", "flag": True}),
        ("x=1.5e3", {"x": 1500.0}),
        ("n=-3", {"n": -3}),
        ("n=x", {"n": "x"}),
        ("n=", {"n": ""}),
        ("n=[1]", {"n": "[1]"}),
        ('n="1"', {"n": '"1"'}),
        ("flag=1", {"flag": 1}),
        ("flag=True", {"flag": "True"}),
        ("x=NaN", {"x": "NaN"}),
        ("x=1e400", {"x": "1e400"}),
        ("maybe=null", {"maybe": None}),
        ("maybe=3", {"maybe": 3}),
        ("text=null", {"text": "null"}),
        ("name=null", {"name": None}),
        ("name=3", {"name": "3"}),
        ("mode=b", {"mode": "b"}),
        ("color=2", {"color": 2}),
        ("n=1&n=2", {"n": 2}),
        ("text=a+b%20c%26%3D", {"text": "a b c&="}),
        ("text=%C3%A9%F0%9F%98%80", {"text": "é😀"}),
        ("text=%ff", {"text": "\ufffd"}),
        ("unknown=1", {"unknown": "1"}),
        ("", {}),
        ("&&=&", {"": ""}),
    ],
)
async def test_a_query_is_typed_by_its_schema(client, query, document):
    got = await find(client, query)
    assert got == document
    assert {k: type(v) for k, v in got.items()} == {k: type(v) for k, v in document.items()}


async def test_arguments_of_a_query_are_accepted_by_the_replica(start):
    client = Client()
    replica = await start(App, below=None)
    client.reply = replica
    await client.request(
        "/find?text=hi&n=2&x=1&flag=true&maybe=null&color=2&mode=b", (), method="GET"
    )
    assert client.status == 200, client.body
    assert client.body == b'"hi"'
    await client.request("/find?text=hi&n=two", (), method="GET")
    assert client.status == 422
    assert client.error["fields"][0]["path"] == "n"


def test_a_repeated_name_makes_an_array_where_one_is_declared():
    schema = {"properties": {"xs": {"type": "array", "items": {"type": "integer"}}}}
    assert query_document(b"xs=1&xs=2&xs=x", schema) == b'{"xs":[1,2,"x"]}'


@given(st.binary(max_size=60))
def test_any_query_is_a_document(query):
    schema = {
        "properties": {
            name: {"type": kind} for name, kind in zip("ab", ["integer", "number"], strict=True)
        }
    }
    assert isinstance(msgspec.json.decode(query_document(query, schema)), dict)


# -- whole answers and errors


async def test_a_whole_answer(client):
    client.reply = Reply(Payload(MSGPACK, (b"\x07",)), version="8", replica="App-3")
    await client.request()
    assert client.status == 200
    assert client.headers == {
        "content-type": MSGPACK,
        "x-request-id": client.call.request_id,
        "x-servekit-version": "8",
        "x-servekit-replica": "App-3",
        "content-length": "1",
    }
    assert client.body == b"\x07"
    assert client.ended
    assert client.counted() == {("App", "f", "8", "200"): 1}


async def test_an_answer_that_is_a_view(client):
    client.reply = Reply(Payload(BINARY, (memoryview(b"x" * 100),)))
    await client.request()
    assert client.headers["content-length"] == "100"
    assert bytes(client.body) == b"x" * 100


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Overloaded("full", reason="queue_full", retry_after_s=0.05, started=False), 429, "1"),
        (Overloaded("full", retry_after_s=2.1), 429, "3"),
        (Unavailable("none", retry_after_s=7), 503, "7"),
        (NotFound("no"), 404, None),
        (InvalidInput("bad", fields=[{"path": "a", "message": "m", "type": "t"}]), 422, None),
        (CallError("plain"), 500, None),
    ],
)
async def test_errors(client, error, status, retry_after):
    client.reply = error
    await client.request(x_request_id="r-9")
    assert client.status == status
    assert client.headers.get("retry-after") == retry_after
    assert client.headers["content-type"] == JSON
    assert client.headers["x-request-id"] == "r-9"
    assert int(client.headers["content-length"]) == len(client.body)
    assert client.error == error.details() | {"request_id": "r-9"}
    assert client.ended
    assert client.counted() == {("App", "f", "7", str(status)): 1}
    assert list(client.counted("servekit_shed_total")) == (
        [] if error.started else [("App", "f", "queue_full")]
    )


async def test_an_exception_is_masked(client, caplog):
    client.reply = ValueError("hunter2")
    await client.request()
    assert client.status == 500
    assert client.error["code"] == "execution_error"
    assert b"hunter2" not in client.body
    assert "hunter2" in caplog.text


# -- streams


class Chunks:
    def __init__(self, *chunks: bytes, error: Exception | None = None, hang: bool = False) -> None:
        self.chunks = list(chunks)
        self.error = error
        self.hang = hang
        self.closed = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.chunks:
            return Payload(JSON, (self.chunks.pop(0),))
        if self.hang:
            await asyncio.get_running_loop().create_future()
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    async def aclose(self):
        self.closed += 1


async def test_a_stream_as_events(client):
    stream = Chunks(b'"a"', b'"b c"', b"{}")
    client.reply = Reply(stream=stream, version="7")
    await client.request("/tokens", accept="text/event-stream")
    assert client.status == 200
    assert client.headers["content-type"] == "text/event-stream"
    assert client.headers["cache-control"] == "no-store"
    assert "content-length" not in client.headers
    assert client.body == b'data: "a"\n\ndata: "b c"\n\ndata: {}\n\nevent: end\ndata: \n\n'
    assert client.ended
    assert client.chunks[:3] == [b'data: "a"\n\n', b'data: "b c"\n\n', b"data: {}\n\n"]
    assert client.call.accept == JSON
    assert stream.closed
    assert client.counted() == {("App", "tokens", "7", "200"): 1}


async def test_an_empty_stream(client):
    client.reply = Reply(stream=Chunks())
    await client.request("/tokens")
    assert client.body == b"event: end\ndata: \n\n"
    assert client.ended


async def test_a_raw_stream(client):
    client.reply = Reply(stream=Chunks(b"ab", memoryview(b"c")))
    await client.request("/tokens", accept=BINARY)
    assert client.headers["content-type"] == BINARY
    assert client.body == b"abc"
    assert client.ended
    assert client.call.accept == BINARY


async def test_an_error_behind_the_first_chunk_is_an_event(client):
    stream = Chunks(b"1", error=Overloaded("enough", retry_after_s=1.0))
    client.reply = Reply(stream=stream)
    await client.request("/tokens", x_request_id="r-9")
    assert client.status == 200
    first, event, rest = client.body.split(b"\n\n")
    assert (first, rest) == (b"data: 1", b"")
    name, data = event.split(b"\n")
    assert name == b"event: error"
    error = msgspec.json.decode(data.removeprefix(b"data: "))["error"]
    assert error == {
        "code": "overloaded",
        "reason": "overloaded",
        "message": "enough",
        "retry_after_s": 1.0,
        "started": True,
        "request_id": "r-9",
    }
    assert client.ended
    assert stream.closed
    assert [labels[-1] for labels in client.counted()] == ["429"]


async def test_a_raw_stream_that_fails_has_no_end(client):
    stream = Chunks(b"1", error=Overloaded("enough"))
    client.reply = Reply(stream=stream)
    await client.request("/tokens", accept=BINARY)
    assert client.body == b"1"
    assert not client.ended
    assert client.wire.aborted
    assert stream.closed
    assert [labels[-1] for labels in client.counted()] == ["429"]


async def test_an_error_before_the_first_chunk_has_a_status_of_its_own(client):
    client.reply = Overloaded("full", retry_after_s=1.0)
    await client.request("/tokens")
    assert client.status == 429


async def test_an_exception_in_a_stream_does_not_start_a_second_answer(client, caplog):
    stream = Chunks(b"1", error=ValueError("hunter2"))
    client.reply = Reply(stream=stream)
    await client.request("/tokens")
    assert client.status == 200
    assert client.ended
    assert client.body.count(b"event: error") == 1
    assert b"hunter2" not in client.body
    assert "hunter2" in caplog.text
    assert stream.closed
    assert [labels[-1] for labels in client.counted()] == ["500"]


# -- clients that leave


async def test_a_client_that_leaves_cancels_its_call(client, until):
    cancelled = asyncio.Event()

    async def wait(call: Call) -> Reply:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cancelled.set()
        raise AssertionError

    client.reply = wait
    task = asyncio.create_task(client.request())
    await until(lambda: client.calls)
    client.exchange.leave()
    await task
    assert cancelled.is_set()
    assert client.wire.written == []
    assert client.counted() == {("App", "f", "7", "499"): 1}


async def test_a_client_that_leaves_ends_its_stream(client, until):
    stream = Chunks(b"1", hang=True)
    client.reply = Reply(stream=stream)
    task = asyncio.create_task(client.request("/tokens"))
    await until(lambda: len(client.wire.written) == 2)
    client.exchange.leave()
    await task
    assert stream.closed
    assert not client.ended
    assert [labels[-1] for labels in client.counted()] == ["499"]
