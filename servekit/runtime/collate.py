"""Making one batch of many items, and many results of one batch.

Lists are gathered argument by argument; arrays are concatenated along the policy's axis and their
rows handed back by count. `pad_to` fills a batch up with copies of its last row, so that compiled
graphs see few sizes; the padding never reaches a caller.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from servekit.errors import InvalidOutput
from servekit.spec.policy import BatchPolicy


def padded_size(rows: int, policy: BatchPolicy) -> int:
    """Return the size that a batch of `rows` is executed with."""
    if not policy.pad_to:
        return rows
    at = bisect_left(policy.pad_to, rows)
    return policy.pad_to[at] if at < len(policy.pad_to) else rows


def join(items: Sequence[tuple[Any, ...]], policy: BatchPolicy) -> tuple[Any, ...]:
    """Return the arguments of the batch function: a list, or an array, per parameter."""
    if policy.axis is None:
        missing = padded_size(len(items), policy) - len(items)
        columns = [list(column) for column in zip(*items, strict=True)]
        for column in columns:
            column.extend(column[-1:] * missing)
        return tuple(columns)
    import numpy as np  # noqa: PLC0415  (only services with arrays need it)

    arrays = [item[0] for item in items]
    batch = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=policy.axis)
    rows = batch.shape[policy.axis]
    missing = padded_size(rows, policy) - rows
    if missing:
        last = np.take(batch, [-1], axis=policy.axis)
        batch = np.concatenate([batch, *[last] * missing], axis=policy.axis)
    return (batch,)


def cut(item: Any, policy: BatchPolicy) -> list[Any]:
    """Return one caller's array in parts that fit into a batch; anything else is one part."""
    axis, limit = policy.axis, policy.max_size
    shape = getattr(item, "shape", ())
    if axis is None or len(shape) <= axis or shape[axis] <= limit:
        return [item]
    before = (slice(None),) * axis
    return [item[(*before, slice(at, at + limit))] for at in range(0, shape[axis], limit)]


def glue(results: Sequence[Any], policy: BatchPolicy) -> Any:
    """Return the result for an item that was cut."""
    import numpy as np  # noqa: PLC0415  (only services with arrays need it)

    return np.concatenate(results, axis=policy.axis)


def split(result: Any, rows: Sequence[int], policy: BatchPolicy, *, where: str) -> Sequence[Any]:
    """Return one result per item of `rows` rows each, without the padding.

    Raises:
        InvalidOutput: The function returned more or fewer results than it was given items.
    """
    if policy.axis is None:
        wanted = padded_size(len(rows), policy)
        if not _is_list(result):
            kind = type(result).__name__
            raise InvalidOutput(f"{where} returned a {kind}, not a list with a result per item")
        if len(result) != wanted:
            raise InvalidOutput(f"{where} returned {len(result)} results for {wanted} items")
        return list(result)[: len(rows)]
    shape = getattr(result, "shape", ())
    wanted = padded_size(sum(rows), policy)
    if len(shape) <= policy.axis or shape[policy.axis] != wanted:
        raise InvalidOutput(
            f"{where} returned shape {tuple(shape)}; axis {policy.axis} must have {wanted} rows, "
            "as many as it was given"
        )
    before = (slice(None),) * policy.axis
    parts: list[Any] = []
    start = 0
    for count in rows:
        parts.append(result[(*before, slice(start, start + count))])
        start += count
    return parts


def _is_list(result: Any) -> bool:
    """Return whether it has an order; an array's rows are results, too."""
    if hasattr(result, "shape"):
        return True
    return isinstance(result, Sequence) and not isinstance(result, str | bytes)
