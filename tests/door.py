"""A gateway on real sockets, whose endpoints answer with what they got, and a client that reads it."""

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Self

import msgspec
import pytest
import uvloop
from starlette.types import ASGIApp
from uvicorn.server import ServerState

import servekit as sk
from servekit.core.call import BINARY, Call, Payload, Reply
from servekit.gateway.edge import PLAIN, Edge
from servekit.gateway.guard import Guard
from servekit.gateway.http import Gateway
from servekit.gateway.protocol import HttpProtocol
from servekit.gateway.reader import Reader
from servekit.gateway.server import Server
from servekit.observe.families import Families
from servekit.observe.metrics import Metrics
from servekit.spec.describe import describe
from tests.pairs import Pair

MAX_BODY = 10_000_000
HEAD = 64 * 1024


@sk.service(limits=sk.Limits(max_body=MAX_BODY))
class App:
    @sk.endpoint
    async def echo(self, n: int) -> int:
        return n

    @sk.endpoint(method="GET")
    async def find(self, text: str) -> str:
        return text

    @sk.endpoint
    async def tokens(self, n: int) -> AsyncIterator[str]:
        yield ""


SPEC = describe(App)


async def page(scope, receive, send) -> None:
    """Answer what is no endpoint: `/page` with what it was asked, others with 404."""
    assert scope["type"] == "http"
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        more = message["more_body"]
    text = b"%b?%b %d" % (scope["method"].encode(), scope["query_string"], len(body))
    headers = [(b"content-length", b"%d" % len(text))]
    status = 200 if scope["path"] == "/page" else 404
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    chunks: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def code(self) -> str:
        return msgspec.json.decode(self.body)["error"]["code"]


