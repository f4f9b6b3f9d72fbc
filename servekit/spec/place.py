"""Where in the author's code a mistake is, the way every error message names it."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from servekit.errors import ConfigError, SpecError


def place(what: type | Callable[..., Any]) -> str:
    """Return `"Service.method"`, or the class's name, without the functions around it."""
    name: str = getattr(what, "__qualname__", None) or repr(what)
    return name.rpartition("<locals>.")[2]


@contextmanager
def at(where: str) -> Generator[None]:
    """Put the place in front of the mistakes that settings objects find in themselves."""
    try:
        yield
    except (SpecError, ConfigError) as error:
        raise SpecError(f"{where}: {error}") from None
