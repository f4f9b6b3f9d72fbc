"""Images and containers with real engines: what is built here runs there, locked down, and is replaced."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from servekit.cli.project import Template, create
from servekit.packaging.containerize import DOORS
from tests.house.test_docs import blocks_of, commands_of, matches
from tests.packaging.conftest import Shell, free_port, needs, until

SAMPLE = (Path(__file__).parents[2] / "templates/pipeline/sample.json").read_bytes()


@pytest.fixture(scope="module")
def shell(tmp_path_factory, docker_host):
    made = Shell(tmp_path_factory.mktemp("cache"), docker_host)
    made.env |= {"SERVEKIT_DRAIN_DELAY_S": "0.5", "SERVEKIT_START_TIMEOUT_S": "60"}
    return made


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return create("wave", Template.PIPELINE, tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def image(shell, project, base) -> Path:
    """The tar of an image."""
    shell("containerize", "app.py", "--base", str(base), "-t", "wave:1", "-o", "1.tar", cwd=project)
    return project / "1.tar"


def predict(port: int, body: bytes = SAMPLE) -> object:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/predict", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def test_the_same_image_from_two_cold_builds(image, base, tmp_path, docker_host):
    """Of copies in two folders, with two caches: the same bytes."""
    other = create("wave", Template.PIPELINE, tmp_path)
    shell = Shell(tmp_path / "cache", docker_host)
    shell("containerize", "app.py", "--base", str(base), "-t", "wave:1", "-o", "2.tar", cwd=other)
    assert (other / "2.tar").read_bytes() == image.read_bytes()


def test_an_edit_of_the_code_makes_one_layer_anew(image, shell, project, base):
    app = (project / "app.py").read_text()
    (project / "app.py").write_text(f"{app}\n# edited\n")
    told = shell("containerize", "app.py", "--base", str(base), "-o", "3.tar", cwd=project)
    (project / "app.py").write_text(app)
    lines = {line.split()[0]: line for line in told.splitlines()}
    assert lines["dependencies"].endswith("cached")
    assert not lines["code"].endswith("cached")


@pytest.fixture(scope="module")
def loaded(image, docker):
    with image.open("rb") as tar:
        [found] = docker.images.load(tar)
    assert found.tags == ["wave:1"]
    return found


@contextmanager
def locked_down(docker, image, port: int, *, env=None, **more):
    """Run an image with nothing that it need not have, until it is ready; SIGTERM ends it with 0."""
    given = {"network_mode": "host", "read_only": True, "tmpfs": {"/tmp": ""}, "pids_limit": 300}
    container = docker.containers.run(
        image,
        detach=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        environment={"SERVEKIT_PORT": str(port), "SERVEKIT_DRAIN_DELAY_S": "0", **(env or {})},
        **{**given, **more},
    )
    probe = ["/app/env/bin/python", "-m", "servekit.engine.probe"]
    try:
        until(lambda: container.exec_run(probe).exit_code == 0, "it is ready")
        yield container
        container.kill("SIGTERM")
        assert container.wait(timeout=60)["StatusCode"] == 0
    finally:
        log = container.logs().decode()
        container.remove(force=True)
    assert "Traceback" not in log


@pytest.mark.parametrize("user", ["12345:54321", "0:0"])
def test_it_runs_locked_down_and_drains(loaded, docker, user):
    """A read-only root, a user that nobody knows, no capabilities."""
    port = free_port()
    with locked_down(docker, loaded, port, user=user):
        assert predict(port)["shape"] == "square"


RAY = """
import servekit as sk


@sk.service
class Length:
    weights = sk.model("weights.txt")

    @sk.endpoint
    def predict(self, text: str) -> str:
        return f"{self.weights.read_text()} {len(text)}"
"""


def test_an_image_serves_on_ray(shell, base, docker, tmp_path):
    """The same image runs every role: here Ray starts in it, and has the app's replicas."""
    (tmp_path / "app.py").write_text(RAY)
    (tmp_path / "weights.txt").write_text("v1")
    (tmp_path / "requirements.txt").write_text("servekit[ray]\n")
    made = ("containerize", "app.py", "--base", str(base), "--engine", "docker", "-t", "length:1")
    shell(*made, cwd=tmp_path)
    port, ray = free_port(), {"SERVEKIT_ENGINE": "ray", "SERVEKIT_HOST": "127.0.0.1"}
    more = {"user": "12345:54321", "pids_limit": 3000, "shm_size": "2g"}
    with locked_down(docker, "length:1", port, env=ray, **more) as container:
        assert predict(port, b'{"text": "four"}') == "v1 4"
        assert "ray::ServeReplica:Length" in str(container.top()["Processes"])


def test_what_the_image_says(loaded):
    config = loaded.attrs["Config"]
    assert config["User"] == "65532:65532"
    assert config["ExposedPorts"] == {"3000/tcp": {}}
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"][-2:] == ["-m", "servekit.engine.probe"]
    assert config["Labels"]["io.servekit.app"] == "app.py"


def test_a_registry_has_it_and_an_engine_pulls_it(image, shell, project, base, registry, docker):
    name = f"{registry}/team/wave:1"
    told = shell("containerize", "app.py", "--base", str(base), "--push", name, cwd=project)
    digest = told.splitlines()[-1].split()[0]
    pulled = docker.images.pull(f"{registry}/team/wave", tag="1")
    assert f"{registry}/team/wave@{digest}" in pulled.attrs["RepoDigests"]
    edited = shell("containerize", "app.py", "--base", name, "-o", "on-top.tar", cwd=project)
    assert edited.splitlines()[0].split()[0] == "base"


