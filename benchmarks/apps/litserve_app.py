"""LitServe: `python litserve_app.py WORKLOAD PORT`; `pipeline` is a single batched API."""

import sys
from collections.abc import AsyncIterator
from typing import Annotated

import litserve as ls
import numpy as np
from fastapi import Body


class Sum(ls.LitAPI):
    """Workload `sum`."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    async def decode_request(self, request: dict) -> list[float]:
        """Take the numbers out of the body."""
        return request["values"]

    async def predict(self, values: list[float]) -> float:
        """Add the numbers up."""
        return sum(values)

    async def encode_response(self, output: float) -> float:
        """Answer with the bare number."""
        return output


class Pipeline(ls.LitAPI):
    """Workload `pipeline`."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def decode_request(self, request: dict) -> list[float]:
        """Take the numbers out of the body."""
        return request["values"]

    def batch(self, inputs: list[list[float]]) -> list[list[float]]:
        """Keep the rows as they are."""
        return inputs

    def predict(self, rows: list[list[float]]) -> list[float]:
        """Add up every row."""
        return [sum(row) for row in rows]

    def unbatch(self, output: list[float]) -> list[float]:
        """One number per caller."""
        return output

    def encode_response(self, output: float) -> float:
        """Answer with the bare number."""
        return output


class Mean(Sum):
    """Workload `mean`."""

    async def decode_request(
        self, request: Annotated[bytes, Body(media_type="application/octet-stream")]
    ) -> np.ndarray:
        """View the body as an image."""
        return np.frombuffer(request, np.float32).reshape(1, 3, 224, 224)

    async def predict(self, image: np.ndarray) -> float:
        """Average the image."""
        return float(image.mean())


class Tokens(ls.LitAPI):
    """Workload `tokens`."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    async def decode_request(self, request: dict) -> int:
        """Take the count out of the body."""
        return request["n"]

    async def predict(self, n: int) -> AsyncIterator[str]:
        """Yield the tokens one by one."""
        for i in range(n):
            yield f"token{i}"

    async def encode_response(self, outputs: AsyncIterator[str]):  # FastAPI reads an annotation
        """Frame every token as a server-sent event."""
        async for token in outputs:
            yield f"data: {token}\n\n"


def build(workload: str) -> ls.LitAPI:
    """The API of one workload."""
    if workload == "sum":
        return Sum(enable_async=True)
    if workload == "pipeline":
        return Pipeline(max_batch_size=64)
    if workload == "mean":
        return Mean(enable_async=True)
    return Tokens(stream=True, enable_async=True)


if __name__ == "__main__":
    server = ls.LitServer(build(sys.argv[1]), accelerator="cpu")
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", generate_client_file=False
    )
