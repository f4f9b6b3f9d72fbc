"""Which files belong to a project, and which of them look as if they had secrets or places of one machine."""

import os
import tarfile
from pathlib import Path, PurePosixPath

import pytest

from servekit.errors import ConfigError
from servekit.packaging import portable, project, secrets
from servekit.packaging.oci.base import scratch
from servekit.packaging.oci.blobs import Blobs
from servekit.packaging.oci.documents import Platform
from servekit.packaging.oci.layout import write_folder, write_tar
from servekit.packaging.project import Project


@pytest.fixture
def root(tmp_path):
    """A project with what projects have."""
    for name in (
        "pyproject.toml", "app.py", "data/words.txt", "data/big.bin", "src/pkg/__init__.py",
        "src/pkg/__pycache__/x.cpython-311.pyc", ".git/HEAD", ".env", ".venv/pyvenv.cfg",
        "environment/pyvenv.cfg", "environment/lib/x.py", "dist/old.bundle", "build/x.o",
        "node_modules/a.js", "pkg.egg-info/PKG-INFO", "a.pyc", "inner/dist/kept.js",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def names(root: Path, included=()) -> list[str]:
    return [str(path) for path in Project(root, "app.py").files(included)]


def test_what_no_project_ships_is_left_out(root):
    assert names(root) == [
        "app.py",
        "data/big.bin",
        "data/words.txt",
        "inner/dist/kept.js",
        "pyproject.toml",
        "src/pkg/__init__.py",
    ]


def test_what_a_project_ignores_and_an_image_takes_back(root):
    (root / ".servekitignore").write_text("# big\ndata/\n*.js\n!inner/dist/kept.js\n")
    assert names(root) == [
        ".servekitignore",
        "app.py",
        "inner/dist/kept.js",
        "pyproject.toml",
        "src/pkg/__init__.py",
    ]
    assert "data/words.txt" in names(root, ["data/*.txt"])
    assert "data/big.bin" not in names(root, ["data/*.txt"])


def test_images_that_were_written_into_a_project_are_left_out(root):
    image = scratch(Blobs(root / ".cache"), Platform("linux", "amd64"))
    write_tar(image, root / "image.tar")
    write_folder(image, root / "layout")
    with tarfile.open(root / "data" / "photos.tar", "w") as tar:
        tar.add(root / "app.py", "app.py")
    (root / "broken.tar").write_text("no tar")
    assert {"data/photos.tar", "broken.tar"} == {n for n in names(root) if n.endswith(".tar")}
    assert not any(name.startswith("layout") for name in names(root))
    assert "image.tar" in names(root, ["image.tar"])


@pytest.mark.parametrize(
    ("target", "cwd", "expected", "inner"),
    [
        ("app.py", "", "", "app.py"),
        ("app.py:Root", "", "", "app.py:Root"),
        ("../app.py:Root", "src", "", "app.py:Root"),
        ("pkg/__init__.py", "src", "", "src/pkg/__init__.py"),
        ("app:Root", "", "", "app:Root"),
        ("app:Root", "src/pkg", "", "app:Root"),
    ],
)
def test_the_nearest_folder_with_a_mark(root, target, cwd, expected, inner):
    found = Project.of(target, root / cwd)
    assert (found.root, found.target) == ((root / expected).resolve(), inner)


def test_a_folder_without_a_mark_is_its_own(tmp_path):
    (tmp_path / "app.py").write_text("")
    assert Project.of("app.py", tmp_path).root == tmp_path
    with pytest.raises(ConfigError, match=r"other\.py: there is no such file"):
        Project.of("other.py", tmp_path)


def test_links(root, tmp_path_factory):
    """One to a file of the project is that file; others are refused with the fix."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "x.txt"
    elsewhere.write_text("")
    (root / "inside.txt").symlink_to(root / "data/words.txt")
    assert "inside.txt" in names(root)
    for target in (elsewhere, root / "data", root / "nothing"):
        (root / "link").symlink_to(target)
        with pytest.raises(ConfigError, match=r"link is a link to .*name it in \.servekitignore"):
            names(root)
        (root / "link").unlink()


def test_what_is_no_file_is_left_out(root):
    os.mkfifo(root / "pipe")
    assert "pipe" not in names(root)


def test_too_many_files_are_refused(root, monkeypatch):
    monkeypatch.setattr(project, "MAX_FILES", 3)
    with pytest.raises(ConfigError, match=r"more than 3 files; name in \.servekitignore"):
        names(root)


# -- secrets


def found(tmp_path: Path, text: str, name: str = "config.py") -> list[str]:
    (tmp_path / name).write_text(text)
    return [str(one) for one in secrets.search(tmp_path, [PurePosixPath(name)])]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("a private key", "-----BEGIN RSA " + "PRIVATE KEY-----"),
        ("a private key", "-----BEGIN " + "PRIVATE KEY-----"),
        ("an access key of AWS", "AKIA" + "ABCDEFGHIJKLMNOP"),
        ("a token of GitHub", "ghp_" + "a1" * 18),
        ("a token of Hugging Face", "hf_" + "Ab1" * 11),
        ("a key of Google", "AIza" + "a" * 35),
        ("a token of Slack", "xoxb-" + "123456789-" * 3),
        ("a token of PyPI", "pypi-" + "Ag" * 30),
        ("a key of an LLM provider", "sk-" + "proj-" + "aB3" * 12),
        ("an API key of servekit", "sk_" + "0a" * 6 + "_" + "0b" * 32),
        ("a password in a URL", "postgres://me:" + "hunter22@db.example.com/x"),
    ],
)
def test_secrets_are_found_with_their_lines_and_never_shown(tmp_path, kind, text):
    assert found(tmp_path, f"# first\n\nX = '{text}'\n") == [f"config.py:3: {kind}"]
    with pytest.raises(ConfigError) as caught:
        secrets.refuse(secrets.search(tmp_path, [PurePosixPath("config.py")]), ())
    assert text not in str(caught.value)
    assert "--allow-secret" in str(caught.value)
    secrets.refuse(secrets.search(tmp_path, [PurePosixPath("config.py")]), ["conf*"])


@pytest.mark.parametrize(
    "text",
    [
        "url = 'http://127.0.0.1:3000/x@y'", "postgres://{user}:{password}@host/db", "sk-learn",
        "'https://example.com/a:b@c'", "hf_hub_download", "AKIA", "sha256:" + "0a" * 32,
        "-----BEGIN CERTIFICATE-----", "-----BEGIN PUBLIC KEY-----",
    ],
)  # fmt: skip
def test_what_is_no_secret(tmp_path, text):
    assert found(tmp_path, text) == []


@pytest.mark.parametrize("name", [".env", ".env.local", "id_ed25519", "store.p12", ".pypirc"])
def test_files_that_hold_credentials_by_their_names(tmp_path, name):
    assert len(found(tmp_path, "", name)) == 1


# -- places of this machine


def test_a_path_beside_the_projects_code_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(portable, "_EVERYWHERE", ("/usr",))
    (tmp_path / "weights.bin").write_bytes(b"")
    source = tmp_path / "app.py"
    source.write_text(f"import os\nX = '{tmp_path}/weights.bin'\nY = '/usr/bin/env'\n")
    with pytest.raises(ConfigError, match=r"app\.py:2: .*weights\.bin' is a place on this machine"):
        portable.check([source], tmp_path)
    source.write_text(f"X = '{tmp_path}/weights.bin'  # servekit: path\nR = '/models'\n")
    portable.check([source], tmp_path)


def test_sources_outside_of_the_project(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match=r"x\.py is part of the app, and outside of its project"):
        portable.check([tmp_path / "x.py"], tmp_path / "a")