def test_skopeo_and_podman_take_it(image, tmp_path):
    needs("skopeo")
    copy = ["skopeo", "copy", f"oci-archive:{image}", f"oci:{tmp_path / 'copy'}"]
    subprocess.run(copy, check=True, capture_output=True)
    needs("podman")
    with tempfile.TemporaryDirectory(prefix="skp-", dir="/tmp") as folder:  # its paths are short
        podman = ["podman", "--root", f"{folder}/root", "--runroot", f"{folder}/run"]
        done = subprocess.run(
            [*podman, "--storage-driver", "vfs", "load", "-i", image],
            check=False,
            capture_output=True,
            text=True,
        )
    assert "wave:1" in done.stdout, done.stderr


class Callers:
    """Clients that connect anew for each call, as long as the block lasts."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.outcomes: Counter[str] = Counter()

    async def __aenter__(self):
        self._tasks = [asyncio.create_task(self._call()) for _ in range(2)]
        return self

    async def __aexit__(self, *_):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _call(self):
        head = (
            f"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(SAMPLE)}\r\n\r\n"
        ).encode()
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(head + SAMPLE)
                try:
                    line = await reader.readline()
                finally:
                    writer.close()
                self.outcomes[line[9:12].decode()] += 1
                await asyncio.sleep(0.1)
                await writer.wait_closed()
            except OSError as error:
                self.outcomes[repr(error)] += 1


ONLY_ONE = f"""
import os, pathlib
mine = pathlib.Path("/tmp/mine")
if "SERVEKIT_HANDOVER_DIR" in os.environ and not mine.exists():
    open("{DOORS}/only-one", "x")
    mine.touch()
"""
"""A second container of it does not start; by then the first has taken an old one's place."""


async def test_the_life_of_an_app_on_an_engine(shell, project, base, docker):
    """Deployed twice behind one port, replaced, broken, rolled back and ended: no call is lost."""
    port = free_port()

    async def deploy(*words: str, fails: bool = False) -> str:
        return await asyncio.to_thread(
            shell,
            *("deploy", "app.py", "--target", "docker", "--base", str(base), "--app", "wave"),
            *("--network", "host", "--port", str(port), "--replicas", "2", *words),
            cwd=project,
            fails=fails,
        )

    def running() -> set[str]:
        return {container.name for container in docker.containers.list()}

    app = (project / "app.py").read_text()
    assert "2 containers start" in await deploy("--plan")
    assert running() == set()
    told = await deploy()
    assert f"wave is ready at http://127.0.0.1:{port}" in told
    first = running()
    assert len(first) == 3
    async with Callers(port) as callers:
        (project / "app.py").write_text(f"{app}\n# edited\n")
        assert "2 in turn" in await deploy()
        second = running()
        assert first & second == {"wave-port"}
        (project / "app.py").write_text(f"{app}\n{ONLY_ONE}")
        broken = await deploy(fails=True)
        assert "FileExistsError" in broken
        assert running() == second
        await asyncio.to_thread(shell, "rollback", "--target", "docker", cwd=project)
        assert running() == first
    assert callers.outcomes.keys() == {"200"}
    assert callers.outcomes["200"] > 100
    (project / "app.py").write_text(app)
    assert "stays" in await deploy()
    status = await asyncio.to_thread(shell, "status", "--target", "docker", cwd=project)
    assert status.count("wave-") == 2
    logs = await asyncio.to_thread(shell, "logs", "--target", "docker", cwd=project)
    assert "is serving at" in logs
    await asyncio.to_thread(shell, "delete", "--target", "docker", cwd=project)
    assert docker.containers.list(all=True) == []
    assert [volume.name for volume in docker.volumes.list() if "wave" in volume.name] == []


def test_five_commands_from_nothing_to_a_container(shell, base, docker, tmp_path):
    """Those of the page, one by one, with what it shows of their output.

    The engine of the tests has no bridge, so its containers are in the machine's network.
    """
    page = Path(__file__).parents[2] / "docs/guides/first-container.md"
    [block] = blocks_of(page)
    commands = commands_of(block.text)
    assert len(commands) == 5
    port = str(free_port())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cwd = tmp_path
    for command, shown in commands:
        if command.startswith("cd "):
            cwd /= command.removeprefix("cd ")
            continue
        here = command.replace("registry.example.com/python:3.11-slim", f"{base} --network host")
        done = subprocess.run(
            ["bash", "-c", here],
            cwd=cwd,
            env={**shell.env, "SERVEKIT_PORT": port, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert matches(shown, done.stdout.replace(port, "3000")), f"{command}\n{done.stdout}"
    assert docker.containers.list(all=True) == []


def test_the_demos_image_is_small(shell, base, tmp_path):
    """What it adds to its base, compressed, as a registry has it; onnxruntime and numpy are most of it."""
    folder = Path(__file__).parents[2] / "examples/filetypes"
    made = tmp_path / "demo"
    told = shell("containerize", "app.py", "--base", str(base), "-o", str(made), cwd=folder)
    [image] = json.loads((made / "index.json").read_text())["manifests"]
    manifest = made / "blobs/sha256" / image["digest"].removeprefix("sha256:")
    _, *own = json.loads(manifest.read_text())["layers"]
    assert len(own) == 2
    assert sum(layer["size"] for layer in own) < 150_000_000, told
