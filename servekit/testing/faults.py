"""What a `FaultProxy` can do to the bytes of a connection: values, without I/O.

A fault sees one direction of one connection, and knows how many bytes have passed in it. Several
compose: the smallest piece, the sum of the delays, the first end. A fault of your own is a subclass
of `Fault` with the methods that it needs.
"""

from dataclasses import dataclass
from math import inf
from random import Random
from typing import Literal, TypeAlias

from servekit.errors import ConfigError

Ending: TypeAlias = Literal["close", "half-close", "reset"]

_TURN_S = 0.02
"""Seconds of a bandwidth that pass as one piece."""


@dataclass(frozen=True)
class Fault:
    """One fault; this one does nothing."""

    def delay_s(self, rng: Random) -> float:  # noqa: ARG002
        """Return the seconds that bytes which just came are held back."""
        return 0.0

    def most(self, passed: int) -> float:  # noqa: ARG002
        """Return how many bytes may pass as one piece, behind those that have; 0 is none for now."""
        return inf

    def changed(self, piece: bytes, passed: int) -> bytes:  # noqa: ARG002
        """Return what arrives in place of a piece, of the same length."""
        return piece

    def pause_s(self, count: int) -> float:  # noqa: ARG002
        """Return the seconds to wait behind a piece of `count` bytes."""
        return 0.0

    def ending(self, passed: int) -> Ending | None:  # noqa: ARG002
        """Return how the connection ends here, if it does."""
        return None


@dataclass(frozen=True)
class Delay(Fault):
    """Bytes arrive later; their order and the bandwidth stay.

    Attributes:
        seconds: How much later.
        jitter_s: Up to so much more, at random.
    """

    seconds: float
    jitter_s: float = 0.0

    def delay_s(self, rng: Random) -> float:
        """Return the seconds that bytes are held back."""
        return self.seconds + rng.uniform(0, self.jitter_s)


@dataclass(frozen=True)
class Bandwidth(Fault):
    """At most so many bytes pass in a second.

    Raises:
        ConfigError: It is not above 0.
    """

    bytes_per_s: float

    def __post_init__(self) -> None:
        _need(self.bytes_per_s > 0, f"{self}: need a number above 0; Freeze() lets nothing pass")

    def most(self, passed: int) -> float:  # noqa: ARG002
        """Return the bytes of one turn."""
        return max(1.0, self.bytes_per_s * _TURN_S)

    def pause_s(self, count: int) -> float:
        """Return the seconds that a piece takes."""
        return count / self.bytes_per_s


@dataclass(frozen=True)
class Slice(Fault):
    """Bytes arrive in pieces of at most `size`, each a write of its own.

    Raises:
        ConfigError: It is below 1.
    """

    size: int

    def __post_init__(self) -> None:
        _need(self.size >= 1, f"{self}: need a size of 1 or more")

    def most(self, passed: int) -> float:  # noqa: ARG002
        """Return the size."""
        return self.size


@dataclass(frozen=True)
class Corrupt(Fault):
    """Other bytes arrive in place of those at an offset.

    Attributes:
        at: Offset of the first one, from the connection's beginning in this direction.
        data: What arrives.
    """

    at: int
    data: bytes = b"\xff"

    def changed(self, piece: bytes, passed: int) -> bytes:
        """Return the piece, with the part of `data` that falls into it."""
        start, stop = max(self.at, passed), min(self.at + len(self.data), passed + len(piece))
        if start >= stop:
            return piece
        spoilt = self.data[start - self.at : stop - self.at]
        return piece[: start - passed] + spoilt + piece[stop - passed :]


@dataclass(frozen=True)
class Freeze(Fault):
    """Nothing passes behind `after` bytes, and nobody hangs up, until the fault is removed."""

    after: int = 0

    def most(self, passed: int) -> float:
        """Return what is left before the silence."""
        return max(0, self.after - passed)


@dataclass(frozen=True)
class Cut(Fault):
    """The connection ends behind `after` bytes.

    Attributes:
        after: Bytes that arrive before.
        how: `"close"` ends both sides in order, `"half-close"` this direction only, `"reset"` both
            at once, as a host does that has crashed.
    """

    after: int = 0
    how: Ending = "close"

    def most(self, passed: int) -> float:
        """Return what is left before the end."""
        return max(0, self.after - passed)

    def ending(self, passed: int) -> Ending | None:
        """Return how it ends, when it is time."""
        return self.how if passed >= self.after else None


@dataclass(frozen=True)
class Refuse(Fault):
    """Nobody listens: new connections are refused. Those that are open go on."""


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
