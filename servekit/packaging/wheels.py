"""Wheels of what is installed from its source: servekit itself in a checkout, and folders that a lock names."""

import importlib.metadata
import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from servekit.errors import ConfigError
from servekit.packaging import uv
from servekit.version import __version__

_NAMED = re.compile(r"\bservekit\s*\[([A-Za-z0-9_,\s-]+)\]")


def build_wheel(folder: Path, scratch: Path) -> Path:
    """Build a project's wheel; its bytes depend on its content only.

    Args:
        folder: The project.
        scratch: Where the wheel is put.

    Raises:
        ConfigError: It can't be built.
    """
    if not (folder / "pyproject.toml").is_file():
        raise ConfigError(
            f"{folder} is a dependency, and has no pyproject.toml to build a wheel from"
        )
    out = scratch / "built" / folder.name
    uv.run("build", "--wheel", "--out-dir", out, folder, doing=f"build a wheel of {folder}")
    [wheel] = out.glob("*.whl")
    return wheel


def own_requirement(asked: Iterable[Path], scratch: Path) -> str:
    """Return the requirement for the servekit that runs here, with the extras that files ask for.

    Args:
        asked: Files with requirements.
        scratch: Where a wheel is put, if one must be built.

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
    wheel = build_wheel(place, scratch) if place.is_dir() else place
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
