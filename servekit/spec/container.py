"""`Image`: what an app's container has besides the app, as data that is read without importing it.

The order in which an image is made is fixed: base, system packages, commands, dependencies, models,
code. What changes often comes last, and an edit of the code makes one small layer anew.
"""

import re
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from servekit.errors import SpecError, suggest

_APT = re.compile(r"[a-z0-9][a-z0-9+.-]*(?<!-)(?:=[A-Za-z0-9.+:~-]+)?")  # apt removes "name-"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PYTHON = re.compile(r"3\.[0-9]{1,2}")
PLATFORMS = ("linux/amd64", "linux/arm64")
_SECRET = re.compile(r"(?i)(secret|token|passw|api_?key)")


class Requirement(msgspec.Struct, frozen=True, kw_only=True):
    """A dependency, and the package index that it alone comes from; "" is the usual ones."""

    text: str
    index: str = ""


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is run in the image while it is made.

    Attributes:
        argv: The program and its arguments.
        secrets: Environment variables of who builds; each is the file `/run/secrets/NAME` meanwhile.
    """

    argv: tuple[str, ...]
    secrets: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.argv)


class Image(msgspec.Struct, frozen=True):
    """The container of an app: `@sk.service(image=sk.Image().apt("ffmpeg"))` on its root service.

    Each method returns another image. All arguments are literals, as `servekit build` reads them
    without importing the module.

    Args:
        base: Reference of the base image; "" is what `servekit containerize --base` says.
        python: Version of Python, like `"3.12"`; "" is that of who builds.
        platform: `"linux/amd64"` or `"linux/arm64"`.
    """

    base: str = ""
    python: str = ""
    platform: str = "linux/amd64"
    system_packages: tuple[str, ...] = ()
    commands: tuple[Command, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    lock: str = ""
    included: tuple[str, ...] = ()
    variables: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    secret_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.python and not _PYTHON.fullmatch(self.python):
            raise SpecError(f"Image(python={self.python!r}): write it like '3.12'")
        if self.platform not in PLATFORMS:
            hint = suggest(self.platform, PLATFORMS)
            raise SpecError(
                f"Image(platform={self.platform!r}): there are {' and '.join(PLATFORMS)}.{hint}"
            )
        for name in self.system_packages:
            if not _APT.fullmatch(name):
                raise SpecError(f"Image.apt({name!r}): no name of a package of Debian")
        for command in self.commands:
            _check_command(command)
        for name, value in self.variables.items():
            if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SpecError(f"Image.env({name}={value!r}): write it as text")
            if _SECRET.search(name):
                raise SpecError(
                    f"Image.env({name}=…) would be in the image for everybody who has it; name it "
                    f"in .secrets({name!r}), and give it where the image runs"
                )
        for name in self.secret_names:
            if not _VARIABLE.fullmatch(name):
                raise SpecError(f"Image.secrets({name!r}): no name of an environment variable")

    def apt(self, *names: str) -> Self:
        """Install packages of Debian; needs a Docker engine, or a base that has them.

        Args:
            *names: Like `"ffmpeg"` or `"ffmpeg=7:5.1.6-0"`.
        """
        return self._with(system_packages=(*self.system_packages, *names))

    def run(self, *argv: str, secrets: Sequence[str] = ()) -> Self:
        """Run a command in the image, as root, without a shell; needs a Docker engine.

        Args:
            *argv: The program and its arguments: `.run("ldconfig", "-v")`.
            secrets: Names of environment variables of who builds. While it runs, the file
                `/run/secrets/NAME` has the value; the image does not.
        """
        if isinstance(secrets, str):
            raise SpecError(f"Image.run(secrets={secrets!r}): write it as ({secrets!r},)")
        command = Command(argv=argv, secrets=tuple(secrets))
        return self._with(commands=(*self.commands, command))

    def packages(self, *requirements: str, index: str = "") -> Self:
        """Add dependencies to those of the project.

        Args:
            *requirements: Like `"torch==2.6"`.
            index: URL of the package index that these, and only these, come from.
        """
        more = tuple(Requirement(text=text, index=index) for text in requirements)
        return self._with(requirements=(*self.requirements, *more))

    def lockfile(self, path: str = "pylock.toml") -> Self:
        """Install exactly what a lock file of the project has: `pylock.toml` or `uv.lock`."""
        return self._with(lock=path)

    def include(self, *patterns: str) -> Self:
        """Take along files that `.servekitignore` leaves out: `.include("data/**")`."""
        return self._with(included=(*self.included, *patterns))

    def env(self, **variables: str) -> Self:
        """Set environment variables."""
        return self._with(variables={**self.variables, **variables})

    def secrets(self, *names: str) -> Self:
        """Name environment variables that the image is run with, and that it never contains."""
        return self._with(secret_names=(*self.secret_names, *names))

    def _with(self, **changes: Any) -> Self:
        return msgspec.structs.replace(self, **changes)


def _check_command(command: Command) -> None:
    argv = command.argv
    if not argv or not argv[0]:
        raise SpecError("Image.run(): give a program and its arguments, one by one")
    for word in argv:
        if not isinstance(word, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(f"Image.run(… {word!r} …): write it as text")
    if len(argv) == 1 and " " in argv[0]:
        words = ", ".join(map(repr, argv[0].split()))
        raise SpecError(
            f"Image.run({argv[0]!r}): there is no shell; give the words one by one: {words}"
        )
    for name in command.secrets:
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(f"Image.run(secrets=({name!r},)): no name of an environment variable")
