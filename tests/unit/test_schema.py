"""Schemas: signatures in, payloads to arguments and results to payloads."""

import base64
import contextlib
import datetime as dt
import decimal
import enum
import json
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, Optional, TypedDict, TypeVar

import msgspec
import numpy as np
import pytest
import typing_extensions
from annotated_types import MaxLen
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, computed_field, field_validator

from servekit.core.call import BINARY, EMPTY, EVENT_STREAM, JSON, MSGPACK, NPY, Payload
from servekit.errors import (
    BadRequest,
    CallError,
    InvalidInput,
    InvalidOutput,
    SpecError,
    UnsupportedMedia,
)
from servekit.spec.array import Array
from servekit.spec.body import from_msgpack, media_type, negotiate
from servekit.spec.item import Item, ItemError
from servekit.spec.schema import endpoint_schemas
from servekit.spec.segment import KEY
from servekit.spec.tensor import ITEM_BYTES, write_npy
from tests.examples import examples

T = TypeVar("T")
Image = Array["float32", "N 3"]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Doc(BaseModel):
    text: str
    score: float = 0.0


class Odd(BaseModel):
    """Everything about a model that makes its JSON differ from its fields."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    size: int = Field(1, alias="theSize")
    data: bytes = b""
    image: Image | None = None

    @computed_field
    @property
    def double(self) -> int:
        return 2 * self.size


@dataclass
class Point:
    x: float
    y: float = 0.0
    tags: list[str] = field(default_factory=list)
    image: Image | None = None


class Row(typing_extensions.TypedDict):
    name: str
    data: bytes
    mask: typing_extensions.NotRequired[Array["bool", "N"]]


class OldRow(TypedDict):
    name: str


def body_of(hint, result=None):
    """Return the schemas of a method whose one parameter is the body."""

    def method(self, value, /): ...

    method.__annotations__ = {"value": hint, "return": hint if result is None else result}
    return endpoint_schemas(method, where="Svc.method")


def schemas(fn, **options):
    return endpoint_schemas(fn, where=f"Svc.{fn.__name__}", **options)


def as_json(value):
    return Payload(JSON, (json.dumps(value).encode(),))


def same(left, right):
    """Compare deeply: types, arrays with their dtypes, NaN equal to NaN."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and left.tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, BaseModel | Point):
        return same(vars(left), vars(right))
    return left == right


# ---- signatures


def test_keys_are_parameters():
    def predict(self, values: list[float], k: int = 3, *, mode: Literal["a", "b"] = "a") -> Doc: ...

    inputs, output = schemas(predict)
    assert inputs.json_schema["required"] == ["values"]
    assert inputs.json_schema["properties"]["k"]["default"] == 3
    assert inputs.json_schema["properties"]["mode"]["enum"] == ["a", "b"]
    assert inputs.json_schema["additionalProperties"] is False
    assert output.json_schema["properties"]["text"] == {"title": "Text", "type": "string"}
    assert inputs.decode(as_json({"values": [1, 2.5]})) == ((), {"values": [1.0, 2.5]})
    assert (inputs.form, output.form) == ("", "")


def test_a_positional_only_parameter_is_the_body():
    def predict(self, doc: Doc, /) -> None: ...

    inputs, _ = schemas(predict)
    assert inputs.decode(as_json({"text": "a"})) == ((Doc(text="a"),), {})
    assert inputs.json_schema["properties"].keys() == {"text", "score"}


def test_no_parameters():
    def size(self) -> int: ...

    inputs, output = schemas(size)
    assert inputs.decode(EMPTY) == inputs.decode(as_json({})) == ((), {})
    assert inputs.encode((), {}).segments == [b"{}"]
    assert output.decode(output.encode(3)) == 3
    with pytest.raises(InvalidInput, match="unknown field"):
        inputs.decode(as_json({"a": 1}))


def test_streams_have_the_schema_of_a_chunk():
    async def a(self) -> AsyncIterator[str]:
        yield ""

    async def b(self) -> AsyncGenerator[str, None]:
        yield ""

    def c(self) -> Iterator[str]: ...

    for fn in (a, b, c):
        _, output = schemas(fn)
        assert output.json_schema == {"type": "string"}
        assert output.encode("x", accept=EVENT_STREAM).segments == (b'"x"',)


def test_batched_methods_have_the_schema_of_an_item():
    def embed(self, texts: list[str]) -> list[NDArray[np.float32]]: ...
    def items(self, texts: Sequence[Item[Doc]]) -> Sequence[str | ItemError]: ...
    def wrapped(self, texts: list[str]) -> Coroutine[Any, Any, list[str]]: ...

    inputs, output = schemas(embed, batched="list")
    assert inputs.decode(as_json("a")) == (("a",), {})
    assert output.form == "array"
    inputs, output = schemas(items, batched="list")
    assert inputs.decode(as_json({"text": "a"})) == ((Doc(text="a"),), {})
    assert output.json_schema == {"type": "string"}
    assert schemas(wrapped, batched="list")[1].json_schema == {"type": "string"}


