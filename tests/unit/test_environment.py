"""Environments of locks: made once, and again where their Python has gone."""

from pathlib import Path

import pytest

from servekit.packaging import uv
from servekit.packaging.environment import environment


@pytest.fixture
def python(tmp_path, monkeypatch):
    """The Python that environments link to; what uv is run for is in its `runs`."""
    found = tmp_path / "python"
    found.touch()

    def run(*words: str | Path, **_: object) -> str:
        runs.append(words[0])
        if words[0] == "venv":
            (Path(words[-1]) / "bin").mkdir(parents=True)
            (Path(words[-1]) / "bin" / "python").symlink_to(found)
        return ""

    runs: list[str | Path] = []
    monkeypatch.setattr(uv, "run", run)
    return found, runs


def test_an_environment_is_made_once(tmp_path, python):
    _, runs = python
    lock = tmp_path / "pylock.toml"
    lock.write_text("one")
    cache = tmp_path / "cache"
    made = environment(lock, python="3.11", cache=cache)
    assert environment(lock, python="3.11", cache=cache) == made
    assert runs == ["venv", "pip"]
    lock.write_text("other")
    assert environment(lock, python="3.11", cache=cache) != made


def test_it_is_made_again_where_its_python_has_gone(tmp_path, python):
    """As in a cache that CI brings to a machine with another patch version of Python."""
    found, runs = python
    lock = tmp_path / "pylock.toml"
    lock.write_text("one")
    made = environment(lock, python="3.11", cache=tmp_path / "cache")
    found.rename(tmp_path / "another")
    assert not made.exists()
    environment(lock, python="3.11", cache=tmp_path / "cache")
    assert runs == ["venv", "pip"] * 2
