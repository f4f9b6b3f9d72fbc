"""Environments made of locks: one folder for each, made once, shared by all bundles that have it."""

import fcntl
import hashlib
import shutil
from pathlib import Path

from servekit.packaging import uv

_DONE = ".complete"


def environment(lock: Path, *, python: str, cache: Path) -> Path:
    """Return the Python of an environment that has exactly what a lock says.

    Args:
        lock: A `pylock.toml`, with the wheels beside it that it names.
        python: Version of Python, like `"3.12"`.
        cache: The folder of environments.

    Raises:
        ConfigError: It can't be installed here.
    """
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    home = cache / f"{digest}-{python}"
    interpreter = home / "bin" / "python"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{home.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # Its Python is a link: to one that may be gone, in a cache that was brought from elsewhere.
        if not ((home / _DONE).exists() and interpreter.exists()):
            shutil.rmtree(home, ignore_errors=True)
            uv.run(
                "venv", "--python", python, home, doing=f"make an environment of Python {python}"
            )
            uv.run(
                *("pip", "sync", "--python", interpreter, "--require-hashes", "--only-binary"),
                *(":all:", lock.name),
                cwd=lock.parent,
                doing=f"install what {lock} has",
            )
            (home / _DONE).touch()
    return interpreter