def test_batched_methods_with_several_lists():
    def rank(self, queries: list[str], docs: list[Doc]) -> list[float | None]: ...

    inputs, output = schemas(rank, batched="list")
    _, kwargs = inputs.decode(as_json({"queries": "a", "docs": {"text": "b"}}))
    assert kwargs == {"queries": "a", "docs": Doc(text="b")}
    assert inputs.encode(("a", Doc(text="b")), {}).segments[0].startswith(b'{"queries":"a"')
    assert output.encode(None).segments == (b"null",)


def test_batched_along_an_axis():
    def project(self, x: NDArray[np.float32]) -> Annotated[np.ndarray, Array["int8", "N"]]: ...

    inputs, output = schemas(project, batched="axis")
    assert (inputs.form, output.form) == ("array", "array")
    assert inputs.decode(as_json([[1, 2]]))[0][0].shape == (1, 2)


class Bad:
    def no_hint(self, x) -> int: ...
    def no_result(self, x: int): ...
    def args(self, *x: int) -> int: ...
    def kwargs(self, **x: int) -> int: ...
    def two_bodies(self, x: int, /, y: int) -> int: ...
    def unresolved(self, x: "Missing") -> int: ...
    def old_typed_dict(self, y: int, x: OldRow) -> int: ...
    def strange(self, x: object()) -> int: ...
    def callback(self, x: Callable[[], int]) -> int: ...
    def arbitrary(self, x: threading.Lock if False else type(iter([]))) -> int: ...
    def text_or_bytes(self, x: list[bytes | str]) -> int: ...
    def complex_array(self, x: list[NDArray[np.complex64]]) -> int: ...
    def bare_stream(self) -> AsyncIterator: ...

    def yields(self) -> int:
        yield 1


class BadBatch:
    def no_list(self, x: str) -> list[str]: ...
    def no_item(self, x: list) -> list[str]: ...
    def bare_item(self, x: list[Item]) -> list[str]: ...
    def no_result_list(self, x: list[str]) -> str: ...
    def default(self, x: list[str] = ()) -> list[str]: ...
    def nothing(self) -> list[str]: ...
    def stream(self, x: list[str]) -> Iterator[list[str]]: ...


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_hint", r"Svc\.no_hint\(x\): the type is missing; write x: str"),
        ("no_result", r"Svc\.no_result: the return type is missing"),
        ("args", r"Svc\.args\(\*x\): callers need names"),
        ("kwargs", r"Svc\.kwargs\(\*\*x\)"),
        ("two_bodies", r"Svc\.two_bodies\(x\): a positional-only parameter is the request body"),
        ("unresolved", r"Svc\.unresolved: the hint 'Missing' can't be resolved"),
        ("old_typed_dict", r"Svc\.old_typed_dict\(x\): .*from typing_extensions"),
        ("strange", r"Svc\.strange"),
        ("callback", r"Svc\.callback: .*JSON form"),
        ("arbitrary", r"Svc\.arbitrary\(x\): .*use builtins, dataclasses"),
        ("text_or_bytes", r"Svc\.text_or_bytes\(x\): bytes \| str can't be told apart"),
        ("complex_array", r"Svc\.complex_array\(x\): arrays of complex64"),
        ("bare_stream", r"Svc\.bare_stream: write what the stream yields"),
        ("yields", r"Svc\.yields: it yields, so"),
    ],
)
def test_signatures_refused(name, message):
    with pytest.raises(SpecError, match=message):
        schemas(getattr(Bad, name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_list", r"Svc\.no_list\(x\): a batched parameter is list\[X\]"),
        ("no_item", r"Svc\.no_item\(x\): a batched parameter is list\[X\]"),
        ("bare_item", r"write what an Item holds"),
        ("no_result_list", r"returns list\[Y\]"),
        ("default", r"can't have a default"),
        ("nothing", r"needs a parameter"),
        ("stream", r"can't stream"),
    ],
)
def test_batched_signatures_refused(name, message):
    with pytest.raises(SpecError, match=message):
        schemas(getattr(BadBatch, name), batched="list")


def test_an_axis_needs_arrays():
    with pytest.raises(SpecError, match=r"with axis= it must be an array"):
        schemas(BadBatch.no_list, batched="axis")


def test_plain_ndarray_in_a_dataclass_says_what_to_use():
    @dataclass
    class Holder:
        x: np.ndarray

    with pytest.raises(SpecError, match="Array for arrays"):
        body_of(Holder)


# ---- the caller's arguments


