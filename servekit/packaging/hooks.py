"""`@sk.on_build`: runs in the environment of a bundle, from its code; what it writes there goes along.

`python -m servekit.packaging.hooks TARGET` runs those of an app, with the models of their services.
"""

import asyncio
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from servekit.errors import SetupError
from servekit.packaging import manifest as m
from servekit.settings import Settings
from servekit.spec.graph import definition_of, topology
from servekit.spec.target import load
from servekit.store.store import Store


def run(target: str, folder: Path, interpreter: Path | None) -> None:
    """Run an app's hooks in a process of its own.

    Args:
        target: The app, from the bundle's code.
        folder: Of the bundle.
        interpreter: Of its environment; None is this one's.

    Raises:
        SetupError: One raised.
    """
    python = (sys.executable,) if interpreter is None else (interpreter, "-E", "-B")
    done = subprocess.run(  # noqa: S603
        [*python, "-m", "servekit.packaging.hooks", target],
        cwd=folder / m.CODE,
        env={**os.environ, "SERVEKIT_BUNDLE_DIR": str(folder), "SERVEKIT_OFFLINE": "true"},
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise SetupError(f"@sk.on_build: {said.splitlines()[-1]}", trace=done.stderr)
    sys.stderr.write(done.stderr)


def _main(target: str) -> None:
    store = Store.of(Settings.load())
    for service in topology(definition_of(load(target))):
        instance: Any = object.__new__(cast("type[Any]", service.cls))
        hooks = service.hooks.get("on_build", ())
        for attribute, model in service.models.items() if hooks else ():
            setattr(instance, attribute, store.path(model.spec, model.base))
        for hook in hooks:
            outcome = hook(instance)
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)


if __name__ == "__main__":
    _main(sys.argv[1])
