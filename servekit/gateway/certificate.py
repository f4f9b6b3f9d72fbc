"""The gateway's certificate: files in, a TLS context out, kept up to date while files change."""

import asyncio
import ssl
from pathlib import Path
from typing import Final, NoReturn

from servekit.core.files import fingerprint
from servekit.errors import ConfigError
from servekit.observe.log import get_logger

_log = get_logger("servekit.gateway")

HANDSHAKE_S: Final = 10.0
"""Longest time that a client has for its handshake."""
_LOOK_EVERY_S: Final = 3.0


class Certificate:
    """A certificate and its key, in two files.

    Args:
        cert: File with the certificate and those between it and the root, in PEM.
        key: File with its key, in PEM.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._cert = Path(cert)
        self._key = Path(key)
        self._live: ssl.SSLContext | None = None
        self._seen = fingerprint(self._cert, self._key)

    def context(self) -> ssl.SSLContext:
        """Return a context for connections from clients.

        Raises:
            ConfigError: A file is missing or holds something else, or the two don't match.
        """
        context = self._live = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # else a client could ask for it on and on
        context.set_alpn_protocols(["http/1.1"])
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        for name, path in (("tls_cert", self._cert), ("tls_key", self._key)):
            try:
                path.read_bytes()
            except OSError as error:
                raise ConfigError(f"{name} = {path}: {error.strerror}") from None

        def password() -> NoReturn:  # without this, OpenSSL would ask at the terminal
            raise ConfigError(
                f"tls_key = {self._key}: the key is encrypted; store it without a pass phrase, in a "
                "file that only the server's user can read"
            )

        try:
            context.load_cert_chain(self._cert, self._key, password)
        except ssl.SSLError as error:
            pair = f"tls_cert = {self._cert}, tls_key = {self._key}"
            if error.reason == "KEY_VALUES_MISMATCH":
                text = "the key is that of another certificate"
            else:
                text = f"need a certificate and its key, both in PEM ({error.reason or error})"
            raise ConfigError(f"{pair}: {text}") from None
        except OSError as error:  # gone since it was read
            raise ConfigError(f"tls_cert = {self._cert}, tls_key = {self._key}: {error}") from None

    # -- changes -----------------------------------------------------------------------------

    async def follow(self) -> NoReturn:
        """Look at the files every few seconds; new connections get what is in them."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.refresh()

    def refresh(self) -> bool:
        """Load the files if they have changed; a pair that can't be used leaves the old one.

        Returns:
            Whether new handshakes have another certificate from now on.
        """
        state = fingerprint(self._cert, self._key)
        if state == self._seen or self._live is None:
            return False
        self._seen = state
        try:
            # Loading is no transaction: what fails half-way must not be the live context.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self._live)
        except ConfigError as error:
            _log.error("new certificate can't be used, the old one stays", cause=str(error))
            return False
        if fingerprint(self._cert, self._key) != state:
            self._seen = None  # written meanwhile: perhaps what was loaded is half of each
        _log.info("certificate loaded again", tls_cert=str(self._cert))
        return True
