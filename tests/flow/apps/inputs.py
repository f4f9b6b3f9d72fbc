"""Endpoints with every type of input that a signature can have."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

import servekit as sk

Pairs = sk.Array["float32", "N 2"]


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: float
    y: float = 0.0


class Options(TypedDict):
    deep: bool
    names: list[str]


class Strict(BaseModel):
    """Models keep their own configuration; by default pydantic takes `false` for 0."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Cat(Strict):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)] = 9


class Dog(Strict):
    kind: Literal["dog"]
    name: Annotated[str, Field(min_length=1, max_length=20)]


class Tree(Strict):
    value: int
    children: list["Tree"] = []
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None


@sk.service
class Everything:
    @sk.endpoint
    async def builtins(
        self, flag: bool, count: int, ratio: float, text: str, maybe: int | None = None
    ) -> list[str]:
        return [str(value) for value in (flag, count, ratio, text, maybe)]

    @sk.endpoint
    async def constrained(
        self,
        score: Annotated[float, Field(ge=0, le=1)],
        code: Annotated[str, Field(min_length=2, max_length=4)],
        few: Annotated[list[int], Field(min_length=1, max_length=3)],
        even: Annotated[int, Field(multiple_of=2)] = 2,
    ) -> float:
        return score * even

    @sk.endpoint
    async def choice(self, level: Literal["low", "high", 3], color: Color = Color.RED) -> Color:
        return color

    @sk.endpoint
    def point(self, point: Point) -> Point:
        return Point(point.y, point.x)

    @sk.endpoint
    def options(self, options: Options) -> Options:
        return options

    @sk.endpoint
    def tree(self, root: Tree, /) -> Tree:
        return root

    @sk.endpoint
    def union(self, value: int | str | list[Point]) -> dict[str, int | str | list[Point]]:
        return {"value": value}

    @sk.endpoint
    def nested(self, table: dict[str, list[dict[str, int]]], pair: tuple[int, str]) -> int:
        return len(table)

    @sk.endpoint
    def array(self, values: Pairs) -> Pairs:
        return values * np.float32(0.5)

    @sk.endpoint
    def pixels(self, image: sk.Array["uint8", "2 3"], /) -> sk.Array["uint8", "3 2"]:
        return image.T

    @sk.endpoint
    def data(self, data: bytes, /) -> bytes:
        return data[::-1]

    @sk.endpoint
    def file(self, content: bytes, name: str) -> int:
        return len(content)

    @sk.endpoint(method="GET")
    def find(
        self, text: str, limit: Annotated[int, Field(ge=1, le=50)] = 10, exact: bool = False
    ) -> dict[str, str | int | bool]:
        return {"text": text, "limit": limit, "exact": exact}

    @sk.batched(max_size=8)
    def double(self, xs: list[int]) -> list[int]:
        return [2 * x for x in xs]

    @sk.batched(max_size=8)
    def lengths(self, points: list[Point]) -> list[float]:
        return [min(abs(point.x) + abs(point.y), 1e300) for point in points]

    @sk.endpoint
    async def count(self, upto: Annotated[int, Field(ge=0, le=50)]) -> AsyncIterator[int]:
        for number in range(upto):
            yield number
