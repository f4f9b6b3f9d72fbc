"""What an engine does to a base image before the layers of an app come on top, as data.

One step for all packages of Debian, then one for each command. A step has a key, which is made of what
it starts from and what it does; values of secrets are no part of it.
"""

import hashlib
from typing import Final

import msgspec

from servekit.spec.container import Image

LABEL: Final = "io.servekit.step"
"""Label of an image that a step has made; its value is the step's key."""
SECRETS: Final = "/run/secrets"

_INSTALL: Final = """\
set -e
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q install -y --no-install-recommends -- "$@"
rm -f /var/log/alternatives.log /var/log/dpkg.log /var/log/apt/*
"""
"""Packages are its arguments. Folders below /var/log stay: packages bring some that they need."""
_LONGEST: Final = 60


class BuildStep(msgspec.Struct, frozen=True, kw_only=True):
    """One container that runs, and what it leaves.

    Attributes:
        title: What people read.
        argv: What runs in it, without a shell.
        secrets: Names of variables that it has as files.
        scratch: Folders of which nothing is left, in memory.
        spool: The same, on the engine's disk: what may be large.
    """

    title: str
    argv: tuple[str, ...]
    secrets: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()
    spool: tuple[str, ...] = ()

    def key(self, before: str) -> str:
        """Return the key of the step on top of an image.

        Args:
            before: The image's id or digest.
        """
        document = msgspec.json.encode([before, self], order="sorted")
        return hashlib.sha256(document).hexdigest()


def steps_of(image: Image) -> tuple[BuildStep, ...]:
    """Return what an engine has to do for an image; nothing, if our own writer can make it."""
    steps: list[BuildStep] = []
    if names := image.system_packages:
        install = BuildStep(
            title=_short(f"apt {' '.join(names)}"),
            argv=("sh", "-c", _INSTALL, "sh", *names),
            scratch=("/tmp", "/var/lib/apt/lists"),  # noqa: S108
            spool=("/var/cache/apt",),
        )
        steps.append(install)
    for command in image.commands:
        title = _short(f"run {command}")
        steps.append(BuildStep(title=title, argv=command.argv, secrets=command.secrets))
    return tuple(steps)


def _short(title: str) -> str:
    line = " ".join(title.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
