"""Certificates for `localhost`, each signed by itself, with their keys, in files."""

import datetime as dt
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from servekit.gateway.certificate import Certificate
from servekit.gateway.edge import Edge


@dataclass
class Pair:
    cert: Path
    key: Path

    def certificate(self) -> Certificate:
        return Certificate(str(self.cert), str(self.key))

    def edge(self, **settings) -> Edge:
        return Edge(tls_cert=str(self.cert), tls_key=str(self.key), **settings)

    def client(self) -> ssl.SSLContext:
        """Return the context of a client that trusts this certificate alone."""
        return ssl.create_default_context(cafile=self.cert)


def make_pair(folder: Path, *, password: bytes | None = None) -> Pair:
    """Write a new pair, over one that is there."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    locked = (
        serialization.NoEncryption()
        if password is None
        else serialization.BestAvailableEncryption(password)
    )
    pair = Pair(folder / "cert.pem", folder / "key.pem")
    pair.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    pair.key.write_bytes(key.private_bytes(*form, locked))
    return pair
