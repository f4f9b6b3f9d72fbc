"""What comes in through the door, good and bad, and what goes out."""

import asyncio
import io
import json
import pickle

import msgspec
import numpy as np
import pytest

from servekit.spec.body import pack, unpack
from tests.flow.harness import RAY, Http, of_a_file, until

MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}
BINARY = {"content-type": "application/octet-stream"}
NPY = {"content-type": "application/x-npy", "accept": "application/x-npy"}


@pytest.fixture(scope="module")
def app():
    """One app for the whole file; each test that may harm it proves that it lives."""
    yield from of_a_file("kinds.py:Http")


async def lives(app) -> None:
    answer = await app.post("/area", {"box": {"width": 2}})
    assert (answer.status, answer.json) == (200, 2.0)


async def test_json(app):
    answer = await app.post("/area", {"box": {"width": 2.5, "tags": ["a"]}, "times": 2})
    assert (answer.status, answer.json) == (200, 5.0)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-servekit-version"] == "7"
    assert answer.headers["x-servekit-replica"].startswith("Http-")
    assert answer.headers["x-request-id"]
    assert (await app.post("/whole", [1, 2, 3])).json == 6


async def test_request_id(app):
    """A client's id comes back; one that could do harm in a header or a log is replaced."""
    answer = await app.post("/area", {"box": {"width": 1}}, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    failed = await app.post("/boom", headers={"x-request-id": "mine-2"})
    assert failed.headers["x-request-id"] == failed.json["error"]["request_id"] == "mine-2"
    answer = await app.post("/area", {"box": {"width": 1}}, headers={"x-request-id": "é" * 200})
    assert answer.headers["x-request-id"].isalnum()


async def test_msgpack_with_arrays(app):
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    body = pack({"values": values})
    answer = await app.call("POST", "/double", body=body, headers=MSGPACK)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/msgpack"
    np.testing.assert_array_equal(unpack(answer.body), values * 2)


async def test_raw_bytes(app):
    data = bytes(range(256)) * 300
    answer = await app.call("POST", "/reverse", body=data, headers=BINARY)
    assert answer.status == 200, answer.body
    assert answer.body == data[::-1]
    assert answer.headers["content-type"] == "application/octet-stream"


async def test_npy_in_and_out(app):
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    buffer = io.BytesIO()
    np.save(buffer, values)
    answer = await app.call("POST", "/triple", body=buffer.getvalue(), headers=NPY)
    assert answer.status == 200, answer.body
    np.testing.assert_array_equal(np.load(io.BytesIO(answer.body), allow_pickle=False), values * 3)


@pytest.mark.parametrize("path", ["/count", "/count_sync"])
async def test_server_sent_events(app, path):
    answer = await app.post(path, {"upto": 50})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.body.decode().split("\n\n")
    assert events[:50] == [f"data: {number}" for number in range(50)]
    assert events[50].startswith("event: end")


async def test_get(app):
    assert (await app.get("/greet?name=Ann%20B&times=2")).json == "hello Ann B hello Ann B"
    answer = await app.get("/greet?name=Ann&times=many")
    assert answer.status == 422
    assert answer.json["error"]["fields"][0]["path"] == "times"


async def test_a_client_s_own_batch(app):
    """One result or error for each item, in their order."""
    answer = await app.post("/root/batch", [4, -1, 9])
    assert answer.status == 200
    good, bad, other = answer.json
    assert (good, other) == ({"result": 2.0}, {"result": 3.0})
    assert "-1" in bad["error"]["message"]


async def test_seven_good_and_one_bad(app):
    """In one batch: the bad one fails alone."""
    answers = await asyncio.gather(*(app.post("/root", x) for x in [1, 4, 9, 16, 25, 36, 49, -1]))
    assert [a.status for a in answers] == [200] * 7 + [422]
    assert [a.json for a in answers[:7]] == [1, 2, 3, 4, 5, 6, 7]


async def test_each_item_has_its_own_context(app):
    """In a batch of many callers, everyone's headers and id are their own."""

    async def ask(number):
        headers = {"x-name": f"name{number}", "x-request-id": f"id{number}"}
        return (await app.post("/who", number, headers=headers)).json

    answers = await asyncio.gather(*(ask(number) for number in range(40)))
    assert answers == [f"{n} id{n} name{n}" for n in range(40)]


async def test_rows_of_many_callers(app):
    """5 clients with 32 rows each: everyone gets their own, no batch is over 32 rows."""

    async def ask(number):
        values = np.full((32, 2), number, dtype=np.float32)
        body = pack(values)
        answer = await app.call("POST", "/rows", body=body, headers=MSGPACK)
        assert answer.status == 200, answer.body
        np.testing.assert_array_equal(unpack(answer.body), values * 2)

    await asyncio.gather(*(ask(number) for number in range(5)))
    sizes = [int(line.split()[1]) for line in app.traced() if line.startswith("rows")]
    assert sum(sizes) == 160
    assert max(sizes) <= 32


async def test_more_rows_than_a_batch_takes(app):
    body = pack(np.zeros((33, 2), dtype=np.float32))
    answer = await app.call("POST", "/rows", body=body, headers=MSGPACK)
    assert answer.status == 200


async def test_a_bucketing_callback_that_raises(app):
    """Fails the call that it raised for, and no other."""
    texts = ["a", "bad", "b", "c"]
    answers = await asyncio.gather(*(app.post("/upper", text) for text in texts))
    assert [a.status for a in answers] == [200, 500, 200, 200]
    assert (await app.post("/upper", "again")).json == "AGAIN"


async def test_not_found(app):
    answer = await app.post("/aera", {})
    assert answer.status == 404
    assert "'/area'" in answer.json["error"]["message"]


async def test_wrong_method(app):
    answer = await app.get("/area")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    answer = await app.post("/greet", {})
    assert (answer.status, answer.headers["allow"]) == (405, "GET")


async def test_too_large_by_length(app):
    """Refused on the word of the header, before the body is there."""
    async with await Http.open(app.url) as http:
        headers = {"content-length": str(2**20 + 1), "content-type": "application/json"}
        await http.send("POST", "/area", headers=headers)
        assert (await http.answer()).status == 413
    await lives(app)


async def test_too_large_in_chunks(app):
    """A body without a length, that goes on and on, is cut off."""
    async with await Http.open(app.url) as http:
        http.writer.write(
            b"POST /area HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        answer = asyncio.create_task(http.answer())
        for _ in range(64):
            try:
                http.writer.write(chunk)
                await http.writer.drain()
            except OSError:
                break
            if answer.done():
                break
        assert (await answer).status == 413
    await lives(app)


@pytest.mark.parametrize("media", ["application/xml", "text/csv", "application/python-pickle"])
async def test_unknown_media_type(app, media):
    answer = await app.post("/area", {}, headers={"content-type": media})
    assert answer.status == 415


async def test_an_answer_that_nobody_takes(app):
    answer = await app.post("/area", {"box": {"width": 1}}, headers={"accept": "image/png"})
    assert answer.status in (406, 415)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/area", {"box": {"width": -1}}, "box.width"),
        ("/area", {"box": {"width": "wide"}}, "box.width"),
        ("/area", {"box": {"width": 1, "tags": ["a", 2]}}, "box.tags[1]"),
        ("/area", {"box": {"width": 1}, "times": 1.5}, "times"),
        ("/area", {}, "box"),
        ("/whole", [1, "two"], "[1]"),
        ("/double", {"values": [[1, 2, 3]]}, "values"),
    ],
)
async def test_invalid_input_names_the_field(app, path, body, field):
    answer = await app.post(path, body)
    assert answer.status == 422, answer.body
    assert answer.json["error"]["fields"][0]["path"] == field


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b'{"box": {"width": 1}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"box": ' * 100_000,
        b'{"box": {"width": \xff}}',
        b'{"box": {"width": "\\ud800"}}',
        b"nonsense",
    ],
)
async def test_a_body_that_is_no_json(app, body):
    """Refused, and the replica is alive after it; also for arrays 10^5 deep."""
    before = await app.replicas("Http")
    for path in ("/area", "/whole", "/root/batch"):
        answer = await app.call("POST", path, body=body)
        assert answer.status in (400, 422), (path, answer)
        assert body[:1] != b"{" or len(body) > 30 or answer.status == 400
    await lives(app)
    assert await app.replicas("Http") == before


