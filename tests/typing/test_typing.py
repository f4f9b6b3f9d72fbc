"""Both type checkers, in their strict modes, see in the demos what is marked there, and no more."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = Path(__file__).with_name("demo.py")
STUB_DEMO = Path(__file__).with_name("stub_demo.py")
EVERYTHING = ROOT / "tests/flow/apps/everything.py"


def test_mypy_reports_the_marked_lines_only() -> None:
    _mypy_agrees(DEMO)


def test_pyright_reports_the_marked_lines_only() -> None:
    _pyright_agrees(DEMO)


@pytest.fixture(scope="module")
def stub_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's file beside the module that `servekit client` writes for it."""
    folder = tmp_path_factory.mktemp("stubs")
    command = [sys.executable, "-m", "servekit", "client", str(EVERYTHING)]
    subprocess.run([*command, "-o", "client.py"], cwd=folder, check=True)
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    return Path(shutil.copy(STUB_DEMO, folder))


def test_mypy_reads_a_written_client(stub_demo: Path) -> None:
    _mypy_agrees(stub_demo, stub_demo.with_name("client.py"))


def test_pyright_reads_a_written_client(stub_demo: Path) -> None:
    _pyright_agrees(stub_demo, stub_demo.with_name("client.py"))


@pytest.mark.parametrize(
    "words",
    [
        ("check", "--isolated", "--select", "E4,E7,E9,F,W,I,UP,B,C4,SIM,RET,PIE,RUF"),
        ("format", "--isolated", "--diff"),
    ],
)
def test_ruff_leaves_a_written_client_as_it_is(stub_demo: Path, words: tuple[str, ...]) -> None:
    pytest.importorskip("ruff")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *words, "client.py"],
        cwd=stub_demo.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def _mypy_agrees(demo: Path, *others: Path) -> None:
    files = map(str, (demo, *others))
    output = _run("mypy", "--strict", "--no-error-summary", "--hide-error-context", *files)
    found = re.findall(r"^(?:.*/)?([\w.]+):(\d+): error: ", output, re.MULTILINE)
    assert {(name, int(line)) for name, line in found} == _marked(demo), output


def _pyright_agrees(demo: Path, *others: Path) -> None:
    files = map(str, (demo, *others))
    words = ("pyright", "--outputjson", "--pythonpath", sys.executable)
    output = _run(*words, *files, cwd=demo.parent if others else ROOT)
    report = json.loads(output[output.index("{") :])
    found = {
        (Path(problem["file"]).name, problem["range"]["start"]["line"] + 1)
        for problem in report["generalDiagnostics"]
        if problem["severity"] == "error"
    }
    assert found == _marked(demo), output


def _marked(demo: Path) -> set[tuple[str, int]]:
    lines = demo.read_text().splitlines()
    return {(demo.name, n) for n, line in enumerate(lines, start=1) if "  # E:" in line}


def _run(checker: str, *arguments: str, cwd: Path = ROOT) -> str:
    pytest.importorskip(checker)
    done = subprocess.run(
        [sys.executable, "-m", checker, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr or done.stdout
    return done.stdout