def test_arguments_are_bound_as_in_a_call():
    def f(self, a: int, b: int = 2, *, c: int = 3) -> None: ...

    inputs, _ = schemas(f)
    assert inputs.encode((1,), {"c": 4}).segments[0] == b'{"a":1,"c":4}'
    assert inputs.encode((), {"b": 1, "a": 2}).segments[0] == b'{"a":2,"b":1}'
    for args, kwargs, message in [
        ((1, 2, 3), {}, r"Svc\.f\(\) takes 2 positional arguments, got 3"),
        ((1,), {"a": 1}, "two values for 'a'"),
        ((), {}, "a: Field required"),
        ((1,), {"cc": 1}, "Did you mean 'c'"),
        (("1",), {}, "a: Input should be a valid integer, got '1'"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            inputs.encode(args, kwargs)


def test_a_body_is_bound_by_position():
    inputs, _ = body_of(int)
    for args, kwargs in [((), {}), ((1, 2), {}), ((), {"value": 1})]:
        with pytest.raises(InvalidInput, match=r"takes 1 positional argument \(value\)"):
            inputs.encode(args, kwargs)


def test_a_caller_can_write_for_the_outside():
    inputs, _ = body_of(list[Image])
    image = np.ones((1, 3), np.float32)
    assert inputs.encode(([image],), {}, accept=JSON).segments == (b"[[[1.0,1.0,1.0]]]",)
    payload = inputs.encode(([image],), {}, accept=MSGPACK)
    assert payload.content_type == MSGPACK
    assert same(inputs.decode(payload), (([image],), {}))


# ---- strictness, errors


@pytest.mark.parametrize(
    ("hint", "document", "path", "message"),
    [
        (int, '"3"', "", "valid integer, got '3'"),
        (int, "3.0", "", "valid integer, got 3.0"),
        (int, "true", "", "valid integer"),
        (float, "true", "", "valid number"),
        (str, "3", "", "valid string"),
        (bool, "1", "", "valid boolean"),
        (list[Point], '[{"x": 1}, {"x": "2"}]', "[1].x", "valid number, got '2'"),
        (dict[str, list[Doc]], '{"a": [{"text": 1}]}', "a[0].text", "valid string"),
        (Row, '{"name": "a", "data": "!"}', "data", "valid base64"),
        (Point, '{"x": 1, "z": 2}', "z", "unknown field"),
        (Point, "[]", "", "an object"),
        (bytes, '"a"', "", "wanted bytes as base64"),
        (bytes, "3", "", "base64 string"),
        (Literal["a", "b"], '"c"', "", "'a' or 'b', got 'c'"),
        (Color, '"green"', "", "'red' or 'blue'"),
        (Annotated[int, Field(ge=3)], "2", "", "greater than or equal to 3"),
        (Annotated[bytes, MaxLen(1)], '"AAAA"', "", "at most 1"),
        (list[Image], "[[[1,2,3]],[[1,2]]]", "[1]", r"wanted float32 of shape \(N, 3\), got"),
        (list[float], "[1,1e400]", "[1]", "finite number"),
        (Doc, '{"text": "a", "score": 1e400}', "score", "finite number"),
        (Any, '{"a": [0, 1e999]}', "a[1]", "finite number"),
        (float, "1" + "0" * 400, "", "number"),
        (Image, "[[1,1,1e39]]", "[0][2]", "fit into float32"),
        (Image, f'{{"{KEY}": 1, "dtype": "float32", "shape": [1, 3]}}', "", "wanted an array"),
        (bytes, f'{{"{KEY}": 1}}', "", "base64"),
    ],
)
def test_wrong_values(hint, document, path, message):
    inputs, _ = body_of(hint)
    with pytest.raises(InvalidInput, match=message) as caught:
        inputs.decode(Payload(JSON, (document.encode(),)))
    assert caught.value.fields[0]["path"] == path
    assert caught.value.fields[0]["type"]
    assert not caught.value.started


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"", "EOF while parsing"),
        (b"{", "line 1 column 1"),
        (b"[1,]", "line 1 column 4"),
        (b'"\\ud800"', "hex escape"),
        (b'"\xff"', "unicode"),
        (b"[" * 100_000, "recursion limit"),
        (b"[NaN]", "no NaN or Infinity.*column 2"),
        (b"-Infinity", "no NaN or Infinity"),
        (b'"a" 1', "trailing characters"),
        (b"\xef\xbb\xbf1", "line 1 column 1"),
    ],
)
def test_unparsable_documents(document, message):
    inputs, output = body_of(Any)
    with pytest.raises(BadRequest, match=message):
        inputs.decode(Payload(JSON, (document,)))
    if b"NaN" not in document and b"Inf" not in document:
        with pytest.raises(InvalidOutput):
            output.decode(Payload(JSON, (document,)))


def test_text_that_only_looks_like_nan_is_welcome():
    inputs, output = body_of(list[str])
    assert inputs.decode(as_json(["NaN", "-Infinity"])) == ((["NaN", "-Infinity"],), {})
    assert output.encode(["NaN"]).segments == (b'["NaN"]',)


