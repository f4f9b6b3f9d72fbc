"""`Scaler` as Ray Serve's autoscaling policy: the same numbers, from the same load.

Ray Serve makes one object per deployment in its controller, which is one process for the whole
cluster, and calls it several times a second: it must never block and never raise.
"""

import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from servekit.engine.scaler import Scaler
from servekit.spec.policy import Autoscale

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

ONGOING, FINISHED, CAPACITY = "ongoing", "finished", "capacity_per_s"
"""What replicas report."""
STALE_S = 3.0
"""Figures that are older count no more; they come twice a second."""


class Policy:
    """Follows one service.

    Args:
        policy: Bounds and delays, as `Autoscale` in builtin types.
        target: Calls on board that one replica should have.
    """

    def __init__(self, *, policy: dict[str, Any], target: float) -> None:
        self._scaler = Scaler(msgspec.convert(policy, Autoscale), target=target)

    def __call__(self, ctx: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """Return how many replicas there should be, and nothing to remember."""
        try:
            return self._wanted(ctx), {}
        except Exception:
            logging.getLogger("ray.serve").exception("servekit's autoscaling policy failed")
            return ctx.target_num_replicas, {}

    def _wanted(self, ctx: "AutoscalingContext") -> int:
        figures = ctx.raw_metrics or {}
        capacities = [points[-1].value for points in _fresh(figures.get(CAPACITY))]
        ongoing = sum(points[-1].value for points in _fresh(figures.get(ONGOING)))
        return self._scaler.observe(
            time.monotonic(),
            ongoing=ongoing + ctx.total_num_requests,  # those are calls that wait for the first one
            rate_per_s=sum(_rate(points) for points in _fresh(figures.get(FINISHED))),
            capacity_per_s=min((c for c in capacities if c > 0), default=None),
            replicas=ctx.target_num_replicas,
        )


def _fresh(series: Any) -> list[Any]:
    """Return each replica's figures, if the last is fresh."""
    oldest = time.time() - STALE_S
    return [
        points for points in (series or {}).values() if points and points[-1].timestamp > oldest
    ]


def _rate(points: Any) -> float:
    """Return the growth per second of a count."""
    first, last = points[0], points[-1]
    time_s = last.timestamp - first.timestamp
    return float((last.value - first.value) / time_s) if time_s > 0 else 0.0
