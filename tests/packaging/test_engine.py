"""`apt` and `run` of an image, on a real engine: what they leave, what they don't, and what is kept."""

import gzip
import io
import json
import subprocess
import tarfile
import urllib.request
from pathlib import Path

import pytest

import servekit as sk
from servekit.errors import ConfigError, SetupError
from servekit.packaging.docker.prepare import prepare
from servekit.packaging.docker.step import LABEL
from servekit.packaging.oci.assemble import BASE_DIGEST, Changes, assemble
from servekit.packaging.oci.base import open_base
from servekit.packaging.oci.blobs import Blobs
from servekit.packaging.oci.documents import Platform
from tests.packaging.conftest import Shell, free_port, needs, until

VALUE = "swordfish-7f3a"
PLATFORM = Platform.parse("linux/amd64")
LOOK = """
import os, pathlib
secret = pathlib.Path("/run/secrets/TOKEN")
print("token", secret.read_text(), oct(secret.stat().st_mode), os.getuid(), flush=True)
try:
    secret.write_text("x")
except OSError as error:
    print(error.strerror)
pathlib.Path("/made").write_text(str(len(secret.read_text())))
pathlib.Path("/environment").write_text(repr(sorted(os.environ)))
"""


def python(text: str, *, secrets=(), image=None):
    """Return an image that runs Python while it is made."""
    return (image or sk.Image()).run("python3", "-c", text, secrets=secrets)


def opened(tar: Path, folder: Path):
    """Return a root filesystem as a base with settings of its own."""
    plain = open_base(tar, Blobs(folder / "blobs"), platform=PLATFORM)
    changes = Changes(
        env={"COLOUR": "red"}, entrypoint=["/bin/own"], user="1000", labels={"a": "b"}
    )
    return assemble(plain, [], changes, epoch=0)


@pytest.fixture
def made(base, tmp_path, docker):
    """Return what prepares on the tests' engine, and check that nothing is left on it."""
    on = opened(base, tmp_path)

    def made(declared, *, on=on, connect=lambda: docker, **secrets):
        lines: list[str] = []
        found = prepare(connect, on, declared, secrets=secrets, network="host", logged=lines.append)
        return found, lines

    made.on = on
    yield made
    assert docker.containers.list(all=True) == []
    assert docker.volumes.list() == []


def everything(tar: bytes) -> bytes:
    """Return all bytes of a tar, also of the tars and the gzip in it."""
    found = [tar]
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        for member in opened:
            if (file := opened.extractfile(member)) is not None:
                content = file.read()
                if content.startswith(b"\x1f\x8b"):
                    content = gzip.decompress(content)
                found.append(content)
    return b"".join(found)


def test_a_secret_is_a_file_while_the_command_runs_and_nowhere_after(made, docker, tmp_path):
    declared = python("print(open('/made').read())", image=python(LOOK, secrets=("TOKEN",)))
    done, lines = made(declared, TOKEN=VALUE)
    assert lines == ["token *** 0o100400 0", "Read-only file system", str(len(VALUE))]
    assert done.image.read("made") == str(len(VALUE)).encode()
    assert done.image.files.find("run/secrets/TOKEN") is None
    before, after = made.on.config, done.image.config
    assert after.config == before.config  # its settings are what they were
    assert after.rootfs.diff_ids[: len(made.on.layers)] == before.rootfs.diff_ids
    assert eval(done.image.read("environment")) == ["COLOUR", "HOME", "HOSTNAME", "PATH"]
    for image in docker.images.list(all=True, filters={"label": LABEL}):
        config = docker.images.get(image.id).attrs["Config"]
        assert config["User"] == "1000"
        assert (config["Entrypoint"], config["Cmd"]) == (["/bin/own"], [])
        assert {line.split("=")[0] for line in config["Env"]} == {"COLOUR", "PATH"}
        assert VALUE.encode() not in everything(b"".join(image.save())) + repr(image.attrs).encode()
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.stat().st_size < 10 << 20:
            data = file.read_bytes()
            assert VALUE.encode() not in (
                gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
            )


