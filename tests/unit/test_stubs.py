"""Written clients: any document becomes code that can be run, or is refused; none becomes its own code."""

import ast
import json
import keyword
import subprocess
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import servekit as sk
from servekit.errors import ConfigError
from servekit.protocols.annotations import Annotations
from servekit.protocols.openapi import document
from servekit.protocols.source import docstring, identifier, literal, quoted
from servekit.protocols.stubs import write
from servekit.spec.definition import definition
from servekit.spec.describe import describe
from tests.examples import examples

TEXT = st.text(st.characters(exclude_categories=[])) | st.sampled_from(
    ['"', "'", '"""', "\\", "\\\\", '\\"', "\n", "a\r\nb", "\x00", "\ud800", '"end"', "'\"", "\t x"]
)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


# -- source


@given(TEXT)
def test_a_quoted_text_is_that_text(text):
    written = quoted(text)
    assert ast.literal_eval(written) == text
    assert written.isprintable()
    written.encode()


@given(JSON_VALUES)
def test_a_literal_is_its_value(value):
    assert ast.literal_eval(literal(value)) == value


@given(st.lists(TEXT, max_size=4).map("\n".join))
def test_a_docstring_stays_one(text):
    lines = docstring(text, "    ")
    source = "\n".join(["class X:", *lines, "    x = 1"])
    source.encode()
    [found] = ast.parse(source).body
    assert len(found.body) == 1 + bool(lines)


@given(st.lists(st.text("ab\"'\\ ,.é"), max_size=4).map("\n".join))
def test_a_docstring_says_what_it_should(text):
    source = "\n".join(["class X:", *docstring(text, "    "), "    x = 1"])
    said = ast.get_docstring(ast.parse(source).body[0]) or ""
    assert said.split() == text.split()


@given(TEXT, st.booleans())
def test_an_identifier_is_one(text, capital):
    name = identifier(text, capital=capital)
    assert name.isidentifier()
    assert not keyword.iskeyword(name)
    assert not name.startswith("__")


# -- modules


@sk.service(version="2")
class Plain:
    """Adds."""

    @sk.endpoint
    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @sk.endpoint(method="GET", path="/v1/all")
    def all(self, k: int) -> list[int]:
        return [k]


def test_a_small_module():
    app = describe(Plain)
    assert (
        write(document(app))
        == f'''"""The services of Plain, written by `servekit client`: write it anew, don't edit it.

Call them through `servekit.connect`::

    with sk.connect(Plain, "http://127.0.0.1:3000") as service:
        service.method(name=value)               # in plain code
        await service.method.remote(name=value)  # in async code
"""

from __future__ import annotations

import servekit as sk

REVISION = "{app.revision}"
"""Of the app that this was written from."""


@sk.service(version="2")
class Plain:
    """Adds."""

    @sk.endpoint
    def add(self, *, a: int, b: int = 1) -> int:
        """Add two numbers."""
        raise NotImplementedError

    @sk.endpoint(path="/v1/all", method="GET")
    def all_(self, *, k: int) -> list[int]:
        raise NotImplementedError
'''
    )


def run(text):
    """Run a module in a namespace of its own, and return that."""
    import types

    module = types.ModuleType("written")
    sys.modules["written"] = module
    exec(compile(text, "written.py", "exec"), vars(module))
    return module


def test_a_written_service_has_the_endpoints_of_its_model():
    there, here = definition(Plain), definition(run(write(document(describe(Plain)))).Plain)
    assert (here.name, here.version) == (there.name, there.version)
    for name, written in (("add", "add"), ("all", "all_")):
        one, other = there.endpoints[name], here.endpoints[written]
        assert (one.method, one.path, one.kind) == (other.method, other.path, other.kind)
        assert one.idempotent == other.idempotent
        for ours, theirs in zip(one.schemas, other.schemas, strict=True):
            assert ours.json_schema == theirs.json_schema


