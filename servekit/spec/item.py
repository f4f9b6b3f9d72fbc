"""What a `@batched` method may take and return per element, besides the bare value."""

from typing import Generic, TypeVar

from servekit.core.context import RequestContext

T = TypeVar("T")


class Item(Generic[T]):
    """One element of a batch with the context of the call it came from."""

    __slots__ = ("ctx", "value")

    def __init__(self, value: T, ctx: RequestContext) -> None:
        self.value = value
        self.ctx = ctx

    def __repr__(self) -> str:
        return f"Item({self.value!r}, request_id={self.ctx.request_id!r})"


class ItemError:
    """Returned in place of an element's result: fails that caller alone, with `error`."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"ItemError({self.error!r})"
