import io
import json

import pytest

from servekit.cli.console import Steps, fail, is_terminal, print_json, rows, write


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


@pytest.mark.parametrize("document", [b'{"a":[1,2],"b":"\xc3\xa9"}', b"[]", b"1.5"])
def test_json_stays_the_same_document(document, capsys):
    print_json(document)
    assert json.loads(capsys.readouterr().out) == json.loads(document)


def test_what_a_step_prints_is_plain_lines_where_nobody_looks(capsys):
    with Steps() as steps:
        steps.step("run [x]")
        steps.log("[bold]one[/]")
        steps.progress(1, 2)
        steps.log("two")
    assert capsys.readouterr().err == "[bold]one[/]\ntwo\n"


def test_a_terminal_has_the_last_lines_below_the_step(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    sink = Terminal()
    monkeypatch.setattr("sys.stderr", sink)
    with Steps() as steps:
        steps.step("run [x]")
        for number in range(10):
            steps.log(f"[line {number}]")
    last = sink.getvalue().rpartition("run [x]")[2]
    assert [f"[line {n}]" in last for n in range(10)] == [False] * 4 + [True] * 6
