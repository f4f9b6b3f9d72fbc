"""`servekit scale`: other numbers of replicas for an app that runs."""

import json

from tests.flow.harness import serving, until
from tests.flow.load import Load


async def test_other_numbers_under_load():
    """Up and down again while calls run: none is lost, and `--wait` returns when it is so."""
    async with serving("graph.py:Root") as app:
        async with Load(app, "/echo", rate=80) as load:
            await load.goes_on()
            code, text = await app.command("scale", "Child=4", "Root=1", "--wait")
            assert code == 0, text
            assert text.splitlines() == [
                "Child  2 → 4 replicas  4 of 4 ready",
                "Root   2 → 1 replicas  1 of 1 ready",
                "it holds until the code of the service changes or the app ends",
            ]
            assert len(await app.replicas("Child")) == 4
            assert len(await app.replicas("Root")) == 1
            await load.goes_on()
            code, text = await app.command("scale", "Child=1", "--json", "--wait", "--url", app.url)
            assert code == 0, text
            [child] = json.loads(text)
            assert (child["name"], child["bounds"], child["desired"]) == ("Child", "1", 1)
            await load.goes_on()
        assert load.check().keys() == {"200"}


async def test_what_can_not_be_is_refused_whole():
    """The first line says why and what to write; of several numbers none is taken."""
    async with serving("graph.py:Root", env={"SERVEKIT_GPUS": "1"}) as app:
        for words, said in (
            (("Chld=3",), "error: no service 'Chld' runs here. Did you mean 'Child'?"),
            (("Child=3", "Rot=1"), "error: no service 'Rot' runs here. Did you mean 'Root'?"),
            (("Child=3", "Root=0"), "error: Root=0: must be 1 or more; a service that may sleep"),
            (("Child=1..3",), "error: Child has a fixed number of replicas, 2; write Child=3, or"),
            (("Child",), "error: 'Child': write SERVICE=N or SERVICE=MIN..MAX"),
            (("Child=-1",), "error: 'Child=-1': write SERVICE=N or SERVICE=MIN..MAX"),
            (("Child=3", "--pid", "1"), "error: no such app"),
        ):
            code, text = await app.command("scale", *words)
            assert code == 1, words
            assert text.startswith(said), text
        assert [s.desired for s in (await app.status()).services] == [2, 2]


async def test_gpus_that_are_not_there():
    """What is there and what was asked, before anything starts."""
    async with serving("scaling.py:OnGpu", env={"SERVEKIT_GPUS": "2"}) as app:
        code, text = await app.command("scale", "OnGpu=3")
        assert code == 1
        assert text.startswith("error: OnGpu #3 asks gpu=1; this machine has 2 GPUs (0: 1 in use;")
        assert (await app.status()).services[0].desired == 1
        assert (await app.command("scale", "OnGpu=2", "--wait"))[0] == 0
        assert len(await app.replicas("OnGpu")) == 2


async def test_bounds_of_a_service_that_follows_its_load():
    async with serving("scaling.py:Grows") as app:
        code, text = await app.command("scale", "Grows=2")
        assert code == 1
        assert text.startswith(
            "error: Grows follows its load from 1 to 3 replicas; move its bounds, Grows=1..2, or "
            "pin it, Grows=2..2"
        )
        code, text = await app.command("scale", "Grows=2..2", "--wait")
        assert (code, text.splitlines()[0]) == (0, "Grows  1..3 → 2..2 replicas  2 of 2 ready")
        code, text = await app.command("scale", "Grows=3..2")
        assert (code, text.startswith("error: Autoscale(min=3, max=2): need")) == (1, True)
        assert (await app.status()).services[0].bounds == "2..2"


async def test_waiting_ends_when_a_replica_can_not_start():
    async with serving("scaling.py:Lone") as app:
        code, text = await app.command("scale", "Lone=2", "--wait")
        assert code == 1
        assert text.startswith("error: Lone: a replica did not start; the app's log says why")
        assert len(await app.replicas("Lone")) == 1
        assert (await app.post("/echo", {"x": 1})).json == 1


async def test_a_starting_replica_goes_first():
    """A smaller number does not wait until what it makes needless has loaded."""
    async with serving("scaling.py:SlowTwin", env={"LOAD_S": "300"}) as app:
        before = await app.replicas("SlowTwin")
        assert (await app.command("scale", "SlowTwin=3"))[0] == 0

        async def loading():
            return len(await app.replicas("SlowTwin", "starting")) == 2

        await until(loading, "two more load")
        assert (await app.command("scale", "SlowTwin=1", "--wait"))[0] == 0

        async def gone():
            return len((await app.status()).services[0].replicas) == 1

        await until(gone, "they have gone", timeout_s=30)
        assert await app.replicas("SlowTwin") == before
        assert (await app.status()).services[0].restarts == 0


async def test_the_codes_number_counts_again_when_it_changes(tmp_path):
    source = "import servekit as sk\n\n\n@sk.service(replicas=1, version='{}')\nclass Root:\n"
    source += "    @sk.endpoint\n    async def echo(self, x: int) -> int:\n        return x\n"
    file = tmp_path / "app.py"
    file.write_text(source.format("v1"))
    async with serving(f"{file}:Root", verb="dev", cwd=tmp_path) as app:
        assert (await app.command("scale", "Root=2", "--wait"))[0] == 0
        file.write_text(source.format("v2"))

        async def rolled():
            [service] = (await app.status()).services
            return service.version == "v2" and service.bounds == "1" and len(service.replicas) == 1

        await until(rolled, "one replica of the new code")


async def test_several_apps():
    """One has to be chosen; `status` shows what may be."""
    async with serving("graph.py:Root") as one, serving("slow.py:Slow") as two:
        link = one.runtime_dir / two.folder().name
        link.symlink_to(two.folder())  # as if they had one runtime directory
        code, text = await one.command("scale", "Slow=2")
        head, *rest = text.splitlines()
        assert (code, head) == (1, "error: 2 apps run here; choose one by --app, --url or --pid")
        assert sorted(line.split()[2] for line in rest) == sorted([one.url, two.url])
        code, text = await one.command("scale", "Slow=2", "--pid", str(two.pid))
        assert code == 0, text
        for words, urls in (
            (("--url", one.url), {one.url}),
            (("--pid", str(two.pid)), {two.url}),
            ((), {one.url, two.url}),
        ):
            _, text = await one.command("status", "--json", *words)
            assert {app["url"] for app in json.loads(text)} == urls
        link.unlink()
