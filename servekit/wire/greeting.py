"""The greeting, without I/O: who is there, which protocol, and proof of the shared secret.

On a socket without a secret each side sends HELLO at once. With one, the server challenges first;
the client proves itself in its HELLO and challenges back; the server proves itself in AUTH. A proof
is HMAC-SHA256 over the prover's side and both nonces, so none can be replayed or reflected.
"""

import hashlib
import hmac
import secrets

import msgspec

from servekit.core.call import Buffer
from servekit.errors import WireError
from servekit.wire.frames import PROTOCOL, Frame, Hello, Kind, encode

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Hello).decode
_NONCE_BYTES = 16


class Greeting:
    """One side's greeting.

    Args:
        own: What the peer is told.
        client: Whether this side connected.
        secret: What both sides must know; empty skips the proof.

    Attributes:
        peer: What the peer told; set once `receive` returned for its HELLO.
        done: Whether calls may flow.
    """

    def __init__(self, own: Hello, *, client: bool, secret: bytes) -> None:
        self._own = own
        self._client = client
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_BYTES) if secret else b""
        self.peer: Hello | None = None
        self.done = False

    def start(self) -> list[Buffer]:
        """Return what to send when the transport is there."""
        return [] if self._client and self._secret else self._hello(b"")

    def receive(self, frame: Frame) -> list[Buffer]:
        """Take a frame of the peer's greeting; returns what to send in answer.

        Raises:
            WireError: It is no greeting, of another protocol, or its proof is wrong.
        """
        kind, _, header, _ = frame
        answer: list[Buffer] = []
        if kind == Kind.HELLO and self.peer is None:
            peer = self.peer = _unpack(header)
            if peer.protocol != PROTOCOL:
                raise WireError(
                    f"the peer speaks protocol {peer.protocol}, this side {PROTOCOL}; "
                    "run the same servekit version on both"
                )
            if peer.nonce and not self._secret:
                raise WireError("the peer wants proof of the app's secret, which this side lacks")
            if self._secret and len(peer.nonce) != _NONCE_BYTES:
                raise WireError("the peer brings no proof that it knows the app's secret")
            if self._secret and self._client:
                return self._hello(self._proof(b"client", peer.nonce, self._nonce))
            if self._secret:
                self._check(peer.proof, self._proof(b"client", self._nonce, peer.nonce))
                proof = self._proof(b"server", peer.nonce, self._nonce)
                answer = encode(Kind.AUTH, 0, proof)
        elif kind == Kind.AUTH and self._secret and self._client and self.peer is not None:
            self._check(header, self._proof(b"server", self._nonce, self.peer.nonce))
        else:
            raise WireError(f"frame of kind {kind} within the greeting")
        self.done = True
        return answer

    def _hello(self, proof: bytes) -> list[Buffer]:
        own = self._own
        hello = Hello(PROTOCOL, own.service, own.replica, own.version, self._nonce, proof)
        return encode(Kind.HELLO, 0, _pack(hello))

    def _proof(self, side: bytes, challenge: bytes, own: bytes) -> bytes:
        return hmac.digest(self._secret, side + challenge + own, hashlib.sha256)

    @staticmethod
    def _check(given: Buffer, wanted: bytes) -> None:
        if not hmac.compare_digest(bytes(given), wanted):
            raise WireError("the peer does not know the app's secret")
