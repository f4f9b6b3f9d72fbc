"""What in an app's sources would not be the same on another machine: sources in, places out."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from servekit.errors import ConfigError

_EVERYWHERE = ("/bin", "/dev", "/etc", "/lib", "/proc", "/run", "/sbin", "/sys", "/tmp", "/usr")  # noqa: S108
"""Folders whose content each system has of its own accord."""
_MARKER = "servekit: path"
"""A comment in a line whose path is meant as it stands."""


def check(sources: Iterable[Path], root: Path) -> None:
    """Refuse sources outside of the project, and files of this machine that sources name.

    Args:
        sources: The author's modules.
        root: The project's folder.

    Raises:
        ConfigError: There are some.
    """
    found: list[str] = []
    for source in sources:
        if not source.is_relative_to(root):
            raise ConfigError(
                f"{source} is part of the app, and outside of its project {root}; move it there, or "
                "install it from a wheel that the project's dependencies name"
            )
        inner = PurePosixPath(source.relative_to(root).as_posix())
        text = source.read_text("utf-8", errors="replace")
        found += [f"{inner}:{line}: {path!r}" for line, path in absolute_paths(text)]
    if found:
        raise ConfigError(
            f"{found[0]} is a place on this machine only\n"
            + "".join(f"  {one}\n" for one in found)
            + "take the path from __file__, or let sk.model(…) name it; if every machine will have "
            f"it, say so in a comment of that line: # {_MARKER}"
        )


def absolute_paths(text: str) -> Iterator[tuple[int, str]]:
    """Yield the absolute paths in a module's literals that this machine has, with their lines.

    A path has at least two parts, so that routes like `"/models"` are none.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        path = node.value
        if _MARKER not in lines[node.lineno - 1] and _is_of_this_machine(path):
            yield node.lineno, path


def _is_of_this_machine(text: str) -> bool:
    if not text.startswith(("/", "~/")) or text.count("/") < 2 or len(text) > 1000 or "\0" in text:
        return False
    if any(text == place or text.startswith(f"{place}/") for place in _EVERYWHERE):
        return False
    try:
        return Path(text).expanduser().exists()
    except (OSError, RuntimeError):
        return False