@pytest.mark.parametrize(
    "body", [b"\x91" * 100_000, b"\xc1", b"", b"\xdf\xff\xff\xff\xff", b"\x81\xa3box"]
)
async def test_a_body_that_is_no_msgpack(app, body):
    answer = await app.call(
        "POST", "/area", body=body, headers={"content-type": "application/msgpack"}
    )
    assert answer.status in (400, 422)
    await lives(app)


async def test_numbers_that_json_does_not_have(app):
    """NaN and what is too large for a float are refused, and never sent."""
    for text in (b"NaN", b"1e400", b"-Infinity"):
        answer = await app.call("POST", "/area", body=b'{"box": {"width": %b}}' % text)
        assert answer.status in (400, 422), text
    answer = await app.post("/nan")
    assert answer.status == 500
    assert answer.json["error"]["code"] == "invalid_output"


async def test_an_exception_is_masked(app):
    """The caller learns that it failed; only the log says more."""
    answer = await app.post("/boom", headers={"x-request-id": "find-me"})
    assert answer.status == 500
    assert b"secret" not in answer.body
    await until(lambda: any("find-me" in x and "secret" in x for x in app.lines), "the log has it")


async def test_a_full_queue(app):
    """429 at once, with a time to come back; those that were taken are answered."""
    first = asyncio.create_task(app.post("/narrow/hold", {"name": "a"}))
    await until(lambda: "hold a" in app.traced(), "a runs")
    second = asyncio.create_task(app.post("/narrow/hold", {"name": "b"}))

    async def queued():
        return await app.total("servekit_queued", 'service="Narrow"') == 1

    await until(queued, "b waits")
    refused = await app.post("/narrow/hold", {"name": "c"})
    assert refused.status == 429
    assert refused.reason == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    for name in ("a", "b"):
        app.let_go(name)
    assert [a.json for a in await asyncio.gather(first, second)] == ["a", "b"]
    assert "hold c" not in app.traced()