class Client:
    """One connection, and the protocol at its other end."""

    protocol: HttpProtocol

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._here = b""

    async def send(self, data: bytes, *, cuts: Iterable[int] = ()) -> None:
        """Send bytes, in pieces that end at `cuts`; a server that hung up doesn't matter."""
        ends = sorted({*cuts, len(data)})
        with contextlib.suppress(ConnectionError):
            for begin, end in zip([0, *ends], ends, strict=False):
                await self._loop.sock_sendall(self._sock, data[begin:end])
                if end < len(data):
                    await turns(3)

    async def _more(self) -> bool:
        try:
            data = await self._loop.sock_recv(self._sock, 1 << 20)
        except ConnectionError:
            return False
        self._here += data
        return bool(data)

    async def _take(self, end: bytes | int) -> bytes:
        while (self._here.find(end) < 0) if isinstance(end, bytes) else (len(self._here) < end):
            if not await self._more():
                raise EOFError(self._here)
        size = end if isinstance(end, int) else self._here.find(end) + len(end)
        taken, self._here = self._here[:size], self._here[size:]
        return taken

    async def answer(self, method: str = "") -> Answer:
        """Read one answer; EOFError if the connection ends within it."""
        head = (await self._take(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, status, _ = head[0].split(" ", 2)
        assert version == "HTTP/1.1"
        lines = [line.partition(": ") for line in head[1:-2]]
        answer = Answer(int(status), {name: value for name, _, value in lines}, [])
        assert len(answer.headers) == len(lines)
        if answer.headers.get("transfer-encoding") == "chunked":
            while size := int(await self._take(b"\r\n"), 16):
                answer.chunks.append(await self._take(size))
                assert await self._take(2) == b"\r\n"
            assert await self._take(2) == b"\r\n"
        elif "content-length" in answer.headers:
            if method != "HEAD":
                answer.chunks.append(await self._take(int(answer.headers["content-length"])))
        elif answer.status >= 200 and answer.status != 204:
            assert answer.headers["connection"] == "close"
            answer.chunks.append(await self.rest())
        return answer

    async def take(self, size: int) -> bytes:
        """Return the next bytes, whatever they are."""
        return await self._take(size)

    async def rest(self) -> bytes:
        """Return what comes until the server hangs up."""
        while await self._more():
            pass
        taken, self._here = self._here, b""
        return taken

    async def ask(self, data: bytes, method: str = "") -> Answer:
        await self.send(data)
        return await self.answer(method)

    async def lives(self) -> None:
        """The connection is in step: the next request has its answer, and nothing is left over."""
        answer = await self.ask(get("still=here"))
        assert (answer.status, answer.body) == (200, b'{"still":"here"}')
        assert self._here == b""

    def leave(self) -> None:
        self._sock.close()


class TlsClient(Client):
    """One connection over TLS."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(sock)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname="localhost")

    async def _flush(self) -> None:
        await self._loop.sock_sendall(self._sock, self._out.read())

    async def _receive(self) -> bool:
        try:
            data = await self._loop.sock_recv(self._sock, 1 << 20)
        except ConnectionError:
            data = b""
        self._in.write(data)
        return bool(data)

    async def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                assert await self._receive(), "hung up within the handshake"
            else:
                break
        await self._flush()

    async def send(self, data: bytes, *, cuts: Iterable[int] = ()) -> None:
        ends = sorted({*cuts, len(data)})
        with contextlib.suppress(ConnectionError):
            for begin, end in zip([0, *ends], ends, strict=False):
                if end > begin:
                    self._tls.write(data[begin:end])
                await self._flush()
                if end < len(data):
                    await turns(3)

    async def _more(self) -> bool:
        while True:
            try:
                data = self._tls.read(1 << 20)
            except ssl.SSLWantReadError:
                if not await self._receive():
                    return False
            except ssl.SSLZeroReturnError:
                return False
            else:
                self._here += data
                return bool(data)


class Door:
    """A gateway whose endpoints answer with what they got, unless `reply` says otherwise."""

    def __init__(
        self,
        *,
        keep_alive_s: float = 75,
        edge: Edge = PLAIN,
        pair: Pair | None = None,
        app: ASGIApp = page,
        guard: Guard | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.bodies: list[bytes] = []
        self.reply: object = None
        self.stream: AsyncIterator[Payload] | None = None
        self.cancelled = 0
        self.go_on = asyncio.Event()
        self.metrics = Metrics()
        self.state = ServerState()
        self.gateway = Gateway(self._handle, Families(self.metrics), edge, guard)
        self.gateway.serve(SPEC)
        self._pair = pair
        self._server = Server(self.gateway, app, None, drain_s=1.0, edge=edge)
        self._server.server_state = self.state
        self._config = self._server.config
        self._config.load()
        self._config.timeout_keep_alive = keep_alive_s
        self._clients: list[Client] = []

    async def _handle(self, call: Call) -> Reply:
        self.calls.append(call)
        body = bytes(call.payload.segments[0])
        if isinstance(self.reply, Exception):
            raise self.reply
        if self.reply == "hold":
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        elif isinstance(self.reply, Reply):
            return self.reply
        if call.endpoint == "tokens":
            return Reply(stream=self.stream or chunks(body[:1], body[1:]))
        self.bodies.append(body)
        return Reply(Payload(BINARY, (body[:100],)), version="7", replica="App-0")

    async def connect(self) -> Client:
        near, far = socket.socketpair()
        near.setblocking(False)
        readers: list[Reader] = []

        def make() -> Reader:
            factory = self._config.http_protocol_class
            readers.append(factory(config=self._config, server_state=self.state, app_state={}))
            return readers[0]

        connect = asyncio.get_running_loop().connect_accepted_socket
        if self._pair is None:
            client = Client(near)
            await connect(make, far)
        else:
            client = TlsClient(near, self._pair.client())
            context = self._pair.certificate().context()
            await asyncio.gather(client.shake_hands(), connect(make, far, ssl=context))
        client.protocol = readers[0].protocol  # uvloop gives that of TLS
        self._clients.append(client)
        return client

    def leave(self) -> None:
        """Be about to end."""
        self._server.leave()

    def cut(self) -> None:
        """End what runs, as the server does when the time to drain is over."""
        for task in self.state.tasks:
            task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_) -> None:
        for client in self._clients:
            client.leave()
        for _ in range(2000):
            if not self.state.connections and not self.state.tasks:
                await turns(3)
                assert self.gateway.bodies.held == 0
                assert self.gateway.connections.count == 0
                return
            await asyncio.sleep(0.001)
        raise AssertionError("work for clients that are gone goes on")

    def counted(self) -> dict[str, float]:
        found = [f for f in self.metrics.snapshot() if f.name == "servekit_requests_total"]
        return {sample.labels[-1]: sample.value for f in found for sample in f.samples}


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def chunks(*parts: bytes, error: Exception | None = None) -> AsyncIterator[Payload]:
    for part in parts:
        yield Payload(BINARY, (part,))
    if error is not None:
        raise error


@pytest.fixture(params=["asyncio", "uvloop"], autouse=True)
def loop(request, monkeypatch):
    """Run each test on either loop: their transports change protocols each in its own way."""
    if request.param == "uvloop":
        monkeypatch.setattr(asyncio, "run", uvloop.run)


def post(body: bytes = b"{}", path: str = "/echo", *lines: str, length: int | None = None) -> bytes:
    lines = ("host: h", f"content-length: {len(body) if length is None else length}", *lines)
    return head(f"POST {path} HTTP/1.1", *lines) + body


def chunked(*parts: bytes, path: str = "/echo", lines: tuple[str, ...] = ()) -> bytes:
    coded = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))
    return head(f"POST {path} HTTP/1.1", "transfer-encoding: chunked", *lines) + coded


def get(query: str) -> bytes:
    return head(f"GET /find?{query} HTTP/1.1", "host: h")


def head(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def bytes_of(size: int, seed: int = 0) -> bytes:
    """Return bytes of which no two parts are alike, so that a part at the wrong place shows."""
    return random.Random(seed).randbytes(size)
