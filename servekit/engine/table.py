"""The routing table: which replicas answer for which service. Plain data, pushed to every process."""

from typing import Literal

import msgspec


class Target(msgspec.Struct, frozen=True):
    """One replica that takes calls."""

    replica: str
    address: str
    version: str = ""


class ServiceTargets(msgspec.Struct, frozen=True):
    """All of one service's.

    Attributes:
        state: While none of the targets can be reached: `"starting"` and `"asleep"` (scaled to
            zero, and ready so) mean that calls may wait for one, `"down"` that the service keeps
            failing, so they are refused at once.
        retry_after_s: When a service that is down is tried again.
        unready: Ids of targets that are to take no calls for now; they finish those they have.
    """

    targets: tuple[Target, ...] = ()
    state: Literal["up", "starting", "asleep", "down"] = "starting"
    retry_after_s: float = 1.0
    unready: tuple[str, ...] = ()


class Table(msgspec.Struct, frozen=True):
    """A whole routing table.

    Attributes:
        serial: A higher one replaces a lower.
        services: All services, by name.
        proves: What is not in it is gone. Else only the end of its connection says so: Ray Serve's
            table is empty for a moment now and then.
    """

    serial: int = 0
    services: dict[str, ServiceTargets] = msgspec.field(default_factory=dict[str, ServiceTargets])
    proves: bool = True
