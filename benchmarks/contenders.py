"""Who takes part: what each one installs, how it is started, and where it answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
APPS = Path(__file__).parent / "apps"
VENVS = Path(__file__).parent / ".venvs"

LIMIT = "limit"
SERVEKIT = "servekit"
RAY_TUNED = "ray-tuned"


@dataclass(frozen=True, slots=True)
class Launch:
    """What a command may depend on: the workload, the port, and a private scratch folder."""

    workload: str
    port: int
    scratch: Path
    free_port: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Contender:
    """One server under test; `paths` maps each workload it takes part in to its URL path."""

    name: str
    title: str
    paths: Mapping[str, str]
    arguments: Callable[[Launch], list[str]]
    requirements: tuple[str, ...] = ()
    venv: Path = ROOT / ".venv"
    environment: Callable[[Launch], dict[str, str]] = field(default=lambda _: {})

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.venv / "bin" / "python"


def _uvicorn(module: str) -> Callable[[Launch], list[str]]:
    def arguments(launch: Launch) -> list[str]:
        return [
            *("-m", "uvicorn", f"{module}:app", "--app-dir", str(APPS)),
            *("--port", str(launch.port), "--loop", "uvloop", "--http", "httptools"),
            *("--no-access-log", "--log-level", "warning"),
        ]

    return arguments


def _script(name: str) -> Callable[[Launch], list[str]]:
    return lambda launch: [str(APPS / name), launch.workload, str(launch.port)]


_CLASSES = {"sum": "Sum", "pipeline": "Pipeline", "mean": "Mean", "tokens": "Tokens"}
_NAMED_PATHS = {"sum": "/sum", "pipeline": "/predict", "mean": "/mean", "tokens": "/stream"}
_SINGLE_SERVICE_PATHS = {name: _NAMED_PATHS[name] for name in ("sum", "mean", "tokens")}


def _servekit(launch: Launch) -> list[str]:
    target = f"benchmarks.apps.servekit_app:{_CLASSES[launch.workload]}"
    return ["-m", "servekit", "serve", target, "--port", str(launch.port), "--drain-delay-s", "0"]


def _servekit_ray(launch: Launch) -> list[str]:
    return [*_servekit(launch), "--engine", "ray"]


def _bentoml(launch: Launch) -> list[str]:
    target = f"bentoml_app:{_CLASSES[launch.workload]}"
    address = ("--host", "127.0.0.1", "--port", str(launch.port))
    return ["-m", "bentoml", "serve", target, *address, "--working-dir", str(APPS)]


def _bentoml_environment(launch: Launch) -> dict[str, str]:
    return {"BENTOML_HOME": str(launch.scratch), "BENTOML_DO_NOT_TRACK": "True"}


def _ray_environment(launch: Launch) -> dict[str, str]:
    return {"RAY_TMPDIR": str(launch.scratch), "RAY_USAGE_STATS_ENABLED": "0"}


def _ray_tuned_environment(launch: Launch) -> dict[str, str]:
    return _ray_environment(launch) | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(launch.scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(launch.scratch / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(launch.scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(launch.scratch / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(launch.scratch / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(launch.free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(launch.free_port()),
    }


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(
            LIMIT,
            "Starlette, uvicorn, orjson",
            _SINGLE_SERVICE_PATHS,
            _uvicorn("starlette_app"),
            ("starlette", "uvicorn", "uvloop", "httptools", "orjson", "numpy"),
            VENVS / "limit",
        ),
        Contender(SERVEKIT, "servekit", _NAMED_PATHS, _servekit),
        Contender(
            "servekit-ray",
            "servekit on Ray",
            _NAMED_PATHS,
            _servekit_ray,
            environment=_ray_environment,
        ),
        Contender(
            "fastapi",
            "FastAPI, uvicorn",
            _SINGLE_SERVICE_PATHS,
            _uvicorn("fastapi_app"),
            ("fastapi", "uvicorn", "uvloop", "httptools", "numpy"),
            VENVS / "fastapi",
        ),
        Contender(
            "litserve",
            "LitServe",
            dict.fromkeys(_CLASSES, "/predict"),
            _script("litserve_app.py"),
            ("litserve", "numpy"),
            VENVS / "litserve",
        ),
        Contender(
            "bentoml",
            "BentoML",
            _NAMED_PATHS,
            _bentoml,
            ("bentoml", "numpy"),
            VENVS / "bentoml",
            _bentoml_environment,
        ),
        Contender(
            "ray",
            "Ray Serve as it comes",
            dict.fromkeys(_CLASSES, "/"),
            _script("ray_app.py"),
            ("ray[serve]", "numpy"),
            VENVS / "ray",
            _ray_environment,
        ),
        Contender(
            RAY_TUNED,
            "Ray Serve, HAProxy + throughput mode",
            dict.fromkeys(_CLASSES, "/"),
            _script("ray_app.py"),
            ("ray[serve]", "numpy"),
            VENVS / "ray",
            _ray_tuned_environment,
        ),
    )
}
