"""Pydantic's complaints as callers see them: one `{"path", "message", "type"}` per wrong field.

Nothing here repeats a large value: a message has at most a few hundred characters.
"""

import re
import reprlib
from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails, ValidationError

from servekit.errors import suggest
from servekit.spec.body import path_text

Field = dict[str, Any]

_MAX_FIELDS = 20
_UNKNOWN = frozenset({"extra_forbidden", "unexpected_keyword_argument"})
_SELF_EXPLAINING = ("missing", "array_", "bytes_")
_UNEXPECTED = re.compile(
    r"(Expected .*?) - serialized value may not be as expected "
    r"\[(?:field_name='(\w+)', )?input_value=(.*?), input_type=\w+\]",
    re.DOTALL,
)
_BYTES_ADVICE = "; bytes in a pydantic model need ser_json_bytes and val_json_bytes='base64'"

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 3, 3


def shorten(value: object) -> str:
    """Return a value's repr in at most 100 characters, without making a longer one first."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # an int of more digits than Python agrees to print
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def unparsable(error: ValidationError) -> str:
    """Return why the JSON document can't be parsed, with the position; "" if it can."""
    if error.error_count() > 1:
        return ""
    (detail,) = error.errors(include_url=False, include_context=False, include_input=False)
    text = detail["msg"]
    return text[:1].lower() + text[1:200] if detail["type"] == "json_invalid" else ""


def of_validation(error: ValidationError, keys: Sequence[str]) -> list[Field]:
    """Return the first wrong fields; `keys` are the known ones of the outermost object."""
    details = error.errors(include_url=False, include_context=False)
    return [_field(detail, keys) for detail in details[:_MAX_FIELDS]]


def _field(detail: ErrorDetails, keys: Sequence[str]) -> Field:
    path, kind, message = detail["loc"], detail["type"], detail["msg"][:200]
    if kind in _UNKNOWN:
        message = f"unknown field.{suggest(str(path[-1])[:100], keys if len(path) == 1 else ())}"
    elif not kind.startswith(_SELF_EXPLAINING):
        message += f", got {shorten(detail['input'])}"
    return {"path": path_text(path), "message": message, "type": kind}


def of_serialization(error: BaseException) -> Field:
    """Return the field that couldn't be written, as far as pydantic tells."""
    text = str(error)
    path = ""
    if (match := _UNEXPECTED.search(text)) is not None:
        path = match[2] or ""
        text = f"{match[1]}, got {match[3]}"
    elif "codec can't decode" in text:
        text += _BYTES_ADVICE
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    message = lines[-1] if lines else type(error).__name__
    return {"path": path, "message": message[:300], "type": "serialization"}
