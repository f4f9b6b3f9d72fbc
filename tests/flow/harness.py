"""Running apps for the flow tests: real processes, real sockets, and nothing left behind.

`serving` starts `python -m servekit serve`, gives its address and its processes, and at the end
stops it and proves that no process and no socket file of it is left.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from servekit.engine.control import AppStatus, ask
from servekit.errors import CallError, WireError
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, connect

APPS = Path(__file__).parent / "apps"
ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "servekit")
RAY: dict[str, str] = {}
"""Where apps run: nothing is processes of this machine, else the settings of a cluster to join."""

PATIENCE_S = 150.0
"""How long anything may take that takes a second on a machine with nothing else to do."""
GONE_S = 15.0
"""How long processes may live on after their supervisor."""


def show(text: str) -> None:
    """Print what pytest shows of a failed test, and with `-rP` of every one."""
    print(text)


async def until(
    condition: Callable[[], Any], what: str, *, timeout_s: float = PATIENCE_S, every_s: float = 0.05
) -> Any:
    """Wait until `condition()`, awaited if need be, is true; returns what it returned."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(every_s)


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits for its parent doesn't."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def rss_mb(pid: int) -> float:
    """Return a process's resident memory in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def descriptors(pid: int) -> int:
    """Return how many files and sockets a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class Answer(NamedTuple):
    """An HTTP answer that was read whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        return self.json["error"]["reason"]


class Http:
    """One keep-alive connection to a gateway, with nothing between the test and the bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, url: str, tls: ssl.SSLContext | None = None) -> Self:
        address = urlsplit(url)
        return cls(*await asyncio.open_connection(address.hostname, address.port, ssl=tls))

    @property
    def port(self) -> int:
        """The client's own."""
        return self.writer.get_extra_info("sockname")[1]

    async def send(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        given = {"host": "test", "content-length": str(len(body))} | dict(headers or {})
        if body and "content-type" not in given:
            given["content-type"] = "application/json"
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items())]
        self.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        pairs = (line.partition(": ") for line in lines)
        return int(first.split()[1]), {name.lower(): value for name, _, value in pairs}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the chunks of a chunked body."""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def answer(self) -> Answer:
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        else:
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(status, headers, body)

    async def call(self, method: str, path: str, **given: Any) -> Answer:
        await self.send(method, path, **given)
        return await self.answer()

    def abort(self) -> None:
        """Be gone, as a client is that crashed."""
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Running:
    """An app that runs in processes of its own.

    Args:
        target: As for `servekit serve`; a file is looked for in `apps/`.
        verb: `serve` or `dev`.
        env: Added to this process's environment.
        options: More words for the command line.
        cwd: Where to start it; None is a folder of its own.
        tls: For calls to it, if it serves HTTPS.

    Attributes:
        url: Where its gateway listens, once it is ready.
        lines: What it wrote to stdout and stderr.
        trace: A file for the app to write down what it does: `TRACE` in its environment.
    """

    def __init__(
        self,
        target: str,
        *,
        verb: str = "serve",
        env: Mapping[str, str] | None = None,
        options: tuple[str, ...] = (),
        port: int = 0,
        cwd: Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="skf-", dir="/tmp"))
        self.scratch = Path(tempfile.mkdtemp(prefix="skf-w-", dir="/tmp"))
        self.trace = self.scratch / "trace"
        self.trace.touch()
        self.lines: list[str] = []
        self.url = ""
        self._mark = f"SERVEKIT_RUNTIME_DIR={self.runtime_dir}".encode()
        path = (APPS / target).as_posix() if ".py" in target and "/" not in target else target
        self._process = subprocess.Popen(
            [*COMMAND, verb, path, "--port", str(port), "--log-format", "json", *options],
            cwd=cwd or self.scratch,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "SERVEKIT_RUNTIME_DIR": str(self.runtime_dir),
                "SERVEKIT_DRAIN_DELAY_S": "0",
                "TRACE": str(self.trace),
                **RAY,
                **({"RAY_JOB_CONFIG_JSON_ENV_VAR": self._job(env or {})} if RAY else {}),
                **(env or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _job(self, env: Mapping[str, str]) -> str:
        """Return what Ray is to give to the processes of this app: the environment is not theirs."""
        variables = {"TRACE": str(self.trace), "PYTHONPATH": RAY["PYTHONPATH"], **env}
        return json.dumps({"runtime_env": {"env_vars": variables}})

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as out:
            for line in out:
                self.lines.append(line.rstrip("\n"))

    # -- looking -----------------------------------------------------------------------------

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def processes(self) -> dict[int, str]:
        """Return all its processes and what they started: pid to command line."""
        found: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                        line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        if alive(int(folder.name)):
                            found[int(folder.name)] = line
        return found

    def all_of(self, module: str) -> set[int]:
        """Return the pids of the processes that run a module of the engine."""
        return {pid for pid, line in self.processes().items() if f"engine.{module}" in line}

    def process(self, module: str) -> int:
        """Return the pid of the one process that runs a module of the engine."""
        [pid] = self.all_of(module)
        return pid

    def folder(self) -> Path | None:
        """Return the app's private folder, while there is one."""
        return next((path.parent for path in self.runtime_dir.glob("servekit-*/admin.sock")), None)

    def sockets(self) -> list[Path]:
        """Return all unix sockets of the app."""
        return list(self.runtime_dir.glob("servekit-*/*.sock"))

    async def status(self) -> AppStatus | None:
        """Return what `servekit status` shows; None while nobody answers."""
        folder = self.folder()
        if folder is None:
            return None
        try:
            connection = await connect(
                Address(f"unix:{folder}/admin.sock"), lambda: Connection(Hello(), client=True)
            )
        except (OSError, WireError):
            return None
        try:
            return await ask(connection, "status", answer=AppStatus, timeout_s=PATIENCE_S)
        except CallError:
            return None
        finally:
            await connection.close()

    async def replicas(self, service: str, state: str | None = "ready") -> dict[str, int]:
        """Return a service's replicas in a state, or in any: id to pid."""
        status = await self.status()
        if status is None:
            return {}
        return {
            replica.id: replica.pid
            for found in status.services
            if found.name == service
            for replica in found.replicas
            if state in (None, replica.state)
        }

    async def metrics(self) -> dict[str, float]:
        """Return the series of `/metrics`: name and labels to value."""
        answer = await self.get("/metrics")
        assert answer.status == 200
        rows = (line.rpartition(" ") for line in answer.body.decode().splitlines())
        return {name: float(value) for name, _, value in rows if not name.startswith("#")}

    async def total(self, family: str, *labels: str) -> float:
        """Return the sum of a family's series that have all these `name="value"` labels."""
        return sum(
            value
            for name, value in (await self.metrics()).items()
            if name.partition("{")[0] == family and all(label in name for label in labels)
        )

    def traced(self) -> list[str]:
        """Return what the app wrote down so far."""
        return self.trace.read_text("utf-8").splitlines()

    def let_go(self, name: str) -> None:
        """End what an endpoint of the app holds under this name (`graph.is_held`)."""
        self.trace.with_name(f"{self.trace.name}.{name}").touch()

    async def command(self, *words: str) -> tuple[int, str]:
        """Run `servekit` beside it; returns the exit code and what it printed."""
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *words,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "SERVEKIT_RUNTIME_DIR": str(self.runtime_dir),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        async with asyncio.timeout(PATIENCE_S):
            out, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode()

    # -- calling -----------------------------------------------------------------------------

    async def call(self, method: str, path: str, **given: Any) -> Answer:
        """Make one call on a connection of its own, within a generous time."""
        async with asyncio.timeout(PATIENCE_S):
            async with await Http.open(self.url, self._tls) as http:
                return await http.call(method, path, **given)

    async def get(self, path: str) -> Answer:
        return await self.call("GET", path)

    async def post(
        self, path: str, arguments: object = None, *, headers: Mapping[str, str] | None = None
    ) -> Answer:
        return await self.call(
            "POST",
            path,
            body=json.dumps({} if arguments is None else arguments).encode(),
            headers=headers,
        )

    # -- life --------------------------------------------------------------------------------

    async def known(self) -> None:
        """Wait until the supervisor answers; services may still load."""

        async def look() -> bool:
            self._still_runs()
            status = await self.status()
            if status is not None:
                self.url = status.url
            return status is not None

        await until(look, "the supervisor answers")

    def _still_runs(self) -> None:
        if self.code is not None:
            raise AssertionError(f"the app ended with code {self.code}:\n{self.text}")

    async def ready(self) -> Self:
        """Wait until it takes calls."""
        await self.known()

        async def look() -> bool:
            self._still_runs()
            try:
                return (await self.get("/readyz")).status == 200
            except (OSError, EOFError):
                return False

        await until(look, "/readyz is 200")
        return self

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        if group:
            os.killpg(self.pid, number)
        else:
            self._process.send_signal(number)

    async def exit_code(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end, and for all that it wrote."""
        await until(lambda: self.code is not None, "the app ends", timeout_s=timeout_s)
        await asyncio.to_thread(self._reader.join, 5.0)
        assert self.code is not None
        return self.code

    async def gone(self) -> None:
        """Wait until no process and no file of it is left."""
        await until(lambda: not self.processes(), "all its processes have ended", timeout_s=GONE_S)
        await until(
            lambda: not list(self.runtime_dir.iterdir()),
            "its folder has been removed",
            timeout_s=GONE_S,
        )

    async def close(self) -> None:
        """End it, whatever its state; raises when it did not clean up behind itself."""
        try:
            if self.code is None:
                self.send(signal.SIGTERM)
                assert await self.exit_code() == 0
            await self.gone()
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.code is None:
                self._process.kill()
            await asyncio.to_thread(self._process.wait, 10.0)
            await asyncio.to_thread(self._reader.join, 5.0)
            shutil.rmtree(self.runtime_dir, ignore_errors=True)
            shutil.rmtree(self.scratch, ignore_errors=True)


def of_a_file(target: str) -> Iterator[Running]:
    """Run an app for all tests of a file: the body of a fixture."""
    running = Running(target)
    try:
        asyncio.run(running.ready())
        yield running
    finally:
        show("\n".join(running.lines[-40:]))
        asyncio.run(running.close())


@contextlib.asynccontextmanager
async def serving(target: str, *, ready: bool = True, **given: Any) -> AsyncIterator[Running]:
    """Run an app; on failure its log is printed."""
    app = Running(target, **given)
    try:
        try:
            if ready:
                await app.ready()
            yield app
        finally:
            await app.close()
    except BaseException:
        show("\n".join(["-- the app's output:", *app.lines[-80:]]))
        raise
