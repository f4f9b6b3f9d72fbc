"""The guard: from headers to a caller or a refusal, limits of keys, files that change."""

import logging
import os
import time

import jwt
import pytest

from servekit.errors import ConfigError, Overloaded, Unauthorized
from servekit.gateway.credentials import Credentials
from servekit.gateway.guard import Guard
from servekit.gateway.keys import new_key
from servekit.settings import Settings

SECRET = "s" * 32


def entry(name: str, made: tuple[str, str, str], *limits: str) -> str:
    lines = [f'name = "{name}"', f'id = "{made[0]}"', f'hash = "{made[2]}"', *limits]
    return "\n".join(["[[key]]", *lines, ""])


class Files:
    """Two keys and a secret for tokens, on disk."""

    def __init__(self, folder) -> None:
        self.keys, self.secret = folder / "keys.toml", folder / "secret"
        self.a, self.b = new_key(), new_key()
        self.key_a, self.key_b = self.a[1].encode(), self.b[1].encode()
        self.write(entry("team-a", self.a), entry("team-b", self.b))
        self.secret.write_text(SECRET)

    def write(self, *entries: str) -> None:
        self.keys.write_text("\n".join(entries))

    def guard(self, *, keys: bool = True, tokens: bool = True, share: float = 1.0) -> Guard:
        accepted = Credentials(
            api_keys=str(self.keys) if keys else "", jwt_key=str(self.secret) if tokens else ""
        )
        return Guard(accepted, share=share)


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def token(secret: str = SECRET, sub: str = "eve", ttl_s: float = 600) -> bytes:
    return jwt.encode({"sub": sub, "exp": time.time() + ttl_s}, secret, "HS256").encode()


def bearer(credential: bytes, scheme: bytes = b"Bearer") -> tuple[bytes, bytes]:
    return b"authorization", scheme + b" " + credential


def refused(guard: Guard, *headers: tuple[bytes, bytes]) -> Unauthorized:
    with pytest.raises(Unauthorized) as caught:
        guard.identify(list(headers))
    error = caught.value
    assert not error.started
    challenge = error.headers["www-authenticate"]
    assert challenge.startswith("Bearer realm=")
    assert ("invalid_token" in challenge) == (error.reason != "missing_credentials")
    for _, value in headers:
        secret = value.rpartition(b" ")[2]
        assert len(secret) < 8 or secret.decode("latin-1") not in f"{error.message}{challenge}"
    return error


# -- who it is


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER", b"Bearer "])
def test_each_kind_of_credential(files, scheme):
    guard = files.guard()
    assert guard.identify([bearer(files.key_a, scheme)]).caller == "team-a"
    assert guard.identify([(b"x-api-key", files.key_b)]).caller == "team-b"
    assert guard.identify([bearer(token(), scheme)]).caller == "eve"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"host", b"h")],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic dXNlcjpwYXNzd29yZA==")],
        [(b"x-api-key", b"")],
        [(b"cookie", b"authorization=Bearer x")],
    ],
)
def test_none_at_all(files, headers):
    assert refused(files.guard(), *headers).reason == "missing_credentials"


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("value", [b"x", b"sk_", b"sk_abcd1234_secret", b"a.b.c", b"\xff" * 60_000])
def test_wrong_ones(files, keys, tokens, value):
    if keys or tokens:
        guard = files.guard(keys=keys, tokens=tokens)
        assert refused(guard, bearer(value)).reason == "invalid_credentials"
        if keys:
            assert refused(guard, (b"x-api-key", value)).reason == "invalid_credentials"


def test_an_old_token(files):
    assert refused(files.guard(), bearer(token(ttl_s=-3600))).reason == "expired_credentials"


def test_what_is_not_asked_for_is_not_taken(files):
    assert refused(files.guard(keys=False), bearer(files.key_a))
    assert refused(files.guard(keys=False), (b"x-api-key", files.key_a))
    assert refused(files.guard(tokens=False), bearer(token()))
    assert refused(files.guard(), (b"x-api-key", token()))  # which is for keys


