"""`servekit graph`: the services of an app, their endpoints, and who depends on whom."""

import asyncio
from typing import Annotated, Literal

import typer

from servekit.cli.console import print_json


def graph(
    target: Annotated[
        str, typer.Argument(metavar="APP", help="Import string or file: app:Search, app.py.")
    ],
    *,
    format: Annotated[  # noqa: A002  (as the option is called)
        Literal["tree", "mermaid", "json"], typer.Option("--format", "-f", help="How to draw it.")
    ] = "tree",
    json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
) -> None:
    """Show an app's services and endpoints.

    The app is imported, in a process of its own, but not started.
    """
    from servekit.engine.description import describe_elsewhere  # noqa: PLC0415
    from servekit.spec import render  # noqa: PLC0415

    app = asyncio.run(describe_elsewhere(target)).app
    assert app is not None
    if json or format == "json":
        print_json(app.to_json())
    else:
        typer.echo(render.mermaid(app) if format == "mermaid" else render.tree(app))
