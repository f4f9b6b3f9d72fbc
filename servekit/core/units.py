"""Sizes, durations and rates as people write them: `"64MiB"`, `"250ms"`, `"10/s"`."""

import re
from math import inf

from servekit.errors import ConfigError

_SIZE = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_TIME = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*/\s*([smh])\s*")


def parse_bytes(text: str | int, *, where: str) -> int:
    """Return a size in bytes: `"64MiB"` → 67108864; an int is bytes already.

    Raises:
        ConfigError: It is no size; the message starts with `where`.
    """
    if isinstance(text, int):
        if text < 0:
            raise ConfigError(f"{where}: {text} is negative; give a size like '64MiB'")
        return text
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].upper() not in _SIZE:
        raise ConfigError(f"{where}: {text!r} is no size; write it like '64MiB' or '512KB'")
    return int(float(match[1]) * _SIZE[match[2].upper()])


def shown_bytes(size: float) -> str:
    """Return a size as people read it: 67108864 → `"64.0 MiB"`."""
    units = ("B", "KiB", "MiB", "GiB")
    power = next((n for n in range(len(units)) if size < 1024 ** (n + 1)), len(units) - 1)
    return f"{size / 1024**power:.{1 if power else 0}f} {units[power]}"


def parse_seconds(text: str | float, *, where: str) -> float:
    """Return a duration in seconds: `"250ms"` → 0.25; a number is seconds already.

    Raises:
        ConfigError: It is no duration; the message starts with `where`.
    """
    if isinstance(text, int | float):
        return float(text)
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _TIME:
        raise ConfigError(f"{where}: {text!r} is no duration; write it like '250ms' or '30s'")
    return float(match[1]) * _TIME[match[2]]


def parse_rate(text: str, *, where: str) -> float:
    """Return a rate per second: `"600/m"` → 10.0.

    Raises:
        ConfigError: It is no rate above 0; the message starts with `where`.
    """
    match = _RATE.fullmatch(text)
    per_s = float(match[1]) / _TIME[match[2]] if match is not None else 0.0
    if not 0 < per_s < inf:
        raise ConfigError(
            f"{where}: {text!r} is no rate above 0; write it like '10/s', '600/m' or '1000/h'"
        )
    return per_s