def test_a_step_runs_once(made, base, tmp_path):
    """The second time the engine isn't asked; with another cache it has the image still."""
    declared = python("open('/now', 'w').write(__import__('uuid').uuid4().hex); print('ran')")
    first, lines = made(declared)
    assert lines == ["ran"]
    again, lines = made(declared, connect=lambda: pytest.fail("the engine is asked"))
    assert lines == []
    assert again.image.descriptor == first.image.descriptor
    assert [step.cached for step in first.steps + again.steps] == [False, True]
    elsewhere, lines = made(declared, on=opened(base, tmp_path / "other"))
    assert lines == []
    assert elsewhere.image.descriptor == first.image.descriptor
    more, lines = made(python("print('more')", image=declared))
    assert lines == ["more"]
    assert [step.cached for step in more.steps] == [True, False]
    assert more.image.layers == first.image.layers  # it has changed nothing


def test_a_step_that_fails_shows_the_end_of_its_log(made):
    text = "for n in range(100): print(n)\nprint(open('/run/secrets/TOKEN').read())\nexit(3)"
    with pytest.raises(SetupError) as raised:
        made(python(text, secrets=("TOKEN",)), TOKEN=VALUE)
    assert "run python3 -c for n in range(100)" in raised.value.message
    assert raised.value.message.endswith("ended with exit code 3")
    assert raised.value.trace.splitlines() == [*map(str, range(61, 100)), "***"]
    with pytest.raises(SetupError, match=r"run nowhere -v: can't run: .*no such file|not found"):
        made(sk.Image().run("nowhere", "-v"))


def test_secrets_are_asked_for_before_anything_runs(made):
    declared = python("print(1)", secrets=("TOKEN",), image=python("print('first, alone')"))
    with pytest.raises(ConfigError, match=r"print\(1\): asks for the secret TOKEN.* set it in"):
        made(declared)
    assert made(declared, TOKEN="")[1] == ["first, alone", "1"]


def test_ctrl_c_leaves_nothing(base, tmp_path, docker):
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt(line)

    declared = python("print(1, flush=True)\nwhile True: pass", secrets=("TOKEN",))
    with pytest.raises(KeyboardInterrupt):
        prepare(
            lambda: docker,
            opened(base, tmp_path),
            declared,
            secrets={"TOKEN": VALUE},
            network="host",
            logged=interrupt,
        )
    assert docker.containers.list(all=True) == []
    assert docker.volumes.list() == []


CONTROL = """\
Package: {name}
Version: 1.0
Architecture: all
Maintainer: Nobody <nobody@example.com>
Description: of a test
"""
SCRIPT = """\
#!/bin/sh
set -e
echo "$DEBIAN_FRONTEND" > /frontend
echo x > /tmp/x
"""


