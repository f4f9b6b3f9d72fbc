"""Forms, files, images and tables: as bodies, as parts of forms, in JSON, and between services."""

import base64
import contextlib
import io
import struct
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageChops

import servekit as sk
from servekit.errors import SpecError
from servekit.protocols.openapi import document
from servekit.spec import image as image_module
from servekit.spec.describe import describe
from servekit.spec.form import document as form_document
from servekit.spec.table import is_compressed
from tests.serving import served

pytestmark = pytest.mark.slow

Grid = Annotated[NDArray[np.float32], sk.Array["float32", "N 2"]]


@sk.service
class Keeper:
    @sk.endpoint
    async def sizes(self, files: list[sk.File]) -> list[str]:
        return [f"{f.name}|{f.content_type}|{f.size}|{len(f.read())}" for f in files]

    @sk.endpoint
    async def flip(self, image: Image.Image) -> Image.Image:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)

    @sk.endpoint
    async def head(self, table: pd.DataFrame) -> pa.Table:
        return pa.Table.from_pandas(table.head(1))


@sk.service(limits=sk.Limits(max_body="4MiB"))
class Desk:
    keeper = sk.depends(Keeper)

    @sk.endpoint
    def upload(self, image: sk.File, top: int = 3, note: str | None = None) -> dict[str, str]:
        kind = type(image.file).__name__
        disk = kind == "SpooledTemporaryFile" and image.file._rolled  # type: ignore[attr-defined]
        return {
            "name": image.name,
            "type": image.content_type,
            "size": str(len(image.read())),
            "top": repr(top),
            "note": repr(note),
            "disk": str(disk),
        }

    @sk.endpoint
    async def many(self, files: list[sk.File], tags: list[str]) -> list[str]:
        return [f.name for f in files] + tags

    @sk.endpoint
    async def whole(self, file: sk.File, /) -> str:
        return f"{file.content_type} {file.size} {file.read(2)!r}"

    @sk.endpoint
    async def mixed(
        self, data: bytes, image: Image.Image, grid: Grid, table: pd.DataFrame, deep: dict[str, int]
    ) -> str:
        return f"{data!r} {image.size} {grid.tolist()} {table.to_dict('list')} {deep}"

    @sk.endpoint
    async def picture(self, image: Image.Image, /) -> Image.Image:
        return image.convert("RGB") if image.mode == "P" else image

    @sk.endpoint
    async def mode(self, image: Image.Image, /) -> str:
        return f"{image.mode} {image.size}"

    @sk.endpoint
    def rows(self, table: pd.DataFrame, /) -> pd.DataFrame:
        return table

    @sk.endpoint
    def arrow(self, table: pa.Table, /) -> pa.Table:
        return table

    @sk.endpoint
    async def shout(self, text: str, /) -> str:
        return text.upper()

    @sk.endpoint
    async def wrong(self) -> Image.Image:
        return b"no image"  # type: ignore[return-value]


def png(size: tuple[int, int] = (3, 2), mode: str = "RGB") -> bytes:
    into = io.BytesIO()
    Image.new(mode, size, 1).save(into, format="PNG")
    return into.getvalue()


