"""Locks: what could not be installed again elsewhere is refused, with the fix; the rest goes along."""

import hashlib
import os
import tomllib
from pathlib import Path

import pytest

from servekit.errors import ConfigError
from servekit.packaging import lock as locks
from servekit.packaging import uv
from servekit.packaging.lock import Options, make
from servekit.packaging.wheels import build_wheel, own_requirement
from servekit.spec.container import Image
from servekit.version import __version__

SERVEKIT = """
[[packages]]
name = "servekit"
version = "0.1.0"
wheels = [{url = "https://example.com/servekit-0.1.0-py3-none-any.whl", hashes = {sha256 = "00"}}]
"""


HEAD = 'lock-version = "1.0"\ncreated-by = "a test"\n'


def written(root: Path, packages: str, *, servekit: str = SERVEKIT) -> None:
    (root / "pylock.toml").write_text(HEAD + servekit + packages)


def made(root: Path, image: Image | None = None, **options) -> locks.Lock:
    scratch = root / ".scratch"
    scratch.mkdir(exist_ok=True)
    return make(
        root,
        image or Image(),
        Options(**options),
        python="3.11",
        scratch=scratch,
        cache=root / ".cache",
    )


def wheel(folder: Path, name: str = "own-1.0-py3-none-any.whl") -> tuple[Path, str]:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"a wheel")
    return folder / name, hashlib.sha256(b"a wheel").hexdigest()


def test_a_lock_is_taken_as_it_is_but_for_what_installs_nothing(tmp_path):
    path, digest = wheel(tmp_path / "local")
    written(
        tmp_path,
        f"""
[[packages]]
name = "numpy"
version = "2.0"
index = "https://example.com/simple"
sdist = {{url = "https://example.com/numpy-2.0.tar.gz", hashes = {{sha256 = "02"}}}}
wheels = [{{url = "https://example.com/numpy-2.0-cp311-cp311-linux_x86_64.whl", size = 5, hashes = {{sha256 = "01"}}}}]

[[packages]]
name = "own"
version = "1.0"
archive = {{path = "local/own-1.0-py3-none-any.whl", hashes = {{sha256 = "{digest}"}}}}

[[packages]]
name = "project"
directory = {{path = "."}}
""",
    )
    lock = made(tmp_path)
    assert lock.origin == "pylock.toml"
    assert lock.wheels == {path.name: path}
    found = tomllib.loads(lock.text(python="3.11").decode())
    assert found["requires-python"] == "==3.11.*"
    assert found["packages"] == [
        {
            "name": "numpy",
            "version": "2.0",
            "wheels": [
                {
                    "url": "https://example.com/numpy-2.0-cp311-cp311-linux_x86_64.whl",
                    "hashes": {"sha256": "01"},
                }
            ],
        },
        {
            "name": "own",
            "version": "1.0",
            "wheels": [{"path": f"wheels/{path.name}", "hashes": {"sha256": digest}}],
        },
        tomllib.loads(SERVEKIT)["packages"][0],
    ]
    assert made(tmp_path).text(python="3.11") == lock.text(python="3.11")


@pytest.mark.parametrize(
    ("package", "match"),
    [
        (
            'wheels = [{url = "https://example.com/x-1-py3-none-any.whl", hashes = {md5 = "0"}}]',
            "pylock.toml: x 1 has no sha256; lock again with hashes",
        ),
        (
            'sdist = {url = "https://example.com/x-1.tar.gz", hashes = {sha256 = "0"}}',
            "x 1 has no wheel for this platform, .*--find-links FOLDER",
        ),
        (
            'archive = {url = "https://example.com/x-1.tar.gz", hashes = {sha256 = "0"}}',
            r"x 1 is x-1\.tar\.gz, and an image builds nothing",
        ),
        (
            'vcs = {type = "git", url = "https://example.com/x", commit-id = "0123"}',
            "x 1 is a commit of a repository, which has no hash",
        ),
        (
            'archive = {path = "nowhere/x-1-py3-none-any.whl", hashes = {sha256 = "0"}}',
            r"there is no .*nowhere/x-1-py3-none-any\.whl; lock again",
        ),
        (
            'archive = {path = "local/own-1.0-py3-none-any.whl", hashes = {sha256 = "0"}}',
            "is another file now; lock again",
        ),
        (
            'archive = {url = "https://me:pw@example.com/x-1.whl", hashes = {sha256 = "0"}}',
            "its URL has credentials; keep them in ~/.netrc",
        ),
        ('directory = {path = "../sibling"}', "has no pyproject.toml to build a wheel from"),
    ],
)
def test_what_could_not_be_installed_elsewhere(tmp_path, package, match):
    wheel(tmp_path / "local")
    written(tmp_path, f'[[packages]]\nname = "x"\nversion = "1"\n{package}\n')
    with pytest.raises(ConfigError, match=match) as caught:
        made(tmp_path)
    assert "pw" not in str(caught.value)


