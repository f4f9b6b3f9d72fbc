"""The `servekit` command as people and scripts use it: real processes, sockets and terminals."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVEKIT = [sys.executable, "-m", "servekit"]
DEADLINE_S = 60.0

APP = """
import os
from collections.abc import AsyncIterator
from typing import Annotated
import numpy as np
import servekit as sk

@sk.service
class Model:
    @sk.batched(max_size=64)
    def total(self, rows: list[list[float]]) -> list[float]:
        return [sum(row) for row in rows]

    @sk.endpoint
    def double(self, x: Annotated[np.ndarray, sk.Array["float32", "N"]], /) -> Annotated[
        np.ndarray, sk.Array["float32", "N"]
    ]:
        return x * 2

@sk.service
class Root:
    model = sk.depends(Model)

    @sk.endpoint
    async def predict(self, values: list[float]) -> float:
        return await self.model.total.remote(values)

    @sk.endpoint
    async def words(self, n: int) -> AsyncIterator[str]:
        for index in range(n):
            if index == 3:
                raise ValueError("a secret")
            yield f"w{index} "

    @sk.endpoint
    def double(self, x: Annotated[np.ndarray, sk.Array["float32", "N"]], /) -> Annotated[
        np.ndarray, sk.Array["float32", "N"]
    ]:
        return x * 2
"""

BROKEN = """
import servekit as sk

def open_weights(path: str) -> bytes:
    raise FileNotFoundError(path)

