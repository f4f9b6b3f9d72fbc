"""`servekit scale`: other numbers of replicas for a running app."""

import asyncio
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.apps import App, Name, Pid, RayAddress, Url, running, the_one
from servekit.cli.console import print_json, rows, write
from servekit.errors import CallError, ConfigError
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.engine.control import AppStatus, ServiceStatus

_NUMBER = re.compile(r"([^=]+)=(\d+)(?:\.\.(\d+))?")
_POLL_S = 0.2


def scale(
    numbers: Annotated[
        list[str],
        typer.Argument(
            metavar="SERVICE=N…",
            help="A number, or SERVICE=MIN..MAX for a service whose number follows its load.",
        ),
    ],
    *,
    name: Name = None,
    url: Url = None,
    pid: Pid = None,
    ray_address: RayAddress = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the replicas are ready.")] = (
        False
    ),
    json: Annotated[bool, typer.Option("--json", help="Print these services as JSON.")] = False,
) -> None:
    """Change how many replicas the services of a running app have.

    It holds until the service's code changes or the app ends; then the code's number counts again.
    Either all of the numbers are taken or none.
    """
    import msgspec  # noqa: PLC0415

    async def work() -> "tuple[list[ServiceStatus], list[ServiceStatus]]":
        apps = await running(Settings.load(ray_address=ray_address))
        return await _scale(the_one(apps, url=url, pid=pid, name=name), _read(numbers), wait=wait)

    before, after = asyncio.run(work())
    if json:
        print_json(msgspec.json.encode(after))
        return
    write(*rows([_row(was, now) for was, now in zip(before, after, strict=True)]))
    write([("it holds until the code of the service changes or the app ends", "dim")])


def _read(words: Sequence[str]) -> dict[str, int | tuple[int, int]]:
    numbers: dict[str, int | tuple[int, int]] = {}
    for word in words:
        found = _NUMBER.fullmatch(word)
        if found is None:
            raise ConfigError(f"{word!r}: write SERVICE=N or SERVICE=MIN..MAX")
        name, low, high = found.groups()
        numbers[name] = int(low) if high is None else (int(low), int(high))
    return numbers


async def _scale(
    app: App, numbers: dict[str, int | tuple[int, int]], *, wait: bool
) -> "tuple[list[ServiceStatus], list[ServiceStatus]]":
    """Return these services as they were, and as they are then."""
    before, after = _named(app.status, numbers), _named(await app.scale(numbers), numbers)
    while wait and not all(map(_is_there, after)):
        await asyncio.sleep(_POLL_S)
        after = _named(await app.look(), numbers)
        for was, service in zip(before, after, strict=True):
            if service.restarts > was.restarts:
                raise CallError(f"{service.name}: a replica did not start; the app's log says why")
    return before, after


def _named(status: "AppStatus", names: dict[str, int | tuple[int, int]]) -> "list[ServiceStatus]":
    services = {service.name: service for service in status.services}
    return [services[name] for name in names if name in services]


def _is_there(service: "ServiceStatus") -> bool:
    return sum(replica.state == "ready" for replica in service.replicas) == service.desired


def _row(was: "ServiceStatus", now: "ServiceStatus") -> list[tuple[str, str]]:
    ready = sum(replica.state == "ready" for replica in now.replicas)
    return [
        (now.name, "bold"),
        (f"{was.bounds} → {now.bounds} replicas", ""),
        (f"{ready} of {now.desired} ready", "dim"),
    ]
