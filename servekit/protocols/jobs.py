"""The part of an OpenAPI document that is about jobs: what each task has below its own path."""

import re
from collections.abc import Mapping
from typing import Any, Final, get_args

import msgspec

from servekit.core.call import EVENT_STREAM, JSON, MSGPACK
from servekit.core.job import JOBS, MAX_LISTED, JobEvent, JobState, JobStatus
from servekit.errors import CallError, Conflict, NotFound
from servekit.protocols.models import REF, Schema

_STATUS: Final[Schema] = {"$ref": f"{REF}JobStatus"}
_FIELD: Final = re.compile(r"^ +(\w+): (.*)$", re.MULTILINE)
_ID: Final = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "The job's id, as the submission answered it.",
    "schema": {"type": "string"},
}

JOB_ERRORS: Final[Mapping[CallError, str]] = {
    NotFound("there is no job '9f0c2b7e41d54f6c8a3d5e1f7b9a0c24'"): "There is no such job.",
    Conflict(
        "job 9f0c2b7e41d54f6c8a3d5e1f7b9a0c24 is running", reason="running", retry_after_s=1.0
    ): "The job's state does not allow it, or not yet; `reason` is its status.",
}
"""One example of each error that only the routes of jobs have, and what it means."""


def job_schemas() -> dict[str, Schema]:
    """Return the models that all jobs share."""
    _, found = msgspec.json.schema_components((JobStatus, JobEvent), ref_template=REF + "{name}")
    for schema in found.values():
        schema["description"], _, fields = schema["description"].partition("\n\nAttributes:\n")
        for name, text in _FIELD.findall(fields):
            field = schema["properties"][name]
            if name.endswith("_at") or name == "at":
                field["format"] = "date-time"
            if "$ref" not in field:
                field["description"] = text
    return found


def accepted() -> dict[str, Any]:
    """Return the answer to a submission."""
    return {
        "description": "The job is kept, and will run.",
        "headers": _headers("location"),
        "content": _content(_STATUS),
    }


def job_paths(
    path: str, service: str, task: str, result: dict[str, Any], *, secured: bool
) -> dict[str, dict[str, Any]]:
    """Return the paths of a task's jobs.

    Args:
        path: The task's.
        service: The service's name.
        task: The task's.
        result: What the task would answer if it were no job.
        secured: A credential is needed.
    """
    base = f"{path.rstrip('/')}{JOBS}"

    def get(name: str, summary: str, answer: dict[str, Any], *parameters: Any) -> dict[str, Any]:
        return {"get": _described(service, task, name, summary, answer, parameters, secured)}

    def post(name: str, summary: str) -> dict[str, Any]:
        answer = _answer(_STATUS)
        return {"post": _described(service, task, name, summary, answer, (_ID,), secured)}

    return {
        base: get(
            "", "List the newest jobs", _answer({"type": "array", "items": _STATUS}), *_FILTER
        ),
        f"{base}/{{id}}": get("/get", "Where a job is", _answer(_STATUS), _ID),
        f"{base}/{{id}}/result": get(
            "/result", "A job's result, or the error that it ended with", result, _ID, _WAIT
        ),
        f"{base}/{{id}}/events": get(
            "/events", "A job's changes, from the first on", _events(), _ID, _LAST
        ),
        f"{base}/{{id}}/cancel": post("/cancel", "Cancel a job"),
        f"{base}/{{id}}/retry": post("/retry", "Queue a job again that did not succeed"),
    }


_WAIT: Final = {
    "name": "wait",
    "in": "query",
    "description": "How long to wait for the end of the job; at most 60s.",
    "schema": {"type": "string", "examples": ["30s"]},
}
_LAST: Final = {
    "name": "last-event-id",
    "in": "header",
    "description": "Number of the last event that is known.",
    "schema": {"type": "string"},
}
_FILTER: Final = (
    {
        "name": "status",
        "in": "query",
        "description": "Only jobs with this status.",
        "schema": {"enum": list(get_args(JobState))},
    },
    {
        "name": "limit",
        "in": "query",
        "description": "Most jobs.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 50},
    },
)


def _described(
    service: str,
    task: str,
    verb: str,
    summary: str,
    answer: dict[str, Any],
    parameters: tuple[Any, ...],
    secured: bool,
) -> dict[str, Any]:
    endpoint = f"{task}{JOBS}{verb}"
    errors = ["BadRequest", "NotFound", "Conflict", "Overloaded", "ExecutionError", "Unavailable"]
    codes = ["400", "404", "409", "429", "500", "503"]
    if secured:
        errors.insert(1, "Unauthorized")
        codes.insert(1, "401")
    return {
        "operationId": f"{service}.{endpoint.replace('/', '.')}",
        "tags": [service],
        "summary": summary,
        "parameters": [*parameters, {"$ref": "#/components/parameters/RequestId"}],
        "responses": {
            "200": answer,
            **{
                code: {"$ref": f"#/components/responses/{error}"}
                for code, error in zip(codes, errors, strict=True)
            },
        },
        "x-servekit": {
            "service": service,
            "endpoint": endpoint,
            "kind": "job",
            "idempotent": verb != "/retry",
        },
    }


def _answer(schema: Schema) -> dict[str, Any]:
    return {"description": "The answer.", "headers": _headers(), "content": _content(schema)}


def _content(schema: Schema) -> dict[str, Any]:
    return {JSON: {"schema": schema}, MSGPACK: {"schema": schema}}


def _headers(*more: str) -> dict[str, Any]:
    return {
        name: {"$ref": f"#/components/headers/{name}"}
        for name in ("x-request-id", "x-servekit-version", "x-servekit-replica", *more)
    }


def _events() -> dict[str, Any]:
    data = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"$ref": f"{REF}JobEvent"},
    }
    return {
        "description": "Server-sent events: a JobEvent in each `data:`, with its number as `id:`, "
        "then `event: end`; or `event: error` with an Error.",
        "content": {
            EVENT_STREAM: {
                "schema": {"type": "string", "contentMediaType": EVENT_STREAM},
                "x-itemSchema": {
                    "type": "object",
                    "required": ["data"],
                    "properties": {
                        "data": data,
                        "id": {"type": "string"},
                        "event": {"enum": ["end", "error"]},
                    },
                },
            }
        },
    }