def test_one_that_is_sent_twice_is_none(files):
    """Two readers might take two different ones."""
    guard = files.guard()
    for header in (bearer(files.key_a), (b"x-api-key", files.key_a)):
        assert "was sent 2 times" in refused(guard, header, header).message


def test_a_key_of_its_own_header_counts_before_authorization(files):
    guard = files.guard()
    theirs = (b"authorization", b"Bearer of-their-own")
    guest = guard.identify([theirs, (b"x-api-key", files.key_a)])
    assert (guest.caller, guest.headers) == ("team-a", [theirs])
    assert refused(guard, bearer(files.key_a), (b"x-api-key", b"sk_wrong")).message


# -- what goes on to replicas

OTHERS = [(b"host", b"h"), (b"authority", b"x"), (b"x-api-key-2", b"y"), (b"cookie", b"z")]


def test_credentials_go_no_further(files):
    guard = files.guard()
    key = (b"x-api-key", files.key_a)
    for sent in ([bearer(files.key_a)], [bearer(token())], [key], [bearer(files.key_b), key]):
        assert guard.identify([*OTHERS[:2], *sent, *OTHERS[2:]]).headers == OTHERS


def test_headers_that_are_not_ours_go_on(files):
    theirs = (b"x-api-key", b"theirs")
    assert files.guard(keys=False).identify([theirs, bearer(token())]).headers == [theirs]
    basic = (b"authorization", b"Basic abc")
    assert files.guard().identify([basic, (b"x-api-key", files.key_a)]).headers == [basic]


# -- limits


def test_the_rate_of_a_key(files):
    files.write(entry("team-a", files.a, 'rate = "2/s"', "burst = 3"), entry("team-b", files.b))
    guard = files.guard()
    a, b = (guard.identify([bearer(key)]) for key in (files.key_a, files.key_b))
    for _ in range(3):
        guard.enter(a, 100.0)()
    with pytest.raises(Overloaded) as caught:
        guard.enter(a, 100.25)
    error = caught.value
    assert (error.reason, error.retry_after_s, error.started) == ("rate_limited", 0.25, False)
    guard.enter(a, 100.5)()
    for _ in range(100):
        guard.enter(b, 100.0)()
        guard.enter(guard.identify([bearer(token())]), 100.0)()


def test_requests_of_a_key_that_run_at_once(files):
    files.write(entry("team-a", files.a, "max_ongoing = 2"))
    guard = files.guard()
    guest = guard.identify([bearer(files.key_a)])
    first, second = guard.enter(guest, 0.0), guard.enter(guest, 0.0)
    with pytest.raises(Overloaded) as caught:
        guard.enter(guest, 0.0)
    assert (caught.value.reason, caught.value.started) == ("too_many_ongoing", False)
    assert caught.value.retry_after_s > 0
    first()
    third = guard.enter(guest, 0.0)
    second()
    third()
    assert len(guard._ongoing) == 0


def test_a_request_that_is_refused_takes_no_place_and_no_part_of_the_rate(files):
    limits = ('rate = "1/s"', "burst = 1", "max_ongoing = 1")
    files.write(entry("team-a", files.a, *limits))
    guard = files.guard()
    guest = guard.identify([bearer(files.key_a)])
    leave = guard.enter(guest, 0.0)
    for at in (0.0, 1.0, 5.0):
        with pytest.raises(Overloaded, match="wait for one to end"):
            guard.enter(guest, at)
    leave()
    for at in (0.0, 0.5):
        with pytest.raises(Overloaded, match="1 requests a second"):
            guard.enter(guest, at)
    guard.enter(guest, 1.0)()
    assert len(guard._ongoing) == 0


