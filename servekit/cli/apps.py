"""The apps of this user that run on this machine: found, chosen, and asked over their own sockets."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from servekit.errors import ConfigError

if TYPE_CHECKING:
    import msgspec

    from servekit.engine.control import AppStatus

Url = Annotated[str | None, typer.Option(help="The app that listens there.")]
Pid = Annotated[int | None, typer.Option(help="The app whose `servekit serve` has this pid.")]

_TIMEOUT_S = 2.0


class App(NamedTuple):
    """A running app: the socket of its supervisor, and what that says."""

    socket: Path
    status: "AppStatus"


async def running(folder: Path) -> list[App]:
    """Ask all apps of this user below a runtime directory; what does not answer is left out."""
    sockets = _sockets(folder)
    found = await asyncio.gather(*(_status(path) for path in sockets))
    apps = [App(path, status) for path, status in zip(sockets, found, strict=True) if status]
    return sorted(apps, key=lambda app: -app.status.uptime_s)


def chosen(apps: list[App], url: str | None, pid: int | None) -> list[App]:
    """Return the apps that listen at a URL and have a pid, where these are given."""
    return [
        app
        for app in apps
        if (url is None or app.status.url == url.rstrip("/"))
        and (pid is None or app.status.pid == pid)
    ]


def the_one(apps: list[App], url: str | None, pid: int | None) -> App:
    """Return the one app that is meant.

    Raises:
        ConfigError: There is none, or there are several.
    """
    found = chosen(apps, url, pid)
    if len(found) == 1:
        return found[0]
    if not apps:
        raise ConfigError("no app runs here; servekit serve app:Service starts one")
    here = "\n".join(f"  {a.status.target}  {a.status.url}  pid {a.status.pid}" for a in apps)
    what = f"{len(found)} apps run here; choose one by --url or --pid" if found else "no such app"
    raise ConfigError(f"{what}\n{here}")


def _sockets(folder: Path) -> list[Path]:
    return [path for path in folder.glob("servekit-*/admin.sock") if _is_own(path)]


def _is_own(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


async def _status(path: Path) -> "AppStatus | None":
    import msgspec  # noqa: PLC0415

    from servekit.errors import CallError, WireError  # noqa: PLC0415

    try:
        return await ask(path, "status")
    except (OSError, WireError, CallError, msgspec.MsgspecError):
        return None  # it is on its way out, or of another version


async def ask(path: Path, verb: str, body: "msgspec.Struct | None" = None) -> "AppStatus":
    """Have a supervisor do something; returns how its app is then.

    Raises:
        CallError: It refuses, or did not answer in time.
        OSError: Nobody listens there.
        WireError: It greets in another way.
    """
    from servekit.engine.control import AppStatus, ask  # noqa: PLC0415
    from servekit.wire.connection import Connection  # noqa: PLC0415
    from servekit.wire.frames import Hello  # noqa: PLC0415
    from servekit.wire.sockets import Address, connect  # noqa: PLC0415

    connection = await connect(
        Address(f"unix:{path}"), lambda: Connection(Hello(), client=True), timeout_s=_TIMEOUT_S
    )
    try:
        return await ask(connection, verb, body, answer=AppStatus, timeout_s=_TIMEOUT_S)
    finally:
        await connection.close()
