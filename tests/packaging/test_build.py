"""`servekit build` as a new user runs it: a project becomes one file, which then serves elsewhere."""

import asyncio
import base64
import contextlib
import functools
import hashlib
import http.server
import os
import subprocess
import sys
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from servekit.cli.project import Template, create
from servekit.packaging.bundle import read
from tests.flow.harness import serving

COMMAND = (sys.executable, "-m", "servekit")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


WEIGHTS = b"weights" * 200_000


class Web(http.server.BaseHTTPRequestHandler):
    """Has one file."""

    asked = 0

    def do_GET(self):
        Web.asked += 1
        self.send_response(200)
        self.send_header("content-length", str(len(WEIGHTS)))
        self.end_headers()
        self.wfile.write(WEIGHTS)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(handler) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def web():
    with served(Web) as url:
        yield f"{url}/weights.bin"


@pytest.fixture(scope="module")
def project(tmp_path_factory, web):
    """A project from a template, whose dependencies are resolved, and not installed in ours."""
    return with_models(tmp_path_factory.mktemp("project"), web)


def with_models(folder: Path, url: str) -> Path:
    """Return a new project whose root service has two models: one of the project, one from `url`."""
    made = create("wave", Template.PIPELINE, folder)
    (made / "names.txt").write_text("sine")
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    app = (made / "app.py").read_text()
    edge = "    shapes = sk.depends(Shapes)\n"
    models = (
        '    names = sk.model("names.txt")\n'
        f'    weights = sk.model("{url}", sha256="{sha256}")\n\n'
        "    @sk.on_build\n"
        "    async def prepare(self):\n"
        "        made.write_bytes(self.weights.read_bytes()[:3])\n"
        "    def __init__(self):\n"
        "        assert made.read_bytes() == b'wei'\n"
        "        assert self.names.read_text() == 'sine'\n"
        "        assert self.weights.read_bytes() == b'weights' * 200_000\n"
    )
    assert edge in app
    first = "\nOVERTONES ="
    path = "\nfrom pathlib import Path\nmade = Path(__file__).parent / 'made'\n"
    app = app.replace(edge, edge + models).replace(first, path + first)
    (made / "app.py").write_text(app)
    return made