def test_the_last_of_duplicate_keys_wins():
    inputs, _ = body_of(dict[str, int])
    assert inputs.decode(Payload(JSON, (b'{"a":1,"a":2}',))) == (({"a": 2},), {})


def test_unknown_keys_get_a_suggestion():
    def f(self, values: list[float], top_k: int = 1) -> None: ...

    inputs, _ = schemas(f)
    with pytest.raises(InvalidInput, match=r"topk: unknown field. Did you mean 'top_k'\?"):
        inputs.decode(as_json({"values": [], "topk": 1}))


def test_all_wrong_fields_are_listed():
    def f(self, a: int, b: int) -> None: ...

    inputs, _ = schemas(f)
    with pytest.raises(InvalidInput, match=r"Svc\.f: a: .*\(and 1 more\)") as caught:
        inputs.decode(as_json({"a": "1"}))
    assert [f["path"] for f in caught.value.fields] == ["a", "b"]
    assert caught.value.fields[1]["message"] == "Field required"


def test_errors_stay_small():
    inputs, _ = body_of(dict[str, int] | list[int])
    for value in (
        ["a"] * 100_000,
        {"k" * 10_000: "v" * 10_000},
        {str(i): "x" for i in range(1000)},
        "z" * 100_000,
    ):
        with pytest.raises(InvalidInput) as caught:
            inputs.decode(as_json(value))
        assert len(json.dumps(caught.value.details())) < 20_000
        assert all(len(f["message"]) < 400 and len(f["path"]) < 300 for f in caught.value.fields)


def test_models_keep_their_own_configuration():
    inputs, _ = body_of(Doc)
    ((doc,), _) = inputs.decode(as_json({"text": "a", "score": "1.5", "other": 1}))
    assert doc == Doc(text="a", score=1.5)


