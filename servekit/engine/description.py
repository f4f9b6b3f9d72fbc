"""Describing an app in a process of its own, so that the supervisor never imports user code.

`python -m servekit.engine.description TARGET FD` writes the result to the file descriptor; what user
code prints while it is imported goes to stderr, where it belongs.
"""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from servekit.core.tracebacks import user_traceback
from servekit.errors import AuthorError, SetupError
from servekit.spec.app import AppSpec


class Described(msgspec.Struct, frozen=True):
    """An app as a fresh process found it.

    Attributes:
        app: None when it can't be described.
        search_path: Folders that loading it put onto `sys.path`.
        has_build_hooks: Some service has `@on_build`.
        sources: Files of the author's modules that it imported, or that its functions would.
        error: What is wrong, one line.
        trace: The user's exception, when it was one.
    """

    app: AppSpec | None = None
    search_path: tuple[str, ...] = ()
    has_build_hooks: bool = False
    sources: tuple[str, ...] = ()
    error: str = ""
    trace: str = ""


async def describe_elsewhere(
    target: str, *, python: Path | None = None, cwd: Path | None = None
) -> Described:
    """Describe an app in a fresh process.

    Args:
        target: Import string or file.
        python: The interpreter of another environment, which sees nothing of this one's and writes no
            bytecode; None
            is this one.
        cwd: From where; None is the current folder.

    Raises:
        ConfigError: There is no such app.
        SetupError: Importing it raised.
        AuthorError: It can't work as written.
    """
    readable, writable = os.pipe()
    child = await asyncio.create_subprocess_exec(
        *((sys.executable,) if python is None else (python, "-E", "-B")),
        "-m",
        "servekit.engine.description",
        target,
        str(writable),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(writable,),
        cwd=cwd,
        start_new_session=True,  # Ctrl-C is the supervisor's to act on
    )
    os.close(writable)
    try:
        written = await _read_all(readable)
        code = await child.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
        raise
    if not written:
        raise SetupError(f"importing {target} ended the process with code {code}")
    found = msgspec.json.decode(written, type=Described)
    if found.app is None:
        raise SetupError(found.error, trace=found.trace)
    return found


async def _read_all(fd: int) -> bytes:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb")
    )
    try:
        return await reader.read()
    finally:
        transport.close()


def _describe(target: str) -> Described:
    from servekit.spec.describe import describe  # noqa: PLC0415
    from servekit.spec.graph import definition_of, topology  # noqa: PLC0415
    from servekit.spec.own import OwnModules  # noqa: PLC0415
    from servekit.spec.target import load  # noqa: PLC0415

    before = set(sys.path)
    own = OwnModules()
    try:
        root = load(target)
        app = describe(root, own)
        hooks = any(service.hooks.get("on_build") for service in topology(definition_of(root)))
    except AuthorError as error:
        cause = error.__cause__
        trace = user_traceback(cause) if isinstance(error, SetupError) and cause else ""
        return Described(error=str(error), trace=trace)
    except Exception as error:  # noqa: BLE001  (user code runs at import)
        return Described(error=f"describing {target} raised", trace=user_traceback(error))
    return Described(
        app=app,
        search_path=tuple(path for path in sys.path if path not in before),
        has_build_hooks=hooks,
        sources=tuple(map(str, own.files())),
    )


def _main(target: str, fd: int) -> None:
    with os.fdopen(fd, "wb") as result:
        os.dup2(2, 1)
        result.write(msgspec.json.encode(_describe(target)))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
