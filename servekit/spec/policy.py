"""Frozen settings of services and endpoints: what an author may tune, with its bounds checked.

All are plain data, so they serialise into the `AppSpec` as they are.
"""

from collections.abc import Iterable
from math import inf
from typing import Any, Literal

import msgspec

from servekit.core.units import parse_bytes
from servekit.errors import SpecError


class Autoscale(msgspec.Struct, frozen=True, kw_only=True, tag="autoscale"):
    """Let the number of replicas follow the load.

    Attributes:
        min: Fewest replicas; 0 lets the service sleep.
        max: Most replicas.
        target_ongoing: Calls on board that one replica should have; None takes it from the
            batcher's capacity, or the concurrency limit.
        up_delay_s: Seconds that the load must stay high before replicas are added.
        down_delay_s: Seconds that the load must stay low before replicas are removed.
        idle_s: Seconds without any call before the last replica goes, where `min` is 0; None means
            `down_delay_s`.
        initial: Replicas at the start; None means `min`, at least 1.
        window_s: Seconds whose mean load counts; a tenth of them does in a sudden rush.
    """

    min: int = 1
    max: int
    target_ongoing: float | None = None
    up_delay_s: float = 0.0
    down_delay_s: float = 60.0
    idle_s: float | None = None
    initial: int | None = None
    window_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max or self.max < 1:
            raise SpecError(
                f"Autoscale(min={self.min}, max={self.max}): need 0 <= min <= max and max >= 1"
            )
        if self.target_ongoing is not None and self.target_ongoing <= 0:
            raise SpecError(f"Autoscale(target_ongoing={self.target_ongoing}): must be above 0")
        if self.up_delay_s < 0 or self.down_delay_s < 0:
            raise SpecError("Autoscale: up_delay_s and down_delay_s are seconds, 0 or more")
        if self.idle_s is not None and self.idle_s < 0:
            raise SpecError(f"Autoscale(idle_s={self.idle_s}): seconds, 0 or more, or None")
        if self.initial is not None and not self.min <= self.initial <= self.max:
            raise SpecError(
                f"Autoscale(initial={self.initial}): must lie in [{self.min}, {self.max}]"
            )
        if not 6 <= self.window_s <= 3600:
            raise SpecError(f"Autoscale(window_s={self.window_s}): must lie in [6, 3600]")

    @property
    def start(self) -> int:
        """Replicas to start with."""
        return max(1, self.min) if self.initial is None else self.initial


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one service; every queue has one.

    Attributes:
        max_ongoing: Calls that run at once in a replica; None means 32 for sync methods (one
            thread each) and 256 for async ones.
        max_queued: Calls that wait in a replica for their turn; more are refused with 429.
        timeout_s: Deadline of a call that came without one; None waits for ever.
        max_body: Largest request body, as bytes or text like `"64MiB"`.
    """

    max_ongoing: int | None = None
    max_queued: int = 1024
    timeout_s: float | None = 60.0
    max_body: int | str = "64MiB"

    def __post_init__(self) -> None:
        if self.max_ongoing is not None and self.max_ongoing < 1:
            raise SpecError(f"Limits(max_ongoing={self.max_ongoing}): must be 1 or more")
        if self.max_queued < 0:
            raise SpecError(f"Limits(max_queued={self.max_queued}): must be 0 or more")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise SpecError(f"Limits(timeout_s={self.timeout_s}): must be above 0, or None")
        parse_bytes(self.max_body, where="Limits(max_body=…)")

    @property
    def max_body_bytes(self) -> int:
        """Largest request body in bytes."""
        return parse_bytes(self.max_body, where="Limits(max_body=…)")


class BatchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How calls of one endpoint are merged; see `runtime/batcher.py`.

    Attributes:
        max_size: Most rows in one executed batch.
        max_wait_ms: Longest time to hold a batch for more rows; 0 never holds.
        target_ms: Soft target for queue and run; lets the batcher pick sizes under overload.
        max_queued: Calls that may wait; None means 1024.
        concurrent_batches: Batches that run at once.
        axis: Arrays are concatenated along this axis; None passes a list.
        pad_to: Sizes that executed batches are padded to, ascending; empty pads nothing.
        isolate: When a batch raises, split it and retry, so that only the bad item fails.
        strictness: k in [1, 3]: higher refuses more and misses fewer deadlines.
    """

    max_size: int
    max_wait_ms: float = 0.0
    target_ms: float | None = None
    max_queued: int | None = None
    concurrent_batches: int = 1
    axis: int | None = None
    pad_to: tuple[int, ...] = ()
    isolate: bool = False
    strictness: float = 2.0

    def __post_init__(self) -> None:
        if self.max_size < 1:
            raise SpecError(f"batched(max_size={self.max_size}): must be 1 or more")
        if self.max_wait_ms < 0:
            raise SpecError(f"batched(max_wait_ms={self.max_wait_ms}): must be 0 or more")
        if self.target_ms is not None and self.target_ms <= 0:
            raise SpecError(f"batched(target_ms={self.target_ms}): must be above 0, or None")
        if self.concurrent_batches < 1:
            raise SpecError(f"batched(concurrent_batches={self.concurrent_batches}): 1 or more")
        if not 1 <= self.strictness <= 3:
            raise SpecError(f"batched(strictness={self.strictness}): must lie in [1, 3]")
        if self.pad_to and (
            list(self.pad_to) != sorted(set(self.pad_to)) or self.pad_to[-1] != self.max_size
        ):
            raise SpecError(
                f"batched(pad_to={self.pad_to}): sizes must ascend and end at max_size="
                f"{self.max_size}"
            )


class TaskPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How the jobs of one task are queued, run and repeated; see `jobs/job.py`.

    Attributes:
        retries: Attempts after the first.
        backoff_s: Wait before the first of them; doubles each time.
        timeout_s: Longest time for one attempt; None has no limit.
        ttl_s: How long a finished job is kept, and how long one may be queued.
        max_concurrency: Jobs that run at once in a replica.
        max_queued: Jobs that may be queued in all.
    """

    retries: int = 3
    backoff_s: float = 1.0
    timeout_s: float | None = 3600.0
    ttl_s: float = 86_400.0
    max_concurrency: int = 1
    max_queued: int = 10_000

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise SpecError(f"task(retries={self.retries}): must be 0 or more")
        if not 0 <= self.backoff_s < inf:
            raise SpecError(f"task(backoff_s={self.backoff_s}): must be 0 or more")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise SpecError(f"task(timeout_s={self.timeout_s}): must be above 0, or None")
        if not 0 < self.ttl_s < inf:
            raise SpecError(f"task(ttl_s={self.ttl_s}): must be above 0")
        if self.max_concurrency < 1:
            raise SpecError(f"task(max_concurrency={self.max_concurrency}): must be 1 or more")
        if self.max_queued < 1:
            raise SpecError(f"task(max_queued={self.max_queued}): must be 1 or more")


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where on a cluster a replica may be; a single machine has no choice, and ignores it.

    Attributes:
        accelerator: Kind of GPU, like `"A100"`; "" takes any.
        resources: Amounts of the cluster's custom resources.
        labels: Labels that the node must have.
        bundles: Resources to reserve together, for a replica that starts workers of its own; the
            replica itself runs in the first, by the cluster's names: `({"GPU": 2}, {"CPU": 4})`.
        strategy: How bundles are spread over nodes.
        python: Python interpreter on the nodes, with the same Ray and servekit; "" is the cluster's.
        runtime_env: Ray runtime environment, as JSON values.
    """

    accelerator: str = ""
    resources: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    bundles: tuple[dict[str, float], ...] = ()
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    python: str = ""
    runtime_env: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU", "memory"):
                raise SpecError(
                    f"Placement(resources={{{name!r}: …}}): write it as cpu=, gpu= or memory= of "
                    "@sk.service"
                )
            if amount <= 0:
                raise SpecError(f"Placement(resources={{{name!r}: {amount}}}): must be above 0")
        if any(not bundle or min(bundle.values()) < 0 for bundle in self.bundles):
            raise SpecError("Placement(bundles=…): each needs resources, with amounts of 0 or more")
        if self.strategy not in _STRATEGIES:
            raise SpecError(
                f"Placement(strategy={self.strategy!r}): write one of {', '.join(_STRATEGIES)}"
            )
        for name, what in (("py_executable", "python="), ("env_vars", "env= of @sk.service")):
            if name in self.runtime_env:
                raise SpecError(f"Placement(runtime_env={{{name!r}: …}}): write it as {what}")


_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica needs.

    Attributes:
        gpu: Devices; a fraction below 1 shares one, whole numbers above take that many.
        cpu: Cores, to warn when there are too few; 0 asks for none in particular.
        memory: Bytes of memory, which the machine must have; 0 asks for none in particular.
    """

    gpu: float = 0.0
    cpu: float = 0.0
    memory: int = 0

    def __post_init__(self) -> None:
        if self.gpu < 0 or (self.gpu > 1 and self.gpu != int(self.gpu)):
            raise SpecError(
                f"gpu={self.gpu}: write a share of one device (0 to 1) or a whole number of them"
            )
        if self.cpu < 0:
            raise SpecError(f"cpu={self.cpu}: must be 0 or more")

    @classmethod
    def together(cls, parts: Iterable["Resources"]) -> "Resources":
        """Return what services that share a process need.

        Raises:
            SpecError: Their GPUs add up to neither a share of one nor a whole number.
        """
        parts = list(parts)
        return cls(
            gpu=round(sum(part.gpu for part in parts), 6),  # ten times 0.1 is one device
            cpu=sum(part.cpu for part in parts),
            memory=sum(part.memory for part in parts),
        )
