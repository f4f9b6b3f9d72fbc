"""Every kind of input and output, and names that are hard to write."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from typing import Annotated, Any, Literal, NotRequired
from uuid import UUID

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

import servekit as sk

Pairs = Annotated[NDArray[np.float32], sk.Array["float32", "N 2"]]


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: Annotated[str, Field(max_length=40)]


@dataclass
class Node:
    """A tree.

    Its "leaves" have no children; C:\\temp is no tree.
    """

    label: str
    children: list["Node"] = field(default_factory=list)


class Box(BaseModel):
    """A box."""

    width: float
    tags: list[str] = []
    color: Color = Color.RED
    note: str | None = None
    made: date | None = None


class Sparse(TypedDict):
    a: int
    b: NotRequired[str]


class Odd(BaseModel):
    """Keys that can't be attributes, or hide their own types."""

    list_: Annotated[list[int], Field(alias="list")]
    from_: Annotated[str, Field(alias="from")]
    two_words: Annotated[int, Field(alias="two words")] = 2


class Hit(BaseModel):
    id: UUID
    when: datetime
    vector: Annotated[NDArray[np.float32], sk.Array["float32", "3"]]
    raw: Annotated[bytes, Field(description="Bytes.")] = b""


@sk.service(name="image-lab", prefix="/images", version="3")
class Images:
    """Looks at pictures."""

    @sk.batched(max_size=8)
    def label(self, images: list[bytes]) -> list[str]:
        return [f"{len(image)} bytes" for image in images]

    @sk.batched(axis=0, max_size=8)
    def rows(self, x: Pairs) -> Pairs:
        return x * np.float32(2)


@sk.service
class Everything:
    """All that can be said.

    In one service.
    """

    images = sk.depends(Images)

    @sk.endpoint
    def numbers(self, a: int, b: float = 0.5, *, c: bool = False, d: int | None = None) -> float:
        """Add numbers.

        Returns their "sum".
        """
        return a + b + c + (d or 0)

    @sk.endpoint
    def texts(
        self,
        text: str = 'it\'s "so"\n',
        words: list[str] = [],  # noqa: B006
        more: set[str] = set(),  # noqa: B006
    ) -> str:
        return text + "".join(words) + "".join(sorted(more))

    @sk.endpoint
    def times(self, at: datetime, day: date, wait: timedelta, id: UUID) -> dict[str, str]:  # noqa: A002
        return {"at": at.isoformat(), "day": str(day), "wait": str(wait), "id": str(id)}

    @sk.endpoint
    def choose(
        self, color: Color, size: Literal["s", "m", 3] = "m", only: Literal["x"] = "x"
    ) -> Color:
        return color

    @sk.endpoint
    def long_choice(
        self,
        of: Literal[
            "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"
        ],
    ) -> str:
        return of

    @sk.endpoint
    def pack(self, box: Box, times: int = 1) -> list[Box]:
        return [box] * times

    @sk.endpoint
    def whole(self, box: Box, /) -> Box:
        return box

    @sk.endpoint
    def tree(self, root: Node) -> Node:
        return root

    @sk.endpoint
    def pet(self, pet: Annotated[Cat | Dog, Field(discriminator="kind")]) -> Cat | Dog:
        return pet

    @sk.endpoint
    def sparse(self, value: Sparse, default: Sparse = {"a": 1}) -> Sparse:  # noqa: B006
        return default | value

    @sk.endpoint
    def odd(self, value: Odd) -> Odd:
        return value

    @sk.endpoint
    def anything(self, value: Any, table: dict[str, list[int]], pair: tuple[int, str]) -> Any:
        return [value, table, pair]

    @sk.endpoint
    def many(self, values: dict[str, list[tuple[int, dict[str, list[float | None]], str]]]) -> int:
        return len(values)

    @sk.endpoint
    def arrays(self, x: Pairs, mask: NDArray[np.bool_] | None = None) -> Pairs:
        return x if mask is None else x[mask]

    @sk.endpoint
    def tensor(self, x: np.ndarray, /) -> NDArray[np.float64]:
        return np.asarray(x, np.float64)

    @sk.endpoint
    def reverse(self, data: bytes, /) -> bytes:
        return data[::-1]

    @sk.endpoint
    def hits(self, data: bytes, id: UUID) -> list[Hit]:  # noqa: A002
        zeros = np.zeros(3, np.float32)
        return [Hit(id=id, when=datetime(2026, 1, 2, 3, 4, tzinfo=UTC), vector=zeros, raw=data)]

    @sk.endpoint(method="GET", path="/v1/find")
    def find(self, text: str, k: int = 3, exact: bool = False, color: Color | None = None) -> str:
        return f"{text} {k} {exact} {color and color.value}"

    @sk.endpoint
    def print(self, list: list[int], type: str = "x") -> None:  # noqa: A002
        """\"\"\"Quotes\"\"\" and a backslash: \\"""

    @sk.endpoint(media_type="text/markdown")
    def report(self, title: str) -> str:
        return f"# {title}"

    @sk.endpoint
    async def count(self, upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            yield number

    @sk.endpoint
    def pieces(self, data: bytes) -> Iterator[bytes]:
        yield data[:1]
        yield data[1:]

    @sk.endpoint
    def boxes(self, upto: int) -> Iterator[Hit]:
        for _ in range(upto):
            yield self.hits(b"x", UUID(int=7))[0]

    @sk.endpoint
    def list(self) -> list[str]:
        return ["a"]
