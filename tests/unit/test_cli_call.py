import io
import types

import pytest

from servekit.cli.call import _body, _headers, _url
from servekit.cli.main import run
from servekit.errors import ConfigError


def test_a_body_from_the_command_line_a_file_or_stdin(tmp_path, monkeypatch):
    file = tmp_path / "body.json"
    file.write_text("[1]")
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(b'"in"')))
    assert _body('{"a": 1}', None) == ("application/json", b'{"a": 1}')
    assert _body(f"@{file}", None) == ("application/json", b"[1]")
    assert _body("-", None) == ("application/json", b'"in"')
    assert _body(None, None) == ("application/json", b"")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x.npy", "application/x-npy"),
        ("x.json", "application/json"),
        ("x.msgpack", "application/msgpack"),
        ("x.png", "application/octet-stream"),
    ],
)
def test_a_file_goes_as_it_is(name, kind, tmp_path):
    file = tmp_path / name
    file.write_bytes(b"\x00{")
    assert _body(None, file) == (kind, b"\x00{")


def test_bodies_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="no JSON"):
        _body("{values: 1}", None)
    with pytest.raises(ConfigError, match="give one"):
        _body("1", tmp_path / "x.npy")
    with pytest.raises(ConfigError, match="can't read"):
        _body(None, tmp_path / "missing.npy")
    with pytest.raises(ConfigError, match="can't read"):
        _body("@missing.json", None)


def test_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVEKIT_HOST", "0.0.0.0")
    monkeypatch.setenv("SERVEKIT_PORT", "8080")
    assert _url("predict", None) == "http://127.0.0.1:8080/predict"
    monkeypatch.setenv("SERVEKIT_HOST", "::1")
    assert _url("/a/b", None) == "http://[::1]:8080/a/b"
    assert _url("a", "host:1/") == "http://host:1/a"
    assert _url("a?x=1", "https://host") == "https://host/a?x=1"
    assert _url("https://host/a", None) == "https://host/a"
    with pytest.raises(ConfigError, match="whole URL"):
        _url("http://host/a", "http://host")


def test_headers():
    assert _headers(["X-Key: a:b", "y:"]) == {"x-key": "a:b", "y": ""}
    for wrong in ("nothing", ": x"):
        with pytest.raises(ConfigError, match="NAME:VALUE"):
            _headers([wrong])


def test_nobody_there(capsys):
    assert run(["call", "x", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("error: nothing answers at http://127.0.0.1:1")


def test_no_url_at_all(capsys):
    assert run(["call", "x", "--url", "http://[::1"]) == 1
    assert "is no URL" in capsys.readouterr().err.splitlines()[0]
