"""Describing an app in a process of its own, so that the supervisor never imports user code.

`python -m servekit.engine.description TARGET FD` writes the result to the file descriptor; what user
code prints while it is imported goes to stderr, where it belongs.
"""

import asyncio
import os
import sys
import traceback

import msgspec

from servekit.errors import AuthorError, SetupError
from servekit.spec.app import AppSpec


class Described(msgspec.Struct, frozen=True):
    """An app as a fresh process found it.

    Attributes:
        app: None when it can't be described.
        search_path: Folders that loading it put onto `sys.path`.
        error: What is wrong, one line.
        trace: The user's exception, when it was one.
    """

    app: AppSpec | None = None
    search_path: tuple[str, ...] = ()
    error: str = ""
    trace: str = ""


async def describe_elsewhere(target: str) -> Described:
    """Describe an app in a fresh process.

    Raises:
        ConfigError: There is no such app.
        SetupError: Importing it raised.
        AuthorError: It can't work as written.
    """
    readable, writable = os.pipe()
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "servekit.engine.description",
        target,
        str(writable),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(writable,),
    )
    os.close(writable)
    with os.fdopen(readable, "rb") as result:
        written = await asyncio.to_thread(result.read)
    code = await child.wait()
    if not written:
        raise SetupError(f"importing {target} ended the process with code {code}")
    found = msgspec.json.decode(written, type=Described)
    if found.app is None:
        raise SetupError(found.error + (f"\n\n{found.trace}" if found.trace else ""))
    return found


def _describe(target: str) -> Described:
    from servekit.spec.describe import describe  # noqa: PLC0415
    from servekit.spec.target import load  # noqa: PLC0415

    before = set(sys.path)
    try:
        app = describe(load(target))
    except AuthorError as error:
        cause = error.__cause__
        trace = "".join(traceback.format_exception(cause)) if isinstance(error, SetupError) else ""
        return Described(error=str(error), trace=trace)
    except Exception:  # noqa: BLE001  (user code runs at import)
        return Described(error=f"describing {target} raised", trace=traceback.format_exc())
    added = [path for path in sys.path if path not in before]
    return Described(app=app, search_path=tuple(added))


def _main(target: str, fd: int) -> None:
    with os.fdopen(fd, "wb") as result:
        os.dup2(2, 1)
        result.write(msgspec.json.encode(_describe(target)))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
