"""FastAPI with typed bodies, in one process (`sum`, `mean`, `tokens`)."""

from collections.abc import AsyncIterator

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

app = FastAPI()


class Numbers(BaseModel):
    """Body of `/sum`."""

    values: list[float]


class Count(BaseModel):
    """Body of `/stream`."""

    n: int


@app.post("/sum")
async def sum_values(body: Numbers) -> float:
    """Add the numbers up."""
    return sum(body.values)


@app.post("/mean")
async def mean(request: Request) -> float:
    """Average the image."""
    image = np.frombuffer(await request.body(), np.float32).reshape(1, 3, 224, 224)
    return float(image.mean())


@app.post("/stream")
async def stream(body: Count) -> StreamingResponse:
    """Stream tokens as server-sent events."""

    async def tokens() -> AsyncIterator[str]:
        for i in range(body.n):
            yield f"data: token{i}\n\n"

    return StreamingResponse(tokens(), media_type="text/event-stream")
