import subprocess
import sys

import pytest

from servekit.cli.main import run
from servekit.version import __version__

VERBS = [
    "init",
    "dev",
    "serve",
    "call",
    "client",
    "graph",
    "status",
    "scale",
    "build",
    "inspect",
    "push",
    "pull",
    "containerize",
    "deploy",
    "rollback",
    "logs",
    "delete",
    "doctor",
    "models",
    "jobs",
    "keys",
]


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"servekit {__version__}\n"


def test_version_and_the_entry_point_import_neither_typer_nor_an_engine():
    code = (
        "import sys; from servekit.cli.main import run; run(['--version']);"
        "print([m for m in ('typer', 'rich', 'httpx', 'uvloop', 'servekit.engine') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "[]"


def test_serving_imports_no_http_client_and_no_rich_without_a_terminal():
    code = (
        "import sys; from servekit.cli.main import run; run(['serve', 'nowhere.py']);"
        "print([m for m in ('httpx', 'starlette', 'numpy', 'servekit.cli.console') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['servekit.cli.console']"


def test_without_words_it_helps_and_lists_exactly_what_there_is(capsys):
    assert run([]) == 0
    text = capsys.readouterr().out
    listed = [line.split()[1] for line in text.partition("Commands")[2].splitlines() if "│" in line]
    assert [word for word in listed if word.isalpha() and word.islower()] == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_helps_with_an_example(verb, capsys):
    assert run([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Example: servekit {verb}" in " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "first_line"),
    [
        (["srve"], "error: no such command 'srve'. Did you mean 'serve'?"),
        (["serve"], "error: missing argument 'APP'."),
        (["jobs"], "error: missing command."),
        (["jobs", "lst"], "error: no such command 'lst'"),
        (["jobs", "show", "render"], "error: missing argument 'JOB'."),
        (["serve", "app", "--prt", "1"], "error: no such option: --prt"),
        (["serve", "app", "--port", "x"], "error: invalid value for '--port'"),
    ],
)
def test_a_wrong_command_line_is_explained_in_the_first_line(words, first_line, capsys):
    assert run(words) == 2
    caught = capsys.readouterr()
    assert caught.err.splitlines()[0].startswith(first_line)
    assert "Traceback" not in caught.err
    assert caught.out == ""


def test_a_wrong_setting_is_explained(capsys):
    assert run(["serve", "app", "--port", "99999"]) == 1
    assert capsys.readouterr().err == (
        "error: command line: port = 99999: need a whole number from 0 to 65535\n"
    )


def test_an_error_of_ours_is_not_swallowed(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("servekit.settings.Settings.load", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run(["status"])