def arrow(table: pa.Table, **options) -> bytes:
    into = io.BytesIO()
    with pa.ipc.new_stream(into, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(table)
    return into.getvalue()


# -- forms


@pytest.mark.parametrize("size", [0, 10, 1_000_000, 2_000_000])
async def test_a_file_of_a_form_lies_on_disk_when_it_is_large(size: int):
    async with served(Desk) as app:
        files = {"image": ("a b.png", b"x" * size, "image/png")}
        response = await app.http.post("/upload", files=files, data={"top": "7", "note": "12"})
        assert response.json() == {
            "name": "a b.png",
            "type": "image/png",
            "size": str(size),
            "top": "7",
            "note": "'12'",
            "disk": str(size > 1 << 20),
        }
        await app.idle()


async def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with served(Desk) as app:
        files = {"image": ("a", b"x" * 2_000_000)}
        assert (await app.http.post("/upload", files=files)).status_code == 200
        await app.idle()
    assert list(tmp_path.iterdir()) == []


async def test_names_that_repeat_make_lists():
    async with served(Desk) as app:
        files = [("files", ("a", b"1")), ("files", ("b", b"2"))]
        response = await app.http.post("/many", files=files, data={"tags": ["x", "y"]})
        assert response.json() == ["a", "b", "x", "y"]
        response = await app.http.post("/many", files=files[:1], data={"tags": "x"})
        assert response.json() == ["a", "x"]


async def test_every_type_may_be_a_part_of_a_form():
    grid = io.BytesIO()
    np.save(grid, np.ones((1, 2), np.float32))
    files = {
        "data": ("d", b"\x00\xff"),
        "image": ("i.png", png(), "image/png"),
        "grid": ("g.npy", grid.getvalue(), "application/x-npy"),
        "table": ("t.csv", b"a,b\n1,x\n", "text/csv"),
    }
    async with served(Desk) as app:
        response = await app.http.post("/mixed", files=files, data={"deep": '{"n": 1}'})
        assert response.json() == (
            r"b'\x00\xff' (3, 2) [[1.0, 1.0]] {'a': [1], 'b': ['x']} {'n': 1}"
        )
        files["grid"] = ("g", b"junk", "application/x-npy")
        files["table"] = ("t.csv", b"\x00\x01", "application/vnd.apache.arrow.stream")
        response = await app.http.post("/mixed", files=files, data={"deep": "1"})
        paths = [field["path"] for field in response.json()["error"]["fields"]]
        assert (response.status_code, paths) == (422, ["grid", "table", "deep"])


@pytest.mark.parametrize(
    ("data", "path"),
    [({"top": "x"}, "top"), ({"top": "1.5"}, "top"), ({"none": "1"}, "none"), ({"top": ""}, "top")],
)
async def test_a_wrong_field_is_named(data: dict[str, str], path: str):
    async with served(Desk) as app:
        response = await app.http.post("/upload", files={"image": ("a", b"1")}, data=data)
        assert response.status_code == 422
        assert [field["path"] for field in response.json()["error"]["fields"]] == [path]


BOUNDARY = {"content-type": "multipart/form-data; boundary=b"}
PART = b'--b\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\nxx\r\n'


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"content-type": "multipart/form-data"}, PART + b"--b--\r\n"),
        ({"content-type": "multipart/form-data; boundary=" + "x" * 300}, PART + b"--b--\r\n"),
        (BOUNDARY, b"no form at all"),
        (BOUNDARY, b"--b\r\nno header\r\n\r\nxx\r\n--b--\r\n"),
        (BOUNDARY, b"--b\r\ncontent-disposition: form-data\r\n\r\nxx\r\n--b--\r\n"),
        (BOUNDARY, b"--b\r\n" + b"x: " + b"y" * 100_000 + b"\r\n\r\nxx\r\n--b--\r\n"),
        (
            BOUNDARY,
            b"".join(b"--b\r\nx-%d: y\r\n" % n for n in range(5000)) + b"\r\nx\r\n--b--\r\n",
        ),
        (BOUNDARY, b"".join(PART.replace(b"image", b"f%d" % n) for n in range(1500)) + b"--b--"),
        (
            BOUNDARY,
            b"".join(
                b'--b\r\ncontent-disposition: form-data; name="f%d"\r\n\r\nx\r\n' % n
                for n in range(1500)
            )
            + b"--b--\r\n",
        ),
        (
            BOUNDARY,
            b'--b\r\ncontent-disposition: form-data; name="note"\r\n\r\n'
            + b"x" * 2_000_000
            + b"\r\n--b--\r\n",
        ),
    ],
)
async def test_what_is_no_form_is_a_bad_request_and_the_next_one_works(headers, body):
    async with served(Desk) as app:
        response = await app.http.post("/upload", content=body, headers=headers)
        assert response.status_code in (400, 422)
        assert response.json()["error"]["request_id"]
        response = await app.http.post("/upload", content=PART + b"--b--\r\n", headers=BOUNDARY)
        assert response.json()["size"] == "2"
        await app.idle()


