"""An app that asks for credentials, with real processes: keys that come and go, and what is open."""

import json
import os
import subprocess
import time

import jwt
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.flow.harness import COMMAND, ROOT, Running, serving, until

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
            return (await app.post("/who", headers=bearer(new))).status == 200

        await until(changed, "the new key is known")
        assert (await app.post("/who", headers=bearer(key))).status == 401

        # A broken file changes nothing, and is told.
        file.write_text(file.read_text() + "oops")
        await until(lambda: "the old ones go on" in app.text, "the broken file is logged")
        assert (await app.post("/who", headers=bearer(new))).status == 200


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
        await app.gone()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_an_address_that_others_reach_is_warned_of_once(host):
    async with serving("callers.py:Root", options=("--host", host)) as app:
        answer = await app.call("POST", "/who", headers={"x-api-key": "mine"})
        assert answer.json["here"] == ""
        assert "x-api-key" in answer.json["headers"]
        assert (await app.get("/debug")).status == 404
        events = [json.loads(line) for line in app.lines if line.startswith("{")]
        warnings = [e for e in events if "whoever reaches this address may call" in str(e)]
        assert len(warnings) == (host == "0.0.0.0")


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
