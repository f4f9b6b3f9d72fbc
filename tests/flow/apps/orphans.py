"""A service that starts a process, and one that blocks its event loop."""

import subprocess
import time

from graph import note

import servekit as sk


@sk.service
class Root:
    def __init__(self) -> None:
        self.helper = subprocess.Popen(["sleep", "300"])

    @sk.endpoint
    async def echo(self, x: int) -> int:
        return x

    @sk.endpoint
    async def block(self, seconds: float) -> None:
        note("block")
        time.sleep(seconds)