@pytest.fixture(scope="module")
def with_apt(tmp_path_factory) -> Path:
    """Return a root filesystem with apt, and a repository in it: no network is needed."""
    needs("mmdebstrap", "dpkg-deb", "dpkg-scanpackages")
    folder = tmp_path_factory.mktemp("apt")
    for name in ("sk-one", "sk-two"):
        package = folder / name
        (package / "DEBIAN").mkdir(parents=True)
        (package / "DEBIAN/control").write_text(CONTROL.format(name=name))
        (package / "DEBIAN/postinst").write_text(SCRIPT)
        (package / "DEBIAN/postinst").chmod(0o755)
        (package / "var/log" / name).mkdir(parents=True)
        (folder / "repository").mkdir(exist_ok=True)
        subprocess.run(
            ["dpkg-deb", "--build", package, folder / "repository"], check=True, capture_output=True
        )
    index = subprocess.run(
        ["dpkg-scanpackages", "."], cwd=folder / "repository", check=True, capture_output=True
    )
    (folder / "repository/Packages").write_bytes(index.stdout)
    (folder / "sources.list").write_text("deb [trusted=yes] file:/repository ./\n")
    tar = folder / "base.tar"
    what = "base-files,apt,coreutils,dash,diffutils,dpkg,libc-bin,tar"
    done = subprocess.run(
        [
            *("mmdebstrap", "--variant=extract", f"--include={what}"),
            f'--extract-hook=cp -r {folder}/repository "$1"',
            f'--extract-hook=cp {folder}/sources.list "$1/etc/apt"',
            *("bookworm", tar),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mmdebstrap makes no root filesystem here: {done.stderr[-500:]}")
    return tar


def test_packages_are_installed_and_leave_no_lists(made, with_apt, tmp_path):
    on = opened(with_apt, tmp_path / "apt")
    done, lines = made(sk.Image().apt("sk-one", "sk-two=1.0"), on=on)
    assert any("Setting up sk-two (1.0)" in line for line in lines)
    assert done.image.read("frontend") == b"noninteractive\n"
    assert done.image.settings == on.settings
    files = done.image.files
    assert files.find("var/log/sk-two") is not None  # folders of packages stay
    for folder in ("tmp", "var/lib/apt/lists", "var/cache/apt"):
        assert files.names(folder) == on.files.names(folder)
    assert files.find("var/log/dpkg.log") is None
    assert b"Package: sk-two" in done.image.read("var/lib/dpkg/status")
    with pytest.raises(SetupError, match="apt sk-three: ended with exit code 100") as raised:
        made(sk.Image().apt("sk-three"), on=on)
    assert "Unable to locate package sk-three" in raised.value.trace


APP = """
import pathlib
import servekit as sk

IMAGE = (
    sk.Image()
    .run("python3", "-c", "open('/word', 'w').write(open('/run/secrets/TOKEN').read()[::-1])",
         secrets=("TOKEN",))
    .run("python3", "-c", "print('second')")
)


@sk.service(image=IMAGE)
class Words:
    @sk.endpoint
    def word(self) -> str:
        return pathlib.Path("/word").read_text()
"""
PROJECT = '[project]\nname = "words"\nversion = "1"\ndependencies = ["servekit"]\n'


@pytest.fixture(scope="module")
def shell(tmp_path_factory, docker_host):
    made = Shell(tmp_path_factory.mktemp("cache"), docker_host)
    made.env |= {"TOKEN": "drow"}
    return made


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    (folder / "app.py").write_text(APP)
    (folder / "pyproject.toml").write_text(PROJECT)
    return folder


def test_an_app_with_commands_answers(shell, project, base, docker, tmp_path):
    words = ("containerize", "app.py", "--base", str(base))
    on_engine = (*words, "--engine", "docker", "--build-network", "host")
    refused = shell(*words, cwd=project, fails=True)
    assert "Image.run(\"python3 -c open('/word'" in refused
    assert "needs a Docker engine: --engine docker" in refused
    told = shell(*on_engine, "-t", "words:1", cwd=project).splitlines()
    assert [line.split()[0] for line in told[:5]] == ["base", "run", "run", "dependencies", "code"]
    assert told[5].startswith("made words:1 ")
    assert not (project / "dist").exists()
    image = docker.images.get("words:1")
    assert LABEL not in image.labels

    port = free_port()
    container = docker.containers.run(
        image, detach=True, network_mode="host", environment={"SERVEKIT_PORT": str(port)}
    )
    try:
        probe = ["/app/env/bin/python", "-m", "servekit.engine.probe"]
        until(lambda: container.exec_run(probe).exit_code == 0, "it is ready")
        request = urllib.request.Request(f"http://127.0.0.1:{port}/word", method="POST")
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.load(answer) == "word"
    finally:
        container.remove(force=True)

    away = Shell(shell.cache, "unix:///nowhere/docker.sock")
    again = away(*on_engine, "-o", str(tmp_path / "again.tar"), cwd=project).splitlines()
    assert again[-1] == told[-1]  # the same digest, without the engine and the secret
    assert [line.split()[-1] for line in again[1:5]] == ["cached"] * 4
    blobs = Blobs(tmp_path / "blobs")
    plain = open_base(base, blobs, platform=PLATFORM)
    finished = open_base(tmp_path / "again.tar", blobs, platform=PLATFORM)
    assert finished.manifest.annotations[BASE_DIGEST] == plain.descriptor.digest
    assert len(finished.config.history) == len(finished.layers) + 2  # a step, and our settings
    deploy = ("deploy", "app.py", "--target", "docker", "--base", str(base), "--plan")
    assert "words  1 containers start" in shell(*deploy, cwd=project)
    assert [found.id for found in docker.images.list("servekit/words")] == [image.id]
