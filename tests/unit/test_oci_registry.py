"""A registry's client: what it sends to whom, what it takes, and what it makes of a registry that lies."""

import base64
import functools
import http.server
import json
import stat
import threading
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import ConfigError
from servekit.packaging.oci.authorization import challenge_of
from servekit.packaging.oci.blobs import Blobs
from servekit.packaging.oci.credentials import Credentials, docker_credentials
from servekit.packaging.oci.documents import (
    OCI_MANIFEST,
    Descriptor,
    Manifest,
    Platform,
    digest_of,
    encode,
)
from servekit.packaging.oci.reference import Reference
from servekit.packaging.oci.registry import Registry
from servekit.packaging.oci.transfer import (
    pull_artifact,
    pull_image,
    push_artifact,
    write_artifact,
)

DATA = b"0123456789" * 1000
BLOB = Descriptor(media_type="x", digest=digest_of(DATA), size=len(DATA))


class Server(http.server.ThreadingHTTPServer):
    """Answers each request by `answer(request)`: a status, headers and a body."""

    def __init__(self, answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.host = f"127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _any(self):
        if self.headers.get("transfer-encoding"):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append((self.command, self.path, headers, body))
        status, given, data = self.server.answer(self.command, self.path, headers)
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **given}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PATCH = do_PUT = _any

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """Return `serve(answer)`: a running server."""
    running = []

    def start(answer) -> Server:
        server = Server(answer)
        thread = threading.Thread(target=functools.partial(server.serve_forever, 0.02))
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def blobs(tmp_path):
    return Blobs(tmp_path / "blobs")


def client(server: Server, **given) -> Registry:
    return Registry(server.host, sleep=lambda _: None, **given)


# -- blobs --------------------------------------------------------------------------------------


def test_a_broken_download_is_continued(serve, blobs):
    """From where it broke; from its start where the server does not do that."""
    for ranges in (True, False):
        turns = iter([DATA[:3000], DATA[3000:7000] if ranges else DATA[:500], None])

        def answer(method, path, headers, turns=turns, ranges=ranges):
            start = int(headers.get("range", "bytes=0-")[6:-1])
            part = next(turns)
            if part is None:
                part = DATA[start:] if ranges else DATA
            if not ranges:
                return 200, {"content-length": str(len(DATA)), "connection": "close"}, part
            given = {"content-range": f"bytes {start}-{len(DATA) - 1}/{len(DATA)}"}
            length = {"content-length": str(len(DATA) - start), "connection": "close"}
            return 206 if start else 200, given | length, part

        server = serve(answer)
        with client(server) as registry:
            registry.fetch("team/app", BLOB, blobs)
        assert blobs.read(BLOB) == DATA
        assert len(server.seen) == 3
        blobs.path(BLOB.digest).unlink()


@pytest.mark.parametrize(
    ("answered", "said"),
    [
        ((200, {}, DATA[:-1] + b"x"), "instead of sha256:"),
        ((200, {}, DATA + b"x"), "sends more than the 10000 bytes"),
        ((404, {}, b""), "has no team/app sha256:"),
        ((503, {}, b""), "answers 503; tried 5 times"),
        ((429, {"retry-after": "\xb2"}, b""), "answers 429; tried 5 times"),
        ((403, {}, b'{"errors": [{"code": "DENIED", "message": "no\x1b[31m"}]}'), "403"),
        ((302, {}, b""), "without a location"),
        ((302, {"location": "file:///etc/passwd"}, b""), "which is not safe"),
        ((302, {"location": "http://169.254.169.254/latest"}, b""), "which is not safe"),
        ((302, {"location": "https://user:pw@example.com/"}, b""), "which is not safe"),
        ((302, {"location": "/v2/again"}, b""), "without end"),
    ],
)
def test_a_registry_that_fails_or_lies(serve, blobs, answered, said):
    server = serve(lambda *_: answered)
    with client(server) as registry, pytest.raises(ConfigError) as refused:
        registry.fetch("team/app", BLOB, blobs)
    assert said in str(refused.value)
    assert "\x1b" not in str(refused.value)
    assert not blobs.has(BLOB)
    assert [*blobs.root.rglob("*.*")] == []


def test_nobody_learns_who_we_are_but_the_registry(serve, blobs):
    """An answer that leads elsewhere is followed without a word of who we are."""
    elsewhere = serve(lambda *_: (200, {}, DATA))
    who = Credentials("me", "secret")

    def answer(method, path, headers):
        if "authorization" not in headers:
            return 401, {"www-authenticate": 'Basic realm="x"'}, b""
        return 307, {"location": f"http://{elsewhere.host}/blob"}, b""

    server = serve(answer)
    with client(server, credentials=who) as registry:
        registry.fetch("team/app", BLOB, blobs)
    assert server.seen[-1][2]["authorization"] == who.basic
    [(_, path, headers, _)] = elsewhere.seen
    assert path == "/blob"
    assert "authorization" not in headers
    assert "secret" not in repr(who)


