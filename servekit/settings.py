"""Settings of the process, and the only place that reads the environment.

Each value comes from the last of these that has it: the default below, `[tool.servekit]` of
`pyproject.toml`, `servekit.toml`, the environment, the command line. A name that is not in the
table, or a value that can't be used, is a `ConfigError` that says where it was written.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from servekit.errors import ConfigError, suggest

LogFormat: TypeAlias = Literal["console", "json"]

SOCKET_PATH_BYTES: Final = 103
"""Longest path of a unix socket: `sun_path` has 104 bytes on macOS and the BSDs, with a NUL."""

SOCKET_ROOM_BYTES: Final = 40
"""What is kept of it for `/<private directory>/<socket>` below `runtime_dir`."""

_RUNTIME_DIR_BYTES: Final = SOCKET_PATH_BYTES - SOCKET_ROOM_BYTES
_PREFIX: Final = "SERVEKIT_"
_SECRET: Final = re.compile(r"secret|token|password|key$")
_USER_INFO: Final = re.compile(r"://[^/?#@\s]*@")

_ORIGIN: Final = re.compile(
    r"([a-z][a-z0-9+.-]*)://(?:[a-z0-9._-]+|\[[0-9a-f:]+\])(?::([0-9]{1,5}))?"
)
_USUAL_PORT: Final = {"http": "80", "https": "443"}


class _Unusable(Exception):
    """A value can't be used; the text says what is needed instead."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Unusable("need text")
    return value


