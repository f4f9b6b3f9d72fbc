"""`servekit models`: the models that are kept on this machine."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.console import Line, Steps, rows, write
from servekit.core.units import shown_bytes
from servekit.errors import ConfigError
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.spec.model import ModelSpec
    from servekit.store.store import Kept, Store

_DAY_S = 86400.0

models = typer.Typer(
    help="List, fetch, check and remove the models that are kept here.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@models.command("list", epilog="Example:  servekit models list")
def list_() -> None:
    """Show what is kept, with its digest, its size and when it was last asked for."""
    store = _store()
    table: list[Line] = [[(text, "dim") for text in ("SHA256", "SIZE", "USED", "SOURCE")]]
    table += [_row(kept, store) for kept in store.kept()]
    write(*rows(table) if len(table) > 1 else [[("no models are kept here", "")]])


@models.command(epilog="Example:  servekit models pull hf://org/name --revision 3fa9c1d")
def pull(
    what: Annotated[
        str, typer.Argument(metavar="APP|URL", help="An app, for all its models; or one's source.")
    ],
    *,
    revision: Annotated[str, typer.Option(help="Of a Hugging Face repository.")] = "",
    sha256: Annotated[str, typer.Option(help="What it must be.")] = "",
    include: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only these of several files.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Not these.")] = None,
) -> None:
    """Fetch models, so that nothing is fetched when an app starts."""
    from servekit.spec.model import model  # noqa: PLC0415

    if "://" in what or what.startswith(("models:/", "runs:/")):
        asked = [
            model(
                what,
                revision=revision,
                sha256=sha256,
                include=include or (),
                exclude=exclude or (),
            ).spec
        ]
    elif revision or sha256 or include or exclude:
        raise ConfigError(f"{what} is an app; its code says which models, at which revision")
    else:
        asked = _of_app(what)
    store = _store()
    with Steps() as steps:
        found: list[Kept] = []
        for spec in asked:
            steps.step(f"fetching {spec.title}")
            found.append(store.pull(spec))
    write(*rows([_row(kept, store) for kept in found]) if found else [[("it has none", "")]])


@models.command(epilog="Example:  servekit models verify")
def verify() -> int:
    """Read all that is kept, and drop what is not as it was fetched.

    Exit code 1 says that something was dropped; it is fetched again by who asks for it next.
    """
    store = _store()
    wrong = store.verify()
    for text in wrong:
        write([("broken, and dropped: ", "red"), (text, "")])
    write([(f"{len(store.kept())} models are as they were fetched", "")])
    return 1 if wrong else 0


@models.command(epilog="Example:  servekit models gc --unused-days 30")
def gc(
    *,
    unused_days: Annotated[
        float | None,
        typer.Option(min=0, help="Remove models, too, that nobody has asked for so long."),
    ] = None,
) -> None:
    """Remove files that belong to no model."""
    store = _store()
    freed = store.collect(float("inf") if unused_days is None else unused_days * _DAY_S)
    write([(f"freed {shown_bytes(freed)}", "")])


def _store() -> "Store":
    from servekit.store.store import Store  # noqa: PLC0415

    return Store.of(Settings.load())


def _of_app(target: str) -> "list[ModelSpec]":
    from servekit.engine.description import describe_elsewhere  # noqa: PLC0415

    app = asyncio.run(describe_elsewhere(target)).app
    assert app is not None
    specs = (spec for service in app.everything().values() for spec in service.models.values())
    return [spec for spec in specs if spec.scheme]


def _row(kept: "Kept", store: "Store") -> Line:
    used = time.strftime("%Y-%m-%d", time.localtime(store.used(kept)))
    return [
        (kept.digest, ""),
        (shown_bytes(kept.size), ""),
        (used, "dim"),
        (kept.spec.title, "bold"),
    ]
