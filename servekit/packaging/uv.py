"""uv, which resolves, locks and installs: arguments in, its output or what it complains of out."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from servekit.errors import ConfigError
from servekit.settings import for_uv

PLATFORMS = {
    "linux/amd64": "x86_64-manylinux_2_28",
    "linux/arm64": "aarch64-manylinux_2_28",
}
"""Where images run, and what uv calls it: glibc of 2018 or later."""

_CREDENTIALS = (
    "\nuv takes credentials from ~/.netrc, from `uv auth login`, or from UV_INDEX; those that only the "
    "project or --index has are not there any more when the lock is installed"
)


def run(*words: str | Path, cwd: Path | None = None, doing: str) -> str:
    """Run uv; returns what it wrote to stdout.

    Args:
        *words: The command line behind `uv`.
        cwd: Where; None is the current folder.
        doing: What for, as an error says it: "lock the dependencies".

    Raises:
        ConfigError: It failed, or is not installed.
    """
    command: Sequence[str | Path] = (_binary(), *words, "--quiet", "--no-progress")
    done = subprocess.run(  # noqa: S603
        command, cwd=cwd, env=for_uv(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip()
        hint = _CREDENTIALS if "401 Unauthorized" in said else ""
        raise ConfigError(f"can't {doing}\n{said}{hint}")
    return done.stdout


def _binary() -> str:
    try:
        import uv  # noqa: PLC0415
    except ImportError:
        raise ConfigError("this needs uv: pip install 'servekit[build]'") from None
    return uv.find_uv_bin()
