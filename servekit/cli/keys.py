"""`servekit keys`: makes, lists and removes the API keys of a file that the gateway reads."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from servekit.cli.console import Line, print_json, rows, write
from servekit.errors import ConfigError, suggest
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.gateway.keys import Key

_HEAD: Final = re.compile(r"\s*\[\[\s*key\s*\]\]")
_ASIDE: Final = re.compile(r"\s*(#.*)?")

File = Annotated[
    Path | None, typer.Option(help="The file of keys; else the one that the settings name.")
]

keys = typer.Typer(
    help="Make, list and remove API keys.", no_args_is_help=True, rich_markup_mode="markdown"
)


@keys.command(epilog="Example:  servekit keys add team-a --file keys.toml --rate 10/s")
def add(
    name: Annotated[str, typer.Argument(help="Whose key it is; several may have one name.")],
    *,
    file: File = None,
    rate: Annotated[
        str | None, typer.Option(metavar="N/s|m|h", help="Requests that it is good for.")
    ] = None,
    burst: Annotated[
        int | None, typer.Option(help="Requests that may come at once; else those of a second.")
    ] = None,
    max_ongoing: Annotated[int | None, typer.Option(help="Requests that may run at once.")] = None,
) -> None:
    """Make a key, print it, and add its hash to the file.

    The key is shown once; the file has only its hash. A running gateway takes it within seconds.
    """
    from servekit.gateway.keys import Keys, new_key  # noqa: PLC0415

    path = _path(file)
    before = _text(path) if path.exists() else ""
    Keys.parse(before, where=str(path))
    id_, key, digest = new_key()
    fields: dict[str, str | int | None] = {
        "name": name,
        "id": id_,
        "hash": digest,
        "rate": rate,
        "burst": burst,
        "max_ongoing": max_ongoing,
    }
    lines = [f"{field} = {_toml(value)}" for field, value in fields.items() if value is not None]
    gap = "" if not before else "\n" if before.endswith("\n") else "\n\n"
    entry = "\n".join([f"{gap}[[key]]", *lines, ""])
    Keys.parse(before + entry, where="the new key")
    _append(path, entry)
    write([(key, "")])


@keys.command("list", epilog="Example:  servekit keys list --file keys.toml")
def list_(
    *,
    file: File = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Show the keys of a file: whose they are, and their limits."""
    from servekit.gateway.keys import Keys  # noqa: PLC0415

    path = _path(file)
    found = Keys.read(path)
    if json:
        import msgspec  # noqa: PLC0415

        print_json(msgspec.json.encode([_document(key) for key in found]))
        return
    table: list[Line] = [
        [(text, "dim") for text in ("name", "id", "rate", "burst", "at once")],
        *(_row(key) for key in found),
    ]
    if len(table) > 1:
        write(*rows(table))
    else:
        write([(f"{path} has no keys", ""), ("; servekit keys add NAME makes one", "dim")])


@keys.command(epilog="Example:  servekit keys remove team-a --file keys.toml")
def remove(
    name: Annotated[str, typer.Argument(help="The key's name, or its id.")], *, file: File = None
) -> None:
    """Remove a key from the file; everything else in it stays as it is.

    A running gateway refuses the key within seconds.
    """
    from servekit.gateway.keys import Keys  # noqa: PLC0415

    path = _path(file)
    text = _text(path)
    known = list(Keys.parse(text, where=str(path)))
    found = [key for key in known if name in (key.name, key.id)]
    if not found:
        hint = suggest(name, [key.name for key in known])
        raise ConfigError(f"{path}: there is no key {name!r}.{hint}")
    if len(found) > 1:
        ids = ", ".join(key.id for key in found)
        raise ConfigError(f"{path}: {len(found)} keys are called {name!r}; give an id: {ids}")
    rest = _without(text, known.index(found[0]))
    if list(Keys.parse(rest, where=str(path))) != [key for key in known if key != found[0]]:
        raise ConfigError(
            f"{path}: is written in a way that only a person can edit; remove it there"
        )
    _replace(path, rest)
    write([("removed ", ""), (found[0].name, "bold"), (f" {found[0].id}", "dim")])


def _path(file: Path | None) -> Path:
    path = file or Settings.load().api_keys
    if path is None:
        raise ConfigError("which file? give --file keys.toml, or set api_keys")
    return path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}") from None


def _toml(value: str | int) -> str:
    """Return a value as TOML; text that needs more than quotes is refused by the parser later."""
    return (
        str(value) if isinstance(value, int) else '"' + re.sub(r'["\\\x00-\x1f]', "?", value) + '"'
    )


def _append(path: Path, entry: str) -> None:
    """Add to a file with one write, so that whoever reads it meanwhile sees all of it or nothing."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, entry.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}") from None


def _replace(path: Path, text: str) -> None:
    """Put another file in its place, with the same owner and mode; a link goes on to lead there."""
    target = path.resolve()
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        stat = target.stat()
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.fchown(fd, stat.st_uid, stat.st_gid)
            os.fchmod(fd, stat.st_mode & 0o777)
            os.write(fd, text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        new.replace(target)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"can't write {path}: {error.strerror}") from None


def _without(text: str, index: int) -> str:
    """Return a file without its entry of that number; comments behind it belong to the next."""
    lines = text.splitlines(keepends=True)
    heads = [number for number, line in enumerate(lines) if _HEAD.match(line)]
    if index >= len(heads):
        return text
    begin = heads[index]
    end = heads[index + 1] if index + 1 < len(heads) else len(lines)
    while _ASIDE.fullmatch(lines[end - 1].rstrip("\r\n")):
        end -= 1
    while end < len(lines) and not lines[end].strip():
        end += 1
    return "".join(lines[:begin] + lines[end:])


def _document(key: "Key") -> dict[str, object]:
    return {
        "name": key.name,
        "id": key.id,
        "rate_per_s": None if key.rate is None else key.rate.per_s,
        "burst": None if key.rate is None else key.rate.burst,
        "max_ongoing": key.max_ongoing,
    }


def _row(key: "Key") -> Line:
    return list(_cells(key))


def _cells(key: "Key") -> Iterator[tuple[str, str]]:
    yield key.name, "bold"
    yield key.id, ""
    yield ("any", "dim") if key.rate is None else (f"{key.rate.per_s:g}/s", "")
    yield ("", "") if key.rate is None else (str(key.rate.burst), "")
    yield ("any", "dim") if key.max_ongoing is None else (str(key.max_ongoing), "")