def test_a_users_validator_may_refuse():
    class Even(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def even(cls, n: int) -> int:
            if n % 2:
                raise ValueError("must be even {really}")
            return n

    inputs, _ = body_of(list[Even])
    with pytest.raises(
        InvalidInput, match=r"\[0\]\.n: Value error, must be even \{really\}, got 3"
    ):
        inputs.decode(as_json([{"n": 3}]))


# ---- output


def test_output_must_be_what_is_declared():
    for hint, value in [
        (int, "3"),
        (int, 3.0),
        (list[int], (1, 2)),
        (Doc, {"text": 1}),
        (Doc, Doc.model_construct(text=3)),
        (Point, Point("3")),
        (Point, Point(1, image=np.zeros((1, 3)))),
        (list[Point], [Point(1, tags="a")]),
        (Image, np.zeros((1, 3))),
        (Image, np.zeros((1, 4), np.float32)),
        (Image, [[1, 2, 3]]),
        (bytes, "a"),
        (str, "\ud800"),
        (Any, object()),
        (Any, {"a": np.zeros(2)}),
        (None, 3),
    ]:
        _, output = body_of(hint)
        for options in ({}, {"internal": True}, {"accept": MSGPACK}):
            if (hint, value) == (str, "\ud800") and "accept" in options:
                continue
            with pytest.raises(InvalidOutput, match=r"Svc\.method") as caught:
                output.encode(value, **options)
            assert caught.value.started


class Leaf(BaseModel):
    n: int
    note: str | None = None


class Branch(BaseModel):
    leaf: Leaf = Field(alias="Leaf")
    more: list[Leaf | None] = []
    by_name: dict[str, Leaf] = {}
    either: Leaf | str = ""


def test_none_is_no_answer_where_the_type_has_none():
    good, bad = Leaf(n=1), Leaf.model_construct(n=None)
    for value, path in [
        (bad, "n"),
        (Branch(Leaf=good).model_copy(update={"leaf": None}), "Leaf"),
        (Branch(Leaf=good).model_copy(update={"leaf": bad}), "Leaf.n"),
        (Branch(Leaf=good).model_copy(update={"more": [None, bad]}), "more[1].n"),
        (Branch(Leaf=good).model_copy(update={"by_name": {"x": bad}}), "by_name.x.n"),
        (Branch(Leaf=good).model_copy(update={"either": bad}), "either.n"),
        (Point(None), "x"),
    ]:
        _, output = body_of(type(value))
        for options in ({}, {"internal": True}, {"accept": MSGPACK}):
            with pytest.raises(InvalidOutput) as caught:
                output.encode(value, **options)
            (field,) = caught.value.fields
            assert (field["path"], field["type"]) == (path, "none_not_allowed")


def test_none_is_an_answer_where_the_type_says_so():
    for value in [
        Leaf(n=1),
        Branch(Leaf=Leaf(n=1), more=[None, Leaf(n=2)], either=Leaf(n=3)),
        Branch(Leaf=Leaf(n=1), either="null"),
    ]:
        _, output = body_of(type(value))
        for options in ({}, {"internal": True}, {"accept": MSGPACK}):
            assert output.encode(value, **options)


def test_a_model_may_be_given_as_a_dict_as_its_configuration_says():
    _, output = body_of(list[Doc])
    assert output.encode([{"text": "a"}]).segments == (b'[{"text":"a","score":0.0}]',)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_output(value):
    for hint, result, path in [
        (float, value, ""),
        (list[float], [0.0, value], "[1]"),
        (Doc, Doc(text="NaN", score=value), "score"),
        (Point, Point(value), "x"),
        (Any, {"a": {"b": [value]}}, "a.b[0]"),
        (Image, np.array([[0, value, 0]], np.float32), "[0][1]"),
        (Odd, Odd(image=np.array([[0, value, 0]], np.float32)), "image[0][1]"),
    ]:
        inputs, output = body_of(hint)
        with pytest.raises(InvalidOutput, match="no JSON form") as caught:
            output.encode(result)
        assert caught.value.fields[0]["path"] == path
        payload = output.encode(result, internal=True)
        assert same(output.decode(payload), result)
        assert same(inputs.decode(payload, internal=True)[0][0], result)


def test_a_model_may_choose_null_for_nan():
    class Nullable(BaseModel):
        model_config = ConfigDict(ser_json_inf_nan="null")
        x: float | None

    _, output = body_of(Nullable)
    assert output.encode(Nullable(x=math.nan)).segments == (b'{"x":null}',)
    assert math.isnan(output.decode(output.encode(Nullable(x=math.nan), internal=True)).x)


def test_bytes_in_a_model_need_base64():
    class Raw(BaseModel):
        data: bytes

    _, output = body_of(Raw)
    with pytest.raises(InvalidOutput, match="val_json_bytes='base64'"):
        output.encode(Raw(data=b"\xff"))


def test_computed_fields_and_aliases_are_for_the_outside():
    _, output = body_of(Odd)
    assert json.loads(output.encode(Odd(theSize=2)).segments[0]) == {
        "theSize": 2,
        "data": "",
        "image": None,
        "double": 4,
    }
    assert b"double" not in output.encode(Odd(theSize=2), internal=True).segments[0]


# ---- media types


def test_accept():
    _, number = body_of(float)
    for accept in ("", "*/*", "application/*", "text/html, */*;q=0.1", "application/json; q=0.5"):
        assert number.encode(1.5, accept=accept).content_type == JSON
    assert number.encode(
        1.5, accept="application/json;q=0.1, application/msgpack"
    ).content_type == (MSGPACK)
    for accept in ("text/html", "application/json;q=0", "image/*", EVENT_STREAM, BINARY):
        with pytest.raises(UnsupportedMedia, match="can with application/json"):
            number.encode(1.5, accept=accept)
    _, raw = body_of(bytes)
    assert raw.encode(b"\xff", accept="*/*").segments == (b"\xff",)
    assert raw.encode(b"\xff", accept="").content_type == BINARY
    assert raw.encode(b"\xff", accept=JSON).segments == (b'"/w=="',)
    _, text = body_of(str)
    assert text.encode("a", accept="*/*").segments == (b'"a"',)


def test_negotiation_reads_odd_headers():
    offers = (JSON, BINARY)
    assert negotiate(" , ", offers) == JSON
    assert negotiate("APPLICATION/OCTET-STREAM", offers) == BINARY
    assert negotiate("*/*;q=0.1, application/json;q=0", offers) == BINARY
    with pytest.raises(UnsupportedMedia):
        negotiate("*/*;q=x", offers)
    assert media_type("Application/JSON; charset=utf-8") == media_type("") == JSON


def test_content_types():
    inputs, _ = body_of(Image)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for payload in (
        as_json(array.tolist()),
        Payload("", (json.dumps(array.tolist()).encode(),)),
        Payload("application/json; charset=utf-8", (bytearray(b"[[0,1,2],[3,4,5]]"),)),
        Payload(BINARY, (array.tobytes(),)),
        Payload(NPY, (memoryview(write_npy(array)),)),
        Payload(MSGPACK, (msgspec.msgpack.encode(array.tolist()),)),
        Payload("application/x-msgpack", (msgspec.msgpack.encode(ext(array)),)),
        inputs.encode((array,), {}),
        inputs.encode((array,), {}, accept=NPY),
        inputs.encode((array,), {}, accept=BINARY),
    ):
        assert same(inputs.decode(payload), ((array,), {}))
    for content_type in ("text/plain", "application/x-pickle", "multipart/form-data"):
        with pytest.raises(
            UnsupportedMedia, match="takes application/json, application/msgpack, application/oct"
        ):
            inputs.decode(Payload(content_type, (b"",)))
    for content_type in (BINARY, NPY):
        with pytest.raises(UnsupportedMedia, match="takes application/json, application/msgpack"):
            body_of(int)[0].decode(Payload(content_type, (b"",)))
    with pytest.raises(InvalidInput, match="takes a multiple of 12 bytes, got 13"):
        inputs.decode(Payload(BINARY, (bytes(13),)))
    with pytest.raises(InvalidInput, match=r"not a \.npy file"):
        inputs.decode(Payload(NPY, (bytes(13),)))
    with pytest.raises(InvalidInput, match="wanted dtype float32, got float64"):
        inputs.decode(Payload(NPY, (write_npy(np.zeros((1, 3))),)))


def ext(array):
    header = msgspec.msgpack.encode([array.dtype.name, list(array.shape)])
    return msgspec.msgpack.Ext(1, len(header).to_bytes(2, "little") + header + array.tobytes())


def test_array_out():
    _, output = body_of(Image)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert bytes(output.encode(array, accept=BINARY).segments[0]) == array.tobytes()
    for accept in (JSON, BINARY, NPY, MSGPACK):
        payload = output.encode(array, accept=accept)
        assert payload.content_type == accept
        assert same(output.decode(payload), array)


def test_bytes_in():
    inputs, _ = body_of(bytes)
    for payload in (
        Payload(BINARY, (memoryview(b"\xff\xfe"),)),
        Payload(JSON, (b'"//4="',)),
        Payload(JSON, (b'"__4="',)),
        Payload(MSGPACK, (msgspec.msgpack.encode(b"\xff\xfe"),)),
        inputs.encode((b"\xff\xfe",), {}),
    ):
        assert inputs.decode(payload) == ((b"\xff\xfe",), {})
    for kind in ("", "image/png", NPY, "application/x-www-form-urlencoded"):
        assert inputs.decode(Payload(kind, (b"\xff\xfe",))) == ((b"\xff\xfe",), {})


def test_large_arrays_are_not_copied():
    inputs, output = body_of(Image)
    array = np.zeros((50_000, 3), np.float32)
    buffer = array.tobytes()
    for payload in (Payload(BINARY, (buffer,)), Payload(NPY, (write_npy(array),))):
        ((got,), _) = inputs.decode(payload)
        assert np.shares_memory(got, np.frombuffer(payload.segments[0], np.uint8))
    payload = output.encode(array, internal=True)
    assert np.shares_memory(np.frombuffer(payload.segments[1], np.uint8), array)
    assert np.shares_memory(output.decode(payload), array)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91",
        b"\x91" * 100_000,
        msgspec.msgpack.encode(msgspec.msgpack.Ext(2, b"")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\xff\xff")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\x01\x00\xc0")),
        msgspec.msgpack.encode(
            msgspec.msgpack.Ext(
                1, b"\x0b\x00" + msgspec.msgpack.encode(["float32", [-1]]) + b"0000"
            )
        ),
        b"\x81\x81\x01\x01\x01",
        msgspec.msgpack.encode(math.nan),
    ],
)
def test_hostile_msgpack(body):
    for hint in (Image, Any, dict[str, Any]):
        with pytest.raises((BadRequest, InvalidInput)):
            body_of(hint)[0].decode(Payload(MSGPACK, (body,)))
    with pytest.raises(CallError):
        body_of(Image)[1].decode(Payload(MSGPACK, (body,)))


