"""A method's signature, read into the types of its input and output.

In goes a function as its author wrote it; out comes a `Signature` of plain hints that pydantic can
build, with arrays and bytes marked as such. What can't be served (no annotation, `*args`, a hint that
doesn't resolve) is refused here, at import, with the place and the fix.
"""

import inspect
import types
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, replace
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from servekit.errors import SpecError
from servekit.spec.array import ArraySpec, spec_of
from servekit.spec.file import File, FileMedia
from servekit.spec.image import ImageMedia, image_hint
from servekit.spec.item import Item, ItemError
from servekit.spec.media import BytesMedia
from servekit.spec.table import table_media

BatchShape: TypeAlias = Literal["list", "axis"]
"""How a batched method takes its batch: a list of items, or arrays joined along an axis."""

_STREAMS = (AsyncIterator, AsyncIterable, AsyncGenerator, Iterator, Generator, Iterable)
_INBOUND: dict[Any, bool] = {AsyncIterator: True, AsyncIterable: True, Iterator: False}
"""Hints of a parameter that streams, and whether it is for async methods."""
_BATCHES = (list, Sequence)
_UNIONS: tuple[Any, ...] = (Union, types.UnionType)
_REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter; `default` is `inspect.Parameter.empty` where there is none."""

    name: str
    hint: Any
    default: Any = _REQUIRED
    keyword_only: bool = False

    @property
    def required(self) -> bool:
        """Whether a caller must give it."""
        return self.default is _REQUIRED


@dataclass(frozen=True, slots=True)
class Signature:
    """What one call of an endpoint takes and gives.

    Attributes:
        where: `Service.method`.
        params: In order, without `self` and the one that streams.
        inbound: The parameter that streams, if there is one; its hint is that of a chunk.
        positional: Names of all parameters that may be given by position.
        body: The only parameter is the body itself, not a key in it.
        result: Type of the answer, or of one chunk of it.
        stream: The answer comes in chunks.
    """

    where: str
    params: tuple[Param, ...]
    inbound: Param | None
    positional: tuple[str, ...]
    body: bool
    result: Any
    stream: bool


def read_signature(
    fn: Callable[..., Any], *, where: str, batched: BatchShape | None = None
) -> Signature:
    """Read a method, or the function inside of one; its first parameter is `self`.

    Raises:
        SpecError: It can't be served as written; names the parameter and the fix.
    """
    hints = _resolve(fn, where)
    declared = list(inspect.signature(fn).parameters.values())[1:]
    params = tuple(_param(p, hints, where) for p in declared)
    positional = tuple(p.name for p in params if not p.keyword_only)
    inbound = _inbound(fn, params, where)
    if inbound is not None:
        params = tuple(p for p in params if p.name != inbound.name)
        declared = [p for p in declared if p.name != inbound.name]
    only = [p for p in declared if p.kind is p.POSITIONAL_ONLY]
    if only and (len(declared) > 1 or inbound is not None):
        raise SpecError(
            f"{where}({only[0].name}): a positional-only parameter is the request body itself, so "
            "it must be the only one; remove the '/' from the signature"
        )
    if "return" not in hints:
        raise SpecError(
            f"{where}: the return type is missing; write -> and a type, -> None if there is none"
        )
    result, stream = _result(fn, hints["return"], where)
    body = bool(only)
    if batched is not None:
        if inbound is not None:
            raise SpecError(f"{where}({inbound.name}): a batched method's input can't stream")
        params, result = _one_of(batched, params, result, stream=stream, where=where)
        body = len(params) == 1
    return Signature(
        where,
        tuple(replace(p, hint=_marked(p.hint, f"{where}({p.name})")) for p in params),
        inbound and replace(inbound, hint=_marked(inbound.hint, f"{where}({inbound.name})")),
        positional,
        body,
        _marked(result, f"{where} -> return"),
        stream,
    )


def _resolve(fn: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return get_type_hints(fn, include_extras=True)
    except NameError as error:
        raise SpecError(
            f"{where}: the hint {error.name!r} can't be resolved; import it, or define it at the "
            "top level of the module, outside of TYPE_CHECKING"
        ) from None
    except (TypeError, SyntaxError, AttributeError) as error:
        raise SpecError(f"{where}: a hint can't be resolved: {error}") from None


def _param(parameter: inspect.Parameter, hints: dict[str, Any], where: str) -> Param:
    name = parameter.name
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
        raise SpecError(
            f"{where}({stars}{name}): callers need names and types; write each parameter out, or "
            "take one list or dict"
        )
    if name not in hints:
        raise SpecError(
            f"{where}({name}): the type is missing; write {name}: str, or typing.Any for any JSON"
        )
    keyword_only = parameter.kind is parameter.KEYWORD_ONLY
    return Param(name, hints[name], parameter.default, keyword_only)


def _inbound(fn: Callable[..., Any], params: tuple[Param, ...], where: str) -> Param | None:
    """Return the parameter that streams, with the hint of one chunk."""
    found = [p for p in params if (get_origin(p.hint) or p.hint) in _INBOUND]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(p.name for p in found)
        raise SpecError(f"{where}: {names} both stream; one request has one body, so only one can")
    (param,) = found
    place = f"{where}({param.name})"
    if not get_args(param.hint):
        raise SpecError(f"{place}: write what the stream holds, like AsyncIterator[bytes]")
    if not param.required:
        raise SpecError(f"{place}: a parameter that streams can't have a default")
    is_async = inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)
    if is_async is not _INBOUND[get_origin(param.hint)]:
        wanted = "AsyncIterator" if is_async else "Iterator"
        kind = "an async" if is_async else "a sync"
        raise SpecError(f"{place}: {kind} method's input streams as {wanted}[X]")
    return replace(param, hint=get_args(param.hint)[0])


def _result(fn: Callable[..., Any], hint: Any, where: str) -> tuple[Any, bool]:
    origin = get_origin(hint)
    if origin is Coroutine:
        return _result(fn, get_args(hint)[-1], where)
    if origin in _STREAMS or hint in _STREAMS:
        args = get_args(hint)
        if not args:
            raise SpecError(f"{where}: write what the stream yields, like AsyncIterator[str]")
        return args[0], True
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise SpecError(f"{where}: it yields, so its return type must be AsyncIterator[...]")
    return hint, False


def _one_of(
    batched: BatchShape, params: tuple[Param, ...], result: Any, *, stream: bool, where: str
) -> tuple[tuple[Param, ...], Any]:
    """Return the parameters and result of one item of a batch."""
    if stream:
        raise SpecError(f"{where}: a batched method returns its results, it can't stream them")
    if not params:
        raise SpecError(f"{where}: a batched method needs a parameter that holds the batch")
    for param in params:
        if not param.required:
            raise SpecError(f"{where}({param.name}): a batched parameter can't have a default")
    if batched == "axis":
        for param in params:
            if spec_of(_bare(param.hint)) is None and _annotated_spec(param.hint) is None:
                raise SpecError(
                    f"{where}({param.name}): with axis= it must be an array, like NDArray[np.float32]"
                )
        return params, result
    items = tuple(replace(p, hint=_item(p.hint, f"{where}({p.name})")) for p in params)
    if get_origin(result) not in _BATCHES or not get_args(result):
        raise SpecError(f"{where}: a batched method returns list[Y], one result per item")
    return items, _without_item_error(get_args(result)[0])


def _item(hint: Any, place: str) -> Any:
    if get_origin(hint) not in _BATCHES or not get_args(hint):
        raise SpecError(
            f"{place}: a batched parameter is list[X], of which a caller passes one X; for arrays "
            "joined along an axis give @batched(axis=0)"
        )
    item = get_args(hint)[0]
    if item is Item:
        raise SpecError(f"{place}: write what an Item holds: list[Item[X]]")
    return get_args(item)[0] if get_origin(item) is Item else item


def _without_item_error(hint: Any) -> Any:
    if get_origin(hint) not in _UNIONS:
        return hint
    return Union[tuple(arg for arg in get_args(hint) if arg is not ItemError)]  # noqa: UP007


# ---- marking arrays and bytes


def _marked(hint: Any, place: str) -> Any:
    """Return the hint with arrays and bytes in builtin containers made known to pydantic.

    What lies in a user's own class is its own affair: there `Array[...]` works by itself.
    """
    try:
        return _mark(hint)
    except SpecError as error:
        raise SpecError(f"{place}: {error}") from None


def _mark(hint: Any) -> Any:
    if hint is bytes:
        return Annotated[bytes, BytesMedia()]
    if hint is File:
        return Annotated[File, FileMedia()]
    if hint is not None and hint is image_hint():
        return Annotated[hint, ImageMedia()]
    if (media := table_media(hint)) is not None:
        return Annotated[hint, media]
    if (spec := spec_of(hint)) is not None:
        return spec
    origin: Any = get_origin(hint)
    args = get_args(hint)
    if origin is None or origin is Literal or not args:
        return hint
    if origin is Annotated:
        base, *metadata = args
        if (spec := _annotated_spec(hint)) is not None:
            base = spec
            metadata = [m for m in metadata if not isinstance(m, ArraySpec)]
        marked = _mark(base)
        return Annotated[(marked, *metadata)] if metadata else marked
    if origin in _UNIONS and bytes in args and str in args:
        raise SpecError("bytes | str can't be told apart in JSON; take one of them")
    marked_args = tuple(_mark(arg) if _is_hint(arg) else arg for arg in args)
    if origin in _UNIONS:
        return Union[marked_args]  # noqa: UP007
    if marked_args != args:
        copy_with = getattr(hint, "copy_with", None)
        hint = copy_with(marked_args) if copy_with else origin[marked_args]
    if origin is list:
        from servekit.spec.adapter import FailFast  # noqa: PLC0415  (pydantic comes with it)

        return Annotated[hint, FailFast()]
    return hint


def _is_hint(arg: Any) -> bool:
    return arg is not Ellipsis and not isinstance(arg, list | tuple)


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _annotated_spec(hint: Any) -> ArraySpec | None:
    """Return the spec in `Annotated[NDArray[np.float32], Array["float32", "N"]]`, if it is one."""
    if get_origin(hint) is not Annotated:
        return None
    base, *metadata = get_args(hint)
    spec = next((m for m in metadata if isinstance(m, ArraySpec)), None)
    return None if spec is None else spec.narrowed(base)
