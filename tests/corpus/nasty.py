"""What a corpus is made of."""

from typing import NamedTuple


class Nasty(NamedTuple):
    """One body that must be refused.

    Attributes:
        name: What is wrong with it.
        body: Its bytes; the query, for GET.
        field: Path of the field that the answer points at, with 422; None where nothing can be
            parsed, with 400.
    """

    name: str
    body: bytes
    field: str | None = None


def rows(**found: bytes | tuple[bytes, str]) -> list[Nasty]:
    """Return nasties by name: bytes that can't be parsed, or bytes and the field that is wrong."""
    return [
        Nasty(name, given) if isinstance(given, bytes) else Nasty(name, *given)
        for name, given in found.items()
    ]