def test_msgpack_has_the_same_meaning_as_json():
    inputs, output = body_of(Row)
    row = {"name": "a", "data": b"\xff", "mask": np.array([True])}
    packed = msgspec.msgpack.encode({"name": "a", "data": b"\xff", "mask": [True]})
    assert same(inputs.decode(Payload(MSGPACK, (packed,)))[0][0], row)
    assert same(output.decode(output.encode(row, accept=MSGPACK)), row)
    with pytest.raises(InvalidInput, match="unknown field"):
        inputs.decode(Payload(MSGPACK, (msgspec.msgpack.encode({**row, "mask": [True], "x": 1}),)))
    with pytest.raises(InvalidInput, match="valid integer"):
        body_of(int)[0].decode(Payload(MSGPACK, (msgspec.msgpack.encode("3"),)))


def test_our_key_in_a_callers_object_is_only_a_key():
    hint = dict[str, Image]
    inputs, output = body_of(hint)
    value = {KEY: np.ones((1, 3), np.float32)}
    assert same(inputs.decode(inputs.encode((value,), {})), ((value,), {}))
    assert same(output.decode(output.encode(value, accept=MSGPACK)), value)
    _, output = body_of(tuple[Any, bytes])
    value = ({KEY: 7}, b"secret")
    assert output.decode(output.encode(value, internal=True)) == value
    assert output.decode(output.encode(value, accept=MSGPACK)) == value


