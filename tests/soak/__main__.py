"""`python -m tests.soak [--quick] [--only NAME]`: run the rows, and print the table."""

import argparse
import asyncio
import contextlib
import io
import sys
import time
import traceback

from rich.console import Console
from rich.table import Table

from tests.soak import callers, changes, deaths, hostile, properties, steady
from tests.soak.row import ROWS, Mark, Row

LIMIT_S = 1200.0
"""What one row may take."""

__all__ = ["callers", "changes", "deaths", "hostile", "properties", "steady"]


async def measure(row: Row, *, quick: bool) -> list[Mark]:
    """Run a row; what it raises is a mark that was missed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            async with asyncio.timeout(LIMIT_S):
                return await row.measure(**(row.quick if quick else row.full))
    except (Exception, TimeoutError) as error:
        sys.stderr.write(printed.getvalue())
        traceback.print_exception(error)
        return [Mark(f"raised {type(error).__name__}", str(error)[:60], "nothing", ok=False)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: some minutes in all")
    parser.add_argument("--only", action="append", choices=[*ROWS], help="this row; repeatable")
    options = parser.parse_args()
    table = Table("test", "figure", "value", "pass mark", "ok", title="servekit soak")
    missed = 0
    try:
        for name in options.only or ROWS:
            began = time.monotonic()
            marks = asyncio.run(measure(ROWS[name], quick=options.quick))
            wrong = [f"{m.figure}: {m.value}, wanted {m.wanted}" for m in marks if not m.ok]
            took_s = time.monotonic() - began
            print(f"{name}: {took_s:.0f} s", *wrong, sep="\n  ", file=sys.stderr, flush=True)
            missed += len(wrong)
            for index, mark in enumerate(marks):
                title = "" if index else ROWS[name].title
                table.add_row(title, *mark[:3], "yes" if mark.ok else "NO")
            table.add_section()
    finally:  # also when it was interrupted
        Console(width=130).print(table)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
