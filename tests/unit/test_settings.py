"""Where settings come from, and what they refuse."""

import dataclasses
from pathlib import Path

import pytest

from servekit.errors import ConfigError
from servekit.settings import SOCKET_PATH_BYTES, SOCKET_ROOM_BYTES, Settings


def load(tmp_path, env=None, **overrides):
    return Settings.load(tmp_path, env or {}, **overrides)


def test_defaults(tmp_path):
    assert load(tmp_path) == Settings()
    assert dataclasses.asdict(Settings()) == {
        "log_level": "info",
        "log_format": "console",
        "engine": "local",
        "ray_address": None,
        "gateway_nodes": (),
        "host": "127.0.0.1",
        "port": 3000,
        "gateway_workers": 1,
        "handover_dir": None,
        "jobs_dir": Path(".servekit"),
        "cache_dir": Path(".servekit/cache"),
        "models_dir": None,
        "bundle_dir": None,
        "offline": False,
        "runtime_dir": Path("/tmp"),
        "gpus": None,
        "cuda_visible_devices": None,
        "drain_delay_s": 5.0,
        "drain_s": 20.0,
        "start_timeout_s": 600.0,
        "start_parallel": None,
        "api_keys": None,
        "jwt_key": None,
        "jwt_algorithms": (),
        "jwt_issuer": None,
        "jwt_audience": None,
        "tls_cert": None,
        "tls_key": None,
        "cors_origins": (),
        "cors_credentials": False,
        "gzip_min_bytes": None,
        "max_connections": 10_000,
        "max_connections_per_address": 0,
        "max_bodies": None,
    }


def test_each_source_beats_the_one_before(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\n[tool.servekit]\n'
        'port = 1\nhost = "pyproject"\nlog_level = "debug"\ndrain_s = 1\ngpus = 1\n'
    )
    (tmp_path / "servekit.toml").write_text('port = 2\nhost = "toml"\nlog_level = "error"\n')
    env = {"SERVEKIT_PORT": "3", "SERVEKIT_HOST": "env"}
    settings = load(tmp_path, env, port=4, host=None)
    assert settings.port == 4
    assert settings.host == "env"
    assert settings.log_level == "error"
    assert settings.drain_s == 1.0
    assert settings.gpus == 1


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("SERVEKIT_LOG_LEVEL", "WARNING", "log_level", "warning"),
        ("SERVEKIT_LOG_FORMAT", "json", "log_format", "json"),
        ("SERVEKIT_HOST", "0.0.0.0", "host", "0.0.0.0"),
        ("SERVEKIT_PORT", "0", "port", 0),
        ("SERVEKIT_RUNTIME_DIR", "/run/x", "runtime_dir", Path("/run/x")),
        ("SERVEKIT_JOBS_DIR", "var/jobs", "jobs_dir", Path("var/jobs")),
        ("SERVEKIT_GPUS", "2", "gpus", 2),
        ("SERVEKIT_DRAIN_S", "2.5", "drain_s", 2.5),
        ("SERVEKIT_START_TIMEOUT_S", "10", "start_timeout_s", 10.0),
        ("SERVEKIT_API_KEYS", "keys.toml", "api_keys", Path("keys.toml")),
        ("SERVEKIT_JWT_KEY", "/k/pub.pem", "jwt_key", Path("/k/pub.pem")),
        ("SERVEKIT_JWT_ALGORITHMS", "RS256, ES256", "jwt_algorithms", ("RS256", "ES256")),
        ("SERVEKIT_JWT_ISSUER", "https://idp", "jwt_issuer", "https://idp"),
        ("SERVEKIT_TLS_CERT", "a/cert.pem", "tls_cert", Path("a/cert.pem")),
        ("SERVEKIT_TLS_KEY", "/key.pem", "tls_key", Path("/key.pem")),
        ("SERVEKIT_CORS_ORIGINS", "*", "cors_origins", ("*",)),
        (
            "SERVEKIT_CORS_ORIGINS",
            "https://A.example, http://localhost:5173,capacitor://app,http://[::1]:8081",
            "cors_origins",
            ("https://a.example", "http://localhost:5173", "capacitor://app", "http://[::1]:8081"),
        ),
        ("SERVEKIT_CORS_CREDENTIALS", "True", "cors_credentials", True),
        ("SERVEKIT_CORS_CREDENTIALS", "0", "cors_credentials", False),
        ("SERVEKIT_GZIP_MIN_BYTES", "4096", "gzip_min_bytes", 4096),
        ("SERVEKIT_MAX_CONNECTIONS", "7", "max_connections", 7),
        ("SERVEKIT_MAX_CONNECTIONS_PER_ADDRESS", "3", "max_connections_per_address", 3),
        ("SERVEKIT_MAX_BODIES", "1048576", "max_bodies", 1 << 20),
        ("CUDA_VISIBLE_DEVICES", "0,1", "cuda_visible_devices", "0,1"),
        ("CUDA_VISIBLE_DEVICES", "", "cuda_visible_devices", ""),
    ],
)
def test_every_variable_is_read(tmp_path, variable, text, name, value):
    assert getattr(load(tmp_path, {variable: text, "OTHER": "x"}), name) == value