def test_stand_ins_are_checked():
    inputs, _ = body_of(Image)
    for stand_in in (
        {KEY: 0, "dtype": "float32", "shape": [1, 3]},
        {KEY: 2, "dtype": "float32", "shape": [1, 3]},
        {KEY: True, "dtype": "float32", "shape": [1, 3]},
        {KEY: 1, "dtype": "float32", "shape": [1, 4]},
        {KEY: 1, "dtype": "float32", "shape": [-1, 3]},
        {KEY: 1, "dtype": "float32", "shape": [1.0, 3]},
        {KEY: 1, "dtype": "object", "shape": [1, 3]},
        {KEY: 1, "dtype": ["float32"], "shape": [1, 3]},
        {KEY: 1},
        {KEY: 1, "dtype": "int32", "shape": [1, 3]},
    ):
        with pytest.raises(InvalidInput):
            inputs.decode(Payload(JSON, (json.dumps(stand_in).encode(), bytes(12))), internal=True)


# ---- a client's own batch


def test_batches():
    def f(self, texts: list[str], ns: list[int]) -> list[str]: ...

    inputs, _ = schemas(f, batched="list")
    items = [{"texts": "a", "ns": 1}, {"texts": "b", "ns": 2}]
    wanted = [((), item) for item in items]
    assert inputs.decode_batch(as_json(items)) == wanted
    assert inputs.decode_batch(Payload(MSGPACK, (msgspec.msgpack.encode(items),))) == wanted
    assert inputs.decode_batch(as_json([])) == []
    good, bad = inputs.decode_batch(as_json([items[0], {"texts": "b", "ns": "2"}]))
    assert good == wanted[0]
    assert isinstance(bad, InvalidInput)
    assert bad.fields[0]["path"] == "ns"
    with pytest.raises(InvalidInput):
        inputs.decode_batch(as_json({"texts": "a"}))
    with pytest.raises(UnsupportedMedia):
        inputs.decode_batch(Payload(BINARY, (b"",)))
    with pytest.raises(BadRequest):
        inputs.decode_batch(Payload(MSGPACK, (b"\xc1",)))


def test_batches_of_arrays_may_be_stacked():
    inputs, _ = body_of(Array["float32", "3"])
    stacked = np.arange(6, dtype=np.float32).reshape(2, 3)
    wanted = [((row,), {}) for row in stacked]
    for payload in (
        as_json(stacked.tolist()),
        Payload(BINARY, (stacked.tobytes(),)),
        Payload(NPY, (write_npy(stacked),)),
        Payload(MSGPACK, (msgspec.msgpack.encode(stacked.tolist()),)),
        Payload(MSGPACK, (msgspec.msgpack.encode(ext(stacked)),)),
        Payload(MSGPACK, (msgspec.msgpack.encode([ext(row) for row in stacked]),)),
        body_of(Array["float32", "N 3"])[0].encode((stacked,), {}),
        body_of(list[Array["float32", "3"]])[0].encode(([*stacked],), {}),
    ):
        assert same(inputs.decode_batch(payload), wanted)
    with pytest.raises(InvalidInput, match=r"wanted float32 of shape \(batch, 3\)"):
        inputs.decode_batch(Payload(NPY, (write_npy(stacked[0]),)))
    anything, _ = body_of(NDArray[np.float32])
    with pytest.raises(InvalidInput, match="got one scalar"):
        anything.decode_batch(Payload(NPY, (write_npy(np.float32(3)),)))


# ---- properties


finite = st.floats(allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))
images = hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=1, min_side=0)).map(
    lambda a: np.repeat(a, 3).reshape(-1, 3)
)
masks = hnp.arrays(np.bool_, hnp.array_shapes(max_dims=1, min_side=0))
CASES = [
    (float, st.floats()),
    (Optional[int], st.none() | st.integers(-(2**63), 2**63 - 1)),  # noqa: UP045
    (list[bytes], st.lists(st.binary())),
    (dict[str, bytes | None], st.dictionaries(texts, st.none() | st.binary())),
    (tuple[str, ...], st.lists(texts).map(tuple)),
    (set[int], st.sets(st.integers(-5, 5))),
    (uuid.UUID, st.uuids()),
    (dt.datetime, st.datetimes(timezones=st.none() | st.just(dt.UTC))),
    (dt.timedelta, st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999))),
    (decimal.Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (Color, st.sampled_from(Color)),
    (
        dict[Literal["a", "b"], Color],
        st.dictionaries(st.sampled_from("ab"), st.sampled_from(Color)),
    ),
    (Doc, st.builds(Doc, text=texts, score=st.floats())),
    (Odd, st.builds(Odd, theSize=st.integers(-9, 9), data=st.binary(), image=st.none() | images)),
    (list[Point], st.lists(st.builds(Point, st.floats(), finite, st.lists(texts), images))),
    (Row, st.fixed_dictionaries({"name": texts, "data": st.binary()}, optional={"mask": masks})),
    (dict[str, list[Image]], st.dictionaries(texts, st.lists(images, max_size=2), max_size=3)),
    (int | Image | None, st.none() | st.integers(0, 9) | images),
    (
        np.ndarray,
        hnp.arrays(st.sampled_from([*ITEM_BYTES]), hnp.array_shapes(min_dims=0, min_side=0)),
    ),
    (Any, st.recursive(st.none() | st.booleans() | texts, lambda x: st.dictionaries(texts, x))),
]
for index, (hint, values) in enumerate(CASES):
    CASES[index] = pytest.param(*body_of(hint), values, id=str(hint)[:40])


