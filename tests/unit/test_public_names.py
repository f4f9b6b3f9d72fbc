"""What `import servekit` gives, and what it costs."""

import inspect
import json
import subprocess
import sys

import pytest

import servekit

NAMES = {
    "__version__", "errors",
    # declare
    "service", "endpoint", "batched", "task", "depends", "ref", "model",
    "mount_asgi", "on_build", "setup", "warmup", "ready", "reconfigure", "live", "teardown",
    # types and settings
    "Array", "Autoscale", "File", "Image", "Item", "ItemError", "Limits", "Placement",
    # use
    "AsyncClient", "Client", "connect", "context", "deploy", "job", "local", "promise",
}  # fmt: skip

HEAVY = {
    "anyio", "asyncio", "concurrent", "httpx", "multiprocessing", "numpy", "pydantic", "ray",
    "rich", "socket", "ssl", "starlette", "structlog", "subprocess", "torch", "typer", "uvicorn",
}  # fmt: skip


def test_the_public_names_are_exactly_these() -> None:
    assert set(servekit.__all__) == NAMES
    assert len(servekit.__all__) == len(NAMES)
    assert set(dir(servekit)) >= NAMES


def test_nothing_else_leaks_in() -> None:
    leaked = {
        name
        for name, value in vars(servekit).items()
        if not name.startswith("_") and name not in NAMES and not inspect.ismodule(value)
    }
    assert leaked == {"TYPE_CHECKING"}


def test_public_things_are_documented() -> None:
    lazy = {"AsyncClient", "Client", "connect", "local"}
    for name in NAMES - lazy - {"__version__"}:
        assert inspect.getdoc(getattr(servekit, name)), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'servekit' has no attribute 'serve'"):
        servekit.serve  # type: ignore[attr-defined]  # noqa: B018


def test_importing_is_light() -> None:
    script = "import sys, json, servekit; print(json.dumps([m for m in sys.modules]))"
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", script], text=True))
    assert not HEAVY & {name.partition(".")[0] for name in loaded}
    assert len([name for name in loaded if name.startswith("servekit")]) < 40