def test_a_share_of_the_limits(files):
    files.write(entry("team-a", files.a, 'rate = "8/s"', "burst = 8", "max_ongoing = 6"))
    guard = files.guard(share=0.5)
    guest = guard.identify([bearer(files.key_a)])
    leaves = [guard.enter(guest, 0.0) for _ in range(3)]
    with pytest.raises(Overloaded, match="wait for one"):
        guard.enter(guest, 0.0)
    leaves.pop()()
    leaves.append(guard.enter(guest, 0.0))
    leaves.pop()()
    with pytest.raises(Overloaded) as caught:
        guard.enter(guest, 0.0)
    assert caught.value.retry_after_s == 0.25


# -- files that change


def test_a_file_that_changes_is_read_again(files):
    guard = files.guard()
    files.write(entry("team-b", files.b))
    assert guard.identify([bearer(files.key_a)]).caller == "team-a"
    guard.refresh()
    assert refused(guard, bearer(files.key_a))
    assert guard.identify([bearer(files.key_b)]).caller == "team-b"
    old = token()
    assert guard.identify([bearer(old)]).caller == "eve"
    files.secret.write_text("t" * 40)
    guard.refresh()
    assert refused(guard, bearer(old))  # nor is it remembered
    assert guard.identify([bearer(token("t" * 40))]).caller == "eve"


def test_a_link_that_leads_elsewhere_is_a_change(files, tmp_path):
    """So are secrets replaced where they are mounted."""
    real = tmp_path / "v1.toml"
    files.keys.rename(real)
    files.keys.symlink_to(real)
    guard = files.guard()
    other = tmp_path / "v2.toml"
    other.write_text(entry("team-b", files.b))
    link = tmp_path / "new"
    link.symlink_to(other)
    link.replace(files.keys)
    guard.refresh()
    assert refused(guard, bearer(files.key_a))


@pytest.mark.parametrize("broken", [b"[[key]]", b"\xff", b"a = " + b"[" * 5000, None])
def test_a_broken_file_changes_nothing_and_is_logged_once(files, broken, caplog):
    guard = files.guard()
    if broken is None:
        files.keys.unlink()
    else:
        files.keys.write_bytes(broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            guard.refresh()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "keys.toml" in caplog.text
    assert guard.identify([bearer(files.key_a)]).caller == "team-a"
    files.write(entry("team-c", files.a))
    guard.refresh()
    assert guard.identify([bearer(files.key_a)]).caller == "team-c"


def test_a_file_that_stays_is_not_read_again(files, monkeypatch):
    guard = files.guard()
    monkeypatch.setattr(guard._keys, "_read", lambda _: pytest.fail("it was read"))
    guard.refresh()
    os.utime(files.keys, ns=(0, 0))
    with pytest.raises(pytest.fail.Exception):
        guard.refresh()


@pytest.mark.parametrize("name", ["keys", "secret"])
def test_a_broken_file_at_the_start_is_an_error(files, name):
    getattr(files, name).write_text("x")
    with pytest.raises(ConfigError, match=name):
        files.guard()


# -- settings


def test_without_files_nobody_is_asked():
    assert Credentials.of(Settings()) is None


def test_paths_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings.load(tmp_path, {}, api_keys="keys.toml", jwt_key="pub.pem", jwt_issuer="i")
    accepted = Credentials.of(settings)
    assert accepted.api_keys == str(tmp_path / "keys.toml")
    assert accepted.jwt_key == str(tmp_path / "pub.pem")
    assert (accepted.jwt_issuer, accepted.jwt_audience) == ("i", "")


@pytest.mark.parametrize("name", ["jwt_algorithms", "jwt_issuer", "jwt_audience"])
@pytest.mark.parametrize("keys", [None, "keys.toml"])
def test_conditions_for_tokens_that_nobody_checks_are_a_mistake(tmp_path, name, keys):
    settings = Settings.load(tmp_path, {}, api_keys=keys, **{name: "RS256"})
    with pytest.raises(
        ConfigError, match=f"{name} is set, but without jwt_key no token is checked"
    ):
        Credentials.of(settings)
