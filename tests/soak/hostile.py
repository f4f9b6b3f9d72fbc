"""Clients that mean harm, or act as if they did."""

import asyncio
import contextlib
import pickle
import random
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from tests.flow.harness import Http, Running, descriptors, rss_mb, serving, until
from tests.flow.load import Load
from tests.soak.row import Mark, at_most, exactly, percentile, row

CAP = 8 << 20
"""The body cap of `Model` in capacity.py."""


# -- slow ones

HALF_HEAD = b"POST /label HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\nx-"
HALF_BODY = b"POST /label HTTP/1.1\r\nhost: t\r\ncontent-length: 1000000\r\n\r\n{"
UNREAD = b"POST /flood HTTP/1.1\r\nhost: t\r\ncontent-length: 0\r\n\r\n"


async def hold(url: str, kind: str, drip: bytes, ended: list[float], after_s: float) -> None:
    """Hold a connection for as long as the server allows, with a byte now and then."""
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    await asyncio.sleep(after_s)
    began = loop.time()
    with socket.socket() as sock:
        sock.setblocking(False)
        if kind == "unread":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(sock, (address.hostname, address.port))
        first = {"half a head": HALF_HEAD, "half a body": HALF_BODY, "unread": UNREAD}[kind]
        try:
            with contextlib.suppress(BlockingIOError):
                sock.send(first)
            while loop.time() < began + 60:
                await asyncio.sleep(1.0)
                if kind == "unread":
                    # Nothing is read, so only an error tells that the server has hung up.
                    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        break
                    sock.send(drip)
                    continue
                with contextlib.suppress(BlockingIOError):
                    if not sock.recv(4096):
                        break
                sock.send(drip)
        except BlockingIOError:
            pass
        except OSError:
            ended.append(loop.time() - began)
            return
    if loop.time() < began + 60:
        ended.append(loop.time() - began)


@row(
    "slowloris of 3 kinds, with good clients",
    quick={"connections": 150, "before_s": 5.0},
    full={"connections": 500, "before_s": 20.0},
)
async def slowloris(connections: int, before_s: float) -> list[Mark]:
    kinds = {
        "half a head": b"a",
        "half a body": b" ",
        "unread": b"GET /livez HTTP/1.1\r\nhost: t\r\n\r\n",
    }
    ended: dict[str, list[float]] = {kind: [] for kind in kinds}
    share = connections // len(kinds)
    async with serving("capacity.py:Model") as app:
        gateways = app.all_of("gateway_worker")
        async with Load(app, "/label", rate=50) as load:
            await asyncio.sleep(before_s)
            files = sum(map(descriptors, gateways))
            attack = time.monotonic()
            bad = [
                asyncio.create_task(
                    hold(app.url, kind, drip, ended[kind], before_s * number / share)
                )
                for kind, drip in kinds.items()
                for number in range(share)
            ]
            await asyncio.sleep(before_s)
            during = time.monotonic()
            await asyncio.gather(*bad)
        outcomes = load.check()
        calm = percentile([o.took_s for o in load.outcomes(before=attack)], 99)
        busy = percentile([o.took_s for o in load.outcomes(attack, during)], 99)
        await until(lambda: sum(map(descriptors, gateways)) <= files + 5, "their sockets are gone")
    return [
        exactly("errors of good clients", outcomes.total() - outcomes["200"], 0),
        at_most("P99 of good clients", 1000 * busy, 1200 * calm, "ms", timing=True),
        *(
            at_most(
                f"last closed, {kind}",
                max(seconds) if len(seconds) == share else float("inf"),
                30.0,
                "s",
            )
            for kind, seconds in ended.items()
        ),
    ]


# -- bodies