async def test_a_form_without_its_end_is_not_taken_for_a_whole_one():
    async with served(Desk) as app:
        response = await app.http.post("/upload", content=PART[:-4], headers=BOUNDARY)
        assert response.status_code == 400
        assert "breaks off" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/upload", "/whole"])
@pytest.mark.parametrize("declared", [True, False])
async def test_a_form_or_file_over_the_limit_is_refused(path: str, declared: bool):
    body = PART.replace(b"xx", b"x" * (4 << 20)) + b"--b--\r\n"

    async def pieces():
        for at in range(0, len(body), 100_000):
            yield body[at : at + 100_000]

    headers = BOUNDARY if path == "/upload" else {"content-type": "video/mp4"}
    async with served(Desk) as app:
        content = body if declared else pieces()
        response = await app.http.post(path, content=content, headers=headers)
        assert response.status_code == 413
        await app.idle()


async def test_a_name_that_looks_like_a_path_is_only_a_name():
    async with served(Desk) as app:
        files = {"image": ("../../etc/passwd", b"1")}
        assert (await app.http.post("/upload", files=files)).json()["name"] == "../../etc/passwd"


async def test_a_stand_in_that_a_client_makes_up_stands_for_nothing():
    async with served(Desk) as app:
        body = {"image": {"$servekit:segment": 1}}
        response = await app.http.post("/upload", json=body)
        assert response.status_code == 422


@given(
    st.lists(st.tuples(st.sampled_from(["a", "n", "xs", "u"]), st.text(max_size=12)), max_size=6)
)
def test_any_fields_make_a_document(fields):
    schema = {
        "properties": {
            "a": {"type": "string"},
            "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "xs": {"type": "array", "items": {"type": "number"}},
        }
    }
    (data,) = form_document(fields, schema)
    assert isinstance(data, bytes)


# -- whole files


@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream", "video/mp4"])
async def test_a_file_may_be_the_body(kind: str):
    async with served(Desk) as app:
        for size in (2, 70_000, 3_000_000):
            response = await app.http.post(
                "/whole", content=b"x" * size, headers={"content-type": kind}
            )
            assert response.json() == f"{kind} {size} b'xx'"
        response = await app.http.post("/whole", json=base64.b64encode(b"abc").decode())
        assert response.json() == "application/octet-stream 3 b'ab'"
        await app.idle()


async def test_files_go_on_to_other_services(tmp_path: Path):
    (tmp_path / "b.txt").write_bytes(b"12345")
    with sk.local(Keeper) as keeper:
        a = sk.File(b"123", name="a", content_type="text/plain")
        with sk.File.open(tmp_path / "b.txt") as b:
            assert await keeper.sizes.remote([a, b]) == [
                "a|text/plain|3|3",
                "b.txt|application/octet-stream|5|5",
            ]


def test_a_file_can_be_saved_and_read_again(tmp_path: Path):
    with sk.File(b"abc", name="x") as file:
        assert (file.read(1), file.read()) == (b"a", b"bc")
        file.save(tmp_path / "copy")
        assert repr(file) == "File('x', 'application/octet-stream', 3 bytes)"
    assert (tmp_path / "copy").read_bytes() == b"abc"
    assert file.file.closed


# -- images


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
async def test_images_of_all_formats_are_read(name: str):
    into = io.BytesIO()
    Image.new("RGB", (5, 4)).save(into, format=name)
    async with served(Desk) as app:
        for kind in (f"image/{name.lower()}", "application/octet-stream"):
            response = await app.http.post(
                "/mode", content=into.getvalue(), headers={"content-type": kind}
            )
            assert response.json().endswith("(5, 4)")


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "image/png"),
        ("image/*", "image/png"),
        ("image/webp,image/png;q=0.5", "image/webp"),
        ("image/jpeg", "image/jpeg"),
        ("application/json", "application/json"),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
