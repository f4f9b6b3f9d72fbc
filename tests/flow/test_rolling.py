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


def numbered(n: int, value: str) -> bool:
    return value.split()[1] == str(n)


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
            Load(app, "/label", rate=60, right=numbered) as load,
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


PARTS = """
import os

import servekit as sk


@sk.service
class Inner:
    @sk.endpoint
    def pid(self) -> int:
        return os.getpid()


@sk.service
class Apart:
    @sk.endpoint
    async def answer(self) -> str:
        return helper()


def helper() -> str:
    return "apart 1"


@sk.service
class Root:
    inner = sk.depends(Inner, colocate=True)
    apart = sk.depends(Apart)

    @sk.endpoint
    async def ask(self) -> list[str]:
        assert await self.inner.pid.remote() == os.getpid()
        return ["root 1", await self.apart.answer.remote()]
"""


async def edit(app, file, old: str, new: str) -> None:
    """Replace a text that is once in a file, and wait until the app has taken it."""
    text = file.read_text()
    assert text.count(old) == 1
    rolls = app.text.count("reloaded")
    file.write_text(text.replace(old, new))
    await until(lambda: app.text.count("reloaded") > rolls, "it is reloaded")


async def test_only_what_runs_the_edited_code_is_replaced(tmp_path):
    file = tmp_path / "app.py"
    file.write_text(PARTS)
    async with serving(f"{file}:Root", verb="dev", cwd=tmp_path) as app:

        async def after(old: str, new: str, answer: list[str]) -> tuple[str, str]:
            """Edit the file, wait until it serves, and return the ids of both replicas."""
            await edit(app, file, old, new)

            async def answers():
                return (await app.post("/ask")).json == answer

            await until(answers, "the new code answers")

            async def alone():
                both = [await app.replicas(name) for name in ("Root", "Apart")]
                return [next(iter(one)) for one in both] if all(len(b) == 1 for b in both) else None

            root, apart = await until(alone, "the old replicas have gone")
            return root, apart

        assert not await app.replicas("Inner")
        before = [next(iter(await app.replicas(name))) for name in ("Root", "Apart")]
        first = await after("import os\n", "import os  # edited\n", ["root 1", "apart 1"])
        assert list(first) == before
        root, apart = await after('"apart 1"', '"apart 2"', ["root 1", "apart 2"])
        assert root == first[0]
        assert apart != first[1]
        second = await after('"root 1"', '"root 2"', ["root 2", "apart 2"])
        assert second[0] != root
        assert second[1] == apart
        third = await after("return os.getpid()", "return int(os.getpid())", ["root 2", "apart 2"])
        assert third[0] != second[0], "what is colocated runs in its process"
        assert third[1] == apart
        fourth = await after(
            "async def answer(self) -> str:",
            "async def answer(self, n: int = 1) -> str:",
            ["root 2", "apart 2"],
        )
        assert fourth[0] != third[0], "its caller knows another signature now"
        assert fourth[1] != apart
        series = await app.metrics()
        assert any('service="Inner"' in name and 'endpoint="pid"' in name for name in series)


ALONE = """
import os

import servekit as sk


@sk.service(gpu=1, replicas=2, version="{version}")
class Root:
    {setup}

    @sk.endpoint(idempotent=True)
    def label(self, x: int) -> str:
        return f"{version} {{x}} {{os.environ['CUDA_VISIBLE_DEVICES']}}"
"""


async def test_saving_a_file_while_all_gpus_are_taken(tmp_path):
    """There is no room for the new beside the old: it replaces it one by one, and no call is lost."""
    file = tmp_path / "app.py"
    file.write_text(ALONE.format(version="v1", setup="pass"))
    env = {"SERVEKIT_GPUS": "2"}
    async with serving(f"{file}:Root", verb="dev", cwd=tmp_path, env=env) as app:

        async def replicas(version: str) -> bool:
            [found] = (await app.status()).services
            answer = await app.post("/label", {"x": 5})
            ready = [replica for replica in found.replicas if replica.state == "ready"]
            return len(ready) == len(found.replicas) == 2 and answer.json.startswith(version)

        async with Load(app, "/label", rate=30, right=numbered) as load:
            await load.goes_on()
            file.write_text(ALONE.format(version="v2", setup="pass"))
            await until(lambda: replicas("v2"), "both are new")
            await load.goes_on()
            assert app.text.count("an old replica, which leaves first") == 2
            file.write_text(ALONE.format(version="v3", setup=BREAKS))
            await until(lambda: "reload failed" in app.text, "the broken edit is reported")
            assert "bad weights" in app.text
            await load.goes_on()  # with the other one: what left can't come back
            file.write_text(ALONE.format(version="v4", setup="pass"))
            await until(lambda: replicas("v4"), "both are new")
        assert load.check().keys() == {"200"}
        assert {outcome.value.split()[2] for outcome in load.outcomes()} == {"0", "1"}