@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "output", "values"), CASES)
@given(data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_between_services_nothing_changes(inputs, output, values, data):
    value = data.draw(values)
    payload = inputs.encode((value,), {})
    payload.segments = [memoryview(segment) for segment in payload.segments]
    assert same(inputs.decode(payload, internal=True), ((value,), {}))
    assert same(output.decode(output.encode(value, internal=True)), value)
    assert same(output.decode(output.encode(value, accept=MSGPACK)), value)


FUZZED = [body_of(hint) for hint in (Image, bytes, Any, Row, dict[str, list[Image | Doc]])]


@given(
    st.sampled_from(FUZZED),
    st.sampled_from([JSON, MSGPACK, BINARY, NPY, "", "text/plain", "a" * 300]),
    st.binary(max_size=200)
    | st.sampled_from([b"{}", b"[[1,2,3]]", write_npy(np.zeros((2, 3), np.float32))]).flatmap(
        lambda seed: st.binary(max_size=4).map(lambda noise: seed[: len(noise) * 9] + noise)
    ),
    st.lists(st.binary(max_size=24), max_size=2),
    st.booleans(),
)
@settings(max_examples=examples(400), deadline=None)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")
def test_only_call_errors_come_out(pair, content_type, document, segments, internal):
    inputs, output = pair
    payload = Payload(content_type, [document, *segments])
    for read in (
        lambda: inputs.decode(payload, internal=internal),
        lambda: inputs.decode_batch(payload, internal=internal),
        lambda: output.decode(payload),
    ):
        try:
            read()
        except CallError as error:
            assert error.status in (400, 415, 422, 500)
            assert len(str(error)) < 1000


@given(st.text(max_size=60))
def test_any_accept_header_is_answered_or_refused(accept):
    with contextlib.suppress(UnsupportedMedia):
        assert negotiate(accept, (JSON, BINARY)) in (JSON, BINARY)


class Box(BaseModel, Generic[T]):
    value: T


@dataclass
class Tree:
    name: str
    children: "list[Tree]" = field(default_factory=list)


def test_generic_and_recursive_types():
    inputs, _ = body_of(Box[Image])
    assert inputs.decode(as_json({"value": [[1, 2, 3]]}))[0][0].value.shape == (1, 3)
    inputs, output = body_of(Tree)
    tree = Tree("a", [Tree("b")])
    assert output.decode(output.encode(tree)) == tree
    with pytest.raises(InvalidInput) as caught:
        inputs.decode(as_json({"name": "a", "children": [{"name": 1}]}))
    assert caught.value.fields[0]["path"] == "children[0].name"


def test_json_schemas():
    inputs, _ = body_of(dict[str, Row])
    assert inputs.json_schema["$defs"]["Row"]["properties"]["mask"] == {
        "type": "array",
        "items": {"type": "boolean"},
        "description": "bool of shape (N,)",
        "title": "Mask",
    }
    inputs, _ = body_of(Array["float32", "2 N"])
    assert inputs.json_schema == {
        "type": "array",
        "items": {"type": "array", "items": {"type": "number"}},
        "minItems": 2,
        "maxItems": 2,
        "description": "float32 of shape (2, N)",
    }
    assert body_of(bytes)[0].json_schema == {"type": "string", "contentEncoding": "base64"}
    assert base64.b64decode("/w==") == b"\xff"


def test_a_default_without_a_json_form_is_left_out():
    marker = np.zeros(2, np.float64)

    def f(self, x: NDArray[np.float32] | None = None, y: Image = marker) -> None: ...

    inputs, _ = schemas(f)
    assert inputs.json_schema["properties"]["x"]["default"] is None
    assert "default" not in inputs.json_schema["properties"]["y"]
    assert inputs.decode(as_json({})) == ((), {})


def test_msgpack_ext_layout():
    array = np.arange(3, dtype=np.int16)
    document, data = from_msgpack(msgspec.msgpack.encode([ext(array)]))
    assert json.loads(document) == [{KEY: 1, "dtype": "int16", "shape": [3]}]
    assert bytes(data) == array.tobytes()