async def test_the_client_chooses_the_format_of_an_answer(accept: str, kind: str, mode: str):
    async with served(Desk) as app:
        headers = {"content-type": "image/png", "accept": accept}
        response = await app.http.post("/picture", content=png(mode=mode), headers=headers)
        assert response.headers["content-type"] == kind
        data = response.content
        if kind == "application/json":
            data = base64.b64decode(response.json())
        assert Image.open(io.BytesIO(data)).size == (3, 2)


def bomb(width: int, height: int) -> bytes:
    """Return the head of a PNG that claims to be that large."""
    data = png()
    return data[:16] + struct.pack(">II", width, height) + data[24:]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        png((50, 50))[:60],
        bomb(100_000, 100_000),
        b"\x89PNG\r\n\x1a\n" + b"\0" * 50,
        b"GIF89a",
    ],
)
async def test_what_is_no_image_is_refused(body: bytes):
    async with served(Desk) as app:
        response = await app.http.post("/mode", content=body, headers={"content-type": "image/png"})
        assert response.status_code == 422
        assert response.json()["error"]["fields"][0]["type"].startswith("image_")
        assert (await app.http.post("/shout", json="x")).text == '"X"'


async def test_an_image_over_the_limit_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(image_module, "MAX_PIXELS", 5)
    async with served(Desk) as app:
        response = await app.http.post(
            "/mode", content=png((3, 2)), headers={"content-type": "image/png"}
        )
        assert response.json()["error"]["fields"][0]["type"] == "image_size"


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I", "F", "CMYK"])
async def test_images_of_all_modes_go_between_services(mode: str):
    if mode in ("LA", "CMYK", "F"):
        given = Image.new("RGBA" if mode == "LA" else "RGB", (7, 5), (1, 2, 3)).convert(mode)
    else:
        given = Image.effect_noise((7, 5), 50).convert(mode)
    with sk.local(Keeper) as keeper:
        flipped = await keeper.flip.remote(given)
    wanted = given.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert (flipped.mode, flipped.size) == (wanted.mode, wanted.size)
    assert ImageChops.difference(flipped.convert("RGBA"), wanted.convert("RGBA")).getbbox() is None


async def test_an_answer_that_is_no_image_is_an_error():
    async with served(Desk) as app:
        response = await app.http.post("/wrong")
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "invalid_output"


# -- tables


TABLE = pa.table({"a": [1, 2, None], "b": ["x", "y", "z"], "c": [1.5, None, 2.5]})


@pytest.mark.parametrize("path", ["/rows", "/arrow"])
@pytest.mark.parametrize("accept", ["application/vnd.apache.arrow.stream", "text/csv", "*/*"])
async def test_tables_come_and_go_in_all_forms(path: str, accept: str):
    csv = b"a,b,c\n1,x,1.5\n2,y,\n,z,2.5\n"
    kinds = {"application/vnd.apache.arrow.stream": arrow(TABLE), "text/csv": csv}
    async with served(Desk) as app:
        for kind, body in kinds.items():
            headers = {"content-type": kind, "accept": accept}
            response = await app.http.post(path, content=body, headers=headers)
            if accept == "text/csv":
                assert response.text.splitlines()[0] == '"a","b","c"'
                assert len(response.text.splitlines()) == 4
            elif accept == "*/*":
                assert response.json()[1]["b"] == "y"
                assert response.json()[1]["c"] is None
            else:
                assert pa.ipc.open_stream(response.content).read_all().num_rows == 3
        response = await app.http.post(path, json=[{"a": 1}, {"a": None}])
        assert [row["a"] for row in response.json()] == [1, None]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/vnd.apache.arrow.stream", b""),
        ("application/vnd.apache.arrow.stream", b"junk" * 10),
        ("application/vnd.apache.arrow.stream", arrow(TABLE)[:-60]),
        ("application/vnd.apache.arrow.stream", b"\xff\xff\xff\xff\xf0\xff\xff\x7f" + b"x" * 50),
        ("text/csv", b""),
        ("text/csv", b"a,b\n1\n"),
        ("text/csv", b"\xff\xfe\x00"),
        ("application/json", b"{}"),
        ("application/json", b"[1]"),
        ("application/json", b'[{"a":1},{"a":"x"}]'),
        ("application/json", b'[{"a":1},[]]'),
    ],
)
async def test_what_is_no_table_is_refused(kind: str, body: bytes):
    async with served(Desk) as app:
        response = await app.http.post("/arrow", content=body, headers={"content-type": kind})
        assert response.status_code == 422, response.text
        assert response.json()["error"]["fields"][0]["type"].startswith("table_")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
