"""New code while calls run: nothing is lost, and code that can't start changes nothing."""

from tests.flow.harness import Http, serving, until
from tests.flow.load import Load

SOURCE = """
import time

import servekit as sk


@sk.service(version="{version}")
class Model:
    {setup}

    @sk.batched(max_size=8)
    def label(self, xs: list[int]) -> list[str]:
        time.sleep(0.002)
        return [f"{version} {{x}}" for x in xs]


@sk.service(replicas=2, version="{version}")
class Root:
    model = sk.depends(Model)

    @sk.endpoint(idempotent=True)
    async def label(self, x: int) -> str:
        return await self.model.label.remote(x)
"""
BREAKS = "def __init__(self) -> None: raise RuntimeError('bad weights')"


def source(version: str, setup: str = "pass") -> str:
    return SOURCE.format(version=version, setup=setup)


async def test_saving_a_file_under_load(tmp_path):
    """`servekit dev`: a good edit goes live without an error, a broken one changes nothing."""
    file = tmp_path / "app.py"
    file.write_text(source("v1"))
    async with serving(f"{file}:Root", verb="dev", cwd=tmp_path) as app:

        async def says(version: str) -> bool:
            answer = await app.post("/label", {"x": 5})
            assert answer.status == 200
            return answer.json == f"{version} 5" and answer.headers["x-servekit-version"] == version

        async with (
            await Http.open(app.url) as kept,
            Load(app, "/label", rate=60, right=lambda n, value: value.split()[1] == str(n)) as load,
        ):
            await load.goes_on()
            file.write_text(source("v2"))
            await until(lambda: says("v2"), "v2 answers")
            await load.goes_on()

            file.write_text(source("v3", BREAKS))
            await until(lambda: "reload failed" in app.text, "the broken edit is reported")
            assert "bad weights" in app.text
            await load.goes_on()
            assert await says("v2")

            file.write_text("def (")
            await until(lambda: "SyntaxError" in app.text, "the syntax error is reported")
            await load.goes_on()
            assert await says("v2")

            file.write_text(source("v4"))
            await until(lambda: says("v4"), "v4 answers")
            await load.goes_on()
            answer = await kept.call("POST", "/label", body=b'{"x": 9}')
            assert answer.json == "v4 9"
        assert load.check().keys() == {"200"}

        async def settled():
            return len(await app.replicas("Root")) == 2 and len(await app.replicas("Model")) == 1

        await until(settled, "the old replicas have gone")
        seen = {outcome.value.split()[0] for outcome in load.outcomes()}
        assert seen == {"v1", "v2", "v4"}
