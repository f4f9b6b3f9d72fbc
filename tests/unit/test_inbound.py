"""Input that streams, from clients and from other services, over HTTP, WebSockets and handles."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator

import pytest
import uvloop
import websockets

import servekit as sk
from servekit.errors import CallError, SpecError
from servekit.gateway import answer, inflow
from servekit.spec.describe import describe
from tests.serving import Served, served

NDJSON = {"content-type": "application/x-ndjson"}


@sk.service
class Chat:
    def __init__(self) -> None:
        self.ended: list[str] = []

    @sk.endpoint
    async def talk(self, messages: AsyncIterator[str], lang: str = "en") -> AsyncIterator[str]:
        how = "cancelled"
        try:
            async for message in messages:
                if message == "boom":
                    raise ValueError("secret")
                for word in message.split():
                    yield f"{lang}:{word}"
            how = "end"
        finally:
            self.ended.append(how)

    @sk.endpoint
    async def total(self, numbers: AsyncIterator[int], *, start: int = 0) -> int:
        async for number in numbers:
            start += number
        return start

    @sk.endpoint
    def count(self, parts: Iterator[bytes]) -> int:
        return sum(len(part) for part in parts)

    @sk.endpoint
    async def patient(self, numbers: AsyncIterator[int]) -> list[int | None]:
        seen: list[int | None] = []
        while True:
            try:
                seen.append(await asyncio.wait_for(anext(numbers), 0.05))
            except TimeoutError:
                if None not in seen:
                    seen.append(None)
            except StopAsyncIteration:
                return seen

    @sk.endpoint
    async def first(self, numbers: AsyncIterator[int]) -> int:
        return await anext(numbers)

    @sk.endpoint
    async def echo(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for part in parts:
            yield part

    @sk.endpoint
    async def deaf(self, parts: AsyncIterator[bytes]) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        return "never"

    @sk.endpoint(timeout_s=0.2)
    async def limited(self, parts: AsyncIterator[bytes]) -> str:
        async for _ in parts:
            pass
        return "late"

    @sk.endpoint
    async def plain(self, n: int) -> int:
        return n

    @sk.endpoint
    async def ticks(self, n: int) -> AsyncIterator[int]:
        for tick in range(n):
            yield tick
            await asyncio.sleep(0.12)


@sk.service
class Relay:
    chat = sk.depends(Chat)

    @sk.endpoint
    async def talk(self, messages: AsyncIterator[str]) -> AsyncIterator[str]:
        async for word in self.chat.talk.remote(messages, lang="de"):
            yield word


@contextlib.asynccontextmanager
async def socket(app: Served, path: str):
    async with websockets.connect(f"ws://{app.address}{path}") as opened:
        yield opened


async def closed(opened) -> int:
    with pytest.raises(websockets.ConnectionClosed):
        await opened.recv()
    return opened.close_code


# -- over HTTP


def lines(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


async def test_lines_of_a_body_are_chunks_whatever_packets_they_come_in():
    body = lines(1, 2, 3) + b"\n  \n" + b"4"  # the last one needs no end
    async with served(Chat) as app:
        for size in (1, 2, 5, 100):

            async def pieces(size=size):
                for at in range(0, len(body), size):
                    yield body[at : at + size]

            response = await app.http.post("/total?start=10", content=pieces(), headers=NDJSON)
            assert (response.status_code, response.text) == (200, "20")
        await app.idle()


@pytest.mark.parametrize(
    ("body", "status", "path"),
    [
        (b"1\nnope\n", 400, None),
        (b'1\n"x"\n', 422, ""),
        (b"1\n1e400\n", 422, ""),
        (b"1\n[" * 3 + b"\n", 400, None),
        (b"1\nNaN\n", 400, None),
        (b"[" * 100_000, 400, None),
        (b"\xff\xfe\n", 400, None),
    ],
)
async def test_a_wrong_line_fails_the_call_and_says_which_parameter(body, status, path):
    async with served(Chat) as app:
        response = await app.http.post("/total", content=body, headers=NDJSON)
        assert response.status_code == status
        assert "Chat.total(numbers)" in response.json()["error"]["message"]
        assert (await app.http.post("/total", content=b"1", headers=NDJSON)).text == "1"
        await app.idle()


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "", "image/png"])
async def test_a_body_without_chunks_is_refused_with_what_is_taken(content_type: str):
    async with served(Chat) as app:
        response = await app.http.post(
            "/total", content=b"1", headers={"content-type": content_type}
        )
        assert response.status_code == 415
        assert "application/x-ndjson" in response.json()["error"]["message"]
        await app.idle()


async def test_bytes_go_through_as_they_come_with_back_pressure():
    size, total = 100_000, 8_000_000

    async def pieces():
        for _ in range(total // size):
            yield b"x" * size

    headers = {"content-type": "application/octet-stream"}
    async with served(Chat) as app:
        response = await app.http.post("/count", content=pieces(), headers=headers)
        assert response.text == str(total)
        response = await app.http.post("/count", content=b"y" * 300_000, headers=headers)
        assert response.text == "300000"  # with a length, too, it goes on as it comes
        await app.idle()


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_streams_has_its_limit(declared: bool):
    @sk.service(limits=sk.Limits(max_body=100_000))
    class Small(Chat):
        pass

    async def pieces():
        for _ in range(3):
            yield b"x" * 50_000

    body = b"x" * 150_000 if declared else pieces()
    headers = {"content-type": "application/octet-stream"}
    async with served(Small) as app:
        response = await app.http.post("/count", content=body, headers=headers)
        assert response.status_code == 413
        await app.idle()
        assert (await app.http.post("/plain", json={"n": 1})).status_code == 200


async def test_an_early_answer_leaves_the_connection_in_step():
    async with served(Chat) as app:
        for _ in range(3):
            response = await app.http.post("/first", content=lines(*range(20_000)), headers=NDJSON)
            assert response.text == "0"
            assert (await app.http.post("/plain", json={"n": 7})).text == "7"
        await app.idle()


async def test_the_query_holds_the_other_parameters():
    async with served(Chat) as app:
        response = await app.http.post("/talk?lang=fr", content=lines("a b"), headers=NDJSON)
        assert response.text == 'data: "fr:a"\n\ndata: "fr:b"\n\nevent: end\ndata: \n\n'
        response = await app.http.post("/total?start=x", content=lines(1), headers=NDJSON)
        assert response.json()["error"]["fields"][0]["path"] == "start"
        response = await app.http.post("/total?begin=1", content=lines(1), headers=NDJSON)
        assert response.status_code == 422


async def test_a_client_that_leaves_within_its_body_ends_the_call():
    async with served(Chat) as app:
        host, port = app.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /talk HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-ndjson\r\n"
        writer.write(head + b'transfer-encoding: chunked\r\n\r\n4\r\n"a"\n\r\n')
        await writer.drain()
        assert b"200 OK" in await reader.readline()
        writer.close()
        await app.idle()
        assert app.replica._instance.ended == ["cancelled"]


@pytest.mark.parametrize("accept", ["application/x-ndjson", "application/jsonl"])
async def test_chunks_of_an_answer_are_lines_for_those_who_ask(accept: str):
    async with served(Chat) as app:
        headers = NDJSON | {"accept": accept}
        response = await app.http.post("/talk", content=lines("a b"), headers=headers)
        assert response.headers["content-type"] == "application/x-ndjson"
        assert response.text == '"en:a"\n"en:b"\n'
        response = await app.http.post("/talk", content=lines("a", "boom"), headers=headers)
        first, last = response.text.splitlines()
        assert json.loads(first) == "en:a"
        assert json.loads(last)["error"]["code"] == "execution_error"
        assert "secret" not in response.text


async def test_a_silent_stream_shows_signs_of_life(monkeypatch):
    monkeypatch.setattr(answer, "_SILENCE_S", 0.05)
    async with served(Chat) as app:
        response = await app.http.post("/ticks", json={"n": 3})
        events = response.text.split("\n\n")
        assert events.count(": keep-alive") >= 2
        assert [e for e in events if e.startswith("data: ")] == ["data: 0", "data: 1", "data: 2"]
        headers = {"accept": "application/x-ndjson"}
        response = await app.http.post("/ticks", json={"n": 3}, headers=headers)
        assert response.text.split() == ["0", "1", "2"]
        assert "\n\n" in response.text


async def test_a_reader_that_gave_up_waiting_may_ask_again():
    async def pieces():
        yield b"1\n"
        await asyncio.sleep(0.3)
        yield b"2\n3\n"

    async with served(Chat) as app:
        response = await app.http.post("/patient", content=pieces(), headers=NDJSON)
        assert response.json() == [1, None, 2, 3]


# -- over WebSockets


async def test_messages_go_both_ways_on_one_socket():
    async with served(Chat) as app, socket(app, "/talk?lang=fr") as ws:
        for word in ("a", "b", "c"):
            await ws.send(word)
            assert await ws.recv() == f"fr:{word}"
        await ws.send(b"")  # the end of the input
        assert await closed(ws) == 1000
        await app.idle()
        assert app.replica._instance.ended == ["end"]
        assert app.counted()["talk", "200"] == 1


async def test_a_socket_for_one_answer():
    async with served(Chat) as app, socket(app, "/total?start=5") as ws:
        await ws.send("1")
        await ws.send("2")
        await ws.send(b"")
        assert await ws.recv() == "8"
        assert await closed(ws) == 1000


async def test_bytes_and_text_go_as_they_are():
    async with served(Chat) as app:
        async with socket(app, "/echo") as ws:
            await ws.send(b"\x00\xff")
            assert await ws.recv() == b"\x00\xff"
        async with socket(app, "/talk") as ws:
            await ws.send('"quoted" ü')
            assert [await ws.recv(), await ws.recv()] == ['en:"quoted"', "en:ü"]


@pytest.mark.parametrize(
    ("path", "message", "status", "code"),
    [
        ("/talk", "boom", 500, "execution_error"),
        ("/total", "x", 400, "bad_request"),
        ("/total", '"x"', 422, "invalid_input"),
        ("/total?start=x", "1", 422, "invalid_input"),
        ("/limited", b"x", 504, "deadline_exceeded"),
    ],
)
async def test_a_failure_is_a_message_and_a_close_code(path, message, status, code):
    async with served(Chat) as app, socket(app, path) as ws:
        await ws.send(message)
        error = json.loads(await ws.recv())["error"]
        assert error["code"] == code
        assert error["request_id"]
        assert "secret" not in error["message"]
        assert await closed(ws) == 4000 + status
        await app.idle()
        assert app.counted() == {(path[1:].partition("?")[0], str(status)): 1}


@pytest.mark.parametrize(("path", "status"), [("/plain", 400), ("/nope", 404), ("/docs", 404)])
async def test_a_path_without_sockets_refuses_the_handshake(path: str, status: int):
    async with served(Chat) as app:
        with pytest.raises(websockets.InvalidStatus) as caught:
            await websockets.connect(f"ws://{app.address}{path}")
        assert caught.value.response.status_code == status
        assert "error" in json.loads(caught.value.response.body)


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_client_that_leaves_ends_a_method_that_listens(how: str):
    async with served(Chat) as app:
        ws = await websockets.connect(f"ws://{app.address}/talk")
        await ws.send("a")
        await ws.recv()
        if how == "close":
            await ws.close()
        else:
            ws.transport.abort()
        await app.idle()
        assert app.replica._instance.ended[0] in (
            ["end"] if how == "close" else ["cancelled", "end"]
        )


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_client_that_leaves_ends_a_method_that_does_not_listen(how: str, monkeypatch):
    monkeypatch.setattr(inflow, "_LEAVE_S", 0.1)
    async with served(Chat) as app:
        ws = await websockets.connect(f"ws://{app.address}/deaf")
        await ws.send(b"a")
        async with asyncio.timeout(10):
            while not app.replica.load().ongoing:
                await asyncio.sleep(0.01)
        if how == "close":
            await ws.close()
        else:
            ws.transport.abort()
        await app.idle()
        assert app.replica._instance.ended == ["cancelled"]
        async with asyncio.timeout(10):
            while not app.counted():
                await asyncio.sleep(0.01)
        assert app.counted() == {("deaf", "499"): 1}


async def test_a_flood_waits_at_the_client_and_arrives_whole():
    async with served(Chat) as app, socket(app, "/total") as ws:
        for _ in range(3000):
            await ws.send("1")
        await ws.send(b"")
        assert await ws.recv() == "3000"


async def test_a_socket_next_to_requests_on_other_connections():
    async with served(Chat) as app, socket(app, "/talk") as ws:
        for n in range(20):
            await ws.send(str(n))
            assert (await app.http.post("/plain", json={"n": n})).text == str(n)
            assert await ws.recv() == f"en:{n}"


async def test_requests_before_an_upgrade_on_one_connection_are_answered():
    async with served(Chat) as app:
        host, port = app.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"n":1}'
        head = b"POST /plain HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert b"200" in await reader.readline()
        await reader.readuntil(b"\r\n\r\n1")
        writer.write(
            b"GET /total HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            b"\x82\x80\x00\x00\x00\x00"  # an empty binary message comes along: the end
        )
        assert b"101" in await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(3) == b"\x81\x010"
        writer.close()


@pytest.mark.parametrize("upgrade", ["h2c", "WEBSOCKETS", "websocket2"])
async def test_other_upgrades_are_requests_as_ever(upgrade: str):
    async with served(Chat) as app:
        headers = {"connection": "upgrade", "upgrade": upgrade}
        assert (await app.http.post("/plain", json={"n": 3}, headers=headers)).text == "3"


# -- between services


def test_a_service_hands_its_input_on_as_it_comes():
    with sk.local(Relay) as relay:
        assert list(relay.talk.remote(iter(["a b", "c"])).iter_sync()) == ["de:a", "de:b", "de:c"]


@pytest.mark.parametrize("kind", ["async", "generator", "list"])
async def test_callers_give_any_iterator(kind: str):
    async def later() -> AsyncIterator[int]:
        for n in (1, 2):
            await asyncio.sleep(0)
            yield n

    given = {"async": later(), "generator": (n for n in (1, 2)), "list": [1, 2]}[kind]
    with sk.local(Chat) as chat:
        assert await chat.total.remote(given, start=3) == 6
        assert await asyncio.to_thread(chat.count, iter([b"ab", b"c"])) == 3


@pytest.mark.parametrize("given", [3, "text", b"bytes", None])
async def test_what_is_no_iterator_is_refused(given: object):
    with sk.local(Chat) as chat, pytest.raises(TypeError, match="numbers"):
        await chat.total.remote(given)


async def test_arguments_beside_the_stream_fit_the_signature():
    with sk.local(Chat) as chat:
        with pytest.raises(TypeError, match="needs 'numbers'"):
            await chat.total.remote(start=1)
        with pytest.raises(TypeError, match="2 values|two values"):
            await chat.total.remote([1], numbers=[2])


async def test_a_wrong_chunk_of_a_caller_is_the_callers_error():
    with sk.local(Chat) as chat, pytest.raises(CallError, match="numbers"):
        await chat.total.remote(["x"])


# -- mistakes of the author


def refused(make) -> str:
    with pytest.raises(SpecError) as caught:
        describe(make())
    return str(caught.value)


def test_two_streams_are_refused():
    def make():
        @sk.service
        class Two:
            @sk.endpoint
            async def f(self, a: AsyncIterator[str], b: AsyncIterator[str]) -> str:
                return ""

        return Two

    assert "a and b both stream" in refused(make)


def test_the_wrong_kind_of_iterator_is_refused():
    def make():
        @sk.service
        class Wrong:
            @sk.endpoint
            async def f(self, a: Iterator[str]) -> str:
                return ""

        return Wrong

    assert "Wrong.f(a): an async method's input streams as AsyncIterator[X]" in refused(make)


def test_a_get_endpoint_has_no_body_to_stream():
    def make():
        @sk.service
        class Get:
            @sk.endpoint(method="GET")
            async def f(self, a: AsyncIterator[str]) -> str:
                return ""

        return Get

    assert "use method='POST'" in refused(make)


def test_what_goes_beside_a_stream_is_scalar():
    def make():
        @sk.service
        class Beside:
            @sk.endpoint
            async def f(self, a: AsyncIterator[str], rows: list[int]) -> str:
                return ""

        return Beside

    assert "parameter 'rows' of an endpoint whose input streams must be a scalar" in refused(make)


def test_a_stream_has_no_default_and_is_never_batched():
    def default():
        @sk.service
        class Default:
            @sk.endpoint
            async def f(self, a: AsyncIterator[str] | None = None) -> str:
                return ""

        return Default

    def batched():
        @sk.service
        class Batched:
            @sk.batched(max_size=2)
            def f(self, a: Iterator[str]) -> list[str]:
                return []

        return Batched

    assert "f" in refused(default)
    assert "a batched method's input can't stream" in refused(batched)


def test_the_document_says_how_a_stream_is_sent():
    from servekit.protocols.openapi import document

    operation = document(describe(Chat))["paths"]["/total"]["post"]
    content = operation["requestBody"]["content"]
    assert content["application/x-ndjson"]["x-itemSchema"] == {"type": "integer"}
    names = [p.get("name") for p in operation["parameters"]]
    assert "start" in names
    content = document(describe(Chat))["paths"]["/count"]["post"]["requestBody"]["content"]
    assert "application/octet-stream" in content


def test_sockets_work_on_the_servers_own_loop():
    uvloop.run(test_messages_go_both_ways_on_one_socket())
