"""`servekit doctor`: whether this machine can serve, and what would get in the way."""

import os
import platform
import re
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from servekit.cli.console import Line, print_json, rows, write
from servekit.errors import AuthorError
from servekit.settings import Settings
from servekit.version import __version__

_MARKS: Final = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("fail", "bold red")}
_FEW_FILES: Final = 4096
_TOO_FEW_FILES: Final = 256
_EXTRAS: Final = ("gpu", "ray", "onnx", "torch", "grpc", "docker", "redis", "otel")
_REQUIREMENT: Final = re.compile(
    r"(?P<name>[\w.-]+)(?:\[[^\]]*\])?(?P<range>[^;]*)(?:;.*extra\s*==\s*['\"](?P<extra>[\w-]+)['\"])?"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        fix: What to do about it; "" when all is well.
    """

    check: str
    level: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


def doctor(
    *, json: Annotated[bool, typer.Option("--json", help="Print a JSON array of findings.")] = False
) -> None:
    """Check that this machine can serve.

    Looks at Python, packages, GPUs, limits, sockets and the port. Exits with 1 when something would keep apps from running.
    """
    findings = list(examine())
    if json:
        import msgspec  # noqa: PLC0415

        print_json(msgspec.json.encode([asdict(finding) for finding in findings]))
    else:
        write(*_report(findings))
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def _report(findings: list[Finding]) -> Iterator[Line]:
    table: list[Line] = []
    for finding in findings:
        line = [_MARKS[finding.level], (finding.check, ""), (finding.found, "")]
        table.append(line)
        if finding.fix:
            table.append([("", ""), ("", ""), (f"→ {finding.fix}", "dim")])
    yield from rows(table)
    counts = {level: sum(f.level == level for f in findings) for level in ("warn", "fail")}
    yield []
    if counts["fail"]:
        yield [(f"{counts['fail']} to fix before apps can run", "bold red")]
    elif counts["warn"]:
        yield [("ready to serve", "bold green"), (f", {counts['warn']} to look at", "")]
    else:
        yield [("ready to serve", "bold green")]


def examine() -> Iterator[Finding]:
    """Yield what there is to say about this machine."""
    yield _python()
    yield _platform()
    yield Finding("servekit", "ok", f"{__version__} in {Path(__file__).parents[1]}")
    yield from _packages()
    yield _uvloop()
    try:
        settings = Settings.load()
    except AuthorError as error:
        yield Finding("settings", "fail", str(error), "correct it where it is written")
        return
    checks: tuple[Callable[[Settings], Finding], ...] = (_gpus, _files, _runtime_dir, _port)
    for check in checks:
        yield check(settings)


def _python() -> Finding:
    found = f"{platform.python_version()} ({platform.python_implementation()}) at {sys.executable}"
    if sys.version_info < (3, 11):  # noqa: UP036  (a wheel can be forced onto an older one)
        return Finding("python", "fail", found, "install Python 3.11 or later")
    if sys.implementation.name != "cpython":
        return Finding("python", "warn", found, "servekit is tested with CPython")
    return Finding("python", "ok", found)


def _platform() -> Finding:
    from servekit.core.host import Host  # noqa: PLC0415

    host = Host()
    found = f"{platform.system()} {platform.release()} on {platform.machine()}, {host.cores()} CPUs"
    if memory := host.memory():
        found += f", {memory / 2**30:.1f} GiB"
    if sys.platform not in ("linux", "darwin"):
        return Finding("platform", "fail", found, "use Linux or macOS; on Windows, WSL 2")
    return Finding("platform", "ok", found)


def _packages() -> Iterator[Finding]:
    """Yield a line on the packages that servekit needs, and one for each extra."""
    try:
        requires = metadata.requires("servekit") or []
    except metadata.PackageNotFoundError:
        yield Finding("packages", "warn", "servekit is not installed, only on the search path")
        return
    needed: dict[str, list[tuple[str, str]]] = {}
    for text in requires:
        found = _REQUIREMENT.match(text)
        assert found is not None
        group = needed.setdefault(found["extra"] or "", [])
        group.append((found["name"], found["range"].strip(" ()")))
    yield _group("packages", needed.get("", []), fix="pip install --upgrade servekit")
    for extra in _EXTRAS:
        if extra in needed:
            fix = f"pip install 'servekit[{extra}]'"
            yield _group(f"extra {extra}", needed[extra], fix=fix, optional=True)


def _group(
    check: str, needed: list[tuple[str, str]], *, fix: str, optional: bool = False
) -> Finding:
    there: list[str] = []
    missing: list[str] = []
    old: list[str] = []
    for name, wanted in needed:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        there.append(f"{name} {version}")
        if not satisfies(version, wanted):
            old.append(f"{name} {version}, needs {wanted}")
    if optional and missing and not old:
        return Finding(check, "ok", f"not installed ({', '.join(missing)})")
    if not missing and not old:
        return Finding(check, "ok", ", ".join(there))
    level: Literal["warn", "fail"] = "warn" if optional else "fail"
    return Finding(
        check, level, "; ".join([*(f"{name} is missing" for name in missing), *old]), fix
    )


def satisfies(version: str, wanted: str) -> bool:
    """Return whether a version is at least what a requirement like `>=2.10` says.

    Only lower bounds and exact versions are read, the kinds that our requirements have.
    """
    for bound in wanted.split(","):
        operator, least = bound.strip()[:2], _numbers(bound.strip()[2:])
        if operator == ">=" and _numbers(version) < least:
            return False
        if operator == "==" and _numbers(version) != least:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[\d.]*", version)
    parts = release[0].split(".") if release else []
    numbers = [int(part) for part in parts if part]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _uvloop() -> Finding:
    try:
        import uvloop  # noqa: PLC0415

        uvloop.new_event_loop().close()
    except Exception as error:  # noqa: BLE001  (whatever a broken build raises)
        text = f"can't be used: {type(error).__name__}: {error}"
        return Finding("uvloop", "fail", text, "pip install --force-reinstall uvloop")
    return Finding("uvloop", "ok", "makes event loops")


def _gpus(settings: Settings) -> Finding:
    from servekit.engine.devices import NOT_ASKED, detect, is_not_asked  # noqa: PLC0415
    from servekit.engine.placement import Placement  # noqa: PLC0415

    if settings.gpus is None and is_not_asked():
        return Finding(
            "GPUs", "warn", "a driver is there, nvidia-ml-py to ask it is not", NOT_ASKED
        )
    found = detect(declared=settings.gpus, visible=settings.cuda_visible_devices)
    text = ", ".join(
        device.id + (f": {device.memory / 2**30:.0f} GiB" if device.memory else "")
        for device in found
    )
    if not found:
        hidden = settings.cuda_visible_devices is not None
        return Finding("GPUs", "ok", "none" + (" (CUDA_VISIBLE_DEVICES is set)" if hidden else ""))
    declared = " (SERVEKIT_GPUS says so)" if settings.gpus is not None else ""
    return Finding("GPUs", "ok", f"{len(Placement(found).statistics())} ({text}){declared}")


def _files(_: Settings) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} per process, up to {_limit(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return Finding("open files", "ok", found)
    fix = "ulimit -n 65536: every connection of a client takes one"
    return Finding("open files", "fail" if soft < _TOO_FEW_FILES else "warn", found, fix)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _runtime_dir(settings: Settings) -> Finding:
    """Make what the supervisor makes: a private folder with a unix socket in it."""
    folder = settings.runtime_dir
    fix = "set SERVEKIT_RUNTIME_DIR to a short path on a local disk that you may write to"
    try:
        with tempfile.TemporaryDirectory(prefix="servekit-", dir=folder) as private:
            mode = Path(private).stat().st_mode & 0o777
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"{private}/doctor.sock")
    except OSError as error:
        return Finding("runtime dir", "fail", f"{folder}: {error.strerror or error}", fix)
    if mode & 0o077:
        text = f"{folder}: a private folder comes out with mode {mode:04o}"
        return Finding("runtime dir", "fail", text, fix)
    size = len(os.fsencode(folder))
    return Finding("runtime dir", "ok", f"{folder} ({size} bytes long, private folders work)")


def _port(settings: Settings) -> Finding:
    from servekit.engine.front import bind  # noqa: PLC0415

    where = f"{settings.host}:{settings.port}"
    try:
        bind(settings.host, settings.port).close()
    except AuthorError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else str(error)
        fix = "servekit status shows what runs; or choose another with --port or SERVEKIT_PORT"
        return Finding("port", "warn", f"{where}: {reason}", fix)
    return Finding("port", "ok", f"{where} is free")
