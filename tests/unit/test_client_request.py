"""From arguments to requests: what the gateway, or a form's parser, reads back is what was given."""

import asyncio
import io
from enum import Enum
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse
from starlette.routing import Route

from servekit.client.request import Outgoing, encoded, with_query
from servekit.core.call import BINARY, JSON, MSGPACK, NPY, now
from servekit.gateway.request import query_document
from servekit.spec.body import unpack

SCHEMAS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "maybe_flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "numbers": {"type": "array", "items": {"type": "integer"}},
    "words": {"type": "array", "items": {"type": "string"}},
    "raw": {"type": "string", "contentEncoding": "base64"},
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "text": TEXT,
            "count": st.integers(-(2**63), 2**63 - 1),
            "share": st.floats(allow_nan=False, allow_infinity=False),
            "flag": st.booleans(),
            "maybe": st.none() | st.integers(-(2**63), 2**63 - 1),
            "maybe_flag": st.none() | st.booleans(),
            "numbers": st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
            "words": st.lists(TEXT, min_size=1),
        },
    )
)
def test_the_gateway_reads_a_query_back(arguments):
    path = with_query("/find", arguments)
    document = query_document(urlsplit(path).query.encode(), {"properties": SCHEMAS})
    assert msgspec.json.decode(document) == arguments


def test_what_else_a_query_takes():
    class Color(Enum):
        RED = "red"

    path = with_query("/find", {"raw": b"\x00\xff", "color": Color.RED, "many": (1, 2), "no": []})
    assert path == "/find?raw=AP8%3D&color=red&many=1&many=2"
    assert with_query("/find", {}) == "/find"


@pytest.mark.parametrize("value", [{"a": 1}, [[1]], np.zeros(3), object()])
def test_what_a_query_does_not_take(value):
    with pytest.raises(TypeError, match="wrong="):
        with_query("/find", {"wrong": value})


# -- bodies


def test_bodies_choose_their_media_type(tmp_path):
    array = np.arange(3, dtype=np.float32)
    assert encoded((), {"a": 1}) == (JSON, b'{"a":1}')
    assert encoded(([1],), {}) == (JSON, b"[1]")
    assert encoded((b"\x00",), {}) == (BINARY, b"\x00")
    kind, body = encoded((), {"x": array})
    assert kind == MSGPACK
    np.testing.assert_array_equal(unpack(body)["x"], array)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.jpg", BINARY), ("a.npy", NPY), ("a.json", JSON), ("a.msgpack", MSGPACK), ("a", BINARY)],
)
def test_a_file_is_a_body_as_it_is(tmp_path, name, kind):
    path = tmp_path / name
    path.write_bytes(b"\x00{")
    assert encoded((path,), {}) == (kind, b"\x00{")
    with path.open("rb") as file:
        assert encoded((file,), {}) == (kind, b"\x00{")
    assert encoded((io.BytesIO(b"\x01"),), {}) == (BINARY, b"\x01")


def test_files_that_give_no_bytes(tmp_path):
    with pytest.raises(TypeError, match="mode 'rb'"):
        encoded((io.StringIO("text"),), {})
    with pytest.raises(FileNotFoundError):
        encoded((tmp_path / "missing",), {})
    with pytest.raises(TypeError, match="holds a int"):
        encoded((), {"images": [io.BytesIO(b"a"), 3]})


def parsed(content_type: str, body: bytes) -> dict:
    """Return what Starlette's parser finds in a form."""

    async def echo(request):
        found = {}
        async with request.form() as form:
            for name, part in form.multi_items():
                if isinstance(part, UploadFile):
                    value = ["file", part.filename, part.content_type, (await part.read()).hex()]
                else:
                    value = ["json", msgspec.json.decode(part)]
                found.setdefault(name, []).append(value)
        return JSONResponse(found)

    async def ask():
        transport = httpx.ASGITransport(Starlette(routes=[Route("/", echo, methods=["POST"])]))
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            return await client.post("/", content=body, headers={"content-type": content_type})

    return asyncio.run(ask()).json()


def test_files_among_arguments_make_a_form(tmp_path):
    path = tmp_path / "my cat.jpg"
    path.write_bytes(b"\xff\xd8")
    content_type, body = encoded(
        (),
        {
            "image": path,
            "more": [io.BytesIO(b"a"), path],
            "k": 3,
            "name": 'é "q"',
            "options": {"deep": [None, True]},
            "vector": np.arange(2),
        },
    )
    assert content_type.startswith("multipart/form-data; boundary=")
    assert parsed(content_type, body) == {
        "image": [["file", "my cat.jpg", "image/jpeg", "ffd8"]],
        "more": [
            ["file", "more", "application/octet-stream", "61"],
            ["file", "my cat.jpg", "image/jpeg", "ffd8"],
        ],
        "k": [["json", 3]],
        "name": [["json", 'é "q"']],
        "options": [["json", {"deep": [None, True]}]],
        "vector": [["json", [0, 1]]],
    }
    assert b"content-type: application/json" in body.lower()


def test_a_part_that_has_no_form():
    with pytest.raises(TypeError, match="beside a file"):
        encoded((), {"image": io.BytesIO(b"a"), "thing": object()})


# -- time


def test_the_time_left_is_never_nothing():
    call = Outgoing("GET", "/", {"a": "b"}, deadline=now() - 5)
    assert call.headers_now() == {"a": "b", "x-servekit-timeout": "0.001s"}
    assert Outgoing("GET", "/", {"a": "b"}).headers_now() == {"a": "b"}


def test_a_limit_that_was_given_is_kept():
    call = Outgoing("GET", "/", {"x-servekit-timeout": "5s"}, deadline=now() + 60)
    assert call.headers_now() == {"x-servekit-timeout": "5s"}
