"""The certificate's files: what is wrong with them is said, and what changes is taken over."""

import os
import ssl
from pathlib import Path

import pytest

from servekit.errors import ConfigError
from tests.pairs import make_pair


def other(folder):
    (folder / "other").mkdir()
    return make_pair(folder / "other")


def test_a_good_pair(tmp_path):
    context = make_pair(tmp_path).certificate().context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pair: pair.cert.unlink(), r"tls_cert = .*cert\.pem: No such file"),
        (lambda pair: pair.key.unlink(), r"tls_key = .*key\.pem: No such file"),
        (lambda pair: (pair.key.unlink(), pair.key.mkdir()), "tls_key = .*: Is a directory"),
        (lambda pair: pair.cert.write_text("no"), r"tls_cert = .*cert\.pem, .*both in PEM"),
        (lambda pair: pair.key.write_bytes(b"\xff"), r"tls_key = .*key\.pem: .*both in PEM"),
        (lambda pair: pair.key.write_bytes(pair.cert.read_bytes()), "both in PEM"),
        (lambda pair: pair.cert.write_text(""), "both in PEM"),
        (
            lambda pair: other(pair.key.parent).key.rename(pair.key),
            r"cert\.pem, .*key\.pem: the key is that of another certificate",
        ),
        (
            lambda pair: make_pair(pair.key.parent, password=b"secret"),
            r"tls_key = .*key\.pem: the key is encrypted; store it without",
        ),
    ],
)
def test_mistakes_are_named(tmp_path, spoil, message):
    pair = make_pair(tmp_path)
    spoil(pair)
    with pytest.raises(ConfigError, match=message):
        pair.certificate().context()


def shown(context: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    """Shake hands in memory; returns whether the client trusts what it is shown."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    visitor = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    waits = {server, visitor}
    for side in [visitor, server] * 4:
        try:
            side.do_handshake()
            waits.discard(side)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError:
            return False
    assert not waits
    return True


def test_a_new_pair_is_taken_over(tmp_path):
    pair = make_pair(tmp_path)
    certificate, old = pair.certificate(), pair.client()
    context = certificate.context()
    assert not certificate.refresh()
    assert shown(context, old)
    make_pair(tmp_path)
    assert certificate.refresh()
    assert not shown(context, old)
    assert shown(context, pair.client())
    assert not certificate.refresh()


@pytest.mark.parametrize("spoil", ["cut", "gone", "mismatch", "encrypted"])
def test_a_broken_pair_leaves_the_old_one(tmp_path, caplog, spoil):
    pair = make_pair(tmp_path)
    certificate, old = pair.certificate(), pair.client()
    context = certificate.context()
    before = pair.cert.read_bytes(), pair.key.read_bytes()
    if spoil == "cut":
        pair.cert.write_bytes(before[0][:100])
    elif spoil == "gone":
        pair.key.unlink()
    elif spoil == "mismatch":
        pair.cert.write_bytes(other(tmp_path).cert.read_bytes())
    else:
        make_pair(tmp_path, password=b"secret")
    assert not certificate.refresh()
    assert "the old one stays" in caplog.text
    assert shown(context, old)
    caplog.clear()
    assert not certificate.refresh()
    assert not caplog.text  # it is said once
    make_pair(tmp_path)
    assert certificate.refresh()
    assert shown(context, pair.client())


def test_a_file_that_goes_while_it_is_loaded(tmp_path, monkeypatch):
    pair = make_pair(tmp_path)
    certificate, old = pair.certificate(), pair.client()
    context = certificate.context()
    make_pair(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", lambda path: path.unlink(missing_ok=True))
        assert not certificate.refresh()
    assert shown(context, old)
    make_pair(tmp_path)
    assert certificate.refresh()
    assert shown(context, pair.client())


def test_the_two_files_may_change_one_after_the_other(tmp_path):
    pair = make_pair(tmp_path)
    certificate = pair.certificate()
    context = certificate.context()
    new = other(tmp_path)
    os.replace(new.cert, pair.cert)
    assert not certificate.refresh()
    os.replace(new.key, pair.key)
    assert certificate.refresh()
    assert shown(context, pair.client())


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path):
    """So Kubernetes does it, for both files at once."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_pair(tmp_path / name)
    (tmp_path / "now").symlink_to("one")
    (tmp_path / "new").symlink_to("two")
    pair = make_pair(tmp_path / "now")
    certificate = pair.certificate()
    context = certificate.context()
    os.replace(tmp_path / "new", tmp_path / "now")
    assert certificate.refresh()
    assert shown(context, pair.client())
