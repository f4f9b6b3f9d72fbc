"""`servekit dev`: go over to the new code each time that one of the app's source files is saved."""

import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from servekit.engine.base import Engine
from servekit.engine.description import Described, describe_elsewhere
from servekit.errors import AuthorError, ResourceError, SetupError
from servekit.observe.log import get_logger

_log = get_logger("servekit.reload")

_SETTLE_MS = 200


async def follow(target: str, engine: Engine, described: Described, *, described_at: float) -> None:
    """Watch the app's sources and roll the engine to what they say; runs until cancelled.

    Args:
        target: What is served.
        engine: Runs it.
        described: What it runs.
        described_at: Time of day (`time.time`) before that was read from the sources.
    """
    sources = described.sources
    while True:
        async for _ in _saved(sources, since=described_at):
            described_at = time.time()
            found = await _roll(target, engine)
            if found is not None and found.sources != sources:
                sources = found.sources
                break  # other files to watch


async def _roll(target: str, engine: Engine) -> Described | None:
    try:
        described = await describe_elsewhere(target)
        changed = await engine.roll(described)
    except ResourceError as error:
        _log.error(
            "reload failed, the old code goes on",
            why=str(error),
            fix="stop and start servekit: then nothing of the old code takes room",
        )
    except SetupError as error:
        _log.error("reload failed, the old code goes on", why=error.message, traceback=error.trace)
    except AuthorError as error:
        _log.error("reload failed, the old code goes on", why=str(error))
    else:
        _log.info("reloaded", changed=", ".join(changed) or "nothing")
        return described
    return None


async def _saved(sources: Iterable[str], *, since: float) -> AsyncIterator[None]:
    """Yield each time that sources were saved, also for what was before the watch began."""
    # dev only; one of its parameters is not fully typed
    from watchfiles import awatch  # noqa: PLC0415  # pyright: ignore[reportUnknownVariableType]

    files = {str(Path(source)) for source in sources}
    folders = {Path(file).parent for file in files}
    # Wakes once a quarter of a second: the first time says that the watch has begun.
    watch = awatch(
        *folders,
        watch_filter=lambda _, path: path in files,
        recursive=False,
        step=_SETTLE_MS,
        rust_timeout=250,
        yield_on_timeout=True,
    )
    first = True
    async for changes in watch:
        missed = first and any(_saved_at(file) > since for file in files)
        first = False
        if changes or missed:
            yield


def _saved_at(file: str) -> float:
    try:
        return Path(file).stat().st_mtime
    except FileNotFoundError:
        return 0.0
