"""JSON Web Tokens (RFC 7519) that someone else signed, checked with PyJWT against keys from a file.

What a token may be signed with is decided by the key, never by the token (RFC 8725, 3.1): a public
key is never taken for a shared secret, and `none` is no algorithm.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec

from servekit.errors import ConfigError, Unauthorized

if TYPE_CHECKING:
    from jwt.algorithms import AllowedPublicKeys

    _Material: TypeAlias = AllowedPublicKeys | bytes

_LEEWAY_S: Final = 30.0
_MAX_KNOWN: Final = 4096
_MAX_NAME: Final = 256
_MIN_RSA_BITS: Final = 2048  # RFC 7518, 3.3
_SECRET: Final = {"HS256": 32, "HS384": 48, "HS512": 64}
"""The fewest bytes of a secret for each (RFC 7518, 3.2)."""
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES: Final = {
    "secp256r1": ("ES256",),
    "secp384r1": ("ES384",),
    "secp521r1": ("ES512",),
    "secp256k1": ("ES256K",),
}
_EDWARDS: Final = ("EdDSA",)
_ALL: Final = (*_SECRET, *_RSA, *(name for names in _CURVES.values() for name in names), *_EDWARDS)


class _SigningKey(NamedTuple):
    """A key, what may be signed with it, and its name in a JWKS."""

    material: "_Material"
    algorithms: tuple[str, ...]
    id: str | None = None


class _Jwks(msgspec.Struct):
    keys: list[dict[str, Any]]


class Tokens:
    """Checks the tokens of one issuer.

    A token that was found good is remembered until it expires, by its hash: checking an RSA
    signature costs 30 to 50 µs, looking it up 2.

    Args:
        path: Holds a public key as PEM, a JWKS (RFC 7517), or a secret for HS256 and its kin, whose
            last line end does not count.
        algorithms: Those to accept; empty is all that the key is good for.
        issuer: What `iss` must be; "" is anything.
        audience: What `aud` must be or contain; "" is anything.
        clock: Seconds since 1970.

    Raises:
        ConfigError: PyJWT is missing, or the file can't be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        algorithms: Sequence[str] = (),
        issuer: str = "",
        audience: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = _read(path, algorithms)
        self._issuer = issuer or None
        self._audience = audience or None
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def check(self, token: bytes) -> str:
        """Return the subject of a token: the caller's name.

        Raises:
            Unauthorized: It is no good, and why.
        """
        digest = hashlib.sha256(token).digest()
        if (found := self._known.get(digest)) is not None:
            if self._clock() < found[1]:
                self._known.move_to_end(digest)
                return found[0]
            del self._known[digest]
        self._known[digest] = caller, _ = self._verified(token)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return caller

    def _verified(self, token: bytes) -> tuple[str, float]:
        """Return the subject of a token, and when it expires."""
        import jwt  # noqa: PLC0415

        try:
            header = jwt.get_unverified_header(token)
            if "crit" in header:
                raise _invalid("it demands extensions (crit) that are not known here")
            claims = jwt.decode(
                token,
                self._choose(header.get("alg"), header.get("kid")),
                algorithms=[header["alg"]],
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "sub"], "verify_aud": self._audience is not None},
            )
            caller: str = claims["sub"]
            if not caller or len(caller) > _MAX_NAME or not caller.isprintable():
                raise _invalid(
                    f"its subject (sub) is empty, not printable or over {_MAX_NAME} characters long"
                )
            return caller, float(claims["exp"])
        except Unauthorized:
            raise
        except jwt.ExpiredSignatureError:
            raise Unauthorized(
                "the token has expired; get a new one", reason="expired_credentials", started=False
            ) from None
        except jwt.MissingRequiredClaimError as error:
            raise _invalid(f"it has no claim {error.claim!r}") from None
        except jwt.InvalidAudienceError:
            raise _invalid("it is for another audience (aud)") from None
        except jwt.InvalidIssuerError:
            raise _invalid("it is from another issuer (iss)") from None
        except (jwt.ImmatureSignatureError, jwt.InvalidIssuedAtError):
            raise _invalid("it is not good yet (nbf, iat)") from None
        except Exception:  # noqa: BLE001  (whatever a stranger's bytes make a parser raise)
            raise _invalid("it can't be read, or its signature is wrong") from None

    def _choose(self, algorithm: object, id_: object) -> "_Material":
        """Return the key that a token says it was signed with; its word is checked by using it."""
        fitting = [key for key in self._keys if algorithm in key.algorithms]
        if not fitting:
            raise _invalid("its algorithm is not accepted here")
        if id_ is not None:
            fitting = [key for key in fitting if key.id in (None, id_)]
        if len(fitting) != 1:
            raise _invalid("its key (kid) is not known here")
        return fitting[0].material