def test_an_empty_variable_is_not_set(tmp_path):
    assert load(tmp_path, {"SERVEKIT_PORT": ""}).port == 3000


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"SERVEKIT_PROT": "1"},
            "environment: there is no setting 'SERVEKIT_PROT'. Did you mean 'SERVEKIT_PORT'?",
        ),
        (
            {"SERVEKIT_PORT": "http"},
            "environment: SERVEKIT_PORT = 'http': need a whole number from 0 to 65535",
        ),
        (
            {"SERVEKIT_PORT": "65536"},
            "environment: SERVEKIT_PORT = '65536': need a whole number from 0 to 65535",
        ),
        (
            {"SERVEKIT_LOG_FORMAT": "xml"},
            "environment: SERVEKIT_LOG_FORMAT = 'xml': need one of console, json",
        ),
        (
            {"SERVEKIT_DRAIN_S": "-1"},
            "environment: SERVEKIT_DRAIN_S = '-1': need a number of seconds, 0 or more",
        ),
        (
            {"SERVEKIT_DRAIN_S": "nan"},
            "environment: SERVEKIT_DRAIN_S = 'nan': need a number of seconds, 0 or more",
        ),
        (
            {"SERVEKIT_RUNTIME_DIR": "run"},
            "environment: SERVEKIT_RUNTIME_DIR = 'run': need an absolute path",
        ),
    ],
)
def test_mistakes_in_the_environment_are_named(tmp_path, env, message):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, env)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "a.example",
        "https://",
        "https://a.example/",
        "https://a.example/path",
        "https://a.example?",
        "https://user@a.example",
        "https://a.example:port",
        "https://a b",
        "https://a\r\nx: y",
        "https://é.example",
        "https://a.example,",
        "https://*.example",
        "https://a.example:443",
        "http://a.example:80",
        "*, https://a.example",
        "null",
    ],
)
def test_what_is_no_origin(tmp_path, text):
    with pytest.raises(ConfigError, match="environment: SERVEKIT_CORS_ORIGINS = "):
        load(tmp_path, {"SERVEKIT_CORS_ORIGINS": text})


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("servekit.toml", "cors_origins = 1", "cors_origins = 1: need origins"),
        ("servekit.toml", "cors_origins = [1]", "1 is no origin"),
        ("servekit.toml", "cors_credentials = 'yes'", "'yes': need true or false"),
        ("servekit.toml", "cors_credentials = 1", "1: need true or false"),
        ("servekit.toml", "tls_cert = 1", "tls_cert = 1: need the path of a file"),
        ("servekit.toml", "max_connections = 0", "need a whole number from 1"),
        ("servekit.toml", "prot = 1", "there is no setting 'prot'. Did you mean 'port'?"),
        ("servekit.toml", "port = true", "port = True: need a whole number from 0 to 65535"),
        ("servekit.toml", "port = 1.5", "port = 1.5: need a whole number from 0 to 65535"),
        ("servekit.toml", "drain_s = false", "drain_s = False: need a number of seconds"),
        ("servekit.toml", "drain_s = []", "drain_s = []: need a number of seconds"),
        ("servekit.toml", "host = 1", "host = 1: need text"),
        ("servekit.toml", "gpus = {}", "gpus = {}: need a whole number from 0 to 1024"),
        ("servekit.toml", "api_keys = ''", "api_keys = '': need the path of a file"),
        ("servekit.toml", "jwt_key = 1", "jwt_key = 1: need the path of a file"),
        ("servekit.toml", "jwt_algorithms = 'a,,b'", "need words, separated by commas"),
        ("servekit.toml", "jwt_algorithms = [1]", "jwt_algorithms = [1]: need words"),
        ("servekit.toml", "jwt_algorithms = 1", "jwt_algorithms = 1: need words"),
        ("servekit.toml", "cuda_visible_devices = 1", "cuda_visible_devices = 1: need text"),
        ("servekit.toml", "port =", "Invalid value"),
        ("pyproject.toml", "[tool.servekit]\nhots = 'x'", "Did you mean 'host'?"),
        ("pyproject.toml", "[tool]\nservekit = 1", "'servekit' must be a table"),
    ],
)
def test_mistakes_in_files_are_named_with_the_file(tmp_path, file, text, message):
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / file}: ")
    assert message in str(caught.value)


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "servekit.toml").write_bytes(b"host = '\xff'")
    with pytest.raises(ConfigError, match=r"servekit\.toml: .*utf-8"):
        load(tmp_path)


