"""`servekit build` as a new user runs it: a project becomes one file, which then serves elsewhere."""

import asyncio
import hashlib
import os
import subprocess
import sys
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


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project from a template, whose dependencies are resolved, and not installed in ours."""
    return create("wave", Template.PIPELINE, tmp_path_factory.mktemp("project"))


def command(*words: str, cwd: Path, cache: Path, fails: bool = False) -> str:
    """Run `servekit`; returns what it printed."""
    done = subprocess.run(
        [*COMMAND, *words],
        cwd=cwd,
        env={**os.environ, "SERVEKIT_CACHE_DIR": str(cache)},
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


def test_two_builds_have_the_same_bytes(project, built, cache, tmp_path):
    """Of two copies of a project in different folders, with other times, and another cache."""
    other = create("wave", Template.PIPELINE, tmp_path)
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
    told = command("inspect", str(built), cwd=built.parent, cache=cache)
    assert f"sha256:{bundle.digest}" in told
    whole = command("inspect", str(built), "--json", cwd=built.parent, cache=cache)
    assert msgspec.json.decode(whole) == msgspec.json.decode(bundle.manifest.to_json())


async def test_it_serves_elsewhere(built, cache, tmp_path):
    """In an environment of its own, from any folder, and writes nothing into the bundle."""
    moved = tmp_path / "moved.bundle"
    moved.write_bytes(built.read_bytes())
    env = {"SERVEKIT_CACHE_DIR": str(cache)}
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
    await asyncio.to_thread(read(moved, cache / "bundles").verify)


def test_what_would_not_run_elsewhere(project, cache, tmp_path):
    """Each with the place and the fix, and before anything is written."""
    app = (project / "app.py").read_text()
    folder = create("other", Template.PIPELINE, tmp_path)
    cases = {
        "the bundle's own environment": ("app.py", "import magika\n" + app),
        "config.py:1: a token of GitHub": ("config.py", f"X = 'ghp_{'a1' * 18}'\n"),
        "Image.run('apt-get update'): there is no shell": (
            "app.py",
            app.replace("@sk.service", "@sk.service(image=sk.Image().run('apt-get update'))"),
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
