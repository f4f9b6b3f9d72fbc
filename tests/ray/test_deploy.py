"""`servekit deploy` and its kin, as an operator uses them; and `sk.deploy`, as a notebook does."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.flow.harness import COMMAND, Http, show, until
from tests.flow.load import Load
from tests.ray.conftest import PATH

APP = """
import servekit as sk


@sk.service(version="{version}")
class Model:
    weights = sk.model("weights.txt")

    def __init__(self, added: int = 0) -> None:
        {setup}
        self.added = added
        self.name = self.weights.read_text()

    @sk.reconfigure
    def add(self, added: int) -> None:
        self.added = 100 // added

    @sk.batched(max_size=8)
    def label(self, xs: list[int]) -> list[str]:
        return [f"{{self.name}} {{x + self.added}}" for x in xs]


model = sk.ref(Model, name="Model", args={args})


@sk.service(replicas=2)
class Root:
    model = sk.depends(model)

    @sk.endpoint(idempotent=True)
    async def label(self, x: int) -> str:
        return await self.model.label.remote(x)
"""
NOTEBOOK = """
import sys
import servekit as sk

@sk.service
class Times:
    def __init__(self, factor: int = 3) -> None:
        self.factor = factor

    @sk.endpoint
    def times(self, x: int) -> int:
        return x * self.factor

app = sk.deploy(Times, port=int(sys.argv[1]), drain_delay_s=0.0)
with sk.connect(Times, app.url) as times:
    print(times.times(4))
