"""Pydantic's side of a type: how hints are built, and what a built type contains.

Imports pydantic, so others import it late, when an endpoint is really declared.
"""

from collections.abc import Iterator
from typing import Any, cast

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import core_schema
from typing_extensions import TypeAliasType

from servekit.errors import SpecError

_STRICT: ConfigDict = {
    "strict": True,
    "extra": "forbid",
    "ser_json_inf_nan": "constants",
    "ser_json_bytes": "base64",
    "val_json_bytes": "base64",
}
_alias: Any = TypeAliasType


class FailFast:
    """Metadata of a list: stop at its first wrong item.

    Else a list of a million wrong items becomes a million error objects. (pydantic's own marker
    isn't hashable, so it can't be in a union.)
    """

    __slots__ = ()

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema = handler(source)
        return {**schema, "fail_fast": True} if schema["type"] == "list" else schema


def build(hint: Any, *, where: str, finite: bool = False) -> TypeAdapter[Any]:
    """Let pydantic build a type.

    Builtins, dataclasses and TypedDicts in it become strict and refuse unknown keys; pydantic
    models keep their own configuration.

    Args:
        hint: The type, with arrays and bytes marked.
        where: `Service.method(param)`, for messages.
        finite: Refuse NaN and infinities.

    Raises:
        SpecError: It can't; says why and, where known, how to fix it.
    """
    config: ConfigDict = {**_STRICT, "allow_inf_nan": not finite}
    try:
        # Behind an alias, because pydantic takes no config beside a dataclass or TypedDict.
        adapter: TypeAdapter[Any] = TypeAdapter(_alias("Body", hint), config=config)
        _ = adapter.core_schema  # Not before this does it miss what a forward reference names.
    except NameError as error:
        raise SpecError(
            f"{where}: the hint {error.name!r} can't be resolved; define it at the top level"
        ) from None
    except (PydanticUserError, TypeError) as error:
        raise SpecError(f"{where}: {_advice(str(error))}") from None
    return adapter


def _advice(problem: str) -> str:
    if "typing_extensions.TypedDict" in problem:
        return "before Python 3.12 import TypedDict from typing_extensions, not from typing"
    line = problem.splitlines()[0]
    if "arbitrary_types_allowed" in problem:
        what = line.partition(". ")[0]
        return f"{what}; use builtins, dataclasses, pydantic models, or Array for arrays"
    return line


def schema_kinds(adapter: TypeAdapter[Any]) -> set[str]:
    """Return which kinds of core schema a type is made of (`"float"`, `"model"`, ...).

    A model that chooses how it writes NaN adds `"ser_json_inf_nan"`.
    """
    return set(_kinds(adapter.core_schema))


def _kinds(schema: Any) -> Iterator[str]:
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            table = cast("dict[str, Any]", node)
            if isinstance(kind := table.get("type"), str):
                yield kind
                if kind == "model" and "ser_json_inf_nan" in (table.get("config") or {}):
                    yield "ser_json_inf_nan"
            stack.extend(table.values())
        elif isinstance(node, list | tuple):
            stack.extend(cast("list[Any]", node))
