"""New revisions while calls run, and the end of an app with calls on board."""

import asyncio
import signal
import tempfile
import time
from pathlib import Path

from tests.flow.harness import Http, serving, until
from tests.flow.load import Load
from tests.soak.row import Mark, at_most, exactly, row
from tests.soak.steady import capacity

SOURCE = """
import time

import servekit as sk


@sk.service(version="{version}", replicas=2, limits=sk.Limits(max_ongoing=16))
class Model:
    @sk.endpoint(idempotent=True)
    def label(self, x: int) -> int:
        time.sleep(0.12)
        return x
"""


@row("rolling update at 70 % load", quick={"times": 3}, full={"times": 10})
async def rolling(times: int) -> list[Mark]:
    old = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "app.py"
        file.write_text(SOURCE.format(version="v0"))
        async with serving(f"{file}:Model", verb="dev", cwd=Path(folder)) as app:
            most = await capacity(app, "/label")
            async with Load(app, "/label", rate=0.7 * most) as load:
                await load.goes_on()
                for number in range(1, times + 1):
                    before = await app.replicas("Model")
                    file.write_text(SOURCE.format(version=f"v{number}"))

                    async def rolled(before=before) -> bool:
                        found = await app.replicas("Model")
                        return len(found) == 2 and not found.keys() & before.keys()

                    await until(rolled, f"v{number} has replaced the one before")
                    since = time.monotonic()
                    await load.goes_on()
                    old += sum(o.version != f"v{number}" for o in load.outcomes(since))
            outcomes = load.check()
            versions = {o.version for o in load.outcomes()}
    return [
        exactly("errors", outcomes.total() - outcomes["200"], 0),
        exactly("versions that answered", len(versions), times + 1),
        exactly("answers of a version that had been replaced", old, 0),
    ]


@row(
    "SIGTERM with running work",
    quick={"short_s": 1.0, "long_s": 3.0},
    full={"short_s": 1.0, "long_s": 10.0},
)
async def shutdown(short_s: float, long_s: float) -> list[Mark]:
    count = int(long_s / 0.1)
    async with serving("slow.py:Slow") as app, await Http.open(app.url) as http:
        await http.send("POST", "/ticks", body=b'{"count": %d, "every_s": 0.1}' % count)
        work = [
            asyncio.create_task(app.post(path, {"seconds": seconds}))
            for path in ("/sync", "/later")
            for seconds in (short_s, long_s)
        ]
        await until(
            lambda: sorted(app.traced()) == ["later", "later", "sync", "sync", "ticks"], "all run"
        )
        began = time.monotonic()
        app.send(signal.SIGTERM)
        answers = await asyncio.gather(*work)
        stream = (await http.answer()).body.decode()
        code = await app.exit_code()
        took_s = time.monotonic() - began
    return [
        exactly("calls that finished", sum(a.status == 200 for a in answers), len(work)),
        exactly("chunks of the stream", stream.count("data: ") - 1, count),
        exactly("the stream's end", stream.rstrip().rpartition("\n\n")[2], "event: end\ndata:"),
        exactly("exit code", code, 0),
        at_most("seconds beyond the work", took_s - long_s, 4.0, "s", timing=True),
    ]