async def test_a_compressed_stream_is_refused_before_it_is_unpacked(codec: str):
    body = arrow(pa.table({"a": [0] * 100_000}), compression=codec)
    headers = {"content-type": "application/vnd.apache.arrow.stream"}
    async with served(Desk) as app:
        response = await app.http.post("/arrow", content=body, headers=headers)
        assert response.json()["error"]["fields"][0]["type"] == "table_compressed"


def test_compression_is_found_in_dictionaries_too():
    table = pa.table({"a": pa.array(["x" * 50] * 1000).dictionary_encode()})
    found = [
        [
            is_compressed(message.metadata.to_pybytes())
            for message in pa.ipc.MessageReader.open_stream(arrow(table, compression=codec))
        ]
        for codec in (None, "zstd")
    ]
    assert found == [[False, False, False], [False, True, True]]


@given(st.binary(max_size=120), st.integers(0, 400))
def test_no_metadata_makes_the_look_at_it_fail_otherwise(noise: bytes, at: int):
    message = next(iter(pa.ipc.MessageReader.open_stream(arrow(TABLE))))
    data = message.metadata.to_pybytes()
    broken = data[:at] + noise + data[at + len(noise) :]
    with contextlib.suppress(struct.error, IndexError):
        assert is_compressed(broken) in (True, False)


async def test_tables_go_between_services():
    with sk.local(Keeper) as keeper:
        frame = pd.DataFrame({"a": [1, 2], "b": ["x", None]})
        head = await keeper.head.remote(frame)
        assert head.to_pylist() == [{"a": 1, "b": "x"}]


# -- text


async def test_text_comes_and_goes_without_quotes_for_those_who_say_so():
    async with served(Desk) as app:
        headers = {"content-type": "text/plain; charset=utf-8", "accept": "text/plain"}
        response = await app.http.post("/shout", content="grüße".encode(), headers=headers)
        assert (response.text, response.headers["content-type"]) == ("GRÜSSE", "text/plain")
        assert (await app.http.post("/shout", json="a")).text == '"A"'
        response = await app.http.post("/shout", content=b"\xff", headers=headers)
        assert response.status_code == 422


# -- the document, and mistakes


def test_the_document_has_forms_and_media_types():
    paths = document(describe(Desk))["paths"]
    upload = paths["/upload"]["post"]["requestBody"]["content"]
    fields = upload["multipart/form-data"]["schema"]["properties"]
    assert fields["image"]["contentMediaType"] == "application/octet-stream"
    assert fields["top"]["default"] == 3
    assert "multipart/form-data" not in paths["/shout"]["post"]["requestBody"]["content"]
    assert next(iter(paths["/picture"]["post"]["requestBody"]["content"])) == "image/png"
    assert "text/csv" in paths["/rows"]["post"]["responses"]["200"]["content"]


def test_a_table_without_pyarrow_is_the_authors_mistake(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SpecError, match="pip install pyarrow"):

        @sk.service
        class Tables:
            @sk.endpoint
            def f(self, t: pd.DataFrame) -> int:
                return 1

        describe(Tables)
