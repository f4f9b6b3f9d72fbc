import io
import json
import traceback

import pytest

import servekit
from servekit.cli.console import fail, is_terminal, print_json, rows, trimmed, write
from servekit.errors import ConfigError


def test_rows_pad_all_cells_but_the_last():
    table = [[("a", ""), ("bcd", ""), ("long text", "")], [("ef", ""), ("g", ""), ("x", "")]]
    texts = ["".join(text for text, _ in line) for line in rows(table, indent="  ")]
    assert texts == ["  a   bcd  long text", "  ef  g    x"]


def test_rows_of_different_length_and_none():
    texts = ["".join(t for t, _ in line) for line in rows([[("a", "")], [("b", ""), ("c", "")]])]
    assert texts == ["a", "b  c"]
    assert list(rows([])) == []


def test_no_colour_and_no_markup_where_nobody_looks():
    sink = io.StringIO()
    assert not is_terminal(sink)
    write([("[bold]x[/]", "bold red"), (" y", "")], [], stream=sink)
    assert sink.getvalue() == "[bold]x[/] y\n\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_but_no_markup_for_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    sink = Terminal()
    write([("[bold]x[/]", "red")], stream=sink)
    assert "\x1b[31m[bold]x[/]\x1b[0m" in sink.getvalue()


def test_a_dumb_terminal_is_none(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Terminal())


def test_fail_says_it_in_the_first_line_and_hints_in_the_last(capsys):
    fail("it broke\n\nTraceback (most recent call last):\nValueError: x", hint="mend it")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: it broke"
    assert lines[-1] == "mend it"
    assert "ValueError: x" in lines


def user_code() -> None:
    raise ValueError("theirs")


def test_a_traceback_keeps_the_frames_of_others_and_its_last_line():
    ours = (
        f'  File "{servekit.__path__[0]}/runtime/replica.py", line 1, in start\n    x()\n    ^^^\n'
    )
    try:
        user_code()
    except ValueError:
        text = traceback.format_exc()
    head, _, rest = text.partition("\n")
    shown = trimmed(f"{head}\n{ours}{rest}")
    assert shown == text.rstrip("\n")


def test_a_traceback_that_is_all_ours_is_shown_whole():
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{servekit.__path__[0]}/x.py", line 1, in f\n    g()\nRuntimeError: a bug'
    )
    assert trimmed(text) == text
    assert trimmed("no traceback\nat all") == "no traceback\nat all"


def test_a_chain_of_errors_stays_a_chain():
    try:
        try:
            user_code()
        except ValueError as error:
            raise ConfigError("second") from error
    except ConfigError:
        text = traceback.format_exc()
    shown = trimmed(text)
    assert "ValueError: theirs" in shown
    assert "direct cause" in shown
    assert "servekit.errors.ConfigError: second" in shown


@pytest.mark.parametrize("document", [b'{"a":[1,2],"b":"\xc3\xa9"}', b"[]", b"1.5"])
def test_json_stays_the_same_document(document, capsys):
    print_json(document)
    assert json.loads(capsys.readouterr().out) == json.loads(document)