@sk.service
class Slow:
    @sk.task(path="/v1/add")
    def add(self, a: int) -> list[int]:
        return [a]


def test_a_task_is_written_as_one():
    text = write(document(describe(Slow)))
    assert '    @sk.task(path="/v1/add")\n    def add(self, *, a: int) -> list[int]:' in text
    there, here = definition(Slow), definition(run(text).Slow)
    assert list(here.endpoints) == ["add"]
    for ours, theirs in zip(
        there.endpoints["add"].schemas, here.endpoints["add"].schemas, strict=True
    ):
        assert ours.json_schema == theirs.json_schema


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"paths": {}},
        {"paths": {}, "tags": [], "info": {"title": "x"}, "components": {"schemas": {}}},
        {"paths": {"/a": {"get": {}}}, "tags": []},
        {"paths": [], "tags": None},
    ],
)
def test_a_document_of_something_else_is_refused(found):
    with pytest.raises(ConfigError):
        write(found)


EVIL = '"""\nimport os; os.system("touch harm")\n"""'
WORDS = [EVIL, "x\n    import os", "a b", "class", "1", "", "é", "\ud800", "print", "sk", "Any"]


@pytest.mark.slow
@pytest.mark.parametrize("evil", WORDS)
def test_what_a_server_says_becomes_no_code(evil):
    """In every place of its document where a server has a word."""
    text = json.dumps(document(describe(Plain)))
    places = [
        ("Plain", evil),
        ("Adds.", evil),
        ("Add two numbers.", evil),
        ("/v1/all", f"/v1/{evil}"),
        ('"2"', json.dumps(evil)),
        (describe(Plain).revision, evil),
        ('"b"', json.dumps(evil)),
        ('"k"', json.dumps(evil)),
        ('"default": 1', f'"default": {json.dumps(evil)}'),
        ('"type": "integer"', f'"enum": [{json.dumps(evil)}]'),
        ('"type": "integer"', f'"type": {json.dumps(evil)}'),
        ('"type": "integer"', f'"$ref": {json.dumps(evil)}'),
        ('"type": "integer"', f'"description": {json.dumps(f"float32 of shape ({evil})")}'),
    ]
    for there, instead in places:
        changed = text.replace(there, instead if there[0] == '"' else json.dumps(instead)[1:-1])
        assert changed != text or there == instead
        try:
            written = write(json.loads(changed))
        except ConfigError:
            continue
        tree = ast.parse(written)
        written.encode()
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        assert {alias.name for node in imports for alias in node.names} <= {"servekit", "numpy"}
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert {ast.unparse(call) for call in calls} <= {
            "TypedDict",
            "object",
            "sk.endpoint",
            "sk.service",
        }


# -- types


def kind(schema, **models):
    types = Annotations(models, {"sk", "np"})
    return types.of(schema, "x"), ["\n".join(lines) for lines in types.definitions()]


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({}, "Any"),
        ({"type": "string"}, "str"),
        ({"type": "string", "format": "date-time"}, "datetime"),
        ({"type": "string", "format": "email"}, "str"),
        ({"type": "string", "contentEncoding": "base64"}, "bytes"),
        ({"type": ["integer", "null"]}, "int | None"),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "int | None"),
        ({"anyOf": [{"type": "integer"}, {}]}, "Any"),
        ({"const": None}, "None"),
        ({"const": "a"}, 'Literal["a"]'),
        ({"enum": ["a", 1, True, None]}, 'Literal["a", 1, True, None]'),
        ({"enum": [1.5]}, "Any"),
        ({"type": "array"}, "list[Any]"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "set[str]"),
        ({"type": "array", "items": {"type": "array"}, "uniqueItems": True}, "list[list[Any]]"),
        ({"type": "array", "prefixItems": [{"type": "string"}, {}]}, "tuple[str, Any]"),
        ({"type": "object"}, "dict[str, Any]"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "dict[str, float]"),
        (
            {"description": "float32 of shape (N, 2)"},
            'Annotated[NDArray[np.float32], sk.Array["float32", "N 2"]]',
        ),
        (
            {"description": "any dtype of shape (...)"},
            'Annotated[NDArray[Any], sk.Array["any", "..."]]',
        ),
        ({"description": "bool of shape ()"}, 'Annotated[NDArray[np.bool_], sk.Array["bool", ""]]'),
        ({"type": "string", "description": "float32 of shape (a-b)"}, "str"),
        ({"$ref": "#/components/schemas/Missing"}, "Any"),
    ],
)
def test_types(schema, written):
    assert kind(schema)[0] == written


