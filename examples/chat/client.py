"""Talk to the therapist in a terminal: `python examples/chat/client.py [URL]`; Ctrl-D ends it."""

import asyncio
import sys

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed


async def main(url: str) -> None:
    async with connect(url.replace("http", "ws", 1) + "/talk") as socket:
        speaking = asyncio.ensure_future(speak(socket))
        try:
            while True:
                print(await socket.recv(), end="", flush=True)
        except ConnectionClosed:
            speaking.cancel()


async def speak(socket: ClientConnection) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        await socket.send(line)
    await socket.send(b"")  # that was all


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:3000"))
