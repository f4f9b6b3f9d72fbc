"""Documents as YAML for people to read: in the order of their keys, and without references."""

from collections.abc import Sequence
from typing import Any

import msgspec

from servekit.errors import ConfigError


def to_yaml(documents: Sequence[Any]) -> str:
    """Return documents of plain data as one text.

    Raises:
        ConfigError: PyYAML is not installed.
    """
    try:
        import yaml  # noqa: PLC0415
    except ImportError:
        raise ConfigError("this needs PyYAML: pip install 'servekit[kubernetes]'") from None
    apart = msgspec.json.decode(
        msgspec.json.encode(documents)
    )  # what is shared would be a reference
    untyped: Any = yaml
    return str(untyped.safe_dump_all(apart, sort_keys=False, width=100))