UNDONE = """
import servekit as sk


@sk.service(gpu=1)
class Model:
    @sk.endpoint
    async def label(self) -> str:
        return "{label}"


@sk.service
class Root:
    model = sk.depends(Model)

    def __init__(self) -> None:
        {setup}

    @sk.endpoint
    async def label(self) -> str:
        return await self.model.label.remote()
"""


async def test_what_ran_an_edit_that_was_undone_is_replaced(tmp_path):
    """A roll fails elsewhere when the only replica has left: it comes back with the new code."""
    file = tmp_path / "app.py"
    file.write_text(UNDONE.format(label="old", setup="pass"))
    env = {"SERVEKIT_GPUS": "1"}
    async with serving(f"{file}:Root", verb="dev", cwd=tmp_path, env=env) as app:

        async def says(label: str) -> bool:
            return (await app.post("/label")).json == label

        await until(lambda: says("old"), "it serves")
        waits = "import time; time.sleep(2); raise RuntimeError('bad')"
        file.write_text(UNDONE.format(label="new", setup=waits))
        await until(lambda: "reload failed" in app.text, "the broken edit is reported")
        await until(lambda: says("new"), "what left came back as the file says")
        file.write_text(UNDONE.format(label="old", setup="pass"))
        await until(lambda: says("old"), "the edit is undone")


async def test_saving_a_file_while_its_only_gpu_is_taken(tmp_path):
    """Calls wait until the new one is there."""
    file = tmp_path / "app.py"
    one = ALONE.replace("replicas=2, ", "")
    file.write_text(one.format(version="v1", setup="pass"))
    env = {"SERVEKIT_GPUS": "1"}
    async with serving(f"{file}:Root", verb="dev", cwd=tmp_path, env=env) as app:
        async with Load(app, "/label", rate=30, right=numbered) as load:
            await load.goes_on()
            file.write_text(one.format(version="v2", setup="pass"))
            await until(lambda: "reloaded" in app.text, "it is reloaded")
            await load.goes_on()
        assert load.check().keys() == {"200"}
        assert {outcome.value.split()[0] for outcome in load.outcomes()} == {"v1", "v2"}


TUNED = """
import servekit as sk


@sk.service
class Model:
    def __init__(self, factor: int = 1, weights: str = "a") -> None:
        self.factor, self.weights = factor, weights

    @sk.reconfigure
    def tune(self, factor: int) -> None:
        self.factor = factor
        if factor < 0:
            raise ValueError("the factor is negative")

    @sk.endpoint(idempotent=True)
    def times(self, x: int) -> str:
        return f"{self.weights} {x * self.factor}"


@sk.service
class Beside:
    def __init__(self, word: str = "by") -> None:
        self.word = word

    @sk.reconfigure
    async def say(self, word: str) -> None:
        self.word = word

    @sk.endpoint
    async def said(self) -> str:
        return self.word


model = sk.ref(Model, name="Tuned", replicas=2, args={"factor": 2})
beside = sk.ref(Beside, name="Word", args={})


@sk.service
class Root:
    model = sk.depends(model)
    beside = sk.depends(beside, colocate=True)

    @sk.endpoint(idempotent=True)
    async def ask(self, x: int) -> str:
        return f"{await self.model.times.remote(x)} {await self.beside.said.remote()}"
"""


async def test_arguments_that_running_replicas_take(tmp_path):
    """Those that an `@sk.reconfigure` hook names restart nothing; all others do; a bad one changes
    nothing."""
    file = tmp_path / "app.py"
    file.write_text(TUNED)
    async with serving(f"{file}:Root", verb="dev", cwd=tmp_path) as app:

        async def replicas():
            return {*await app.replicas("Root"), *await app.replicas("Tuned")}

        async def answer() -> str:
            return (await app.post("/ask", {"x": 3})).json

        async def edited(old: str, new: str, wanted: str) -> set[str]:
            await edit(app, file, old, new)
            assert {await answer() for _ in range(20)} == {wanted}
            return await replicas()

        first = await replicas()
        assert len(first) == 3
        assert await answer() == "a 6 by"
        async with Load(app, "/ask", rate=40, right=lambda *_: True) as load:
            assert await edited('"factor": 2', '"factor": 5', "a 15 by") == first
            assert await edited("args={})", 'args={"word": "or"})', "a 15 or") == first

            good = file.read_text()
            file.write_text(good.replace('"factor": 5', '"factor": -1'))
            await until(lambda: "reload failed" in app.text, "the bad one is reported")
            assert "Tuned: tune raised ValueError: the factor is negative" in app.text
            assert {await answer() for _ in range(20)} == {"a 15 or"}
            assert await replicas() == first

            file.write_text(good.replace('"factor": 5', '"factor": 7, "weights": "b"'))

            async def others_serve():
                return len(await replicas()) == 3 and len(await replicas() & first) == 1

            await until(others_serve, "replicas with other weights are there, and none else")
            assert {await answer() for _ in range(20)} == {"b 21 or"}
        assert load.check().keys() == {"200"}
