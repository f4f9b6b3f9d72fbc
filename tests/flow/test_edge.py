"""TLS and the gateway's limits in a running app."""

import contextlib
import gzip
import re
import ssl
from pathlib import Path

import pytest

from tests.flow.harness import Http, Running, serving, show, until
from tests.pairs import Pair, make_pair

MIB = 1 << 20


@pytest.fixture
def pair(tmp_path):
    return make_pair(tmp_path)


def options(pair: Pair) -> tuple[str, ...]:
    return ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))


async def test_an_app_over_tls(pair):
    old = pair.client()
    async with serving("kinds.py:Http", options=options(pair), tls=old) as app:
        assert app.url.startswith("https://127.0.0.1:")
        assert f"is serving at {app.url}" in app.text
        assert f"{app.url}/docs" in app.text
        answer = await app.post("/area", {"box": {"width": 2}})
        assert (answer.status, answer.json) == (200, 2.0)
        data = bytes(range(256)) * 3000
        headers = {"content-type": "application/octet-stream"}
        answer = await app.call("POST", "/reverse", body=data, headers=headers)
        assert answer.body == data[::-1]
        assert (await app.get("/docs")).status == 200
        async with await Http.open(app.url) as plain:
            with contextlib.suppress(OSError):
                await plain.send("GET", "/livez")
                assert not (await plain.reader.read()).startswith(b"HTTP")

        kept = await Http.open(app.url, old)
        assert (await kept.call("GET", "/livez")).status == 200
        make_pair(pair.cert.parent)
        app._tls = pair.client()

        async def renewed() -> bool:
            try:
                return (await app.get("/livez")).status == 200
            except ssl.SSLCertVerificationError:
                return False

        await until(renewed, "the new certificate is shown")
        with pytest.raises(ssl.SSLCertVerificationError):
            await Http.open(app.url, old)
        assert (await kept.call("GET", "/livez")).status == 200
        await kept.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--tls-cert", "cert.pem"), "tls_cert is set without tls_key"),
        (("--tls-cert", "cert.pem", "--tls-key", "none.pem"), "none.pem: No such file"),
        (("--tls-cert", "cert.pem", "--tls-key", "other.pem"), "key is that of another"),
        (("--tls-cert", "cert.pem", "--tls-key", "locked.pem"), "the key is encrypted"),
    ],
)
async def test_mistakes_end_it_before_anything_starts(tmp_path, given, message):
    make_pair(tmp_path).key.rename(tmp_path / "other.pem")
    make_pair(tmp_path, password=b"secret").key.rename(tmp_path / "locked.pem")
    if "locked.pem" not in given:
        make_pair(tmp_path)
    app = Running("kinds.py:Http", options=given, cwd=tmp_path)
    try:
        assert await app.exit_code() == 1
        assert message in app.text
        assert "Traceback" not in app.text
        assert not list(app.runtime_dir.iterdir())
    finally:
        await app.close()


def peak(pid: int) -> int:
    """Return the most memory that a process has had resident so far, in bytes."""
    [size] = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text("ascii"))
    return int(size) * 1024


async def test_a_bomb_takes_less_than_twice_the_limit():
    """16 times 64 MiB in 1 MiB, for an endpoint that takes 64 MiB."""
    bomb = gzip.compress(bytes(64 * MIB)) * 16
    packed = {"content-encoding": "gzip"}
    async with serving("graph.py:LoneRoot") as app:
        gateway = app.process("gateway_worker")
        before = peak(gateway)
        for _ in range(3):
            answer = await app.call("POST", "/echo", body=bomb, headers=packed)
            assert answer.status == 413
        grown = peak(gateway) - before
        show(f"{len(bomb)} bytes; the gateway grew by {grown / MIB:.1f} MiB")
        assert 48 * MIB < grown < 2 * 64 * MIB
        answer = await app.call("POST", "/echo", body=gzip.compress(b'{"x": 2}'), headers=packed)
        assert (answer.status, answer.json) == (200, 2)


async def test_settings_reach_the_gateway():
    origin = "https://app.example"
    env = {
        "SERVEKIT_CORS_ORIGINS": origin,
        "SERVEKIT_GZIP_MIN_BYTES": "100",
        "SERVEKIT_MAX_CONNECTIONS": "2",
    }
    async with serving("kinds.py:Http", env=env) as app:
        async with await Http.open(app.url) as http:
            headers = {"origin": origin, "access-control-request-method": "POST"}
            await http.send("OPTIONS", "/area", headers=headers)
            status, fields = await http.head()
            assert (status, fields["access-control-allow-origin"]) == (204, origin)
            headers = {"origin": origin, "accept-encoding": "gzip"}
            answer = await http.call("GET", "/openapi.json", headers=headers)
            assert answer.headers["content-encoding"] == "gzip"
            assert answer.headers["access-control-allow-origin"] == origin
            async with await Http.open(app.url) as other:
                assert (await other.call("GET", "/livez")).status == 200
                answer = await app.get("/livez")
                assert (answer.status, answer.reason) == (503, "too_many_connections")
        await until(_lives(app), "there is room again")


def _lives(app: Running):
    async def look() -> bool:
        return (await app.get("/livez")).status == 200

    return look
