"""Bodies that must be refused, by the parser that they are meant for.

A new parser is a module of nasties and one line in `PARSERS`. tests/flow/test_corpus.py sends all
of them to a running app (tests/flow/apps/kinds.py), tests/unit/test_hostile.py mutates them.
"""

from typing import NamedTuple

from tests.corpus.arrays import GOOD, NPY, RAW
from tests.corpus.documents import JSON
from tests.corpus.nasty import Nasty
from tests.corpus.packed import MSGPACK, pack
from tests.corpus.query import QUERY


class Parser(NamedTuple):
    """One way into an endpoint.

    Attributes:
        endpoint: Of `Http` in tests/flow/apps/kinds.py; its path is its name.
        media: Content type; "" sends the body as a query.
        good: A body that is taken.
        nasties: Bodies that aren't.
    """

    endpoint: str
    media: str
    good: bytes
    nasties: list[Nasty]


PARSERS = {
    "json": Parser("area", "application/json", b'{"box": {"width": 2}}', JSON),
    "msgpack": Parser("double", "application/msgpack", pack({"values": [[1.0, 2.0]]}), MSGPACK),
    "npy": Parser("triple", "application/x-npy", GOOD, NPY),
    "raw": Parser("triple", "application/octet-stream", b"\0" * 16, RAW),
    "query": Parser("greet", "", b"name=Ann", QUERY),
}