def test_models_that_name_themselves_and_each_other():
    node = {"type": "object", "properties": {"next": {"$ref": "#/components/schemas/Node"}}}
    written, [model] = kind({"$ref": "#/components/schemas/Node"}, Node=node)
    assert written == "Node"
    assert model == "class Node(TypedDict):\n    next: NotRequired[Node]"
    tree = {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"$ref": "#/components/schemas/T"}},
        ]
    }
    written, [alias] = kind({"$ref": "#/components/schemas/T"}, T=tree)
    assert (written, alias) == ("T", "T: TypeAlias = str | list[Any]")


def test_two_models_of_one_name():
    one = {
        "title": "Hit",
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
    }
    two = {
        "title": "Hit",
        "type": "object",
        "properties": {"b": {"type": "string"}},
        "required": ["b"],
    }
    written, models = kind({"type": "array", "prefixItems": [one, two, one]})
    assert written == "tuple[Hit, Hit2, Hit]"
    assert len(models) == 2


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {},
            {"type": "string"},
            {"type": "integer"},
            {"type": "null"},
            {"const": "x"},
            {"enum": ["a" * 30, "b" * 30, "c" * 30]},
            {"description": "float32 of shape (N, 3, 224, 224)"},
            {"$ref": "#/components/schemas/M"},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item}, inner),
        st.builds(lambda *options: {"anyOf": [*options]}, inner, inner, inner),
        st.builds(
            lambda fields, needed: {
                "type": "object",
                "properties": fields,
                "required": [key for key in fields if needed],
            },
            st.dictionaries(
                st.sampled_from(["a", "list", "from", "date", "two words", "Any", "é"]),
                inner,
                min_size=1,
                max_size=3,
            ),
            st.booleans(),
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=examples(40))
@given(SCHEMAS, SCHEMAS)
@pytest.mark.slow
def test_any_schema_becomes_a_module_that_runs(schema, model):
    described = document(describe(Plain))
    described["components"]["schemas"]["M"] = model
    operation = described["paths"]["/add"]["post"]
    operation["requestBody"]["content"]["application/json"]["schema"] = {
        "title": "T",
        "anyOf": [schema, {"type": "string"}],
    }
    written = write(described)
    module = run(written)
    reads, _ = definition(module.Plain).endpoints["add"].schemas
    assert reads.encode(("text",), {}, accept="application/json").segments[0] == b'"text"'
    assert all(len(line) <= 88 for line in written.splitlines())


def test_it_leaves_numpy_alone_where_there_are_no_arrays():
    script = (
        "import sys, json, servekit.protocols.stubs as s\n"
        "s.write(json.load(sys.stdin)); print('numpy' in sys.modules)"
    )
    text = msgspec.json.encode(document(describe(Plain)))
    done = subprocess.run(
        [sys.executable, "-c", script], input=text, capture_output=True, check=True
    )
    assert done.stdout == b"False\n"


def test_an_endpoint_whose_input_streams():
    @sk.service
    class Live:
        @sk.endpoint
        async def total(self, numbers: AsyncIterator[int], *, start: int = 0) -> int:
            return 0

    text = write(document(describe(Live)))
    assert "def total(self, numbers: Iterator[int], *, start: int = 0) -> int:" in text
    assert "from collections.abc import Iterator" in text
