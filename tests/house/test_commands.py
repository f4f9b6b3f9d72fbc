"""Each `servekit …` that a page, a template or its CI shows without running it is one that the command takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from servekit.cli import main
from tests.house.test_docs import blocks_of

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "templates"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WORKFLOWS = sorted(TEMPLATES.glob("*/dot-github/workflows/*.yml"))


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words behind `servekit` of each such command in a script."""
    for line in re.sub(r"\\\n", " ", script).splitlines():
        lexer = shlex.shlex(re.sub(r"\$\{\{.*?\}\}", "X", line), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in (";", "|", "||", "&&", "&", ">", ">>"):
                words.append(word)
                continue
            if words[:1] == ["servekit"]:
                yield words[1:]
            words = []


def check(words: list[str]) -> None:
    """Parse a command line, and run nothing.

    Raises:
        Exception: Typer's own, where it is written wrong.
    """
    if words == ["--version"]:
        return
    command = main._command(words[0])
    while hasattr(command, "commands"):
        assert words, "a verb is missing"
        assert words[0] in command.commands, f"there is no verb {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context("servekit", list(words))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_each_template_has_a_workflow():
    assert {path.parents[2].name for path in WORKFLOWS} == {p.name for p in TEMPLATES.iterdir()}


@pytest.mark.parametrize("path", WORKFLOWS, ids=_name)
def test_a_workflow_is_one_and_runs_commands_that_exist(path):
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow[True] == "push"  # YAML's "on"
    found = []
    for job_name, job in workflow["jobs"].items():
        assert {"runs-on", "steps"} <= job.keys()
        assert job.get("needs", job_name) in workflow["jobs"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            for words in commands(step.get("run", "")):
                check(words)
                found.append(words[0])
    assert found == ["build", "containerize", "deploy", "deploy"]


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*/README.md")), ids=_name)
def test_a_templates_readme_shows_commands_that_exist(path):
    blocks = re.findall(r"^```sh\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    found = [words for block in blocks for words in commands(block)]
    for words in found:
        check(words)
    assert {"dev", "call", "build", "containerize", "deploy"} <= {words[0] for words in found}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_page_shows_commands_that_exist(page):
    for block in blocks_of(page):
        if block.lang == "text":
            prompts = re.findall(r"^\$ (.*(?:\\\n.*)*)$", block.text, re.MULTILINE)
            for words in commands("\n".join(prompts)):
                check(words)


@pytest.mark.parametrize(
    "line", ["servekit built app.py", "servekit build app.py --lock", "servekit build"]
)
def test_a_wrong_command_is_found(line):
    [words] = commands(line)
    try:
        check(words)
    except Exception as error:
        assert isinstance(error, AssertionError | main._UsageError)
    else:
        pytest.fail("it is taken")


def test_commands_are_found_in_a_script():
    script = (
        "pip install servekit[build]\n"
        'servekit build "$A/app.py" -o ${{ vars.X }}.bundle | tee told  # comment\n'
        "echo servekit; servekit push a \\\n  b && true\n"
    )
    assert [*commands(script)] == [["build", "$A/app.py", "-o", "X.bundle"], ["push", "a", "b"]]
