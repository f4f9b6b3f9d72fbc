"""The OpenAPI document: valid, complete, and with every model under a name of its own."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import BaseModel, Field, computed_field

import servekit as sk
from servekit.errors import Overloaded
from servekit.gateway.routes import routes_of
from servekit.observe.families import Families
from servekit.observe.metrics import Metrics
from servekit.protocols.openapi import document
from servekit.spec.app import AppSpec, EndpointSpec, ServiceSpec
from servekit.spec.describe import describe


class Point(BaseModel):
    """A place in the picture."""

    x: float = Field(ge=0, le=1)


class Hit(BaseModel):
    id: int
    at: Point | None = None


class Box(BaseModel):
    side: float

    @computed_field
    @property
    def area(self) -> float:
        return self.side**2


class Node(BaseModel):
    name: str
    children: list["Node"] = []


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Error(BaseModel):
    """A model of the app that is called like ours."""

    default: str
    note: Annotated[str, Field(json_schema_extra={"examples": ["$ref"]})] = "#/$defs/Point"


Pixels = Annotated[NDArray[np.float32], sk.Array["float32", "N 3"]]


@sk.service
class Hidden:
    @sk.endpoint
    def secret(self) -> str:
        return ""


@sk.service(prefix="/vision")
class Vision:
    """Looks at pictures."""

    hidden = sk.depends(Hidden)

    @sk.endpoint
    def classify(self, image: Pixels, /) -> Pixels:
        return image

    @sk.endpoint(media_type="image/png")
    def draw(self, data: bytes, /) -> bytes:
        return data

    @sk.batched(max_size=8)
    def label(self, images: list[Pixels]) -> list[Hit]:
        """Label a picture."""
        return [Hit(id=1) for _ in images]

    @sk.endpoint
    def where(self, point: Point, /) -> Point:
        return point


@sk.service(version="7")
class Search:
    """Semantic search.

    Finds things by meaning.
    """

    vision = sk.depends(Vision)

    @sk.endpoint(tags=["reading"], timeout_s=5)
    def query(self, text: str, k: Annotated[int, Field(ge=1)] = 3) -> list[Hit]:
        """Find the nearest documents.

        The text is embedded first.
        """
        return []

    @sk.endpoint
    async def answer(self, text: str) -> AsyncIterator[Hit]:
        yield Hit(id=1)

    @sk.endpoint(method="GET", path="/health/of")
    def health_of(self, zone: str, deep: bool = False) -> dict[str, str]:
        return {}

    @sk.endpoint
    def boxes(self, box: Box) -> Box:
        return box

    @sk.endpoint
    def tree(self, root: Node) -> Node:
        return root

    @sk.endpoint
    def pet(self, pet: Annotated[Cat | Dog, Field(discriminator="kind")]) -> Error:
        return Error(default="")

    @sk.endpoint
    def ping(self) -> None: ...

    @sk.endpoint(internal=True)
    def inner(self) -> None: ...


@pytest.fixture(scope="module")
def app() -> AppSpec:
    return describe(Search)


@pytest.fixture(scope="module")
def doc(app: AppSpec) -> dict[str, Any]:
    return document(app)


def content(doc: dict[str, Any], path: str, *, of: str = "requestBody") -> dict[str, Any]:
    operation = doc["paths"][path]["post"]
    part = operation["requestBody"] if of == "requestBody" else operation["responses"][of]
    return part["content"]


def refs(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for mapping in [node.get("discriminator", {})]:
            if isinstance(mapping, dict):
                yield from mapping.get("mapping", {}).values()
        for value in node.values():
            yield from refs(value)
    elif isinstance(node, list):
        for value in node:
            yield from refs(value)


def names(model: str) -> str:
    return f"#/components/schemas/{model}"


# ---- the document


def test_it_is_valid(doc: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(json.loads(json.dumps(doc))).validate()


def test_every_reference_leads_somewhere(doc: dict[str, Any]) -> None:
    found = set(refs(doc))
    assert found
    for ref in found:
        node: Any = doc
        for step in ref.removeprefix("#/").split("/"):
            node = node[step]
    used = {ref.split("/")[-1] for ref in found if "/schemas/" in ref}
    assert used == doc["components"]["schemas"].keys()


def test_every_schema_is_a_json_schema(doc: dict[str, Any]) -> None:
    for schema in doc["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_equal_apps_have_equal_documents(app: AppSpec, doc: dict[str, Any]) -> None:
    again = document(AppSpec.from_json(app.to_json()))
    assert json.dumps(again) == json.dumps(doc)


def test_the_paths_are_the_gateways_routes(app: AppSpec, doc: dict[str, Any]) -> None:
    routes = {
        (path.decode(), method.decode().lower())
        for path, methods in routes_of(app, Families(Metrics())).items()
        for method in methods
    }
    assert {(path, method) for path, item in doc["paths"].items() for method in item} == routes
    assert "/vision/label/batch" in doc["paths"]
    assert not {"/inner", "/secret"} & doc["paths"].keys()


def test_the_root_comes_first_in_the_order_of_its_source(doc: dict[str, Any]) -> None:
    assert list(doc["paths"])[:3] == ["/query", "/answer", "/health/of"]
    assert [tag["name"] for tag in doc["tags"]] == ["Search", "Vision", "reading"]
    assert doc["tags"][1]["description"] == "Looks at pictures."


def test_info_is_the_root_service(app: AppSpec, doc: dict[str, Any]) -> None:
    info = doc["info"]
    assert (info["title"], info["version"]) == ("Search", "7")
    assert info["summary"] == "Semantic search."
    assert info["description"].startswith("Finds things by meaning.\n\n")
    assert info["x-servekit-revision"] == app.revision


def test_an_operation_is_described_by_its_docstring(doc: dict[str, Any]) -> None:
    query = doc["paths"]["/query"]["post"]
    assert query["operationId"] == "Search.query"
    assert query["summary"] == "Find the nearest documents."
    assert query["description"] == "The text is embedded first."
    assert query["tags"] == ["Search", "reading"]
    assert query["x-servekit"] == {
        "service": "Search",
        "version": "7",
        "endpoint": "query",
        "kind": "unary",
        "idempotent": False,
        "timeout_s": 5.0,
        "max_body_bytes": 64 * 2**20,
    }
    ids = [op["operationId"] for item in doc["paths"].values() for op in item.values()]
    assert len(set(ids)) == len(ids)
    assert doc["paths"]["/health/of"]["get"]["summary"] == "Health of"


# ---- requests


def test_query_parameters_of_get(doc: dict[str, Any]) -> None:
    operation = doc["paths"]["/health/of"]["get"]
    assert "requestBody" not in operation
    query = [p for p in operation["parameters"] if p.get("in") == "query"]
    assert [(p["name"], p["required"], p["schema"]["type"]) for p in query] == [
        ("zone", True, "string"),
        ("deep", False, "boolean"),
    ]
    assert "413" not in operation["responses"]


def test_shared_headers(doc: dict[str, Any]) -> None:
    def sent(path: str, method: str) -> set[str]:
        parameters = [p for p in doc["paths"][path][method]["parameters"] if "$ref" in p]
        found = [doc["components"]["parameters"][p["$ref"].split("/")[-1]] for p in parameters]
        assert all(p["in"] == "header" for p in found)
        return {p["name"] for p in found}

    shared = {"x-request-id", "x-servekit-timeout", "x-servekit-affinity", "traceparent"}
    assert sent("/query", "post") == {*shared, "idempotency-key"}
    assert sent("/health/of", "get") == shared


@pytest.mark.parametrize(
    ("path", "types"),
    [
        ("/query", ["application/json", "application/msgpack"]),
        (
            "/vision/classify",
            [
                "application/json",
                "application/msgpack",
                "application/octet-stream",
                "application/x-npy",
            ],
        ),
        (
            "/vision/draw",
            ["application/octet-stream", "application/json", "application/msgpack"],
        ),
        (
            "/vision/label/batch",
            [
                "application/json",
                "application/msgpack",
                "application/octet-stream",
                "application/x-npy",
            ],
        ),
    ],
)
def test_media_types_of_bodies(doc: dict[str, Any], path: str, types: list[str]) -> None:
    assert list(content(doc, path)) == types
    assert doc["paths"][path]["post"]["requestBody"]["required"] is True


def test_an_endpoint_without_parameters_has_no_body(doc: dict[str, Any]) -> None:
    assert "requestBody" not in doc["paths"]["/ping"]["post"]


def test_a_body_of_defaults_only_may_be_left_out() -> None:
    schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"k": {"type": "integer", "default": 3}},
    }
    doc = document(app_of(Search=schema))
    assert doc["paths"]["/Search/run"]["post"]["requestBody"]["required"] is False
    doc = document(app_of(Search={**schema, "title": "Options"}))
    assert doc["paths"]["/Search/run"]["post"]["requestBody"]["required"] is True


def test_a_batch_is_an_array_of_items(doc: dict[str, Any]) -> None:
    one = content(doc, "/vision/label")["application/json"]["schema"]
    many = content(doc, "/vision/label/batch")["application/json"]["schema"]
    assert many == {"type": "array", "items": one}
    answer = content(doc, "/vision/label/batch", of="200")
    assert list(answer) == ["application/json"]
    result, error = answer["application/json"]["schema"]["items"]["oneOf"]
    assert result["properties"]["result"]["title"] == "Hit"
    assert error == {"$ref": names("Error")}
    assert "one result or error" in doc["paths"]["/vision/label/batch"]["post"]["description"]


# ---- answers


def test_media_types_of_answers(doc: dict[str, Any]) -> None:
    assert list(content(doc, "/query", of="200")) == ["application/json", "application/msgpack"]
    assert "application/x-npy" in content(doc, "/vision/classify", of="200")
    assert next(iter(content(doc, "/vision/draw", of="200"))) == "image/png"


def test_a_stream_describes_its_chunks(doc: dict[str, Any]) -> None:
    answer = content(doc, "/answer", of="200")
    assert list(answer) == ["text/event-stream", "application/x-ndjson"]
    data = answer["text/event-stream"]["x-itemSchema"]["properties"]["data"]
    assert data["contentSchema"]["title"] == "Hit"


def test_answers_have_our_headers(doc: dict[str, Any]) -> None:
    headers = doc["paths"]["/query"]["post"]["responses"]["200"]["headers"]
    assert list(headers) == ["x-request-id", "x-servekit-version", "x-servekit-replica"]


def test_errors(doc: dict[str, Any]) -> None:
    responses = doc["paths"]["/query"]["post"]["responses"]
    assert list(responses) == ["200", "400", "413", "415", "422", "429", "500", "503", "504"]
    assert responses["429"] == {"$ref": "#/components/responses/Overloaded"}
    shared = doc["components"]["responses"]
    assert "retry-after" in shared["Overloaded"]["headers"]
    assert "retry-after" not in shared["BadRequest"]["headers"]


def test_the_error_schema_is_that_of_our_errors(doc: dict[str, Any]) -> None:
    schema = {"$ref": names("Error"), "components": doc["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    for response in doc["components"]["responses"].values():
        validator.validate(response["content"]["application/json"]["example"])
    validator.validate({"error": Overloaded("full", retry_after_s=1).details()})
    assert not validator.is_valid({"error": {"message": "no code"}})
    known = doc["components"]["schemas"]["ErrorDetails"]["properties"]
    details = Overloaded("full", retry_after_s=1, fields=[{"path": ""}]).details()
    assert known.keys() == {*details, "request_id"}


# ---- models


def test_equal_models_are_shared(doc: dict[str, Any]) -> None:
    assert content(doc, "/vision/where")["application/json"]["schema"]["title"] == "Point"
    schemas = doc["components"]["schemas"]
    assert schemas["Hit"]["properties"]["at"]["anyOf"][0] == {"$ref": names("Point")}
    assert [name for name in schemas if "Hit" in name or "Point" in name] == ["Hit", "Point"]


def test_recursive_models_refer_to_themselves(doc: dict[str, Any]) -> None:
    schema = content(doc, "/tree")["application/json"]["schema"]
    assert schema["properties"]["root"] == {"$ref": names("Node")}
    node = doc["components"]["schemas"]["Node"]
    assert node["properties"]["children"]["items"] == {"$ref": names("Node")}


def test_the_mapping_of_a_discriminator_follows(doc: dict[str, Any]) -> None:
    pet = content(doc, "/pet")["application/json"]["schema"]["properties"]["pet"]
    assert pet["discriminator"]["mapping"] == {"cat": names("Cat"), "dog": names("Dog")}


def model(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def using(model: str, **definitions: Any) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{model}", "$defs": definitions}


def app_of(**inputs: dict[str, Any]) -> AppSpec:
    """Return an app with one service and endpoint for each input schema."""
    services = [
        ServiceSpec(
            name=name,
            target="m:C",
            prefix=f"/{name}",
            endpoints=(EndpointSpec(name="run", kind="unary", path="/run", input=schema),),
        )
        for name, schema in inputs.items()
    ]
    return AppSpec(root=services[-1].name, services=tuple(services))


def sent(doc: dict[str, Any], service: str) -> Any:
    return content(doc, f"/{service}/run")["application/json"]["schema"]


def test_different_models_of_one_name_do_not_merge() -> None:
    a, b = model(x={"type": "integer"}), model(x={"type": "string"})
    doc = document(app_of(A=using("M", M=a), B=using("M", M=b), C=using("M", M=a)))
    schemas = doc["components"]["schemas"]
    one, two = sent(doc, "A")["$ref"], sent(doc, "B")["$ref"]
    assert one != two
    assert sent(doc, "C")["$ref"] == one
    assert schemas[one.split("/")[-1]] == a
    assert schemas[two.split("/")[-1]] == b
    assert {"B.M", "C.M"} == schemas.keys() - {"Error", "ErrorDetails", "ErrorField"}


def test_models_differ_by_what_they_refer_to() -> None:
    outer = model(inner={"$ref": "#/$defs/Inner"})
    a = using("Outer", Outer=outer, Inner=model(x={"type": "integer"}))
    b = using("Outer", Outer=outer, Inner=model(x={"type": "string"}))
    doc = document(app_of(A=a, B=b))
    schemas = doc["components"]["schemas"]
    for service, kind in (("A", "integer"), ("B", "string")):
        outer = schemas[sent(doc, service)["$ref"].split("/")[-1]]
        inner = schemas[outer["properties"]["inner"]["$ref"].split("/")[-1]]
        assert inner["properties"]["x"]["type"] == kind


def test_two_forms_in_one_service_are_told_apart(doc: dict[str, Any]) -> None:
    endpoint = EndpointSpec(
        name="run",
        kind="unary",
        path="/run",
        input=using("Box", Box=model(side={"type": "number"})),
        output=using("Box", Box=model(side={"type": "number"}, area={"type": "number"})),
    )
    service = ServiceSpec(name="S", target="m:C", prefix="", endpoints=(endpoint,))
    schemas = document(AppSpec(root="S", services=(service,)))["components"]["schemas"]
    assert "area" not in schemas["Box.Input"]["properties"]
    assert "area" in schemas["Box.Output"]["properties"]
    assert "area" in str(content(doc, "/boxes", of="200"))


def test_more_models_of_one_name_are_numbered() -> None:
    endpoints = tuple(
        EndpointSpec(name=f"e{i}", kind="unary", path=f"/e{i}", input=using("M", M=model(x=part)))
        for i, part in enumerate(({"type": "integer"}, {"type": "string"}, {"type": "null"}))
    )
    service = ServiceSpec(name="S", target="m:C", prefix="", endpoints=endpoints)
    doc = document(AppSpec(root="S", services=(service,)))
    found = [content(doc, f"/e{i}")["application/json"]["schema"]["$ref"] for i in range(3)]
    assert found == [names("M.Input"), names("M.Input.2"), names("M.Input.3")]


def test_a_model_named_like_ours_keeps_its_own_schema() -> None:
    doc = document(app_of(A=using("Error", Error=model(x={"type": "integer"}))))
    assert sent(doc, "A") == {"$ref": names("A.Error")}
    assert "error" in doc["components"]["schemas"]["Error"]["properties"]


def test_data_and_property_names_are_left_alone() -> None:
    ref = {"$ref": "#/$defs/M"}
    schema = {
        **model(**{"default": ref, "$ref": {"type": "string"}, "discriminator": ref}),
        "default": ref,
        "examples": [ref],
        "$defs": {"M": model()},
    }
    moved = sent(document(app_of(A=schema)), "A")
    assert moved["default"] == ref
    assert moved["examples"] == [ref]
    assert moved["properties"] == {
        "default": {"$ref": names("M")},
        "$ref": {"type": "string"},
        "discriminator": {"$ref": names("M")},
    }


def test_models_that_only_refer_to_others_are_skipped() -> None:
    schema = using("Alias", Alias={"$ref": "#/$defs/M"}, M=model(me={"$ref": "#/$defs/Alias"}))
    doc = document(app_of(A=schema))
    assert sent(doc, "A") == {"$ref": names("M")}
    assert doc["components"]["schemas"]["M"]["properties"]["me"] == {"$ref": names("M")}


def test_names_fit_a_component_key() -> None:
    doc = document(app_of(A=using("Größe[int]", **{"Größe[int]": model()})))
    assert sent(doc, "A") == {"$ref": names("Gr__e_int_")}


def test_the_apps_schemas_are_not_touched(app: AppSpec) -> None:
    before = app.to_json()
    document(app)
    assert app.to_json() == before


# -- jobs


class JobStatus(BaseModel):
    """A model of the app that is called like ours."""

    mine: int


@sk.service
class Reports:
    @sk.task(tags=["slow"])
    def render(self, query: str) -> JobStatus:
        """Render a report."""
        return JobStatus(mine=1)


def test_a_task_has_the_routes_of_its_jobs():
    described = json.loads(json.dumps(document(describe(Reports))))
    OpenAPIV31SpecValidator(described).validate()
    paths, schemas = described["paths"], described["components"]["schemas"]
    assert {path: list(item) for path, item in paths.items()} == {
        "/render": ["post"],
        "/render/jobs": ["get"],
        "/render/jobs/{id}": ["get"],
        "/render/jobs/{id}/result": ["get"],
        "/render/jobs/{id}/events": ["get"],
        "/render/jobs/{id}/cancel": ["post"],
        "/render/jobs/{id}/retry": ["post"],
    }
    submit = paths["/render"]["post"]
    assert submit["x-servekit"]["kind"] == "task"
    assert "200" not in submit["responses"]
    accepted = submit["responses"]["202"]
    assert "location" in accepted["headers"]
    ours = accepted["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert ours == "JobStatus"
    assert "attempt" in schemas[ours]["properties"]
    assert schemas[ours]["properties"]["submitted_at"]["format"] == "date-time"
    result = paths["/render/jobs/{id}/result"]["get"]["responses"]["200"]
    assert list(result["content"]["application/json"]["schema"]["properties"]) == ["mine"]
    ids = [o["operationId"] for item in paths.values() for o in item.values()]
    assert len(set(ids)) == len(ids)


def test_an_app_without_tasks_tells_nothing_of_jobs():
    described = document(describe(Vision))
    assert not any("Job" in name for name in described["components"]["schemas"])
    assert "Conflict" not in described["components"]["responses"]


# -- credentials


@pytest.mark.parametrize(
    ("keys", "tokens", "schemes"),
    [
        (True, False, ["apiKey", "bearer"]),
        (False, True, ["bearer"]),
        (True, True, ["apiKey", "bearer"]),
    ],
)
def test_credentials_that_are_asked_for(app, keys, tokens, schemes):
    doc = document(app, keys=keys, tokens=tokens)
    OpenAPIV31SpecValidator(json.loads(json.dumps(doc))).validate()
    assert list(doc["components"]["securitySchemes"]) == schemes
    assert doc["security"] == [{name: []} for name in schemes]
    if keys:
        assert doc["components"]["securitySchemes"]["apiKey"]["name"] == "x-api-key"
    for item in doc["paths"].values():
        for operation in item.values():
            assert operation["responses"]["401"] == {"$ref": "#/components/responses/Unauthorized"}
    example = doc["components"]["responses"]["Unauthorized"]["content"]["application/json"][
        "example"
    ]
    assert example["error"]["code"] == "unauthorized"


def test_where_nobody_is_asked_there_is_nothing_of_it(doc):
    assert "security" not in doc
    assert "securitySchemes" not in doc["components"]
    assert "401" not in str(doc["paths"])
    assert "Unauthorized" not in doc["components"]["responses"]
