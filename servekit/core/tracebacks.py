"""Tracebacks for authors: their own frames, without those of the machinery that called them."""

import asyncio
import concurrent.futures
import importlib
import traceback
from pathlib import Path
from types import TracebackType

_PACKAGE = str(Path(__file__).parent.parent)
_MACHINERY = (
    "<frozen importlib",
    importlib.__file__,
    str(Path(asyncio.__file__).parent),
    str(Path(concurrent.futures.__file__).parent),
    _PACKAGE,
)


def user_traceback(error: BaseException) -> str:
    """Return an exception as Python prints it, starting at the first frame of user code.

    When there is none, as for a syntax error in an imported module, no frames are shown.
    """
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_MACHINERY):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
