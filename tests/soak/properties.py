"""The property tests of `make test`, with many more examples each."""

import asyncio
import os
import re
import sys

from tests.examples import VARIABLE
from tests.flow.harness import ROOT
from tests.soak.row import Mark, exactly, row


async def run(times: int, *targets: str) -> list[Mark]:
    """Run tests with so many times the examples; a failure's output goes to stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-q", "--timeout=0", "-p", "no:cacheprovider", *targets),
        cwd=ROOT,
        env={**os.environ, VARIABLE: str(times)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    text = out.decode(errors="replace")
    if process.returncode:
        sys.stderr.write(text[-20_000:])
    summary = text.strip().rpartition("\n")[2]
    failed = re.search(r"(\d+) (?:failed|error)", summary)
    passed = re.search(r"(\d+) passed", summary)
    return [
        exactly(f"failed of {passed[1] if passed else 0}", failed[1] if failed else "0", "0"),
        exactly("exit code", process.returncode, 0),
    ]


@row("state machines of batcher, scaler, slots", quick={"times": 5}, full={"times": 84})
async def machines(times: int) -> list[Mark]:
    """84 times 120 schedules of the batcher are 10,000."""
    modules = ("batcher", "scaler", "slots")
    return await run(times, *(f"tests/unit/test_{module}.py" for module in modules))


@row("Hypothesis at the wire and at bodies", quick={"times": 5}, full={"times": 50})
async def hostile_bytes(times: int) -> list[Mark]:
    modules = ("frames", "connection", "greeting", "schema", "gateway", "hostile")
    return await run(times, *(f"tests/unit/test_{module}.py" for module in modules))


@row("Schemathesis on the OpenAPI document", quick={"times": 3}, full={"times": 30})
async def openapi(times: int) -> list[Mark]:
    return await run(times, "tests/flow/test_openapi.py")
