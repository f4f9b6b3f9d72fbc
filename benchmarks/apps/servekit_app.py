"""The workloads in servekit: one root service each."""

from collections.abc import AsyncIterator

import servekit as sk


@sk.service
class Sum:
    """Workload `sum`."""

    @sk.endpoint
    async def sum(self, values: list[float]) -> float:
        """Add the numbers up."""
        return sum(values)


@sk.service
class Model:
    """The batched half of workload `pipeline`."""

    @sk.batched(max_size=64)
    async def predict(self, rows: list[list[float]]) -> list[float]:
        """Add up every row."""
        return [sum(row) for row in rows]


@sk.service
class Pipeline:
    """Workload `pipeline`: calls the batched model."""

    model = sk.depends(Model)

    @sk.endpoint
    async def predict(self, values: list[float]) -> float:
        """Ask the model."""
        return await self.model.predict.remote(values)


@sk.service
class Mean:
    """Workload `mean`: the body is the raw array."""

    @sk.endpoint
    async def mean(self, image: sk.Array["float32", "1 3 224 224"], /) -> float:  # noqa: F722, F821
        """Average the image."""
        return float(image.mean())


@sk.service
class Tokens:
    """Workload `tokens`: streams."""

    @sk.endpoint
    async def stream(self, n: int) -> AsyncIterator[str]:
        """Yield the tokens one by one."""
        for i in range(n):
            yield f"token{i}"