app.delete()
"""


class Operator:
    """Runs commands against the cluster; what they deploy is reached at `url`."""

    def __init__(self, cluster, folder) -> None:
        self.folder = folder
        self.port = 23_000 + os.getpid() % 1000
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {
            **os.environ,
            "PYTHONPATH": PATH,
            "SERVEKIT_RAY_ADDRESS": cluster.address,
            "SERVEKIT_PORT": str(self.port),
            "SERVEKIT_DRAIN_DELAY_S": "0",
            "SERVEKIT_GATEWAY_NODES": "door=yes",
            "SERVEKIT_RUNTIME_DIR": str(folder),
        }

    def write(self, version: str, setup: str = "pass", args: str = "{}") -> None:
        text = APP.format(version=version, setup=setup, args=args)
        (self.folder / "app.py").write_text(text)
        self.weights(version)

    def weights(self, version: str) -> None:
        """Write the model that the app has beside its code."""
        (self.folder / "weights.txt").write_text(version)

    def run(self, *words: str, code: int = 0, stdin: str = "") -> str:
        """Run `servekit`, or a script of Python from its standard input."""
        command = [sys.executable, "-"] if stdin else COMMAND
        done = subprocess.run(
            [*command, *words],
            env=self.env,
            cwd=self.folder,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=90,
        )
        show(f"$ {' '.join(words)}\n{done.stdout}")
        assert done.returncode == code
        return done.stdout

    async def replicas(self) -> set[str]:
        return set(re.findall(r"(?:Model|Root)-\w+", await self.later("status")))

    async def later(self, *words: str, **given) -> str:
        """Run a command while the loop goes on."""
        return await asyncio.to_thread(self.run, *words, **given)


@pytest.fixture(scope="module", autouse=True)
def serve_has_an_environment(cluster, apps_run_there):
    """Have Ray Serve started by somebody whose processes have variables that nobody else's have.

    Its controller hands them to what it starts; services that stay must stay all the same.
    """
    script = "import ray; from ray import serve; ray.init(); serve.start(proxy_location='Disabled')"
    job = {"runtime_env": {"env_vars": {"WHO": "started Serve"}}}
    env = {
        **os.environ,
        "RAY_ADDRESS": cluster.address,
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job),
    }
    subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True)


@pytest.fixture
def operator(cluster):
    with tempfile.TemporaryDirectory(prefix="sk", dir="/tmp") as folder:
        yield Operator(cluster, Path(folder))


async def test_the_life_of_an_app(operator):
    """Deployed, changed, changed badly, scaled, taken back, ended; no call of its clients is lost."""
    operator.write("v1")
    text = operator.run("deploy", "app.py")
    assert text.splitlines()[:2] == ["+  Model  starts", "+  Root   starts"]
    assert f"Root is ready at {operator.url}" in text
    first = await operator.replicas()
    assert len(first) == 3
    roots = {id_ for id_ in first if id_.startswith("Root-")}
    async with Load(operator, "/label", rate=40, right=lambda n, text: text[3:] == str(n)) as load:
        await load.goes_on()

        operator.weights("v2")
        assert (await operator.later("deploy", "app.py", "--plan")).splitlines() == [
            "~  Model  restarts",
            "=  Root   stays",
        ]
        await operator.later("deploy", "app.py")
        assert await says(operator) == "v2 5"
        assert roots < (second := await operator.replicas())
        assert not (first - roots) & second

        operator.write("v3", "raise RuntimeError('bad weights')")
        text = await operator.later("deploy", "app.py", code=1)
        assert "error: Model: set-up raised RuntimeError: bad weights" in text
        assert "Traceback (most recent call last)" in text
        assert await says(operator) == "v2 5"

        assert "2 of 2 ready" in await operator.later("scale", "Model=2", "--wait")
        assert "has less" not in await operator.later("scale", "Model=900", code=1)

        assert "is back at revision" in await operator.later("rollback")
        assert await says(operator) == "v1 5"
        await load.goes_on()
    assert load.check().keys() == {"200"}

    before = await operator.replicas()
    operator.write("v1", args="{'added': 50}")
    text = operator.run("deploy", "app.py")
    assert text.splitlines()[:2] == ["~  Model  takes other arguments", "=  Root   stays"]
    assert await says(operator) == "v1 7"
    operator.write("v1", args="{'added': 0}")
    text = operator.run("deploy", "app.py", code=1)
    assert "error: Model: add raised ZeroDivisionError" in text
    assert "100 // added" in text
    assert await says(operator) == "v1 7"
    assert await operator.replicas() == before
    assert "set-up raised RuntimeError: bad weights" in operator.run("logs")
    assert "no app 'Rot' runs" in operator.run("delete", "--app", "Rot", code=1)
    assert operator.run("delete") == "Root has ended\n"
    assert operator.run("status").startswith("no app runs here")
    assert not list(operator.folder.glob("servekit-*"))


async def test_a_new_kind_of_gateway(operator):
    """All gateways are replaced while calls come on new connections, and each is answered."""
    operator.write("v1")
    operator.run("deploy", "app.py")
    served: list[str] = []
    going = True

    async def caller() -> None:
        while going:
            served.append(await says(operator))
            await asyncio.sleep(0.02)

    callers = [asyncio.create_task(caller()) for _ in range(8)]
    before = re.findall(r"servekit\.gateway\.\S+", await operator.later("status"))
    operator.env["SERVEKIT_GZIP_MIN_BYTES"] = "1"
    text = await operator.later("deploy", "app.py")
    assert text.splitlines()[:2] == ["=  Model  stays", "=  Root   stays"]

    async def replaced():
        found = re.findall(r"servekit\.gateway\.\S+", await operator.later("status"))
        return found and not set(found) & set(before)

    await until(replaced, "the gateways are others")
    going = False
    await asyncio.gather(*callers)
    assert set(served) == {"v1 5"}
    operator.run("delete")


def test_from_a_notebook(operator):
    """Classes that no module has go by value."""
    text = operator.run(str(operator.port), stdin=NOTEBOOK)
    assert text.splitlines()[-1] == "12"


async def says(operator) -> str:
    async with await Http.open(operator.url) as http:
        answer = await http.call("POST", "/label", body=b'{"x": 5}')
        assert answer.status == 200, answer.body
        return answer.json
