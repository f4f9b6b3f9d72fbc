"""Real engines for the tests of a file, started here, on loopback, and ended by their pids."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]

PATIENCE_S = 60.0
COMMAND = (sys.executable, "-m", "servekit")


def needs(*tools: str) -> None:
    """Skip the test where a tool is not installed, or needs another user."""
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on this machine")
    if os.getuid():
        pytest.skip(f"{tools[0]} needs root here")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def until(condition, what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.05)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    """Start a Docker engine with folders of its own; yield where it listens."""
    needs("dockerd")
    folder = Path(tempfile.mkdtemp(prefix="skd-", dir="/tmp"))
    socket_file = folder / "docker.sock"
    with (folder / "log").open("wb") as log:
        engine = subprocess.Popen(
            [
                *("dockerd", "--storage-driver=overlay2", "--bridge=none", "--iptables=false"),
                *("--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
                *("--data-root", folder / "data", "--exec-root", folder / "exec"),
                *("--pidfile", folder / "docker.pid", "-H", f"unix://{socket_file}"),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        until(lambda: socket_file.exists() or engine.poll() is not None, "the engine starts")
        if engine.poll() is not None:
            pytest.skip(f"no Docker engine starts here: {(folder / 'log').read_text()[-500:]}")
        yield f"unix://{socket_file}"
    finally:
        engine.terminate()
        engine.wait(PATIENCE_S)
        for line in Path("/proc/mounts").read_text().splitlines():  # of its network namespaces
            if (place := line.split()[1]).startswith(f"{folder}/"):
                subprocess.run(["umount", place], check=False)
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def docker(docker_host: str):
    """Return a client of that engine."""
    import docker

    client = docker.DockerClient(base_url=docker_host)
    yield client
    for container in client.containers.list(all=True):
        container.remove(force=True)
    client.close()


@pytest.fixture(scope="session")
def registry() -> Iterator[str]:
    """Start a registry; yield its host and port."""
    needs("docker-registry")
    folder = Path(tempfile.mkdtemp(prefix="skr-", dir="/tmp"))
    port = free_port()
    (folder / "config.yml").write_text(
        "version: 0.1\n"
        f"storage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\n"
        f"http: {{addr: 127.0.0.1:{port}}}\n"
    )
    server = subprocess.Popen(
        ["docker-registry", "serve", folder / "config.yml"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: answers(port), "the registry answers")
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """Return a root filesystem with a Python, as there is no registry to have one from."""
    needs("mmdebstrap")
    tar = tmp_path_factory.mktemp("base") / "base.tar"
    with_python = "--include=base-files,python3,libgomp1,libstdc++6"
    without = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale")]
    done = subprocess.run(
        ["mmdebstrap", "--variant=extract", with_python, *without, "bookworm", tar],
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mmdebstrap makes no root filesystem here: {done.stderr[-500:]}")
    return tar


class Shell:
    """Runs `servekit` with a cache of its own, and on the engine of the tests."""

    def __init__(self, cache: Path, host: str = "") -> None:
        self.cache = cache
        self.env = {**os.environ, "SERVEKIT_CACHE_DIR": str(cache), "DOCKER_HOST": host}

    def __call__(self, *words: str, cwd: Path, fails: bool = False) -> str:
        """Return what a command printed: on stdout, or on stderr where it is to fail."""
        done = subprocess.run(
            [*COMMAND, *words], cwd=cwd, env=self.env, capture_output=True, text=True, check=False
        )
        assert bool(done.returncode) == fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout
