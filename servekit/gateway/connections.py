"""How many connections clients may have: a count by address, without I/O."""

import ipaddress
import resource
from collections import Counter
from typing import Final

from servekit.errors import Unavailable

_OWN_DESCRIPTORS: Final = 512
"""Files and sockets that the gateway has besides its clients': those to replicas, mostly."""


class Connections:
    """The connections that there are.

    Args:
        limit: Of all.
        per_address: From one address; 0 is no limit. Addresses of one IPv6 network of 64 bits
            count as one, as a single client has as many of them as it likes.

    Attributes:
        count: How many there are.
    """

    def __init__(self, limit: int, *, per_address: int = 0) -> None:
        self._limit = limit
        self._per_address = per_address
        self._by_address: Counter[str] = Counter()
        self.count = 0

    def enter(self, address: str) -> Unavailable | None:
        """Count a new connection; returns why not, if it is one too many."""
        if self.count >= self._limit:
            return _too_many(f"the server has {self._limit} connections, and takes no more")
        if self._per_address and address:
            key = _key(address)
            if self._by_address[key] >= self._per_address:
                return _too_many(f"there are {self._per_address} connections from {key} already")
            self._by_address[key] += 1
        self.count += 1
        return None

    def leave(self, address: str) -> None:
        """Take note that one has ended which was counted."""
        self.count -= 1
        if self._per_address and address:
            key = _key(address)
            self._by_address[key] -= 1
            if not self._by_address[key]:
                del self._by_address[key]


def _too_many(text: str) -> Unavailable:
    return Unavailable(text, reason="too_many_connections", retry_after_s=1.0, started=False)


def _key(address: str) -> str:
    """Return what a client can't change about its address at will."""
    if ":" not in address:
        return address
    found = ipaddress.IPv6Address(address.partition("%")[0])
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, 64), strict=False))


def make_room(wanted: int) -> int:
    """Let this process have descriptors for so many connections; returns how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OWN_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return min(wanted, max(needed - _OWN_DESCRIPTORS, 1))
