"""Both type checkers, in their strict modes, see in `demo.py` what is marked there, and no more."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = Path(__file__).with_name("demo.py")

pytestmark = pytest.mark.timeout(300)  # a cold mypy reads all of numpy and pydantic


def test_mypy_reports_the_marked_lines_only() -> None:
    output = _run("mypy", "--strict", "--no-error-summary", "--hide-error-context", str(DEMO))
    found = re.findall(rf"^(?:.*/)?{DEMO.name}:(\d+): error: ", output, re.MULTILINE)
    assert {int(line) for line in found} == _marked(), output


def test_pyright_reports_the_marked_lines_only() -> None:
    output = _run("pyright", "--outputjson", "--pythonpath", sys.executable, str(DEMO))
    report = json.loads(output[output.index("{") :])
    found = {
        problem["range"]["start"]["line"] + 1
        for problem in report["generalDiagnostics"]
        if problem["severity"] == "error"
    }
    assert found == _marked(), output


def _marked() -> set[int]:
    lines = DEMO.read_text().splitlines()
    return {number for number, line in enumerate(lines, start=1) if "  # E:" in line}


def _run(checker: str, *arguments: str) -> str:
    pytest.importorskip(checker)
    done = subprocess.run(
        [sys.executable, "-m", checker, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr or done.stdout
    return done.stdout
