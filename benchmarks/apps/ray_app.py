"""Ray Serve: `python ray_app.py WORKLOAD PORT`, on a private one-node cluster."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import StreamingResponse

TUNED = os.environ.get("RAY_SERVE_THROUGHPUT_OPTIMIZED") == "1"
# The default of 5 would keep a batch of 64 from ever filling up.
OPTIONS: dict[str, Any] = {"max_ongoing_requests": 128}
if TUNED:
    OPTIONS["logging_config"] = {"enable_access_log": False}


@serve.deployment(**OPTIONS)
class Sum:
    """Workload `sum`."""

    async def __call__(self, request: Request) -> float:
        """Add the numbers up."""
        return sum((await request.json())["values"])


@serve.deployment(**OPTIONS)
class Model:
    """The batched half of workload `pipeline`."""

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.0 if TUNED else 0.01)
    async def predict(self, rows: list[list[float]]) -> list[float]:
        """Add up every row."""
        return [sum(row) for row in rows]


@serve.deployment(**OPTIONS)
class Pipeline:
    """Workload `pipeline`: calls the batched model."""

    def __init__(self, model: DeploymentHandle) -> None:
        self.model = model

    async def __call__(self, request: Request) -> float:
        """Ask the model."""
        return await self.model.predict.remote((await request.json())["values"])


@serve.deployment(**OPTIONS)
class Mean:
    """Workload `mean`."""

    async def __call__(self, request: Request) -> float:
        """Average the image."""
        image = np.frombuffer(await request.body(), np.float32).reshape(1, 3, 224, 224)
        return float(image.mean())


@serve.deployment(**OPTIONS)
class Tokens:
    """Workload `tokens`: streams."""

    async def __call__(self, request: Request) -> StreamingResponse:
        """Stream tokens as server-sent events."""
        n = (await request.json())["n"]

        async def tokens() -> AsyncIterator[str]:
            for i in range(n):
                yield f"data: token{i}\n\n"

        return StreamingResponse(tokens(), media_type="text/event-stream")


APPS = {
    "sum": Sum.bind(),
    "pipeline": Pipeline.bind(Model.bind()),
    "mean": Mean.bind(),
    "tokens": Tokens.bind(),
}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Two slots are reserved, more than two cores are never needed: the work is not CPU-pinned.
    ray.init(address="local", include_dashboard=False, num_cpus=4)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    try:
        serve.run(APPS[sys.argv[1]], blocking=True)
    finally:
        serve.shutdown()
        ray.shutdown()
