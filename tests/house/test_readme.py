"""A new user follows the README: what it shows runs, and what it promises is there."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text("utf-8")


def _docs() -> ModuleType:
    """Return the module beside this one; the tests' folders are no packages."""
    name = "servekit_test_docs"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, Path(__file__).with_name("test_docs.py")
        )
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.mark.slow
def test_readme_runs() -> None:
    _docs().run_page(README)


def test_two_commands_set_everything_up() -> None:
    commands = [
        line.partition("#")[0].strip()
        for block in _docs().blocks_of(README)
        if block.lang == "shell"
        for line in block.text.splitlines()
    ]
    assert commands == ["make demo", "make test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)


def test_the_taste_is_short() -> None:
    taste = next(block for block in _docs().blocks_of(README) if block.title == "app.py")
    assert sum(bool(line.strip()) for line in taste.text.splitlines()) <= 15


def test_the_demo_is_as_described() -> None:
    demo = (ROOT / "examples" / "filetypes" / "demo.py").read_text("utf-8")
    sizes = re.search(r"^BURST, CONCURRENCY = (\d+), (\d+)$", demo, re.MULTILINE)
    assert sizes is not None
    assert f"{sizes[1]} requests, {sizes[2]} at a time" in TEXT
    files = re.findall(r"^    (?:SAMPLES|ROOT) / .*: \"", demo, re.MULTILINE)
    assert f"sends {len(files)} files" in " ".join(TEXT.split())
    assert f"{len(files)} of {len(files)} right." in TEXT