def test_a_lock_without_servekit(tmp_path):
    written(tmp_path, "", servekit="packages = []\n")
    with pytest.raises(ConfigError, match="has no servekit, which the app runs on; add it"):
        made(tmp_path)


def test_what_is_no_lock(tmp_path):
    for text in ("packages = 1", "]", 'lock-version = "2.0"\ncreated-by = "x"\npackages = []'):
        (tmp_path / "pylock.toml").write_text(text)
        with pytest.raises(ConfigError, match=r"pylock\.toml: is no lock file"):
            made(tmp_path)


def test_the_lock_that_an_image_names(tmp_path):
    written(tmp_path, "")
    (tmp_path / "pylock.toml").rename(tmp_path / "pylock.gpu.toml")
    assert made(tmp_path, Image().lockfile("pylock.gpu.toml")).origin == "pylock.gpu.toml"
    with pytest.raises(
        ConfigError, match=r"Image\.lockfile\('other\.toml'\): there is no such file"
    ):
        made(tmp_path, Image().lockfile("other.toml"))
    with pytest.raises(ConfigError, match=r"Image\.packages\('numpy'\) is too late"):
        made(tmp_path, Image().lockfile("pylock.gpu.toml").packages("numpy"))


def test_locked_resolves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(uv, "run", lambda *_, **__: pytest.fail("it resolves"))
    with pytest.raises(ConfigError, match="has no lock file, and --locked resolves nothing"):
        made(tmp_path, locked=True)
    written(tmp_path, "")
    assert made(tmp_path, locked=True).has("servekit")


@pytest.mark.parametrize(
    "option",
    [{"index": "https://me:pw@example.com"}, {"find_links": ("x",)}, {"torch_backend": "cpu"}],
)
def test_how_to_resolve_is_too_late_for_a_lock(tmp_path, option):
    written(tmp_path, "")
    name = f"--{next(iter(option)).replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"so {name} is too late; lock again with it"):
        made(tmp_path, **option)


def test_where_a_lock_of_uv_has_its_packages_from(tmp_path, monkeypatch):
    """uv compares that with the lock, so it must know; which PyTorch is in the lock."""
    said = []
    monkeypatch.setattr(uv, "run", lambda *words, **_: said.extend(words) or HEAD + SERVEKIT)
    (tmp_path / "uv.lock").touch()
    made(tmp_path, find_links=("wheels",), index="https://example.com")
    assert {"--locked", "--find-links", "wheels", "--default-index"} <= {*said}
    with pytest.raises(ConfigError, match=r"uv\.lock has all .* --torch-backend is too late"):
        made(tmp_path, torch_backend="cpu")


def test_options_as_uv_takes_them():
    options = Options(index="https://example.com", find_links=("a", "b"), torch_backend="cpu")
    assert options.words() == [
        *("--default-index", "https://example.com", "--find-links", "a", "--find-links", "b"),
        *("--torch-backend", "cpu"),
    ]


class Origin:
    """Where servekit seems to come from."""

    def __init__(self, url: str | None) -> None:
        self._text = None if url is None else f'{{"url": "{url}"}}'

    def read_text(self, _: str) -> str | None:
        return self._text


