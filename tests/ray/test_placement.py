"""Where replicas go, with GPUs that are only counted; and what is refused before anything starts."""

import asyncio
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.flow.harness import ROOT, Running, serving, until
from tests.ray.conftest import raylet_of


@pytest.fixture(scope="module")
def gpus(cluster):
    return cluster.add(num_gpus=5, resources={"licence": 1}, labels={"zone": "a"})


async def test_gpus_and_where_they_are(cluster, gpus, tmp_path):
    """Shares of one device, two devices, a placement group, none; a licence in zone a; an interpreter
    of its own, with the same Ray and servekit."""
    python = _another_python(tmp_path)
    async with serving("placed.py:Root", env={"OTHER_PYTHON": python}) as app:

        async def all_there():
            return [len(s.replicas) for s in (await app.status()).services] == [3, 1, 1, 1, 1, 1]

        await until(all_there, "all replicas are there")
        answer = await app.post("/all")
        assert answer.status == 200, answer.body
        seen = {name: dict(pairs) for name, pairs in answer.json.items()}
        assert (
            sorted(seen["half"].values()) in (["0", "0", "1"], ["0", "1", "1"])
            or len(set(seen["half"].values())) == 2
        )
        [pair] = seen["pair"].values()
        assert len(set(pair.split(","))) == 2
        [group] = seen["group"].values()
        taken = {*pair.split(","), group, *seen["half"].values()}
        assert len(taken) == 5  # nobody shares but the halves
        assert [*seen["without"].values()] == [*seen["bound"].values()] == [""]
        [bound] = seen["bound"]
        assert raylet_of(int(bound)) == raylet_of(int(next(iter(seen["pair"]))))
        assert (await app.post("/interpreters")).json == [python, sys.executable]


def _another_python(folder: Path) -> str:
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/*/site-packages")
    (packages / "both.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    return str(folder / "bin/python")


async def test_the_example_of_stages(cluster, gpus):
    """As on a laptop: GPUs for those that ask, none for others, one stage in the root's process."""
    async with serving(str(ROOT / "examples/stages/app.py")) as app:
        places = {}
        pids = {}

        async def search():
            answer = await app.post("/search", {"query": "a boat", "texts": ["a tree", "a boat"]})
            assert answer.status == 200, answer.body
            assert answer.json["texts"] == ["a boat", "a tree"]
            places.update(
                {(one["stage"], one["pid"]): one["devices"] for one in answer.json["places"]}
            )

        async def both_have_embedded():
            await asyncio.gather(*(search() for _ in range(8)))
            for stage, pid in places:
                pids.setdefault(stage, set()).add(pid)
            return len(pids["Embed"]) == 2

        await until(both_have_embedded, "both replicas of Embed have answered")
        assert pids["Tokenize"] == pids["Search"]
        assert len(pids["Rank"] | pids["Search"]) == 2
        for (stage, _), devices in places.items():
            assert devices in ("0", "1", "2", "3", "4") if stage == "Embed" else devices == ""


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ("TooMany", "TooMany asks for 0.01 CPU, 8 GPU on one node, and no node has that: "),
        (
            "Nowhere",
            "Nowhere asks for a node with the labels {'zone': 'moon'}, and there is none: ",
        ),
    ],
)
async def test_what_is_not_there(cluster, gpus, service, said):
    """The first line says who asks for what, and what there is."""
    app = Running(f"placed.py:{service}")
    try:
        assert await app.exit_code() == 1
        error = next(line for line in app.lines if line.startswith("error: "))
        assert error.startswith(f"error: {said}"), error
        assert "5 GPU" in error
    finally:
        await app.close()


async def test_an_interpreter_without_ray(cluster, tmp_path):
    """Ray would wait for ever for such a worker."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'ray'\" >&2; exit 1\n"
    )
    python.chmod(0o755)
    app = Running("placed.py:Bare", env={"BARE_PYTHON": str(python)})
    try:
        assert await app.exit_code() == 1
        error = next(line for line in app.lines if line.startswith("error: "))
        assert error == (
            f"error: Bare: Placement(python='{python}'): ModuleNotFoundError: No module named 'ray'"
        )
    finally:
        await app.close()
