"""An app that asks for credentials, with real processes: keys that come and go, and what is open."""

import asyncio
import gzip
import json
import os
import shutil
import subprocess
import time

import jwt
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.flow.harness import COMMAND, ROOT, Running, serving, until
from tests.pairs import make_pair

SECRET = "s" * 40
OPEN = ("/livez", "/readyz", "/startupz", "/docs")
CLOSED = (
    "/web/who",
    "/web/x",
    "/talk",
    "/who",
    "/openapi.json",
    "/metrics",
    "/debug",
    "/debug.json",
    "/nothing",
    "/later/jobs",
    "/later/jobs/0/events",
)


def keys(*words: str) -> str:
    done = subprocess.run(
        [*COMMAND, "keys", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def token(**claims: object) -> str:
    return jwt.encode({"sub": "eve", "exp": time.time() + 600} | claims, SECRET, "HS256")


def bearer(credential: str) -> dict[str, str]:
    return {"authorization": f"Bearer {credential}"}


async def test_an_app_that_asks_who_calls(tmp_path):
    file, secret = tmp_path / "keys.toml", tmp_path / "secret"
    key = keys("add", "team-a", "--file", str(file))
    slow = keys("add", "team-b", "--file", str(file), "--rate", "1/h", "--burst", "2")
    secret.write_text(f"{SECRET}\n")
    env = {
        "SERVEKIT_API_KEYS": str(file),
        "SERVEKIT_JWT_KEY": str(secret),
        "SERVEKIT_JWT_AUDIENCE": "app",
    }
    async with serving("callers.py:Root", env=env | {"SERVEKIT_GATEWAY_WORKERS": "1"}) as app:
        for path in OPEN:
            assert (await app.get(path)).status == 200
        for path in CLOSED:
            answer = await app.get(path)
            assert (answer.status, answer.reason) == (401, "missing_credentials"), path
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert (await app.call("GET", path, headers=bearer(key))).status != 401, path

        # Who called is known in all services, and the credential in none.
        for headers, caller in (
            (bearer(key), "team-a"),
            ({"x-api-key": key}, "team-a"),
            (bearer(token(aud="app")), "eve"),
        ):
            answer = await app.post("/who", headers=headers)
            assert answer.json == {
                "here": caller,
                "below": caller,
                "batched": caller,
                "headers": "content-length content-type host",
            }
        for wrong in (key[:-1] + "x", token(aud="other"), token(), "x"):
            answer = await app.post("/who", headers=bearer(wrong))
            assert (answer.status, answer.reason) == (401, "invalid_credentials")
        old = token(aud="app", exp=time.time() - 3600)
        assert (await app.post("/who", headers=bearer(old))).reason == "expired_credentials"

        # Mounted apps and WebSockets are asked, too.
        seen = await app.call("GET", "/web/who", headers=bearer(key))
        assert seen.body == b"team-a content-length host"
        refused = await app.call("POST", "/web/who", body=bytes(500_000))
        assert (refused.status, refused.reason) == (401, "missing_credentials")
        url = app.url.replace("http", "ws") + "/talk"
        async with connect(url, additional_headers=bearer(key)) as talk:
            await talk.send("hi")
            assert await talk.recv() == "team-a says hi"
        for headers in ({}, bearer("sk_wrong_key")):
            with pytest.raises(InvalidStatus) as caught:
                await connect(url, additional_headers=headers)
            assert caught.value.response.status_code == 401
            assert caught.value.response.headers["www-authenticate"].startswith("Bearer")

        # A key's own limits.
        statuses = [(await app.post("/who", headers=bearer(slow))).status for _ in range(3)]
        assert statuses == [200, 200, 429]

        # What the debug page tells, and what not.
        await app.post("/fail", headers=bearer(key) | {"x-request-id": "failed-1"})
        debug = await app.call("GET", "/debug.json", headers=bearer(key))
        found = debug.json
        assert [(e["route"], e["code"], e["caller"]) for e in found["errors"]] == [
            ("/fail", 500, "team-a"),
            ("/who", 429, "team-b"),
        ]
        assert {service["name"] for service in found["app"]["services"]} == {"Root", "Below"}
        assert found["settings"]["api_keys"] == str(file)
        page = await app.call("GET", "/debug", headers=bearer(key))
        shown = debug.body.decode() + page.body.decode()
        assert "the password" not in shown  # the log has it
        for private in (SECRET, key, slow):
            assert private not in shown + app.text
        metrics = (await app.call("GET", "/metrics", headers=bearer(key))).body.decode()
        assert 'reason="rate_limited"' in metrics

        # Keys come and go without a restart.
        new = keys("add", "team-c", "--file", str(file))
        keys("remove", "team-a", "--file", str(file))

        async def changed() -> bool:
            there, gone = [(await app.post("/who", headers=bearer(k))).status for k in (new, key)]
            return (there, gone) == (200, 401)

        await until(changed, "the new key is known, and the old one is not")

        # A broken file changes nothing, and is told.
        file.write_text(file.read_text() + "oops")
        await until(lambda: "the old ones go on" in app.text, "the broken file is logged")
        assert (await app.post("/who", headers=bearer(new))).status == 200


async def curl(*words: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the last answer."""
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "-m", "60", "-i", *words, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    while True:
        head, _, out = out.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        if (status := int(first.split()[1])) != 100:
            fields = [line.partition(": ") for line in lines]
            return status, {name.lower(): value for name, _, value in fields}, out


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
async def test_a_key_over_tls_from_another_origin_with_packed_bodies(tmp_path):
    pair, origin = make_pair(tmp_path), "https://app.example"
    file, packed, large = tmp_path / "keys.toml", tmp_path / "packed", tmp_path / "large"
    key = keys("add", "team-a", "--file", str(file))
    words = {"words": ["to", "and", "fro"] * 400}
    packed.write_bytes(gzip.compress(json.dumps(words).encode()))
    with large.open("wb") as sparse:
        sparse.truncate(60_000_000)
    env = {
        "SERVEKIT_API_KEYS": str(file),
        "SERVEKIT_CORS_ORIGINS": origin,
        "SERVEKIT_GZIP_MIN_BYTES": "100",
    }
    tls = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    async with serving("callers.py:Root", env=env, options=tls, tls=pair.client()) as app:
        usual = ("--cacert", str(pair.cert), "-H", f"origin: {origin}")
        sent = ("-H", "content-encoding: gzip", "-H", "content-type: application/json")
        sent += ("-H", "accept-encoding: gzip", "--data-binary", f"@{packed}")
        for path in ("/echo", "/web/who"):
            asks = ("-H", "access-control-request-method: POST")
            asks += ("-H", "access-control-request-headers: x-api-key, content-encoding")
            status, fields, _ = await curl(*usual, *asks, "-X", "OPTIONS", app.url + path)
            assert (status, fields["access-control-allow-origin"]) == (204, origin)
            assert fields["access-control-allow-headers"] == "x-api-key, content-encoding"
            status, fields, _ = await curl(*usual, *sent, app.url + path)
            assert (status, fields["access-control-allow-origin"]) == (401, origin)
            status, fields, body = await curl(
                *usual, "-H", "expect:", "--data-binary", f"@{large}", app.url + path
            )
            assert (status, fields["connection"]) == (401, "close")
            assert json.loads(body)["error"]["reason"] == "missing_credentials"
        status, fields, body = await curl(
            *usual, *sent, "-H", f"x-api-key: {key}", app.url + "/echo"
        )
        assert (status, fields["access-control-allow-origin"]) == (200, origin)
        assert fields["content-encoding"] == "gzip"
        assert json.loads(gzip.decompress(body)) == words["words"]
        for secret in (key, "PRIVATE KEY"):
            assert secret not in app.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("API_KEYS", None, "api_keys: can't read"),
        ("API_KEYS", "[[key]]\nname = 'a'", "key 1 (a): has no id"),
        ("JWT_KEY", "short", "is a secret of 5 bytes"),
        ("JWT_ISSUER", None, "jwt_issuer is set, but without jwt_key no token is checked"),
    ],
)
async def test_a_mistake_in_a_file_ends_it_before_anything_starts(tmp_path, name, content, message):
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    app = Running("callers.py:Root", env={f"SERVEKIT_{name}": str(file)})
    try:
        assert await app.exit_code() == 1
        assert app.lines[0].startswith("error: ")
        assert message in app.lines[0]
    finally:
        await app.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_an_address_that_others_reach_is_warned_of_once(host):
    async with serving("callers.py:Root", options=("--host", host)) as app:
        answer = await app.call("POST", "/who", headers={"x-api-key": "mine"})
        assert answer.json["here"] == ""
        assert "x-api-key" in answer.json["headers"]
        assert (await app.get("/debug")).status == 404
        text = "\n".join(app.lines)
        assert text.count("whoever reaches this address may call") == (host == "0.0.0.0")
        assert "in the clear" not in text


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_credentials_that_cross_a_network_in_the_clear_are_warned_of_once(host, tmp_path):
    file = tmp_path / "keys.toml"
    keys("add", "a", "--file", str(file))
    env = {"SERVEKIT_API_KEYS": str(file)}
    async with serving("callers.py:Root", options=("--host", host), env=env) as app:
        text = "\n".join(app.lines)
        assert text.count("credentials reach this address in the clear") == (host == "0.0.0.0")
        assert "whoever reaches" not in text


async def test_gateways_share_a_keys_limits_and_each_takes_new_keys(tmp_path):
    file = tmp_path / "keys.toml"
    key = keys("add", "a", "--file", str(file), "--rate", "1/h", "--burst", "20")
    env = {"SERVEKIT_API_KEYS": str(file), "SERVEKIT_GATEWAY_WORKERS": "2"}
    async with serving("callers.py:Root", env=env) as app:
        answers = [await app.post("/who", headers=bearer(key)) for _ in range(200)]
        admitted = sum(answer.status == 200 for answer in answers)
        assert 0 < admitted <= 20  # each has half, and which one is asked is chance
        new = keys("add", "b", "--file", str(file))

        async def known() -> bool:
            asked = [await app.post("/who", headers=bearer(new)) for _ in range(20)]
            return all(answer.status == 200 for answer in asked)

        await until(known, "all gateways know the new key")
