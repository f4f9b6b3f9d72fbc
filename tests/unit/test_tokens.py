"""Tokens that someone else signed: good ones, and every way to forge one."""

import base64
import hashlib
import hmac
import json
import time

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import ConfigError, Unauthorized
from servekit.gateway import tokens as tokens_module
from servekit.gateway.tokens import Tokens

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
P256 = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
SECRET = b"s" * 64


def pem(private) -> bytes:
    return private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def der(private) -> bytes:
    return private.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def private_pem(private) -> bytes:
    return private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def jwk(private, kid: str | None = None, **more: str) -> dict[str, object]:
    algorithm = jwt.get_algorithm_by_name("RS256" if private in (RSA, OTHER_RSA) else "ES256")
    made = json.loads(algorithm.to_jwk(private.public_key()))
    made.pop("key_ops", None)
    return made | ({} if kid is None else {"kid": kid}) | more


def jwks(*keys: dict[str, object]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def token(key=RSA, algorithm: str = "RS256", headers=None, **claims: object) -> bytes:
    claims = {"sub": "eve", "exp": time.time() + 600} | claims
    claims = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(claims, key, algorithm, headers=headers).encode()


def b64(value: bytes | dict[str, object]) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=")


@pytest.fixture
def checks(tmp_path):
    """Return `checks(content)`: what checks tokens with a file of that content."""

    def make(content: bytes, **settings) -> Tokens:
        path = tmp_path / "key"
        path.write_bytes(content)
        return Tokens(path, **settings)

    return make


def refused(tokens: Tokens, text: bytes) -> str:
    """Return why a token is refused; the reason never tells the token."""
    with pytest.raises(Unauthorized) as caught:
        tokens.check(text)
    error = caught.value
    assert not error.started
    for part in text.split(b"."):
        assert len(part) < 8 or part.decode("latin-1") not in error.message
    if error.reason == "expired_credentials":
        return "expired"
    assert error.reason == "invalid_credentials"
    return error.message.removeprefix("the token is not accepted: ")


# -- good ones


@pytest.mark.parametrize(
    ("content", "key", "algorithm"),
    [
        (pem(RSA), RSA, "RS256"),
        (pem(RSA), RSA, "PS512"),
        (pem(P256), P256, "ES256"),
        (pem(ED), ED, "EdDSA"),
        (b"\n" + pem(RSA) + b"\n\n", RSA, "RS384"),
        (SECRET, SECRET, "HS256"),
        (SECRET + b"\r\n", SECRET, "HS512"),
        (jwks(jwk(P256)), P256, "ES256"),
        (jwks(jwk(RSA, "a"), jwk(P256, "b")), RSA, "RS256"),
    ],
)
def test_a_good_token_names_its_caller(checks, content, key, algorithm):
    tokens = checks(content)
    assert tokens.check(token(key, algorithm)) == "eve"
    assert tokens.check(token(key, algorithm, sub="Zoë @ home")) == "Zoë @ home"


def test_all_conditions_are_met(checks):
    tokens = checks(pem(RSA), issuer="https://idp", audience="app")
    assert tokens.check(token(iss="https://idp", aud="app")) == "eve"
    assert tokens.check(token(iss="https://idp", aud=["x", "app"])) == "eve"


def test_without_an_audience_any_will_do(checks):
    assert checks(pem(RSA)).check(token(aud="somebody", iss="else")) == "eve"


def test_clocks_may_differ_by_half_a_minute(checks):
    tokens = checks(pem(RSA))
    now = time.time()
    assert tokens.check(token(exp=now - 15)) == "eve"
    assert tokens.check(token(nbf=now + 15, iat=now + 15)) == "eve"


# -- claims


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": time.time() - 3600}, "expired"),
        ({"exp": 0}, "expired"),
        ({"exp": None}, "it has no claim 'exp'"),
        ({"sub": None}, "it has no claim 'sub'"),
        ({"sub": ""}, "its subject (sub) is empty"),
        ({"sub": "x" * 257}, "its subject (sub) is empty"),
        ({"sub": "a\nb"}, "its subject (sub) is empty"),
        ({"aud": "other"}, "it is for another audience"),
        ({"aud": ["x", "y"]}, "it is for another audience"),
        ({"aud": "ap"}, "it is for another audience"),
        ({"aud": None}, "it has no claim 'aud'"),
        ({"iss": "https://id"}, "it is from another issuer"),
        ({"iss": "https://idp/"}, "it is from another issuer"),
        ({"iss": None}, "it has no claim 'iss'"),
        ({"nbf": time.time() + 3600}, "it is not good yet"),
        ({"iat": time.time() + 3600}, "it is not good yet"),
    ],
)
def test_claims_that_are_not_accepted(checks, claims, why):
    tokens = checks(pem(RSA), issuer="https://idp", audience="app")
    given = {"iss": "https://idp", "aud": "app"} | claims
    assert refused(tokens, token(**given)).startswith(why)