# -- who asks -----------------------------------------------------------------------------------


def test_a_token_is_had_for_what_is_to_be_done_and_kept(serve, blobs):
    def answer(method, path, headers):
        at = urlsplit(path)
        if at.path == "/token":
            query = parse_qs(at.query)
            assert query["scope"] == ["repository:team/app:pull"]
            assert query["service"] == ["reg"]
            return 200, {}, json.dumps({"token": "t0k"}).encode()
        if headers.get("authorization") != "Bearer t0k":
            challenge = f'Bearer realm="http://{server.host}/token",service="reg",error="x"'
            return 401, {"www-authenticate": challenge}, b""
        return 200, {}, DATA

    server = serve(answer)
    with client(server, credentials=Credentials("me", "pw")) as registry:
        registry.fetch("team/app", BLOB, blobs)
        registry.fetch("team/app", BLOB, blobs)
    tokens = [headers for _, path, headers, _ in server.seen if path.startswith("/token")]
    assert [h["authorization"] for h in tokens] == [Credentials("me", "pw").basic]


@pytest.mark.parametrize(
    ("challenge", "said"),
    [
        ("", "not in a known way"),
        ("Negotiate", "not in a known way"),
        ('Basic realm="x"', "run 'docker login"),
        ('Bearer realm="http://example.com/token"', "which is not safe"),
        ('Bearer realm="not a url"', "which is not safe"),
        ('Bearer service="x"', "which is not safe"),
    ],
)
def test_challenges_that_can_not_be_met(serve, blobs, challenge, said):
    server = serve(lambda *_: (401, {"www-authenticate": challenge}, b""))
    with client(server) as registry, pytest.raises(ConfigError) as refused:
        registry.fetch("team/app", BLOB, blobs)
    assert said in str(refused.value)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"token": ""}', b'{"token": "a b"}', b"\xff"])
def test_tokens_that_are_none(serve, blobs, body):
    def answer(method, path, headers):
        if path.startswith("/token"):
            return 200, {}, body
        return 401, {"www-authenticate": f'Bearer realm="http://{server.host}/token"'}, b""

    server = serve(answer)
    with client(server) as registry, pytest.raises(ConfigError, match="has no token for us"):
        registry.fetch("team/app", BLOB, blobs)


def test_a_password_that_is_refused_is_not_sent_for_ever(serve, blobs):
    server = serve(lambda *_: (401, {"www-authenticate": "Basic"}, b""))
    with client(server, credentials=Credentials("me", "wrong")) as registry:
        for _ in range(2):
            with pytest.raises(ConfigError) as refused:
                registry.fetch("team/app", BLOB, blobs)
    assert "wrong" not in str(refused.value)
    assert len(server.seen) <= 4


@given(header=st.text(max_size=60))
def test_any_challenge_is_read(header):
    challenge_of([header, f'Bearer realm="r",{header}'])


# -- credentials of `docker login` --------------------------------------------------------------


