"""`servekit serve` and `servekit dev`: run an app until a signal says stop."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from servekit.core.aio import Tasks
from servekit.engine.deploy import needs_ray
from servekit.engine.description import describe_elsewhere
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.engine.base import Engine


async def serve(
    target: str,
    settings: Settings,
    *,
    dev: bool = False,
    on_loading: Callable[[], None] = lambda: None,
    on_starting: Callable[["Engine"], None] = lambda _: None,
    on_ready: Callable[["Engine"], None] = lambda _: None,
    on_ending: Callable[[float], None] = lambda _: None,
) -> None:
    """Run an app; returns after SIGINT or SIGTERM, when everything has been drained.

    SIGTERM, which comes from an orchestrator, first says for `drain_delay_s` that the app is not
    ready, so that balancers go elsewhere; another signal skips that. SIGINT (Ctrl-C) comes from a
    person who waits, so it drains at once, and while it drains another one ends everything.

    Args:
        target: Import string or file.
        settings: The engine, address, time limits, logging.
        dev: Reload on save, show the playground.
        on_loading: Called while another process describes the app: the time for slow imports.
        on_starting: Called when the app is known, before it starts.
        on_ready: Called when every service is ready.
        on_ending: Called when a signal came to an app that was ready, with the seconds until it
            is drained.

    Raises:
        AuthorError: The app can't be described or started; nothing is left running.
    """
    loop = asyncio.get_running_loop()
    ending, draining = asyncio.Event(), asyncio.Event()
    engine: Engine | None = None

    def end(number: signal.Signals) -> None:
        waits = number is signal.SIGTERM and not dev
        if draining.is_set() and number is signal.SIGINT and engine is not None:
            engine.kill()
        if ending.is_set() or not waits:
            draining.set()
        ending.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    tasks = Tasks()
    described_at = time.time()
    describing = asyncio.ensure_future(describe_elsewhere(target))
    await asyncio.sleep(0)  # its process is on its way now, and imports while this one does
    make = _engine(settings)

    on_loading()
    if not await _finished(describing, unless=ending):
        await _cancel(describing)
        return
    described = describing.result()
    engine = make(described, settings, target=target, dev=dev)
    on_starting(engine)
    starting = asyncio.ensure_future(engine.start())
    try:
        if await _finished(starting, unless=ending):
            on_ready(engine)
            if dev:
                from servekit.engine.reload import follow  # noqa: PLC0415

                tasks.spawn(
                    follow(target, engine, described, described_at=described_at),
                    name="reload",
                )
        elif not engine.ready:
            return
        await ending.wait()
        on_ending(0.0 if draining.is_set() else settings.drain_delay_s)
        await engine.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_delay_s):
                await draining.wait()
    finally:
        draining.set()
        await _cancel(starting)
        await tasks.close()
        await engine.stop()


def _engine(settings: Settings) -> "Callable[..., Engine]":
    """Return what makes the engine that the settings name; to import it takes its time."""
    if settings.engine == "ray":
        needs_ray()
        from servekit.engine.ray.engine import RayEngine  # noqa: PLC0415

        return RayEngine
    from servekit.engine.supervisor import Supervisor  # noqa: PLC0415

    return Supervisor


async def _finished(work: asyncio.Future[Any], *, unless: asyncio.Event) -> bool:
    """Wait for work, unless the end comes first; raises what it raised."""
    ended = asyncio.ensure_future(unless.wait())
    try:
        await asyncio.wait([work, ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
    if work.done():
        work.result()
    return work.done()


async def _cancel(work: asyncio.Future[Any]) -> None:
    work.cancel()
    await asyncio.wait([work])
