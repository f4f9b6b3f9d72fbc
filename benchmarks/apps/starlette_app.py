"""The bare limit: Starlette and orjson with nothing in between (`sum`, `mean`, `tokens`)."""

from collections.abc import AsyncIterator

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


async def sum_values(request: Request) -> Response:
    """Add the numbers up."""
    values = orjson.loads(await request.body())["values"]
    return Response(orjson.dumps(sum(values)), media_type="application/json")


async def mean(request: Request) -> Response:
    """Average the image."""
    image = np.frombuffer(await request.body(), np.float32).reshape(1, 3, 224, 224)
    return Response(orjson.dumps(float(image.mean())), media_type="application/json")


async def stream(request: Request) -> StreamingResponse:
    """Stream tokens as server-sent events."""
    n = orjson.loads(await request.body())["n"]

    async def tokens() -> AsyncIterator[str]:
        for i in range(n):
            yield f"data: token{i}\n\n"

    return StreamingResponse(tokens(), media_type="text/event-stream")


app = Starlette(
    routes=[
        Route("/sum", sum_values, methods=["POST"]),
        Route("/mean", mean, methods=["POST"]),
        Route("/stream", stream, methods=["POST"]),
    ]
)