def _invalid(why: str) -> Unauthorized:
    return Unauthorized(
        f"the token is not accepted: {why}", reason="invalid_credentials", started=False
    )


# -- the file -------------------------------------------------------------------------------------


def _read(path: Path, algorithms: Sequence[str]) -> tuple[_SigningKey, ...]:
    try:
        import jwt  # noqa: F401, PLC0415  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise ConfigError(
            "jwt_key needs PyJWT and cryptography, which are not installed: "
            "pip install 'servekit[auth]'"
        ) from None
    where = f"jwt_key: {path}"
    for name in algorithms:
        if name not in _ALL:
            raise ConfigError(f"jwt_algorithms: {name!r} is none of {', '.join(_ALL)}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"jwt_key: can't read {path}: {error.strerror}") from None
    keys = _parse(content, where)
    allowed = [
        key._replace(algorithms=tuple(n for n in key.algorithms if n in (algorithms or _ALL)))
        for key in keys
    ]
    usable = tuple(key for key in allowed if key.algorithms)
    if not usable:
        good_for = sorted({name for key in keys for name in key.algorithms})
        raise ConfigError(
            f"jwt_algorithms: {', '.join(algorithms)} can't be used with the key in {path}, which "
            f"is good for {', '.join(good_for)}"
        )
    return usable


def _parse(content: bytes, where: str) -> list[_SigningKey]:
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    text = content.strip()
    if text.startswith(b"-----BEGIN"):
        if b"PRIVATE KEY" in text:
            raise ConfigError(
                f"{where}: is a private key; give the public one, this process needs no other"
            )
        try:
            public = serialization.load_pem_public_key(text)
        except Exception:  # noqa: BLE001  (whatever the parser raises, it is no key)
            raise ConfigError(
                f"{where}: is no public key as PEM; it must begin with -----BEGIN PUBLIC KEY-----"
            ) from None
        return [_SigningKey(public, _algorithms(public, where))]  # type: ignore[arg-type]
    if text.startswith(b"{"):
        return _parse_jwks(text, where)
    secret = content.rstrip(b"\r\n")
    if _is_public(secret):
        raise ConfigError(f"{where}: is a public key, but not as PEM; convert it")
    return [_SigningKey(secret, _algorithms(secret, where))]


def _parse_jwks(text: bytes, where: str) -> list[_SigningKey]:
    import jwt  # noqa: PLC0415

    try:
        members = msgspec.json.decode(text, type=_Jwks).keys
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: is no JWKS (RFC 7517): {error}") from None
    keys: list[_SigningKey] = []
    for number, member in enumerate(members, start=1):
        if member.get("use", "sig") != "sig":
            continue
        try:
            key = jwt.PyJWK(member)
        except Exception:  # noqa: BLE001, S112  (of a kind not known here: RFC 7517, 5)
            continue
        algorithms = _algorithms(key.key, f"{where}: key {number}")
        if "alg" in member:
            algorithms = tuple(name for name in algorithms if name == member["alg"])
        keys.append(_SigningKey(key.key, algorithms, key.key_id))
    if not any(key.algorithms for key in keys):
        raise ConfigError(f"{where}: has no key for signatures that is known here")
    return keys


def _algorithms(key: object, where: str) -> tuple[str, ...]:
    """Return what a key may have signed with; a private one is refused."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa  # noqa: PLC0415

    if isinstance(key, bytes):
        good_for = tuple(name for name, size in _SECRET.items() if len(key) >= size)
        if not good_for:
            raise ConfigError(
                f"{where}: is a secret of {len(key)} bytes; need {_SECRET['HS256']} or more: "
                "openssl rand -hex 32"
            )
        return good_for
    if isinstance(key, rsa.RSAPublicKey):
        if key.key_size < _MIN_RSA_BITS:
            raise ConfigError(
                f"{where}: is an RSA key of {key.key_size} bits; need {_MIN_RSA_BITS} or more"
            )
        return _RSA
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return _CURVES[key.curve.name]
    if isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
        return _EDWARDS
    raise ConfigError(
        f"{where}: is a {type(key).__name__}; need a public key for RSA, ECDSA or EdDSA signatures"
    )


def _is_public(secret: bytes) -> bool:
    """Whether bytes are a public key in another form; whoever has it could sign with it."""
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    for load in (serialization.load_der_public_key, serialization.load_ssh_public_key):
        try:
            load(secret)
        except Exception:  # noqa: BLE001, S112  (then it is none)
            continue
        return True
    return False
