"""`servekit status`: the apps of this user that run on this machine, asked over their own sockets."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.console import Line, print_json, rows, write
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.engine.control import AppStatus, ReplicaStatus, ServiceStatus

_TIMEOUT_S = 2.0
_STATES = {"ready": "green", "starting": "cyan", "unready": "red", "draining": "yellow"}


def status(
    *, json: Annotated[bool, typer.Option("--json", help="Print a JSON array of apps.")] = False
) -> None:
    """Show the apps that run on this machine.

    For each service: its replicas, their calls and their memory.
    """
    import msgspec  # noqa: PLC0415

    apps = asyncio.run(running(Settings.load().runtime_dir))
    if json:
        print_json(msgspec.json.encode(apps))
    elif apps:
        write(*(line for index, app in enumerate(apps) for line in _app(app, first=not index)))
    else:
        write([("no app runs here", ""), ("; servekit serve app:Service starts one", "dim")])


async def running(folder: Path) -> "list[AppStatus]":
    """Ask all apps of this user below a runtime directory; what no longer answers is left out."""
    found = await asyncio.gather(*(_ask(path) for path in _sockets(folder)))
    return sorted((app for app in found if app is not None), key=lambda app: -app.uptime_s)


def _sockets(folder: Path) -> list[Path]:
    return [path for path in folder.glob("servekit-*/admin.sock") if _is_own(path)]


def _is_own(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


async def _ask(path: Path) -> "AppStatus | None":
    import msgspec  # noqa: PLC0415

    from servekit.engine.control import AppStatus, ask  # noqa: PLC0415
    from servekit.errors import CallError, WireError  # noqa: PLC0415
    from servekit.wire.connection import Connection  # noqa: PLC0415
    from servekit.wire.frames import Hello  # noqa: PLC0415
    from servekit.wire.sockets import Address, connect  # noqa: PLC0415

    try:
        connection = await connect(
            Address(f"unix:{path}"), lambda: Connection(Hello(), client=True), timeout_s=_TIMEOUT_S
        )
    except (OSError, WireError):
        return None
    try:
        return await ask(connection, "status", answer=AppStatus, timeout_s=_TIMEOUT_S)
    except (CallError, msgspec.MsgspecError):
        return None  # it is on its way out, or of another version
    finally:
        await connection.close()


def _app(app: "AppStatus", *, first: bool) -> Iterator[Line]:
    if not first:
        yield []
    facts = f"pid {app.pid}, up {_duration(app.uptime_s)}, revision {app.revision}"
    yield [(app.target, "bold"), ("  ", ""), (app.url, "cyan"), (f"  {facts}", "dim")]
    head = ("service", "replica", "pid", "state", "ongoing", "finished", "memory")
    table: list[Line] = [[(text, "dim") for text in head]]
    for service in app.services:
        table.extend(_service(service))
    yield from rows(table, indent="  ")


def _service(service: "ServiceStatus") -> Iterator[Line]:
    for index, replica in enumerate(service.replicas):
        yield [("" if index else service.name, ""), *_replica(replica)]
    if not service.replicas:
        yield [
            (service.name, ""),
            ("none", "dim"),
            ("", ""),
            (service.state, _STATES.get(service.state, "yellow")),
        ]
    if service.restarts:
        count = f"{service.restarts} restart{'s' if service.restarts > 1 else ''}"
        yield [("", ""), (count, "yellow")]


def _replica(replica: "ReplicaStatus") -> Iterator[tuple[str, str]]:
    yield replica.id, ""
    yield str(replica.pid), "dim"
    yield replica.state, _STATES.get(replica.state, "")
    yield str(replica.ongoing), ""
    yield str(replica.finished), ""
    yield f"{replica.rss / 2**20:.0f} MiB" if replica.rss else "-", ""
    if replica.trouble:
        yield replica.trouble, "red"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    shown = [f"{count} {unit}" for count, unit in parts if count][:2]
    return " ".join(shown) or "0 s"
