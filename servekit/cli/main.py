"""The `servekit` command: finds the verb, runs it, and turns what went wrong into an exit code.

Exit codes: 0 is well, 1 is a failure that stderr's first line names, 2 a command that was written
wrong, 130 an interrupt.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final, Protocol, runtime_checkable

from servekit.errors import AuthorError, CallError
from servekit.version import __version__

_INTERRUPTED: Final = 130

_VERBS: Final = {
    "init": ("project", "servekit init my-app --template classifier"),
    "dev": ("run", "servekit dev app:Search"),
    "serve": ("run", "servekit serve app:Search --host 0.0.0.0 --port 8080"),
    "call": ("call", """servekit call search/query --data '{"text": "cats"}'"""),
    "client": ("client", "servekit client app:Search -o client.py"),
    "graph": ("graph", "servekit graph app:Search --format mermaid"),
    "status": ("status", "servekit status --json"),
    "scale": ("scale", "servekit scale Embedder=3 --wait"),
    "build": ("build", "servekit build app:Search"),
    "inspect": ("build", "servekit inspect dist/search-3fa9c1d2e4b5.bundle"),
    "push": ("share", "servekit push search.bundle oci://registry.example.com/search:1"),
    "pull": ("share", "servekit pull oci://registry.example.com/search:1"),
    "containerize": ("containerize", "servekit containerize app:Search --base base.tar"),
    "deploy": ("deploy", "servekit deploy app:Search --target ray --ray-address auto"),
    "rollback": ("deploy", "servekit rollback --app Search"),
    "logs": ("deploy", "servekit logs --app Search --follow"),
    "delete": ("deploy", "servekit delete --app Search"),
    "doctor": ("doctor", "servekit doctor"),
    "models": ("models", "servekit models list"),
    "jobs": ("jobs", "servekit jobs list --status failed"),
    "keys": ("keys", "servekit keys add team-a --file keys.toml"),
}
"""Each verb's module, in which a function, or a `Typer` of several, has the verb's name; and an
example of its use."""


@runtime_checkable
class _UsageError(Protocol):
    """Typer's error for a command that was written wrong; it has no public name for it."""

    def format_message(self) -> str: ...


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code.

    Args:
        argv: Words behind `servekit`; None takes the process's.
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if words == ["--version"]:
        print(f"servekit {__version__}")  # noqa: T201
        return 0
    try:
        outcome = _command(words[0])(args=words, prog_name="servekit", standalone_mode=False)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; without this, Python complains while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (AuthorError, CallError) as error:
        from servekit.cli.console import fail  # noqa: PLC0415

        fail(str(error))
        return 1
    except Exception as error:  # noqa: BLE001  (what isn't ours is raised again)
        return _misuse(error, words)
    return outcome if isinstance(outcome, int) else 0


def _misuse(error: Exception, words: Sequence[str]) -> int:
    """Say what is wrong with a command line; what is no such error goes on up."""
    import typer  # noqa: PLC0415

    from servekit.cli.console import fail  # noqa: PLC0415

    if isinstance(error, typer.Abort):
        return _INTERRUPTED
    if not isinstance(error, _UsageError):
        raise error
    verb = words[0] if words[0] in _VERBS else ""
    message = error.format_message()
    fail(
        f"{message[:1].lower()}{message[1:]}", hint=f"see servekit {verb} --help".replace("  ", " ")
    )
    return 2


def _command(word: str) -> Any:
    """Return the command with the verb that was named, or with all when there is none such."""
    import typer  # noqa: PLC0415  (0.1 s, which `servekit --version` doesn't pay)

    app = typer.Typer(
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="markdown",
    )

    def show_version(value: bool) -> None:
        if value:
            print(f"servekit {__version__}")  # noqa: T201
            raise typer.Exit

    @app.callback()
    def servekit(  # pyright: ignore[reportUnusedFunction]
        *,
        _version: Annotated[
            bool,
            typer.Option(
                "--version", callback=show_version, is_eager=True, help="Print the version."
            ),
        ] = False,
    ) -> None:
        """Model serving at scale, from typed Python classes."""

    for name in [word] if word in _VERBS else _VERBS:
        module, example = _VERBS[name]
        verb = getattr(import_module(f"servekit.cli.{module}"), name)
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name, epilog=f"Example:  {example}")
        else:
            app.command(name, epilog=f"Example:  {example}")(verb)
    return typer.main.get_command(app)
