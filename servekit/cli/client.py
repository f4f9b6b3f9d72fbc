"""`servekit client`: a typed module to call an app with, for those who don't have its code."""

import asyncio
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from servekit.cli.console import write
from servekit.errors import ConfigError


def client(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[APP]", help="Import string or file: app:Search, app.py."),
    ] = None,
    *,
    url: Annotated[
        str | None, typer.Option(help="A running app, in place of its code: http://host:3000.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to a file instead of stdout.")
    ] = None,
) -> None:
    """Write a module with the app's services as typed classes, for `sk.connect`.

    It needs servekit, but not the app. An app that is given as code is imported, in a process of its
    own, but not started.
    """
    if (target is None) == (url is None):
        raise ConfigError("give an app, or --url of a running one")
    document = _described(target) if target is not None else _fetched(str(url))
    from servekit.protocols.stubs import write as module  # noqa: PLC0415

    text = module(document)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"can't write {output}: {error.strerror}") from None
    write([(f"wrote {output}", "")])


def _described(target: str) -> dict[str, Any]:
    from servekit.engine.description import describe_elsewhere  # noqa: PLC0415
    from servekit.protocols.openapi import document  # noqa: PLC0415

    app = asyncio.run(describe_elsewhere(target)).app
    assert app is not None
    return document(app)


def _fetched(url: str) -> dict[str, Any]:
    from servekit.client import Client  # noqa: PLC0415

    base = url if "://" in url else f"http://{url}"
    with Client(base, timeout_s=30.0) as app:
        found = app.get("openapi.json")
    if not isinstance(found, dict):
        raise ConfigError(f"{base}/openapi.json is no OpenAPI document")
    return cast("dict[str, Any]", found)
