"""The apps that a user may ask: those on this machine over their own sockets, those on Ray over it."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from servekit.errors import ConfigError
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.engine.control import AppStatus
    from servekit.engine.ray.deploy import Deployment

Url = Annotated[str | None, typer.Option(help="The app that listens there.")]
Pid = Annotated[int | None, typer.Option(help="The app whose `servekit serve` has this pid.")]
Name = Annotated[str | None, typer.Option("--app", metavar="NAME", help="The app of that name.")]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="auto|HOST:PORT|ray://…", help="Look on this Ray cluster."),
]


class App(Protocol):
    """A running app, and how it was when it was found."""

    status: "AppStatus"

    async def look(self) -> "AppStatus":
        """Return how it is now.

        Raises:
            CallError: It does not answer.
        """
        ...

    async def scale(self, numbers: dict[str, int | tuple[int, int]]) -> "AppStatus":
        """Have other numbers of replicas; returns how the app is then.

        Raises:
            CallError: It refuses, or did not answer in time.
        """
        ...


async def running(settings: Settings) -> list[App]:
    """Ask all apps of this user on this machine, or all of a Ray cluster that the settings name.

    Raises:
        ConfigError: There is no such cluster.
    """
    if settings.ray_address is not None:
        return await asyncio.to_thread(_on_ray, settings)
    sockets = settings.runtime_dir.glob("servekit-*/admin.sock")
    found = await asyncio.gather(*(_find(path) for path in sockets if _is_own(path)))
    return sorted(filter(None, found), key=lambda app: -app.status.uptime_s)


def chosen(
    apps: list[App], *, url: str | None = None, pid: int | None = None, name: str | None = None
) -> list[App]:
    """Return the apps that listen at a URL, have a pid and a name, where these are given."""
    return [
        app
        for app in apps
        if (url is None or app.status.url == url.rstrip("/"))
        and (pid is None or app.status.pid == pid)
        and (name is None or app.status.name == name)
    ]


def the_one(
    apps: list[App], *, url: str | None = None, pid: int | None = None, name: str | None = None
) -> App:
    """Return the one app that is meant.

    Raises:
        ConfigError: There is none, or there are several.
    """
    found = chosen(apps, url=url, pid=pid, name=name)
    if len(found) == 1:
        return found[0]
    if not apps:
        raise ConfigError(
            "no app runs here; servekit serve app:Service starts one, and --ray-address auto looks "
            "on a Ray cluster"
        )
    here = "\n".join(_facts(app.status) for app in apps)
    what = f"{len(found)} apps run here; choose one by --app, --url or --pid"
    raise ConfigError(f"{what if found else 'no such app'}\n{here}")


def _facts(status: "AppStatus") -> str:
    pid = f"  pid {status.pid}" if status.pid else ""
    return f"  {status.name}  {status.target}  {status.url}{pid}"


class OnRay:
    """An app on a Ray cluster."""

    def __init__(self, deployment: "Deployment") -> None:
        self._deployment = deployment
        self.status = deployment.status()

    async def look(self) -> "AppStatus":
        """Ask its controller."""
        return await asyncio.to_thread(self._deployment.status)

    async def scale(self, numbers: dict[str, int | tuple[int, int]]) -> "AppStatus":
        """Tell its controller."""
        return await asyncio.to_thread(self._deployment.scale, numbers)


def _on_ray(settings: Settings) -> list[App]:
    from servekit.engine.deploy import needs_ray  # noqa: PLC0415

    needs_ray()
    from servekit.engine.ray import cluster, deploy  # noqa: PLC0415

    cluster.join(settings.ray_address)
    return [OnRay(deploy.Deployment(name)) for name in deploy.deployed()]


class Here:
    """An app on this machine: the socket of its supervisor, and what that says."""

    def __init__(self, socket: Path, status: "AppStatus") -> None:
        self.socket = socket
        self.status = status

    async def look(self) -> "AppStatus":
        """Ask over its socket."""
        from servekit.engine.admin import ask  # noqa: PLC0415
        from servekit.errors import CallError, WireError  # noqa: PLC0415

        try:
            return await ask(self.socket, "status")
        except (OSError, WireError):
            raise CallError("the app has ended") from None

    async def scale(self, numbers: dict[str, int | tuple[int, int]]) -> "AppStatus":
        """Tell it over its socket."""
        from servekit.engine.admin import ask  # noqa: PLC0415
        from servekit.engine.control import Scale  # noqa: PLC0415

        return await ask(self.socket, "scale", Scale(numbers))


def _is_own(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


async def _find(path: Path) -> App | None:
    import msgspec  # noqa: PLC0415

    from servekit.engine.admin import ask  # noqa: PLC0415
    from servekit.errors import CallError, WireError  # noqa: PLC0415

    try:
        return Here(path, await ask(path, "status"))
    except (OSError, WireError, CallError, msgspec.MsgspecError):
        return None  # it is on its way out, or of another version
