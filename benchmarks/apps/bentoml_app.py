"""BentoML, one root service per workload; access logs off, everything else as it comes."""

from collections.abc import AsyncGenerator
from pathlib import Path

import bentoml
import numpy as np

QUIET = {"access": {"enabled": False}}
# By default every 100th internal call closes the session under the calls in flight, which then
# fail (BentoML issue 5540): without this the cells with several connections would be invalid.
KEEP_SESSION = {"max_age": 86400.0, "max_requests": 1_000_000_000}


@bentoml.service(logging=QUIET)
class Sum:
    """Workload `sum`."""

    @bentoml.api
    async def sum(self, values: list[float]) -> float:
        """Add the numbers up."""
        return sum(values)


@bentoml.service(logging=QUIET, runner_connection=KEEP_SESSION)
class Model:
    """The batched half of workload `pipeline`."""

    @bentoml.api(batchable=True, max_batch_size=64)
    async def predict(self, rows: list[list[float]]) -> list[float]:
        """Add up every row."""
        return [sum(row) for row in rows]


@bentoml.service(logging=QUIET, runner_connection=KEEP_SESSION)
class Pipeline:
    """Workload `pipeline`: calls the batched model."""

    model = bentoml.depends(Model)

    @bentoml.api
    async def predict(self, values: list[float]) -> float:
        """Ask the model."""
        return (await self.model.to_async.predict([values]))[0]


@bentoml.service(logging=QUIET)
class Mean:
    """Workload `mean`: binary bodies reach BentoML as files."""

    @bentoml.api
    async def mean(self, image: Path, /) -> float:
        """Average the image."""
        return float(np.fromfile(image, np.float32).reshape(1, 3, 224, 224).mean())


@bentoml.service(logging=QUIET)
class Tokens:
    """Workload `tokens`: streams."""

    @bentoml.api
    async def stream(self, n: int) -> AsyncGenerator[str, None]:
        """Yield the tokens one by one."""
        for i in range(n):
            yield f"token{i}\n"