@pytest.mark.parametrize("limit", ["0.5", "0.5s", "500ms"])
async def test_the_caller_s_deadline(app, limit):
    """3 s of work with 0.5 s to do it: 504 at the deadline, not at the end of the work."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    answer = await app.post("/sleep", {"seconds": 3}, headers={"x-servekit-timeout": limit})
    took = loop.time() - began
    if limit == "0.5" and answer.status == 400:
        assert "5s" in answer.json["error"]["message"]  # it says how to write one
        return
    assert answer.status == 504
    assert answer.json["error"]["code"] == "deadline_exceeded"
    assert took < 2.9


@pytest.mark.parametrize("limit", ["-1s", "0", "soon", "nan", "1e999s"])
async def test_a_deadline_that_is_none(app, limit):
    answer = await app.post("/area", {"box": {"width": 1}}, headers={"x-servekit-timeout": limit})
    assert answer.status == 400


async def test_an_error_before_the_first_chunk(app):
    """Has a status of its own."""
    answer = await app.post("/fails_at", {"chunk": 0})
    assert answer.status == 422
    assert answer.json["error"]["message"] == "no more"


async def test_an_error_behind_the_first_chunk(app):
    """Becomes an event, as the status is already there; masked as any other."""
    answer = await app.post("/fails_at", {"chunk": 2}, headers={"x-request-id": "half"})
    assert answer.status == 200
    first, second, last, _ = answer.body.decode().split("\n\n")
    assert (first, second) == ("data: 0", "data: 1")
    assert last.startswith("event: error\ndata: ")
    error = json.loads(last.partition("data: ")[2])["error"]
    assert (error["code"], error["request_id"]) == ("execution_error", "half")
    assert "secret" not in last


async def test_large_headers(app):
    """64 KiB of headers is the limit: above it the connection is refused."""
    answer = await app.post("/area", {"box": {"width": 1}}, headers={"x-big": "a" * 30_000})
    assert answer.status == 200
    async with await Http.open(app.url) as http:
        try:
            async with asyncio.timeout(10):
                headers = {f"x-big-{n}": "a" * 10_000 for n in range(30)}
                answer = await http.call("POST", "/area", body=b"{}", headers=headers)
        except (OSError, EOFError):
            pass
        else:
            assert answer.status in (400, 431)
    await lives(app)


async def test_pickle_is_refused(app, tmp_path):
    """At the front door, and at every socket behind it."""
    harm = tmp_path / "harm"

    class Bomb:
        def __reduce__(self):
            return (open, (str(harm), "w"))

    bomb = pickle.dumps(Bomb())
    for media in (
        "application/python-pickle",
        "application/x-pickle",
        "application/json",
        "application/msgpack",
    ):
        for path in ("/area", "/root", "/root/batch"):
            answer = await app.call("POST", path, body=bomb, headers={"content-type": media})
            assert answer.status in (400, 415, 422), (media, path)
    buffer = io.BytesIO()
    array = np.empty(1, dtype=object)
    array[0] = Bomb()
    np.save(buffer, array, allow_pickle=True)
    answer = await app.call("POST", "/triple", body=buffer.getvalue(), headers=NPY)
    assert answer.status in (400, 415, 422)
    sockets = app.sockets()
    if RAY:  # which has some for its gateways and its controller, too
        assert len(sockets) > 3
    else:
        assert len(sockets) == 3  # two replicas and the supervisor
    for path in sockets:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(bomb * 20)
        async with asyncio.timeout(20):
            with pytest.raises((OSError, EOFError)):
                while True:
                    await reader.readexactly(1)
        writer.close()
    assert not harm.exists()
    await lives(app)


async def test_sockets_are_private(app):
    """Only this user can reach what is behind the front door."""
    folder = app.folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.glob("*.sock"):
        assert path.stat().st_mode & 0o177 == 0, path


async def test_pages(app):
    """The document, the docs page and the probes are there; the playground only in `dev`."""
    document = (await app.get("/openapi.json")).json
    assert {"/area", "/root", "/root/batch", "/greet", "/narrow/hold"} <= document["paths"].keys()
    for path in ("/docs", "/livez", "/readyz", "/startupz", "/metrics"):
        assert (await app.get(path)).status == 200, path
    assert (await app.get("/playground")).status == 404
    assert msgspec.json.decode((await app.get("/openapi.json")).body)["openapi"].startswith("3.1")


async def test_half_a_request_and_nonsense(app):
    """A client that speaks no HTTP, or leaves in the middle, harms nobody."""
    for data in (b"\x00\xff" * 100, b"GET\r\n\r\n", b"POST /area HTTP/1.1\r\ncontent-le"):
        async with await Http.open(app.url) as http:
            http.writer.write(data)
            await http.writer.drain()
            http.abort()
    async with await Http.open(app.url) as http:
        await http.send("POST", "/area", headers={"content-length": "100"}, body=b"")
        http.writer.write(b'{"box"')
        await http.writer.drain()
        http.abort()
    await lives(app)
