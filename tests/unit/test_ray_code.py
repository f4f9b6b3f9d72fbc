"""The author's code and models on their way to the nodes of a cluster."""

import sys

import pytest

from servekit.engine.ray import code
from servekit.errors import ConfigError


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "app.py").write_text("x = 1\n")
    (folder / "package" / "words.txt").write_text("abc")
    (folder / "package" / "tokens").mkdir()
    (folder / "package" / "tokens" / "a.json").write_text("{}")
    (folder / "package" / "big.bin").write_bytes(b"0" * 100)
    return folder


def sent(project, *models):
    sources = [str(project / "package" / "app.py")]
    return code.archive(sources, (str(project),), [project / "package" / name for name in models])


def arrived(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    node = tmp_path / "node"
    node.mkdir(exist_ok=True)
    code.unpack(packed, node)
    return node / f"code-{packed.digest}" / "package"


def test_modules_find_the_models_that_lie_beside_them(project, tmp_path, monkeypatch):
    home = arrived(sent(project, "words.txt", "tokens"), tmp_path, monkeypatch)
    assert (home / "app.py").read_text() == "x = 1\n"
    assert (home / "words.txt").read_text() == "abc"
    assert (home / "tokens" / "a.json").read_text() == "{}"
    assert sys.path == [str(home.parent), str(project)]


def test_models_without_room_are_where_the_nodes_have_them(project, tmp_path, monkeypatch):
    monkeypatch.setattr(code, "MAX_BYTES", 64 + 400)  # the archive's own needs
    (project / "package" / "big.bin").write_bytes(bytes(1000))
    packed = sent(project, "words.txt", "big.bin")
    home = arrived(packed, tmp_path, monkeypatch)
    assert (home / "words.txt").read_text() == "abc"
    assert (home / "big.bin").is_symlink()
    assert (home / "big.bin").read_bytes() == bytes(1000)
    (project / "package" / "big.bin").unlink()  # as on a node that has no such folder
    assert not (home / "big.bin").exists()


def test_what_is_equal_has_one_digest_and_what_is_not_another(project, tmp_path, monkeypatch):
    first = sent(project, "words.txt")
    assert sent(project, "words.txt") == first
    (project / "package" / "words.txt").write_text("abd")
    assert sent(project, "words.txt").digest != first.digest
    assert sent(project, "tokens").digest != first.digest
    monkeypatch.setattr(code, "MAX_BYTES", 250)
    (project / "package" / "big.bin").write_bytes(bytes(1000))
    assert sent(project, "big.bin").digest != sent(project).digest


def test_modules_that_are_too_large(project, monkeypatch):
    monkeypatch.setattr(code, "MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="install them on the nodes, as a package"):
        sent(project)


def test_models_elsewhere_are_left_where_they_are(project, tmp_path):
    (tmp_path / "else.bin").write_bytes(b"1")
    packed = code.archive(
        [str(project / "package" / "app.py")], (str(project),), [tmp_path / "else.bin"]
    )
    assert packed == sent(project)


@pytest.mark.parametrize("at", [0, 3 << 19, (3 << 20) - 1])
def test_another_model_has_another_fingerprint(tmp_path, at):
    file = tmp_path / "model"
    content = bytearray(3 << 20)
    file.write_bytes(content)
    before = code.fingerprint([file])
    assert code.fingerprint([file]) == before
    content[at] = 1
    file.write_bytes(content)
    in_the_middle = at == 3 << 19  # of large files the ends are read, and weights change everywhere
    assert (code.fingerprint([file]) == before) is in_the_middle
    file.write_bytes(bytes(2 << 20))
    assert code.fingerprint([file]) != before
