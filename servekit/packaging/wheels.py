"""Wheels of what is installed from its source: servekit itself in a checkout, and folders that a lock names."""

import contextlib
import importlib.metadata
import json
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from servekit.errors import ConfigError
from servekit.packaging import uv
from servekit.packaging.project import Project
from servekit.version import __version__

_NAMED = re.compile(r"\bservekit\s*\[([A-Za-z0-9_,\s-]+)\]")


def build_wheel(folder: Path, cache: Path) -> Path:
    """Build a project's wheel, or return that which was built of the same files.

    Its bytes depend on its content only.

    Args:
        folder: The project.
        cache: Where wheels are kept.

    Raises:
        ConfigError: It can't be built.
    """
    if not (folder / "pyproject.toml").is_file():
        raise ConfigError(
            f"{folder} is a dependency, and has no pyproject.toml to build a wheel from"
        )
    home = cache / Project(folder, "").state()
    if not home.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache, prefix=".building-"))
        uv.run("build", "--wheel", "--out-dir", made, folder, doing=f"build a wheel of {folder}")
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(home)
        shutil.rmtree(made, ignore_errors=True)
    [wheel] = home.glob("*.whl")
    return wheel


def own_requirement(asked: Iterable[Path], cache: Path) -> str:
    """Return the requirement for the servekit that runs here, with the extras that files ask for.

    Args:
        asked: Files with requirements.
        cache: Where wheels are kept, if one must be built.

    Raises:
        ConfigError: It was installed from a file that is not there any more.
    """
    extras = sorted(
        {
            extra.strip()
            for file in asked
            for names in _NAMED.findall(_asked(file))
            for extra in names.split(",")
        }
    )
    name = f"servekit[{','.join(extras)}]" if extras else "servekit"
    origin = importlib.metadata.distribution("servekit").read_text("direct_url.json")
    if origin is None:
        return f"{name}=={__version__}\n"
    url: str = json.loads(origin)["url"]
    place = Path(unquote(urlsplit(url).path))
    wheel = build_wheel(place, cache) if place.is_dir() else place
    if not wheel.is_file():
        raise ConfigError(
            f"servekit was installed from {place}, which is not there any more; install it from a "
            "package index, or from a file that stays"
        )
    return f"{name} @ {wheel.as_uri()}\n"


def _asked(file: Path) -> str:
    """Return what a file asks for; not what a project's extras do, which its image goes without."""
    text = file.read_text("utf-8")
    if file.suffix != ".toml":
        return text
    return "\n".join(tomllib.loads(text).get("project", {}).get("dependencies", ()))