def _choice(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise _Unusable(f"need one of {', '.join(choices)}")
        return value.lower()

    return parse


def _whole(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
            raise _Unusable(f"need a whole number from {low} to {high}")
        return number

    return parse


def _seconds(value: object) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) else -1.0
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < float("inf"):
        raise _Unusable("need a number of seconds, 0 or more")
    return number


def _path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise _Unusable("need a path")
    return Path(value)


def _flag(value: object) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    found = words.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise _Unusable("need true or false")
    return found


def _origins(value: object) -> tuple[str, ...]:
    """Return origins as browsers write them: in lower case, without a path or the usual port."""
    if not isinstance(value, str | list | tuple):
        raise _Unusable("need origins, with commas between them")
    texts = value.split(",") if isinstance(value, str) else cast("list[object]", value)
    origins: list[str] = []
    for text in texts:
        origin = text.strip().lower() if isinstance(text, str) else ""
        match = _ORIGIN.fullmatch(origin)
        if origin != "*" and match is None:
            raise _Unusable(f"{text!r} is no origin; write it like https://app.example.com, or *")
        if match is not None and match[2] and match[2] == _USUAL_PORT.get(match[1]):
            raise _Unusable(f"{text!r}: browsers leave out :{match[2]} behind {match[1]}")
        origins.append(origin)
    if "*" in origins and len(origins) > 1:
        raise _Unusable("* is every origin, so it stands alone")
    return tuple(origins)


def _directory(value: object) -> Path:
    if not isinstance(value, str | Path) or not Path(value).is_absolute():
        raise _Unusable("need an absolute path")
    path = Path(value)
    if len(os.fsencode(path)) > _RUNTIME_DIR_BYTES:
        raise _Unusable(
            f"need a path of at most {_RUNTIME_DIR_BYTES} bytes, as it holds unix sockets"
        )
    return path


def _file(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise _Unusable("need the path of a file")
    return Path(value)


def _words(value: object) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        raise _Unusable("need words, separated by commas")
    found: list[str] = []
    for word in cast("Sequence[object]", words):
        if not isinstance(word, str) or not word.strip():
            raise _Unusable("need words, separated by commas")
        found.append(word.strip())
    return tuple(found)


def _pairs(value: object) -> tuple[tuple[str, str], ...]:
    pairs = [word.partition("=") for word in _words(value)]
    if not all(name and sep for name, sep, _ in pairs):
        raise _Unusable("need labels like zone=a, separated by commas")
    return tuple((name, text) for name, _, text in pairs)


def _setting(default: Any, parse: Callable[[object], Any], variable: str = "") -> Any:
    """Return a dataclass field that knows how to read its value, and its variable's odd name."""
    return field(default=default, metadata={"parse": parse, "variable": variable})


def given(names: Iterable[str]) -> dict[str, str]:
    """Return those of some environment variables that are set: secrets, which are no settings."""
    return {name: os.environ[name] for name in names if name in os.environ}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The table. A field `port` is `SERVEKIT_PORT` in the environment and `port` in TOML files.

    Attributes:
        log_level: Least level that is logged.
        log_format: Lines for people, or one JSON object a line.
        engine: What runs an app: `local` starts processes on this machine, `ray` replicas on Ray.
        ray_address: A Ray cluster to join: `auto`, `host:port` or `ray://host:port`; None starts one
            on this machine.
        gateway_nodes: On Ray: labels of the nodes that have a gateway, like `door=yes`; empty is all.
        host: Address that the gateway listens on.
        port: Its port; 0 takes a free one.
        gateway_workers: Gateway processes that share that port.
        handover_dir: A folder in which an app hands its port over to the next one: start that, then end
            this one, and no connection is refused. Only its user may write there.
        jobs_dir: Where the jobs of `@task` methods are kept, from the current folder; made, for its
            owner alone, when an app has tasks. Not on a network file system.
        cache_dir: Where bundles, environments and models are kept, all of which can be had again;
            `$XDG_CACHE_HOME/servekit` or `$HOME/.cache/servekit` when not set.
        models_dir: Where models are kept that are fetched; None is in `cache_dir`.
        bundle_dir: The bundle that runs, set by what runs it: its models are looked at first.
        offline: Fetch no models.
        runtime_dir: Where private directories for unix sockets are made; `$XDG_RUNTIME_DIR`,
            `$TMPDIR` or `/tmp` when not set.
        gpus: GPUs to act as if this machine had; None asks the driver.
        cuda_visible_devices: `CUDA_VISIBLE_DEVICES`: the devices that may be used; None is all.
        drain_delay_s: After SIGTERM, how long new calls are still taken while `/readyz` says 503,
            so that balancers can go elsewhere first.
        drain_s: Longest wait for running calls at shutdown, after that delay.
        start_timeout_s: Longest time for a replica to become ready.
        start_parallel: Replicas of an app that may load at the same time; None is as many as
            there are cores, at least 2.
        api_keys: A TOML file of API keys, one of which a request must bring; see `servekit keys`.
        jwt_key: A file with what signs the tokens that a request may bring instead: a public key as
            PEM, a JWKS, or a secret.
        jwt_algorithms: Signature algorithms to accept, separated by commas; empty is all that the
            key is good for.
        jwt_issuer: What a token's `iss` must be; None is anything.
        jwt_audience: What a token's `aud` must be or contain; None is anything.
        tls_cert: File with the gateway's certificate and those between it and the root, in PEM;
            read again when it changes.
        tls_key: File with its key, in PEM, not encrypted.
        cors_origins: Origins whose pages may read answers, like `https://app.example.com`; `*` is
            every one.
        cors_credentials: Their requests may carry cookies and credentials of the browser's.
        gzip_min_bytes: Least size of an answer that is compressed; None compresses none.
        max_connections: Clients' connections at one time.
        max_connections_per_address: Those from one address; 0 is no limit. Behind a proxy all
            come from the proxy's.
        max_bodies: Bytes of all request bodies that the gateway holds at one time; None is a
            quarter of the memory, and at most 2 GiB.
    """

    log_level: str = _setting("info", _choice("debug", "info", "warning", "error", "critical"))
    log_format: LogFormat = _setting("console", _choice("console", "json"))  # noqa: RUF009
    engine: Literal["local", "ray"] = _setting("local", _choice("local", "ray"))
    ray_address: str | None = _setting(None, _text)
    gateway_nodes: tuple[tuple[str, str], ...] = _setting((), _pairs)
    host: str = _setting("127.0.0.1", _text)
    port: int = _setting(3000, _whole(0, 65535))
    gateway_workers: int = _setting(1, _whole(1, 64))
    handover_dir: Path | None = _setting(None, _path)  # noqa: RUF009
    jobs_dir: Path = _setting(Path(".servekit"), _path)  # noqa: RUF009
    cache_dir: Path = _setting(Path(".servekit/cache"), _path)  # noqa: RUF009
    models_dir: Path | None = _setting(None, _path)  # noqa: RUF009
    bundle_dir: Path | None = _setting(None, _path)  # noqa: RUF009
    offline: bool = _setting(default=False, parse=_flag)
    runtime_dir: Path = _setting(Path("/tmp"), _directory)  # noqa: RUF009, S108
    gpus: int | None = _setting(None, _whole(0, 1024))
    cuda_visible_devices: str | None = _setting(None, _text, "CUDA_VISIBLE_DEVICES")
    drain_delay_s: float = _setting(5.0, _seconds)
    drain_s: float = _setting(20.0, _seconds)
    start_timeout_s: float = _setting(600.0, _seconds)
    start_parallel: int | None = _setting(None, _whole(1, 1024))
    api_keys: Path | None = _setting(None, _file)  # noqa: RUF009
    jwt_key: Path | None = _setting(None, _file)  # noqa: RUF009
    jwt_algorithms: tuple[str, ...] = _setting((), _words)
    jwt_issuer: str | None = _setting(None, _text)
    jwt_audience: str | None = _setting(None, _text)
    tls_cert: Path | None = _setting(None, _file)  # noqa: RUF009
    tls_key: Path | None = _setting(None, _file)  # noqa: RUF009
    cors_origins: tuple[str, ...] = _setting((), _origins)
    cors_credentials: bool = _setting(default=False, parse=_flag)
    gzip_min_bytes: int | None = _setting(None, _whole(0, 1 << 40))
    max_connections: int = _setting(10_000, _whole(1, 1_000_000))
    max_connections_per_address: int = _setting(0, _whole(0, 1_000_000))
    max_bodies: int | None = _setting(None, _whole(1 << 20, 1 << 50))

    @classmethod
    def load(
        cls,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        **overrides: object,
    ) -> "Settings":
        """Read all sources.

        Args:
            cwd: Directory of the TOML files; None is the current one.
            env: The environment; None is the process's own.
            **overrides: Values from the command line; None means not given.

        Raises:
            ConfigError: A name is unknown or a value can't be used.
        """
        env = os.environ if env is None else env
        parsers = {f.name: f.metadata["parse"] for f in fields(cls)}
        values: dict[str, Any] = {
            "runtime_dir": _default_runtime_dir(env),
            "cache_dir": _default_cache_dir(env),
        }
        for source in _sources(Path.cwd() if cwd is None else cwd, env, overrides):
            for written, value in source.values.items():
                name = source.names.get(written)
                if name is None:
                    hint = suggest(written, list(source.names))
                    raise ConfigError(f"{source.where}: there is no setting {written!r}.{hint}")
                try:
                    values[name] = parsers[name](value)
                except _Unusable as need:
                    raise ConfigError(f"{source.where}: {written} = {value!r}: {need}") from None
        return cls(**values)

    def shown(self) -> dict[str, str]:
        """Return all settings as text for people; what may be a secret is masked."""
        return {f.name: _masked(f.name, getattr(self, f.name)) for f in fields(self)}


def _word(value: object) -> str:
    return "=".join(cast("tuple[str, str]", value)) if isinstance(value, tuple) else str(value)


def _masked(name: str, value: object) -> str:
    if value is None or value == ():
        return ""
    if not isinstance(value, Path) and _SECRET.search(name):
        return "…"
    text = (
        ", ".join(map(_word, cast("tuple[object, ...]", value)))
        if isinstance(value, tuple)
        else str(value)
    )
    return _USER_INFO.sub("://…@", text)


class _Source(NamedTuple):
    """Values from one place; `names` maps how a setting is written there to its field."""

    where: str
    names: Mapping[str, str]
    values: Mapping[str, object]


def _sources(
    cwd: Path, env: Mapping[str, str], overrides: Mapping[str, object]
) -> Iterator[_Source]:
    """Yield all sources, the weakest first."""
    names = {f.name: f.name for f in fields(Settings)}
    variables = {
        f.metadata["variable"] or _PREFIX + f.name.upper(): f.name for f in fields(Settings)
    }
    for file, path in (("pyproject.toml", ("tool", "servekit")), ("servekit.toml", ())):
        if (cwd / file).is_file():
            yield _Source(str(cwd / file), names, _table(cwd / file, path))
    # An empty variable is one that a script left unset; but no CUDA device is a real answer.
    ours = {k: v for k, v in env.items() if v and k.startswith(_PREFIX)}
    theirs = {k: env[k] for k in variables if k in env and not k.startswith(_PREFIX)}
    yield _Source("environment", variables, ours | theirs)
    yield _Source("command line", names, {k: v for k, v in overrides.items() if v is not None})


def _table(file: Path, path: tuple[str, ...]) -> dict[str, object]:
    """Return the TOML table at `path` in a file, empty if it isn't there."""
    try:
        table: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    for key in path:
        inner = table.get(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{file}: {key!r} must be a table")
        table = cast("dict[str, Any]", inner)
    return table


def for_uv(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment that uv is run with: it trusts whom the system trusts, as pip does."""
    env = os.environ if env is None else env
    return {"UV_NATIVE_TLS": "1", "UV_SYSTEM_CERTS": "1", **env}


def _default_cache_dir(env: Mapping[str, str]) -> Path:
    """Return the user's own place for such things; who has no home has it where the jobs are."""
    usual = Path(env.get("XDG_CACHE_HOME", "")), Path(env.get("HOME", "")) / ".cache"
    return next((p / "servekit" for p in usual if p.is_absolute()), Path(".servekit/cache"))


def _default_runtime_dir(env: Mapping[str, str]) -> Path:
    """Return the first usual directory that exists and leaves room for a socket's name."""
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        path = Path(env.get(name, ""))
        if path.is_absolute() and path.is_dir() and len(os.fsencode(path)) <= _RUNTIME_DIR_BYTES:
            return path
    return Path("/tmp")  # noqa: S108