def test_servekit_itself(tmp_path, monkeypatch):
    """From an index it is that version; from a file, that file; with the extras that are asked for."""
    asked = tmp_path / "requirements.txt"
    asked.write_text("numpy\nservekit[onnx, auth]>=0.1\nservekit-plugins\n")
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project]\ndependencies = ["servekit[auth]"]\n'
        '[project.optional-dependencies]\ndev = ["servekit[build]"]\n'
    )
    path, _ = wheel(tmp_path, f"servekit-{__version__}-py3-none-any.whl")
    for url, expected in (
        (None, f"servekit[auth,onnx]=={__version__}\n"),
        (path.as_uri(), f"servekit[auth,onnx] @ {path.as_uri()}\n"),
    ):
        monkeypatch.setattr("importlib.metadata.distribution", lambda _, url=url: Origin(url))
        assert own_requirement([asked], tmp_path) == expected
        assert own_requirement([project], tmp_path) == expected.replace("auth,onnx", "auth")
    path.unlink()
    with pytest.raises(ConfigError, match="which is not there any more"):
        own_requirement([asked], tmp_path)


def test_what_uv_complains_of_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"can't do this\n.*nowhere\.txt"):
        uv.run("pip", "compile", "nowhere.txt", cwd=tmp_path, doing="do this")


@pytest.fixture
def resolver(tmp_path, monkeypatch):
    """Count how often uv resolves; it finds servekit alone."""
    asked = []

    def run(*words, **_):
        asked.append(words)
        Path(words[words.index("--output-file") + 1]).write_text(
            'lock-version = "1.0"\ncreated-by = "a test"\n' + SERVEKIT
        )
        return ""

    monkeypatch.setattr(uv, "run", run)
    monkeypatch.setattr(locks, "own_requirement", lambda *_: "servekit")
    (tmp_path / "requirements.txt").write_text("numpy\n-c constraints.txt\n")
    (tmp_path / "constraints.txt").write_text("numpy<3\n")
    (tmp_path / "app.py").write_text("x = 1\n")
    return asked


def test_an_edit_of_the_code_resolves_nothing_again(tmp_path, resolver):
    first = made(tmp_path)
    (tmp_path / "app.py").write_text("x = 2  # edited\n")
    assert made(tmp_path).packages == first.packages
    assert len(resolver) == 1


@pytest.mark.parametrize(
    "change",
    ["requirements.txt", "constraints.txt", "image", "option", "environment", "links", "age"],
)
def test_what_could_resolve_otherwise_is_resolved_again(tmp_path, resolver, monkeypatch, change):
    wheel(tmp_path / "wheels")
    links = (str(tmp_path / "wheels"),)
    made(tmp_path, find_links=links)
    image, options = Image(), {"find_links": links}
    match change:
        case "image":
            image = Image().packages("pandas")
        case "option":
            options["torch_backend"] = "cpu"
        case "environment":
            monkeypatch.setenv("UV_PRERELEASE", "allow")
        case "links":
            wheel(tmp_path / "wheels", "other-1.0-py3-none-any.whl")
        case "age":
            [kept] = (tmp_path / ".cache" / "locks").iterdir()
            os.utime(kept, (0, 0))
        case name:
            (tmp_path / name).write_text((tmp_path / name).read_text() + "# edited\n")
    made(tmp_path, image, **options)
    assert len(resolver) == 2


def test_what_refers_to_other_folders_is_resolved_each_time(tmp_path, resolver):
    (tmp_path / "requirements.txt").write_text("-r ../common.txt\n")
    made(tmp_path)
    made(tmp_path)
    assert len(resolver) == 2


def test_a_wheel_is_built_again_when_a_file_has_changed(tmp_path, monkeypatch):
    built = []

    def run(*words, **_):
        built.append(words)
        wheel(words[words.index("--out-dir") + 1])
        return ""

    monkeypatch.setattr(uv, "run", run)
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[project]\n")
    first = build_wheel(folder, tmp_path / "cache")
    assert build_wheel(folder, tmp_path / "cache") == first
    assert len(built) == 1
    (folder / "module.py").write_text("x = 1\n")
    assert build_wheel(folder, tmp_path / "cache") != first
    assert len(built) == 2
