"""Reads all of Python's own library and reports its longest functions: work for a minute or so.

Nobody waits for that in a request, so it is a job: accepted at once, kept on disk, followed by its
progress, stopped at any file, and started again if its process dies.
"""

import ast
import sysconfig
import time
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

import servekit as sk

LIBRARY = Path(sysconfig.get_path("stdlib"))


class Function(BaseModel):
    module: str
    name: str
    lines: int


class Report(BaseModel):
    files: int
    lines: int
    longest: list[Function]


@sk.service
class Reports:
    @sk.task(retries=3, timeout_s=600, max_concurrency=2)
    def longest_functions(
        self,
        pattern: str = "*.py",
        top: Annotated[int, Field(ge=1, le=100)] = 5,
        pause_s: float = 0.02,
    ) -> Report:
        """Find the longest functions in the files of Python's library that match a pattern.

        The pause after each file stands for harder work.
        """
        job = sk.job()
        files = sorted(LIBRARY.glob(pattern))
        lines, found = 0, list[Function]()
        for number, file in enumerate(files, start=1):
            if job.cancelled:
                break
            source = file.read_text("utf-8", "replace")
            lines += source.count("\n")
            found = sorted(found + functions(file, source), key=lambda f: -f.lines)[:top]
            job.progress(number / len(files), file.name, {"lines": lines})
            time.sleep(pause_s)
        return Report(files=len(files), lines=lines, longest=found)


def functions(file: Path, source: str) -> list[Function]:
    """Return the functions of a file; one that can't be parsed has none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    return [
        Function(module=file.stem, name=node.name, lines=node.end_lineno - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