@pytest.mark.parametrize("exp", ["soon", True, [], 10**400, "1e400", -1, {}])
@pytest.mark.parametrize("sub", ["eve", 7, ["eve"], {}])
def test_claims_of_odd_types(checks, exp, sub):
    """From an issuer that we trust, but may be mistaken."""
    head, body = b64({"alg": "HS256"}), b64({"sub": sub, "exp": exp})
    signature = b64(hmac.digest(SECRET, head + b"." + body, "sha256"))
    assert refused(checks(SECRET), head + b"." + body + b"." + signature)


# -- forged ones


def unsigned(header: dict[str, object], signature: bytes = b"") -> bytes:
    claims = {"sub": "eve", "exp": time.time() + 600}
    return b".".join([b64(header), b64(claims), b64(signature)])


@pytest.mark.parametrize("content", [pem(RSA), SECRET, jwks(jwk(RSA, "a"))])
@pytest.mark.parametrize(
    "algorithm", ["none", "None", "NONE", "nOnE", "", None, 7, [], {}, "RS256"]
)
@pytest.mark.parametrize("signature", [b"", b"x" * 256])
def test_an_unsigned_token(checks, content, algorithm, signature):
    assert refused(checks(content), unsigned({"alg": algorithm}, signature))
    assert refused(checks(content), unsigned({}, signature))


@pytest.mark.parametrize("content", [pem(RSA), jwks(jwk(RSA)), jwks(jwk(RSA, "a", alg="RS256"))])
@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
@pytest.mark.parametrize("public", [pem(RSA), pem(RSA).strip(), der(RSA)])
def test_a_public_key_is_no_secret(checks, content, algorithm, public):
    """Algorithm confusion: the public key, which everybody has, used as a secret."""
    head = b64({"alg": algorithm, "kid": "a"})
    body = b64({"sub": "eve", "exp": time.time() + 600})
    hash_ = getattr(hashlib, algorithm.replace("HS", "sha"))
    signature = b64(hmac.new(public, head + b"." + body, hash_).digest())
    why = refused(checks(content), head + b"." + body + b"." + signature)
    assert why == "its algorithm is not accepted here"


def test_another_key(checks):
    for content in (pem(RSA), jwks(jwk(RSA, "a"))):
        assert "signature is wrong" in refused(checks(content), token(OTHER_RSA))


def test_the_key_is_chosen_by_its_id(checks):
    tokens = checks(jwks(jwk(RSA, "a"), jwk(OTHER_RSA, "b")))
    assert tokens.check(token(RSA, headers={"kid": "a"})) == "eve"
    assert tokens.check(token(OTHER_RSA, headers={"kid": "b"})) == "eve"
    assert "signature is wrong" in refused(tokens, token(RSA, headers={"kid": "b"}))
    for headers in (None, {"kid": "c"}, {"kid": "../../dev/null"}, {"kid": "A"}):
        assert refused(tokens, token(RSA, headers=headers)) == "its key (kid) is not known here"


def test_a_key_that_comes_with_its_token_is_not_believed(checks):
    headers = {"jwk": jwk(OTHER_RSA), "jku": "https://evil", "x5u": "https://evil"}
    assert "signature is wrong" in refused(checks(pem(RSA)), token(OTHER_RSA, headers=headers))


def test_demands_that_are_not_known_are_refused(checks):
    for headers in ({"crit": ["exp"], "exp": 1}, {"crit": ["b64"], "b64": True}, {"crit": []}):
        assert refused(checks(pem(RSA)), token(headers=headers))


def test_what_was_changed_behind_the_signature(checks):
    tokens, good = checks(pem(RSA)), token()
    head, body, signature = good.split(b".")
    other = b64({"sub": "root", "exp": time.time() + 600})
    assert refused(tokens, b".".join([head, other, signature]))
    assert refused(tokens, b".".join([b64({"alg": "PS256"}), body, signature]))
    assert tokens.check(good) == "eve"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b".",
        b"..",
        b"...",
        b"a.b.c",
        b"\xff.\xff.\xff",
        b"sk_abcd1234_secret",
        b64(b"[" * 45_000) + b".." + b"x",
        b64(b'{"alg":' * 5_000) + b".e30.x",
        b64({"alg": "RS256", "kid": {"a": 1}}) + b".e30.AAAA",
        b64({"alg": "RS256", "b64": False}) + b".e30.AAAA",
        b64(b'"text"') + b".e30.AAAA",
        b64({"alg": "RS256", "enc": "A128GCM"}) + b".a.b.c.d",
    ],
)
def test_garbage(checks, text):
    assert refused(checks(pem(RSA)), text)


@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.pem"
    path.write_bytes(pem(P256))
    assert refused(Tokens(path), text)


# -- what is remembered


@pytest.fixture
def verified(monkeypatch):
    """Count the tokens whose signature was looked at."""
    seen = []
    verify = Tokens._verified

    def count(self, text):
        seen.append(text)
        return verify(self, text)

    monkeypatch.setattr(Tokens, "_verified", count)
    return seen


