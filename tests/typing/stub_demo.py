"""A user's file over what `servekit client` wrote; `test_typing.py` checks the lines marked `# E:`."""

# pyright: strict

import asyncio
from datetime import UTC, date, datetime, timedelta
from typing import assert_type
from uuid import UUID

import numpy as np
from client import Box, Cat, Dog, Everything, Hit, ImageLab, Node, Odd
from numpy.typing import NDArray

import servekit as sk


def plain(url: str) -> None:
    with sk.connect(Everything, url) as s:
        assert_type(s.numbers(a=1, b=2.0), float)
        assert_type(s.pack(box=Box(width=1.0), times=2), list[Box])
        assert_type(s.pet(pet=Dog(name="Rex")), Cat | Dog)
        s.texts()
        s.times(
            at=datetime(2026, 1, 1, tzinfo=UTC),
            day=date(2026, 1, 1),
            wait=timedelta(1),
            id=UUID(int=1),
        )
        s.choose(color="red", size=3)
        s.choose(color="green")  # E: no such color
        s.numbers(b=1.0)  # E: a is missing
        s.numbers(1)  # E: by name only
        tree: Node = {"label": "a", "children": [{"label": "b"}]}
        assert_type(s.tree(root=tree)["label"], str)
        odd: Odd = {"from": "x", "list": [1]}
        s.odd(value=odd)
        for hit in s.boxes(upto=2):
            assert_type(hit, Hit)
            assert_type(hit.vector, NDArray[np.float32])
        assert_type(s.list_(), list[str])
        s.nothing()  # E: no such method


async def events(url: str) -> None:
    async with sk.connect(Everything, url) as s, sk.connect(ImageLab, url) as images:
        assert_type(await s.numbers.remote(a=1), float)
        async for number in s.count.remote(upto=3):
            assert_type(number, int)
        assert_type(await images.label.remote(b"x"), str)


asyncio.run(events(""))
