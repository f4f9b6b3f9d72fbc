"""A bundle runs on this machine: its own environment and its own code take this process's place."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from servekit.errors import ConfigError
from servekit.packaging import manifest as m
from servekit.packaging.bundle import Bundle
from servekit.packaging.environment import environment
from servekit.settings import Settings

MACHINES = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


def enter(bundle: Bundle, words: Sequence[str], settings: Settings) -> NoReturn:
    """Run a command line of servekit as the bundle's own.

    Args:
        bundle: Verified.
        words: Behind `servekit`; the app in it is named from the bundle's code.
        settings: Those of here; files that they name are found from there, too.

    Raises:
        ConfigError: It can't run on this machine.
    """
    manifest = bundle.manifest
    here = f"{sys.platform}/{os.uname().machine}"
    if sys.platform == "linux":
        here = MACHINES.get(os.uname().machine, here)
    if here != manifest.platform:
        raise ConfigError(
            f"{bundle.title} is for {manifest.platform}, and this machine is {here}; build it with "
            f"sk.Image(platform={here!r})"
        )
    python = environment(
        bundle.folder / m.LOCK, python=manifest.python, cache=settings.cache_dir / "environments"
    )
    variables = {
        **os.environ,
        "SERVEKIT_CACHE_DIR": str(settings.cache_dir.absolute()),
        "SERVEKIT_JOBS_DIR": str(settings.jobs_dir.absolute()),
        "SERVEKIT_BUNDLE_DIR": str(bundle.folder.absolute()),
        "PYTHONPYCACHEPREFIX": str(settings.cache_dir.absolute() / "bytecode"),
        "PYTHONNOUSERSITE": "1",
    }
    variables.pop("PYTHONPATH", None)
    os.chdir(bundle.folder / m.CODE)
    sys.stdout.flush()
    os.execve(python, [str(python), "-m", "servekit", *words], variables)  # noqa: S606