@sk.service
class Broken:
    def __init__(self) -> None:
        self.weights = open_weights("weights.bin")

    @sk.endpoint
    def predict(self) -> int:
        return 1
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder short enough for sockets, with the apps in it; also the runtime directory."""
    with tempfile.TemporaryDirectory(prefix="sk", dir="/tmp") as folder:
        (Path(folder) / "app.py").write_text(APP)
        (Path(folder) / "broken.py").write_text(BROKEN)
        yield Path(folder)


def environment(place: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SERVEKIT_")}
    return kept | {
        "SERVEKIT_RUNTIME_DIR": str(place),
        "SERVEKIT_DRAIN_DELAY_S": "0",
        "PYTHONUNBUFFERED": "1",
    }


def run(place: Path, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*SERVEKIT, *words],
        cwd=place,
        env=environment(place),
        input=stdin,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )


@contextlib.contextmanager
def serving(place: Path, *words: str, cwd: Path | None = None) -> Iterator[tuple[str, list[str]]]:
    """Run `servekit serve` until the block ends; yields its URL and what it printed."""
    process = subprocess.Popen(
        [*SERVEKIT, "serve", *words, "--port", "0"],
        cwd=cwd or place,
        env=environment(place),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.strip().startswith("docs"):
                break
        found = re.search(r"http://[\d.:]+", "\n".join(lines))
        assert found is not None, lines
        yield found[0], lines
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def url(place) -> Iterator[str]:
    with serving(place, "app.py:Root") as (url, _):
        yield url


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_serve_says_where_it_is_and_ends_with_nothing_left(place):
    with serving(place, "app.py:Root") as (url, lines):
        assert lines == [
            f"Root is serving at {url}",
            "  POST  /predict  Root.predict",
            "  POST  /words    Root.words    streams",
            "  POST  /double   Root.double",
            f"  docs  {url}/docs",
        ]
        apps = json.loads(run(place, "status", "--json").stdout)
        (app,) = [app for app in apps if app["url"] == url]
        assert app["target"] == "app.py:Root"
        assert {s["name"]: s["state"] for s in app["services"]} == {"Model": "up", "Root": "up"}
        pids = [app["pid"], *(r["pid"] for s in app["services"] for r in s["replicas"])]
        table = run(place, "status").stdout.decode()
        assert "Model-1" in table
        assert url in table
    assert all(is_gone(pid) for pid in pids)
    assert url not in run(place, "status", "--json").stdout.decode()


def test_call_prints_the_answer(place, url):
    done = run(place, "call", "predict", "--data", '{"values":[1,2]}', "--url", url)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"3.0\n", b"")
    done = run(place, "call", f"{url}/predict", "-d", "-", stdin=b'{"values":[4]}')
    assert done.stdout == b"4.0\n"


def test_call_sends_a_file_as_it_is_and_writes_one(place, url):
    import numpy as np

    np.save(place / "x.npy", np.array([1, 2], np.float32))
    words = ("call", f"{url}/double", "--file", "x.npy")
    assert json.loads(run(place, *words).stdout) == [2.0, 4.0]
    done = run(place, *words, "-H", "accept: application/x-npy", "-o", "y.npy")
    assert done.returncode == 0
    assert np.load(place / "y.npy").tolist() == [2.0, 4.0]


def test_call_prints_a_stream_and_its_error(place, url):
    done = run(place, "call", f"{url}/words", "-d", '{"n": 2}')
    assert (done.returncode, done.stdout) == (0, b'"w0 "\n"w1 "\n')
    done = run(place, "call", f"{url}/words", "-d", '{"n": 2}', "--raw")
    assert done.stdout == b"w0 w1 "
    done = run(place, "call", f"{url}/words", "-d", '{"n": 9}')
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == b'"w2 "'
    assert done.stderr.startswith(b"error: 500 execution_error: ")
    assert b"secret" not in done.stderr


def test_call_says_which_field_is_wrong(place, url):
    done = run(place, "call", f"{url}/predict", "-d", '{"values":[1,"x"]}')
    assert (done.returncode, done.stdout) == (1, b"")
    first, second, third = done.stderr.decode().splitlines()
    assert first.startswith("error: 422 invalid_input: ")
    assert second.startswith("  values[1]  ")
    assert third.startswith("  request ")
    done = run(place, "call", f"{url}/predct", "-d", "{}")
    assert done.stderr.splitlines()[0].endswith(b"Did you mean '/predict'?")


def test_a_port_in_use_is_explained(place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(place, "serve", "app.py:Root", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: can't listen on 127.0.0.1:{port}: ".encode())
    assert b"Traceback" not in done.stderr


def test_a_failing_set_up_shows_the_users_frames_and_no_others(place):
    done = run(place, "serve", "broken.py", "--port", "0")
    assert done.returncode == 1
    text = done.stderr.decode()
    said = text[text.index("error: Broken") :]
    assert said.splitlines()[0] == ("error: Broken: set-up raised FileNotFoundError: weights.bin")
    frames = re.findall(r'File "(.*?)", line \d+, in (\w+)', said)
    assert frames == [(f"{place}/broken.py", "__init__"), (f"{place}/broken.py", "open_weights")]
    assert not list(place.glob("servekit-*/")) or run(place, "status", "--json").returncode == 0


def test_an_import_that_fails_and_an_app_that_is_not_there(place):
    (place / "wrong.py").write_text("import there_is_no_such_module\n")
    done = run(place, "serve", "wrong.py")
    assert done.returncode == 1
    lines = done.stderr.decode().splitlines()
    assert lines[0].startswith("error: importing wrong raised ModuleNotFoundError")
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "{place}/wrong.py", line 1, in <module>'
    ]
    done = run(place, "serve", "missing.py")
    assert done.stderr.decode() == f"error: missing.py: there is no such file in {place}\n"
    done = run(place, "graph", "app.py:Rot")
    assert b"Did you mean 'Root'?" in done.stderr.splitlines()[0]


def test_graph_in_three_forms(place):
    tree = run(place, "graph", "app.py:Root").stdout.decode()
    assert tree.startswith("Root\n├── predict")
    assert run(place, "graph", "app.py:Root", "--format", "mermaid").stdout.startswith(b"flowchart")
    for words in (("--json",), ("--format", "json")):
        assert json.loads(run(place, "graph", "app.py:Root", *words).stdout)["root"] == "Root"


class Screen:
    """A process in a terminal of its own."""

    def __init__(self, place: Path, *words: str) -> None:
        self.written = ""
        self.pid, self._fd = pty.fork()
        if not self.pid:  # pragma: no cover  (the child)
            os.chdir(place)
            os.execvpe(SERVEKIT[0], [*SERVEKIT, *words], environment(place) | {"TERM": "xterm"})

    def read_until(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.written:
            assert time.monotonic() < deadline, self.written
            if select.select([self._fd], [], [], 1.0)[0]:
                self.written += os.read(self._fd, 65536).decode()

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait(self) -> int:
        with contextlib.suppress(OSError):  # what Linux says when the other end has closed
            while data := os.read(self._fd, 65536):
                self.written += data.decode()
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


@pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
def test_a_terminal_shows_progress_and_ctrl_c_ends_it_well(place):
    screen = Screen(place, "serve", "app.py:Root", "--port", "0")
    try:
        screen.read_until("Ctrl-C stops it")
        seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.written)
        assert "loading" in seen
        assert re.search(r"✓  Model  ready  \d+\.\d s", seen)
        assert "\x1b[?25h" in screen.written  # the cursor is back
        screen.type("\x03")
        assert screen.wait() == 0, screen.written
        assert "stopped" in screen.written
        assert "Traceback" not in screen.written, screen.written
    finally:
        screen.close()


@pytest.mark.parametrize("template", ["pipeline", "classifier"])
def test_a_project_from_a_template_tests_serves_and_answers(template, place):
    if template == "classifier":
        pytest.importorskip("onnxruntime")
        if not _is_installed("skl2onnx"):
            pytest.skip("skl2onnx is not installed")
    name = f"my-{template}"
    assert run(place, "init", name, "--template", template).returncode == 0
    folder = place / name
    if template == "classifier":
        subprocess.run([sys.executable, "train.py"], cwd=folder, check=True, timeout=120)
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=folder,
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    with serving(place, "app.py", cwd=folder) as (url, _):
        done = run(folder, "call", f"{url}/predict", "-d", "@sample.json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
    expected = {"pipeline": ("shape", "square"), "classifier": ("digit", 7)}
    key, value = expected[template]
    assert found[key] == value


def _is_installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
