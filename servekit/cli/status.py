"""`servekit status`: the apps of this user that run on this machine, or those of a Ray cluster."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from servekit.cli.apps import Name, Pid, RayAddress, Url, chosen, running
from servekit.cli.console import Line, print_json, rows, write
from servekit.cli.kubernetes import Context, Namespace
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.engine.control import AppStatus, ProcessStatus, ServiceStatus

_STATES = {"ready": "green", "starting": "cyan", "unready": "red", "draining": "yellow"}


def status(
    *,
    name: Name = None,
    url: Url = None,
    pid: Pid = None,
    target: Annotated[
        Literal["", "docker", "kubernetes"],
        typer.Option(help="The containers of a Docker engine, the pods of a cluster."),
    ] = "",
    namespace: Namespace = "",
    context: Context = "",
    ray_address: RayAddress = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array of apps.")] = False,
) -> None:
    """Show the apps that run on this machine, or on a Ray cluster.

    For each service: its replicas, their calls and their memory.
    """
    if target == "docker":
        from servekit.cli import containers  # noqa: PLC0415

        containers.status(name)
        return
    if target == "kubernetes":
        from servekit.cli import kubernetes  # noqa: PLC0415

        kubernetes.status(name, kubernetes.Place(namespace, context))
        return
    import msgspec  # noqa: PLC0415

    apps_there = asyncio.run(running(Settings.load(ray_address=ray_address)))
    found = chosen(apps_there, url=url, pid=pid, name=name)
    apps = [app.status for app in found]
    if json:
        print_json(msgspec.json.encode(apps))
    elif apps:
        write(*(line for index, app in enumerate(apps) for line in _app(app, first=not index)))
    else:
        write([("no app runs here", ""), ("; servekit serve app:Service starts one", "dim")])


def _app(app: "AppStatus", *, first: bool) -> Iterator[Line]:
    if not first:
        yield []
    facts = (
        f"pid {app.pid}, " if app.pid else ""
    ) + f"up {_duration(app.uptime_s)}, revision {app.revision}"
    yield [(app.target, "bold"), ("  ", ""), (app.url, "cyan"), (f"  {facts}", "dim")]
    head = ("service", "process", "pid", "state", "ongoing", "finished", "memory")
    table: list[Line] = [[(text, "dim") for text in head]]
    table.extend(
        [("" if index else "(gateway)", "dim"), *_process(gateway)]
        for index, gateway in enumerate(app.gateways)
    )
    for service in app.services:
        table.extend(_service(service))
    yield from rows(table, indent="  ")


def _service(service: "ServiceStatus") -> Iterator[Line]:
    for index, replica in enumerate(service.replicas):
        yield [("" if index else service.name, ""), *_process(replica)]
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


def _process(process: "ProcessStatus") -> Iterator[tuple[str, str]]:
    yield process.id, ""
    yield str(process.pid), "dim"
    yield process.state, _STATES.get(process.state, "")
    yield str(process.ongoing), ""
    yield str(process.finished), ""
    yield f"{process.rss / 2**20:.0f} MiB" if process.rss else "-", ""
    if process.trouble:
        yield process.trouble, "red"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    shown = [f"{count} {unit}" for count, unit in parts if count][:2]
    return " ".join(shown) or "0 s"