def test_what_docker_login_wrote(tmp_path):
    path = tmp_path / "config.json"
    assert docker_credentials(path, "r.io") is None
    auth = base64.b64encode(b"me:p:w").decode()
    path.write_text(json.dumps({"auths": {"https://r.io/v1/": {"auth": auth}, "q.io": {}}}))
    assert docker_credentials(path, "r.io") == Credentials("me", "p:w")
    assert docker_credentials(path, "q.io") is None
    assert docker_credentials(path, "other.io") is None
    for text in ("{", '{"auths": {"r.io": {"auth": "%%"}}}', '{"auths": []}', "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=str(path)):
            docker_credentials(path, "r.io")


def test_a_credential_helper(tmp_path, monkeypatch):
    program = tmp_path / "docker-credential-test"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path = tmp_path / "config.json"
    path.write_text('{"credHelpers": {"r.io": "test"}}')
    answers = {
        """cat > /dev/null; echo '{"Username": "me", "Secret": "s"}'""": Credentials("me", "s"),
        """cat > /dev/null; echo '{"Username": "<token>", "Secret": "s"}'""": Credentials(
            identity_token="s"
        ),
        "echo credentials not found in native keychain; exit 1": None,
    }
    for script, expected in answers.items():
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        assert docker_credentials(path, "r.io") == expected
    for script in ("exit 3", "echo nothing"):
        program.write_text(f"#!/bin/sh\n{script}\n")
        with pytest.raises(ConfigError, match="docker-credential-test"):
            docker_credentials(path, "r.io")
    for name in ("missing", "../../bin/sh", "a b"):
        path.write_text(json.dumps({"credsStore": name}))
        with pytest.raises(ConfigError, match="can't be asked|no name of a"):
            docker_credentials(path, "r.io")


# -- manifests and artefacts --------------------------------------------------------------------


class Memory:
    """A registry that works, in memory; as `answer` of a server."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.server: Server | None = None

    def __call__(self, method, path, headers):
        at = urlsplit(path)
        _, kind, name = at.path.rsplit("/", 2)
        if method == "POST":
            return 202, {"location": f"/up/{len(self.server.seen)}/x/y"}, b""
        if method == "PATCH":
            self.sent = self.server.seen[-1][3]
            return 202, {"location": at.path}, b""
        if method == "PUT" and kind == "manifests":
            body = self.server.seen[-1][3]
            self.manifests[name] = self.manifests[digest_of(body)] = body
            return 201, {"docker-content-digest": digest_of(body)}, b""
        if method == "PUT":
            self.blobs[parse_qs(at.query)["digest"][0]] = self.sent
            return 201, {}, b""
        found = (self.manifests if kind == "manifests" else self.blobs).get(name)
        if found is None:
            return 404, {}, b""
        given = {"content-type": OCI_MANIFEST} if kind == "manifests" else {}
        return 200, given | {"docker-content-digest": digest_of(found)}, found


@pytest.fixture
def memory(serve):
    registry = Memory()
    registry.server = serve(registry)
    return registry


KIND = "application/vnd.example.v1"


def test_an_artefact_there_and_back(memory, blobs, tmp_path):
    """What is there is not sent again."""
    host = memory.server.host
    artifact = write_artifact(blobs, KIND, [blobs.put(DATA, "x"), blobs.put(b"", "y")])
    reference = Reference(host, "team/app", "1")
    with client(memory.server) as registry:
        pushed = push_artifact(registry, reference, artifact, blobs)
        assert pushed.sent == len(DATA) + 2
        again = push_artifact(registry, reference, artifact, blobs)
        assert (again.sent, again.kept) == (0, pushed.sent)
        other = Blobs(tmp_path / "other")
        got = pull_artifact(registry, reference, other, artifact_type=KIND)
        assert got == artifact
        assert other.read(got.manifest.layers[0]) == DATA
        with pytest.raises(ConfigError, match="not a 'application/other'"):
            pull_artifact(registry, reference, other, artifact_type="application/other")
        with pytest.raises(ConfigError, match="bytes; 10 are the limit"):
            pull_artifact(registry, reference, other, artifact_type=KIND, limit=10)
        with pytest.raises(ConfigError, match="is in another registry"):
            pull_artifact(registry, Reference("r.io", "a"), other, artifact_type=KIND)
        with pytest.raises(ConfigError):
            pull_image(registry, reference, other, platform=Platform("linux", "amd64"))


def test_pieces_for_a_proxy_that_limits_bodies(serve, blobs):
    seen = bytearray()

    def answer(method, path, headers):
        if method == "PATCH":
            assert headers["content-range"] == (
                f"{len(seen)}-{len(seen) + int(headers['content-length']) - 1}"
            )
            seen.extend(server.seen[-1][3])
        status = {"POST": 202, "PATCH": 202, "PUT": 201}[method]
        return status, {"location": "/v2/team/app/blobs/uploads/1?s=a"}, b""

    server = serve(answer)
    blobs.put(DATA, "x")
    with client(server, chunk_bytes=3000) as registry:
        registry.upload("team/app", BLOB, blobs)
    assert bytes(seen) == DATA
    assert parse_qs(urlsplit(server.seen[-1][1]).query) == {"s": ["a"], "digest": [BLOB.digest]}


@pytest.mark.parametrize(
    ("said_digest", "raw"),
    [
        (digest_of(b"other"), encode(Manifest(config=BLOB, layers=[]))),
        (None, b"no json"),
        (None, b" " * (5 << 20)),
    ],
)
def test_manifests_that_are_none(serve, blobs, said_digest, raw):
    given = {"content-type": OCI_MANIFEST}
    given |= {"docker-content-digest": said_digest} if said_digest else {}
    server = serve(lambda *_: (200, given, raw))
    with client(server) as registry, pytest.raises(ConfigError):
        pull_artifact(registry, Reference(server.host, "a"), blobs, artifact_type=KIND)


def test_a_digest_is_what_was_asked_for(serve, blobs):
    """Whatever the registry says that it sends."""
    raw = msgspec.json.encode({"mediaType": OCI_MANIFEST})
    server = serve(lambda *_: (200, {}, raw))
    wanted = Reference(server.host, "a", digest=digest_of(b"other"))
    with client(server) as registry, pytest.raises(ConfigError, match="sends sha256:"):
        pull_artifact(registry, wanted, blobs, artifact_type=KIND)