def test_mistakes_on_the_command_line_are_named(tmp_path):
    with pytest.raises(ConfigError, match="command line: there is no setting 'prot'"):
        load(tmp_path, prot=1)
    with pytest.raises(ConfigError, match="command line: port = -1: need"):
        load(tmp_path, port=-1)


def test_a_pyproject_without_a_table_is_fine(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert load(tmp_path) == Settings()


def test_the_runtime_dir_leaves_room_for_sockets(tmp_path):
    longest = SOCKET_PATH_BYTES - SOCKET_ROOM_BYTES
    assert load(tmp_path, runtime_dir="/" + "x" * (longest - 1))
    with pytest.raises(ConfigError, match=f"at most {longest} bytes"):
        load(tmp_path, runtime_dir="/" + "é" * (longest // 2 + 1))


def test_the_runtime_dir_is_the_first_usual_one_that_will_do(tmp_path):
    short = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/")
    env = {"XDG_RUNTIME_DIR": str(short), "TMPDIR": "/var"}
    assert load(tmp_path, env).runtime_dir == short
    long = tmp_path / ("x" * 80)
    long.mkdir()
    for unfit in ("/does/not/exist", "relative", str(long)):
        assert load(tmp_path, {"XDG_RUNTIME_DIR": unfit, "TMPDIR": "/var"}).runtime_dir == Path(
            "/var"
        )
    assert load(tmp_path, {"XDG_RUNTIME_DIR": "", "TMPDIR": ""}).runtime_dir == Path("/tmp")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/servekit"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/caches"}, "/caches/servekit"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "caches"}, "/home/me/.cache/servekit"),
        ({"HOME": "/home/me", "SERVEKIT_CACHE_DIR": "/mine"}, "/mine"),
        ({}, ".servekit/cache"),
    ],
)
def test_the_cache_is_where_users_have_theirs(tmp_path, env, expected):
    assert load(tmp_path, env).cache_dir == Path(expected)


def test_the_process_is_read_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVEKIT_PORT", "4321")
    assert Settings.load().port == 4321


def test_origins_may_be_a_list(tmp_path):
    (tmp_path / "servekit.toml").write_text('cors_origins = ["https://a.example", "http://b:1"]')
    assert load(tmp_path).cors_origins == ("https://a.example", "http://b:1")


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = 1