def test_a_good_token_is_verified_once_until_it_expires(checks, verified):
    clock = time.time()
    tokens = checks(pem(RSA), clock=lambda: clock)
    text = token(exp=clock + 100)
    for _ in range(5):
        assert tokens.check(text) == "eve"
    assert len(verified) == 1
    clock += 100
    tokens.check(text)  # PyJWT has a clock of its own
    assert len(verified) == 2


def test_a_bad_token_is_not_remembered(checks, verified):
    tokens = checks(pem(RSA))
    bad = token(OTHER_RSA)
    for _ in range(3):
        assert refused(tokens, bad)
    assert len(verified) == 3
    assert not tokens._known


def test_memory_is_bounded(checks, monkeypatch, verified):
    monkeypatch.setattr(tokens_module, "_MAX_KNOWN", 2)
    tokens = checks(SECRET)
    a, b, c = (token(SECRET, "HS256", sub=name) for name in "abc")
    for text in (a, b, a, c):  # b was not seen for longest
        tokens.check(text)
    assert len(tokens._known) == 2
    assert len(verified) == 3
    tokens.check(a)
    assert len(verified) == 3
    tokens.check(b)
    assert len(verified) == 4


# -- the file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is a secret of 0 bytes; need 32 or more: openssl rand -hex 32"),
        (b"short\n", "is a secret of 5 bytes"),
        (private_pem(RSA), "is a private key; give the public one"),
        (b"-----BEGIN PUBLIC KEY-----\nxx\n-----END PUBLIC KEY-----", "is no public key as PEM"),
        (b"-----BEGIN CERTIFICATE-----\nxx", "is no public key as PEM"),
        (
            pem(rsa.generate_private_key(public_exponent=65537, key_size=1024)),
            "of 1024 bits; need 2048",
        ),
        (pem(ec.generate_private_key(ec.SECP224R1())), "need a public key for RSA, ECDSA or EdDSA"),
        (der(RSA), "is a public key, but not as PEM"),
        (
            RSA.public_key().public_bytes(
                serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            ),
            "is a public key, but not as PEM",
        ),
        (b'{"keys": [}', "is no JWKS (RFC 7517): JSON is malformed"),
        (
            json.dumps(jwk(RSA)).encode(),
            "is no JWKS (RFC 7517): Object missing required field `keys`",
        ),
        (b'{"keys": 1}', "is no JWKS"),
        (b'{"keys": [1]}', "is no JWKS"),
        (jwks(), "has no key for signatures"),
        (jwks({"kty": "odd"}), "has no key for signatures"),
        (jwks(jwk(RSA, use="enc")), "has no key for signatures"),
        (jwks(jwk(RSA, alg="RSA-OAEP")), "has no key for signatures"),
        (jwks({"kty": "oct", "k": "c2hvcnQ"}), "key 1: is a secret of 5 bytes"),
        (
            jwks(json.loads(jwt.get_algorithm_by_name("RS256").to_jwk(RSA))),
            "key 1: is a RSAPrivateKey; need a public key",
        ),
    ],
)
def test_files_that_cannot_be_used(checks, content, message):
    with pytest.raises(ConfigError, match=r"^jwt_key: .*key: ") as caught:
        checks(content)
    assert message in str(caught.value)


def test_keys_that_are_not_known_are_passed_over(checks):
    tokens = checks(jwks({"kty": "odd"}, jwk(OTHER_RSA, "a", use="enc"), jwk(RSA, "a")))
    assert tokens.check(token(headers={"kid": "a"})) == "eve"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="jwt_key: can't read .*nothing: No such file"):
        Tokens(tmp_path / "nothing")


@pytest.mark.parametrize("algorithms", [("none",), ("None",), ("RS256", "none"), ("RS257",), ("",)])
def test_algorithms_that_are_none(checks, algorithms):
    with pytest.raises(ConfigError, match=r"^jwt_algorithms: .* is none of HS256, HS384"):
        checks(pem(RSA), algorithms=algorithms)


@pytest.mark.parametrize(
    ("content", "algorithms"),
    [
        (pem(RSA), ("HS256",)),
        (pem(RSA), ("ES256", "EdDSA")),
        (jwks(jwk(RSA)), ("HS512",)),
        (SECRET, ("RS256",)),
        (SECRET[:32], ("HS512",)),
    ],
)
def test_algorithms_that_do_not_fit_the_key(checks, content, algorithms):
    with pytest.raises(ConfigError, match=r"^jwt_algorithms: .* can't be used with the key in"):
        checks(content, algorithms=algorithms)


def test_only_the_algorithms_that_are_allowed(checks):
    tokens = checks(pem(RSA), algorithms=("PS256", "HS256"))
    assert tokens.check(token(algorithm="PS256")) == "eve"
    assert refused(tokens, token(algorithm="RS256")) == "its algorithm is not accepted here"


def test_without_pyjwt_it_says_what_to_install(checks, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jwt", None)
    with pytest.raises(ConfigError, match=r"pip install 'servekit\[auth\]'"):
        checks(SECRET)
