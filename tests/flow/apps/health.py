"""A service that is unwell while a file is there."""

import os
from pathlib import Path

import servekit as sk


@sk.service
class Moody:
    @sk.ready
    def is_content(self) -> bool:
        if Path(f"{os.environ['TRACE']}.ill").exists():
            raise RuntimeError("not today")
        return True

    @sk.endpoint
    async def echo(self, x: int) -> int:
        return x
