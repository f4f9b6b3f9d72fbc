"""Schemathesis at a running service: good and bad data for every kind of input of its document."""

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    positive_data_acceptance,
    response_schema_conformance,
)

from servekit.protocols.openapi import document
from servekit.spec.describe import describe
from tests.examples import examples
from tests.flow.apps.inputs import Everything
from tests.flow.harness import Running, show


def described() -> dict[str, Any]:
    """Return the document without our headers: a bad id is replaced, not refused (test_gateway)."""
    found = document(describe(Everything))
    for item in found["paths"].values():
        for operation in item.values():
            operation["parameters"] = [p for p in operation["parameters"] if "$ref" not in p]
    return found


BEYOND = {"int_type", "array_dtype", "array_bytes", "bytes_base64"}
"""Refused, though the schema has no word for it: 21.0 as an int, 1e300 as a float32, the size of
raw bytes, text that is no base64."""


def unsayable(label: str, response: schemathesis.Response) -> list[Any]:
    """Return the checks that ask for more than a document can say."""
    if label == "POST /count" and response.status_code == 200:  # OpenAPI 3.1 has no events
        return [response_schema_conformance]
    sent = response.request.headers.get("content-type", "")
    if sent.startswith("multipart/") and response.status_code == 200:  # there all is text
        return [negative_data_rejection]
    if response.status_code == 422:
        fields = response.json()["error"]["fields"]
        return [positive_data_acceptance] * ({field["type"] for field in fields} <= BEYOND)
    if label.endswith("/batch") and response.status_code == 200:  # an item may fail alone
        return [negative_data_rejection] * any("error" in item for item in response.json())
    return []


SCHEMA = schemathesis.openapi.from_dict(described())
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}


@pytest.fixture(scope="module")
def app():
    running = Running("inputs.py:Everything")
    try:
        asyncio.run(running.ready())
        replicas = asyncio.run(running.replicas("Everything"))
        yield running
        assert asyncio.run(running.replicas("Everything")) == replicas  # none has died
    finally:
        show("\n".join(running.lines[-40:]))
        asyncio.run(running.close())


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("label", OPERATIONS)
def test_an_operation_keeps_its_promise(app, label, mode):
    """No 5xx, nothing but what the document says, bad data refused, good data taken."""

    @given(OPERATIONS[label].as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples(10),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    def keeps_its_promise(case):
        response = case.call(base_url=app.url, timeout=20)
        case.validate_response(response, excluded_checks=unsayable(label, response))

    keeps_its_promise()