def command(*words: str, cwd: Path, cache: Path, fails: bool = False, **env: str) -> str:
    """Run `servekit`; returns what it printed."""
    done = subprocess.run(
        [*COMMAND, *words],
        cwd=cwd,
        env={**os.environ, "SERVEKIT_CACHE_DIR": str(cache), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def built(project, cache):
    """The file that a first build makes."""
    told = command("build", "app.py", "-o", "wave.bundle", cwd=project, cache=cache)
    assert told.startswith("built wave.bundle")
    return project / "wave.bundle"


def test_two_builds_have_the_same_bytes(built, cache, tmp_path, web):
    """Of two copies of a project in different folders, with other times, and another cache."""
    other = with_models(tmp_path, web)
    command("build", "app.py", "-o", "again.bundle", cwd=other, cache=tmp_path / "cache")
    digests = [hashlib.sha256(f.read_bytes()) for f in (built, other / "again.bundle")]
    assert digests[0].digest() == digests[1].digest()


def test_what_is_in_it(built, cache):
    bundle = read(built, cache / "bundles")
    bundle.verify()
    files = bundle.manifest.files
    assert {"code/app.py", "code/pyproject.toml", "openapi.json", "pylock.toml"} <= files.keys()
    assert not [name for name in files if "__pycache__" in name]
    assert [service.name for service in bundle.manifest.app.services] == ["Shapes", "Waves"]
    openapi = msgspec.json.decode((bundle.folder / "openapi.json").read_bytes())
    assert "/predict" in openapi["paths"]
    sbom = msgspec.json.decode((bundle.folder / "sbom.cdx.json").read_bytes())
    names = {component["name"] for component in sbom["components"]}
    assert {"numpy", "servekit", "uvicorn"} <= names
    models = [c for c in sbom["components"] if c["type"] == "machine-learning-model"]
    assert [model["hashes"][0]["content"] for model in models] == [sha256(WEIGHTS)]
    assert files["code/names.txt"].sha256 == sha256(b"sine")
    assert files["code/made"].sha256 == sha256(b"wei")
    assert sha256(WEIGHTS) in [f.sha256 for name, f in files.items() if name.startswith("models/")]
    told = command("inspect", str(built), cwd=built.parent, cache=cache)
    assert f"sha256:{bundle.digest}" in told
    whole = command("inspect", str(built), "--json", cwd=built.parent, cache=cache)
    assert msgspec.json.decode(whole) == msgspec.json.decode(bundle.manifest.to_json())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_it_serves_elsewhere(built, cache, tmp_path):
    """In an environment of its own, from any folder, with its models, and writes nothing into it."""
    asked = Web.asked
    moved = tmp_path / "moved.bundle"
    moved.write_bytes(built.read_bytes())
    env = {"SERVEKIT_CACHE_DIR": str(cache), "SERVEKIT_MODELS_DIR": str(tmp_path / "models")}
    async with serving(str(moved), env=env) as app:
        sample = (Path(__file__).parents[2] / "templates/pipeline/sample.json").read_bytes()
        answer = await app.call(
            "POST", "/predict", body=sample, headers={"content-type": "application/json"}
        )
        assert answer.status == 200
        pids = [*app.all_of("replica_worker"), *app.all_of("gateway_worker")]
        for pid in pids:
            assert (
                str(cache / "environments") in os.readlink(f"/proc/{pid}/cwd")
                or str(cache / "environments") in Path(f"/proc/{pid}/cmdline").read_text()
            )
    assert Web.asked == asked
    await asyncio.to_thread(read(moved, cache / "bundles").verify)


def test_it_goes_through_a_registry(built, cache, registry, tmp_path):
    """Its model is a blob of its own, which a later push finds there."""
    bundle = read(built, cache / "bundles")
    place = f"oci://{registry}/team/wave"
    told = command("push", str(built), f"{place}:1", cwd=tmp_path, cache=cache)
    assert told.startswith(f"sent {place}:1")
    digest = told.splitlines()[-1].strip()
    other = tmp_path / "cache"
    told = command("pull", f"{place}@{digest}", "-o", "got.bundle", cwd=tmp_path, cache=other)
    assert f"sha256:{bundle.digest}" in told
    assert (tmp_path / "got.bundle").read_bytes() == built.read_bytes()
    blob = f"http://{registry}/v2/team/wave/blobs/sha256:{sha256(WEIGHTS)}"
    with urllib.request.urlopen(blob, timeout=10) as answer:
        assert answer.read() == WEIGHTS
    again = command("push", str(tmp_path / "got.bundle"), f"{place}:2", cwd=tmp_path, cache=other)
    assert again.splitlines()[-1].strip() == digest
    refused = command("pull", f"{place}:3", cwd=tmp_path, cache=other, fails=True)
    assert "has no team/wave 3" in refused


def test_it_goes_through_a_folder(built, cache, tmp_path):
    command("push", str(built), "shared", cwd=tmp_path, cache=cache)
    [shared] = (tmp_path / "shared").iterdir()
    command("pull", str(shared), "-o", "folder", cwd=tmp_path, cache=cache)
    assert read(tmp_path / "folder", cache).digest == read(built, cache / "bundles").digest
    with shared.open("r+b") as broken:
        broken.seek(shared.stat().st_size // 2)
        broken.write(b"\xff" * 2000)
    told = command("pull", str(shared), cwd=tmp_path, cache=tmp_path / "cache", fails=True)
    assert told.startswith("error: ")
    assert not [*tmp_path.glob("*.bundle")]


def test_what_would_not_run_elsewhere(project, cache, tmp_path):
    """Each with the place and the fix, and before anything is written."""
    app = (project / "app.py").read_text()
    folder = create("other", Template.PIPELINE, tmp_path)
    (folder / "names.txt").write_text("sine")
    cases = {
        "@sk.on_build: ZeroDivisionError: division by zero": (
            "app.py",
            app.replace("made.write_bytes", "1 / 0; made.write_bytes"),
        ),
        "Waves.w: nowhere.bin is not in the bundle": (
            "app.py",
            app.replace("    names =", "    w = sk.model('nowhere.bin')\n    names ="),
        ),
        "the bundle's own environment": ("app.py", "import magika\n" + app),
        "config.py:1: a token of GitHub": ("config.py", f"X = 'ghp_{'a1' * 18}'\n"),
        "Image.run('apt-get update'): there is no shell": (
            "app.py",
            app.replace("sk.Image()", "sk.Image().run('apt-get update')"),
        ),
    }
    for expected, (name, text) in cases.items():
        (folder / name).write_text(text)
        told = command("build", "app.py", cwd=folder, cache=cache, fails=True)
        assert told.startswith("error: ")
        assert expected in told
        assert not (folder / "dist").exists()
        (folder / "config.py").unlink(missing_ok=True)
        (folder / "app.py").write_text(app)


class Private(http.server.SimpleHTTPRequestHandler):
    """A package index for those who say who they are."""

    def do_GET(self):
        if self.headers["authorization"] == f"Basic {base64.b64encode(b'me:pa55').decode()}":
            super().do_GET()
            return
        self.send_response(401)
        self.send_header("www-authenticate", 'Basic realm="index"')
        self.send_header("content-length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def index_with(folder: Path, name: str) -> None:
    """Write a package index that has a wheel of one module."""
    page = folder / name
    page.mkdir(parents=True)
    wheel = f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(page / wheel, "w") as made:
        made.writestr(f"{name}.py", "")
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    (page / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>')


PRIVATE = """
[project]
name = "secretive"
version = "1"
requires-python = ">=3.11"
dependencies = ["servekit", "inhouse", "near"]

[[tool.uv.index]]
name = "team"
url = "{url}"
explicit = true

[tool.uv.sources]
inhouse = {{ index = "team" }}
near = {{ path = "../near" }}
"""
NEAR = """
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "near"
version = "1"
"""


def test_dependencies_of_a_private_index_and_of_a_folder(cache, tmp_path):
    """Credentials come from netrc, for the lock and for the installation, and are not in the bundle."""
    index_with(tmp_path / "index", "inhouse")
    for name in ("near", "app"):
        (tmp_path / name).mkdir()
    (tmp_path / "near" / "near.py").touch()
    (tmp_path / "near" / "pyproject.toml").write_text(NEAR)
    app = tmp_path / "app"
    (app / "app.py").write_text(
        "import inhouse\nimport near\nimport servekit as sk\n\n\n"
        "@sk.service\nclass Own:\n    @sk.endpoint\n    def run(self) -> int:\n        return 1\n"
    )
    netrc = tmp_path / "netrc"
    netrc.write_text("")
    with served(functools.partial(Private, directory=str(tmp_path / "index"))) as url:
        (app / "pyproject.toml").write_text(PRIVATE.format(url=url))
        words = ("build", "app.py", "-o", "own.bundle")
        told = command(*words, cwd=app, cache=cache, fails=True, NETRC=str(netrc))
        assert "401 Unauthorized" in told
        assert "uv takes credentials from ~/.netrc" in told
        netrc.write_text("machine 127.0.0.1 login me password pa55\n")
        command(*words, cwd=app, cache=cache, NETRC=str(netrc))
    bundle = read(app / "own.bundle", cache / "bundles")
    lock = (bundle.folder / "pylock.toml").read_text()
    assert f'url = "{url}/inhouse/inhouse-1.0-py3-none-any.whl"' in lock
    assert "pa55" not in (app / "own.bundle").read_bytes().decode("latin-1")
    assert [n for n in bundle.manifest.files if n.startswith("wheels/near-1-")]