async def lying(app: Running, head: str, parts: list[bytes], *, leaves: bool = False) -> int:
    """Send a request that lies about its body; returns the status, 0 if there was no answer."""
    async with await Http.open(app.url) as http:
        lines = ["POST /label HTTP/1.1", "host: t", "content-type: application/json", head]
        with contextlib.suppress(OSError):
            http.writer.write("\r\n".join([*lines, "", ""]).encode())
            for part in parts:
                http.writer.write(part)
                await http.writer.drain()
        if leaves:
            http.writer.write_eof()
        try:
            async with asyncio.timeout(30):
                return (await http.answer()).status
        except (OSError, EOFError):
            return 0


@row("body cap + 1, lying lengths, endless chunks, 1000:1 gzip", quick={"times": 5})
async def bodies(times: int) -> list[Mark]:
    import gzip

    bomb = gzip.compress(b" " * (8 * CAP))
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    statuses: dict[str, set[int]] = {}
    async with serving("capacity.py:Model") as app:
        gateways = app.all_of("gateway_worker")
        for number in range(50):
            assert (await app.post("/label", {"x": number})).json == number
        before = sum(map(rss_mb, gateways))
        files = sum(map(descriptors, gateways))
        most = before
        chunked = "transfer-encoding: chunked"
        for _ in range(times):
            for kind, head, parts, leaves in (
                ("cap + 1, said", f"content-length: {CAP + 1}", [], False),
                ("cap + 1, in chunks", chunked, [chunk] * (CAP // 65536) + [b"1\r\n \r\n"], False),
                ("endless chunks", chunked, [chunk] * (3 * CAP // 65536), False),
                ("says more than it sends", "content-length: 100", [b'{"x": 1}'], True),
                ("says less than it sends", "content-length: 4", [b'{"x": 1}'], False),
                ("no number", "content-length: many", [], False),
                ("negative", "content-length: -1", [], False),
                ("both", f"content-length: 8\r\n{chunked}", [b'{"x": 1}'], False),
                ("gzip", f"content-encoding: gzip\r\ncontent-length: {len(bomb)}", [bomb], False),
            ):
                statuses.setdefault(kind, set()).add(await lying(app, head, parts, leaves=leaves))
                most = max(most, sum(map(rss_mb, gateways)))
                # One after the other: a busy machine would have two bodies at a time.
                await until(lambda: sum(map(descriptors, gateways)) <= files, "it is let go")
        assert (await app.post("/label", {"x": 7})).json == 7
    sizes = {"cap + 1, said", "cap + 1, in chunks", "endless chunks"}
    return [
        *(
            Mark(
                kind,
                ", ".join(map(str, sorted(found))),
                "413" if kind in sizes else "4xx, or hung up",
                found <= ({413} if kind in sizes else {0, 400, 413, 415, 422}),
            )
            for kind, found in statuses.items()
        ),
        at_most("resident memory more", most - before, 2 * CAP / 2**20, "MiB"),
    ]


# -- paths

PATHS = [
    "/../../../../etc/passwd",
    "/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    "/..%2f..%2f..%2f..%2fetc%2fpasswd",
    "/docs/../../../../../etc/passwd",
    "/docs/..%5c..%5c..%5cetc%5cpasswd",
    "//etc/passwd",
    "/label/../../etc/passwd",
    "/label%00.json",
    "/openapi.json/../app.py",
    "/%c0%ae%c0%ae/%c0%ae%c0%ae/etc/passwd",
    "/file:///etc/passwd",
    "/pages/docs.html",
    "/docs.html",
    "/static/../../pyproject.toml",
    "/label/batch/../../../etc/passwd",
    "/....//....//etc/passwd",
    "http://h/../../etc/passwd",
]


@row("path traversal")
async def traversal() -> list[Mark]:
    wrong = []
    async with serving("capacity.py:Model") as app:
        for path in PATHS:
            for method in ("GET", "POST"):
                async with await Http.open(app.url) as http:
                    answer = await http.call(method, path)
                if not 400 <= answer.status < 500 or b"root:" in answer.body:
                    wrong.append(f"{method} {path}: {answer.status}")
        assert (await app.post("/label", {"x": 7})).json == 7
    return [exactly(f"answers of {2 * len(PATHS)} that are no 4xx", wrong, [])]


# -- pickle


def listening(app: Running) -> list[tuple[str, str | tuple[str, int]]]:
    """Return every socket that any process of an app listens on, and the kind of process."""
    rows: dict[str, str | tuple[str, int]] = {}
    for line in Path("/proc/net/tcp").read_text("utf-8").splitlines()[1:]:
        _, own, _, state, *_, inode = line.split()[:10]
        if state == "0A":
            rows[inode] = "127.0.0.1", int(own.rpartition(":")[2], 16)
    for line in Path("/proc/net/unix").read_text("utf-8").splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & 0x10000 and len(fields) > 7:  # __SO_ACCEPTCON
            rows[fields[6]] = fields[7]
    found = set()
    for pid, command in app.processes().items():
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inode = file.readlink().as_posix().removeprefix("socket:[").removesuffix("]")
                if inode in rows:
                    kind = command.partition("engine.")[2].partition(" ")[0] or "supervisor"
                    found.add((kind, rows[inode]))
    return sorted(found, key=str)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return (open, (str(self._path), "w"))


@row("pickle on every port")
async def pickles() -> list[Mark]:
    open_after, statuses = [], set()
    async with serving("graph.py:Root") as app:
        harm = app.scratch / "harm"
        bombs = [pickle.dumps(Bomb(harm), protocol) for protocol in (0, 2, 5)]
        sockets = listening(app)
        for kind, address in sockets:
            for bomb in bombs:
                for framed in (bomb * 20, len(bomb).to_bytes(4, "little") + bomb * 20):
                    unix = isinstance(address, str)
                    reader, writer = await (
                        asyncio.open_unix_connection(address)
                        if unix
                        else asyncio.open_connection(*address)
                    )
                    writer.write(framed)
                    try:
                        async with asyncio.timeout(20):
                            while await reader.read(4096):
                                pass
                    except TimeoutError:
                        open_after.append(kind)
                    except OSError:
                        pass
                    writer.close()
        for media in ("application/python-pickle", "application/x-pickle", "application/x-dill"):
            for bomb in bombs:
                for path in ("/echo", "/once"):
                    answer = await app.call(
                        "POST", path, body=bomb, headers={"content-type": media}
                    )
                    statuses.add(answer.status)
        assert (await app.post("/echo", {"x": 7})).json == 7
        ran = harm.exists()
    kinds = {kind for kind, _ in sockets}
    return [
        exactly(
            "kinds of process that listen",
            sorted(kinds - {"supervisor"}),
            ["gateway_worker", "replica_worker"],
        ),
        exactly("sockets still open", open_after, []),
        exactly("statuses at the front door", statuses, {415}),
        exactly("run", ran, False),
    ]


# -- figures


@row("random paths and clients", quick={"count": 2000}, full={"count": 10_000})
async def series(count: int) -> list[Mark]:
    rng = random.Random(3)
    async with serving("counted.py:Counted") as app:

        async def client() -> None:
            async with await Http.open(app.url) as http:
                for _ in range(count // 16):
                    name = f"{rng.getrandbits(64):x}"
                    headers = {
                        "x-request-id": name,
                        "user-agent": name,
                        "x-servekit-affinity": name,
                    }
                    await http.call("GET", f"/{name}?{name}={name}", headers=headers)
                    await http.call(rng.choice(["PUT", "POST"]), f"/echo/{name}", headers=headers)
                    await http.call("POST", "/far", body=b'{"x": 1}', headers=headers)

        await asyncio.gather(*(client() for _ in range(8)))
        before = len(await app.metrics())
        await asyncio.gather(*(client() for _ in range(8)))
        after = await app.metrics()
    # A histogram is one series to a reader; its buckets are bounded by the number of endpoints.
    names = [n for n in after if not n.partition("{")[0].endswith("_bucket")]
    return [
        at_most("series", len(names), 300),
        exactly("series more for as many strangers again", len(after) - before, 0),
    ]
