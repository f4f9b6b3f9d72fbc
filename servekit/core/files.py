"""Files that may change while a process runs."""

from pathlib import Path


def fingerprint(*paths: Path) -> tuple[tuple[int, int, int], ...] | None:
    """Return what changes when a file is written, or another takes its place; None if one is missing."""
    try:
        stats = [path.stat() for path in paths]
    except OSError:
        return None
    return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in stats)
