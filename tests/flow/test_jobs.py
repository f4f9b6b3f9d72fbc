"""Jobs survive: the replica's death, that of everything, a drain, a sleep; and each ends once."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np

import servekit as sk
from servekit.spec.target import load
from tests.flow.harness import APPS, ROOT, Http, Running, serving, until


async def submit(app: Running, task: str, key: str = "", **arguments: object) -> str:
    answer = await app.post(f"/{task}", arguments, headers={"idempotency-key": key} if key else {})
    assert answer.status == 202, answer.body
    id_ = answer.json["id"]
    assert answer.headers["location"] == f"/{task}/jobs/{id_}"
    return id_


async def status(app: Running, task: str, id_: str) -> dict:
    return (await app.get(f"/{task}/jobs/{id_}")).json


async def ends(app: Running, task: str, id_: str) -> dict:
    async def look():
        found = await status(app, task, id_)
        return found if found["status"] not in ("queued", "running") else None

    return await until(look, f"job {id_} ends")


def told(body: bytes) -> list[dict]:
    events = [event for event in body.decode().split("\n\n") if event.startswith("id: ")]
    return [json.loads(event.partition("data: ")[2]) for event in events]


async def test_kill_9_of_the_replica_starts_its_jobs_again():
    """With the next attempt, in another process; the client's event stream never notices."""
    async with serving("jobs.py:Jobs", env={"SERVEKIT_JOBS_DIR": "var"}) as app:
        assert (app.scratch / "var").stat().st_mode & 0o777 == 0o700
        id_ = await submit(app, "steps", count=40)
        async with await Http.open(app.url) as http:
            await http.send("GET", f"/steps/jobs/{id_}/events")
            await until(lambda: app.traced(), "it runs")
            [pid] = (await app.replicas("Jobs")).values()
            os.kill(pid, signal.SIGKILL)
            stream = await http.answer()
        done = await ends(app, "steps", id_)
        assert (done["status"], done["attempt"]) == ("succeeded", 2)
        assert (await app.get(f"/steps/jobs/{id_}/result")).json == 2
        assert [line.split()[:2] for line in app.traced()] == [[id_, "1"], [id_, "2"]]
        assert len({line.split()[2] for line in app.traced()}) == 2
        events = told(stream.body)
        assert [event["number"] for event in events] == list(range(1, len(events) + 1))
        assert events[-1]["status"] == "succeeded"
        assert any(e["error"] and e["error"]["reason"] == "worker_lost" for e in events)
        assert stream.body.rstrip().endswith(b"event: end\ndata:")


async def test_a_poison_job_does_not_kill_for_ever():
    async with serving("jobs.py:Jobs") as app:
        id_ = await submit(app, "poison")
        done = await ends(app, "poison", id_)
        assert (done["status"], done["attempt"]) == ("failed", 2)
        assert done["error"]["reason"] == "worker_lost"
        answer = await app.get(f"/poison/jobs/{id_}/result")
        assert (answer.status, answer.reason) == (500, "worker_lost")
        assert app.traced() == ["poison 1", "poison 2"]


async def test_kill_9_of_everything_loses_no_job(tmp_path):
    """Whatever was answered 202 is there after a restart, and ends."""
    env = {"SERVEKIT_JOBS_DIR": str(tmp_path / "jobs")}
    async with serving("jobs.py:Jobs", env=env) as app:
        ids = [await submit(app, "steps", count=4) for _ in range(30)]
        running = [await submit(app, "steps", count=100)]
        await until(lambda: len(app.traced()) > 5, "some run")
        for pid in [app.pid, *app.processes()]:
            os.kill(pid, signal.SIGKILL)
        await app.exit_code()
        shutil.rmtree(app.folder())  # nobody was left to do so
    async with serving("jobs.py:Jobs", env=env) as app:
        first = {id_: (await status(app, "steps", id_))["status"] for id_ in ids + running}
        assert "expired" not in first.values()
        for id_ in ids + running:
            done = await ends(app, "steps", id_)
            assert (done["status"], done["progress"]["fraction"] > 0.5) == ("succeeded", True)
            result = await app.get(f"/steps/jobs/{id_}/result")
            assert result.json == done["attempt"]
        listed = (await app.get("/steps/jobs?status=succeeded&limit=100")).json
        assert [job["id"] for job in listed] == [*ids, *running][::-1]


async def test_a_drain_finishes_what_it_can_and_gives_back_the_rest(tmp_path):
    env = {"SERVEKIT_JOBS_DIR": str(tmp_path)}
    async with serving("jobs.py:Jobs", env=env, options=("--drain-s", "3")) as app:
        short = await submit(app, "steps", count=20)
        long = await submit(app, "steps", count=2000)
        await until(lambda: len(app.traced()) == 2, "both run")
        app.send(signal.SIGTERM)
        assert await app.exit_code() == 0
        await app.gone()
    async with serving("jobs.py:Jobs", env=env) as app:
        done = await status(app, "steps", short)
        assert (done["status"], done["attempt"]) == ("succeeded", 1)
        await until(lambda: any(line.startswith(long) for line in app.traced()), "it runs again")
        events = told((await cancel_and_read(app, "steps", long)).body)
        assert [e["attempt"] for e in events if e["status"] == "queued"] == [0, 1]
        assert not any(e["error"] for e in events), "leaving is no failure"
        assert events[-1]["status"] == "cancelled"


async def cancel_and_read(app: Running, task: str, id_: str):
    assert (await app.call("POST", f"/{task}/jobs/{id_}/cancel")).status == 200
    return await app.get(f"/{task}/jobs/{id_}/events")


async def test_running_jobs_are_cancelled():
    async with serving("jobs.py:Jobs") as app:
        for task, arguments in (("steps", {"count": 10_000}), ("block", {"seconds": 600})):
            id_ = await submit(app, task, **arguments)
            await until(lambda id_=id_: any(id_ in line for line in app.traced()), "it runs")
            answer = await app.call("POST", f"/{task}/jobs/{id_}/cancel")
            assert (answer.status, answer.json["cancelling"]) == (200, True)
            assert (await ends(app, task, id_))["status"] == "cancelled"
            result = await app.get(f"/{task}/jobs/{id_}/result")
            assert (result.status, result.reason) == (409, "cancelled")
            assert "retry-after" not in result.headers
        assert app.traced()[-1] == "blocked True"
        again = await app.call("POST", f"/block/jobs/{id_}/retry")
        assert (again.status, again.json["status"]) == (200, "queued")
        await until(lambda: app.traced()[-1] == f"block {id_}", "it runs again")
        await app.call("POST", f"/block/jobs/{id_}/cancel")


async def test_events_go_on_behind_the_last_one():
    async with serving("jobs.py:Jobs") as app:
        id_ = await submit(app, "steps", count=30)
        path = f"/steps/jobs/{id_}/events"
        http = await Http.open(app.url)
        await http.send("GET", path)
        code, headers = await http.head()
        assert (code, headers["content-type"]) == (200, "text/event-stream")
        seen = b""
        async for chunk in http.chunks():
            seen += chunk
            if seen.count(b"id: ") >= 4:
                break
        http.abort()
        last = told(seen)[-1]["number"]
        answer = await app.call("GET", path, headers={"last-event-id": str(last)})
        numbers = [e["number"] for e in told(seen) + told(answer.body)]
        assert numbers == list(range(1, 1 + 1 + 1 + 30 + 1))
        assert told(answer.body)[-1]["status"] == "succeeded"


async def test_retries_wait_and_keep_their_cause():
    async with serving("jobs.py:Jobs") as app:
        id_ = await submit(app, "fail", times=2)
        waited = await app.get(f"/fail/jobs/{id_}/result?wait=30s")
        assert (waited.status, waited.json) == (200, 3)
        events = told((await app.get(f"/fail/jobs/{id_}/events")).body)
        causes = [e["error"]["code"] for e in events if e["error"]]
        assert causes == ["execution_error", "execution_error"]
        assert "secret" not in json.dumps(events)
        id_ = await submit(app, "fail", times=9)
        failed = await app.get(f"/fail/jobs/{id_}/result?wait=30s")
        assert (failed.status, failed.json["error"]["code"]) == (500, "execution_error")


async def test_a_sleeping_service_is_woken_by_its_jobs():
    """Also by one that waits for its next attempt, of which nobody else knows."""
    async with serving("jobs.py:Front") as app:
        asleep = lambda: sleeping(app)  # noqa: E731
        await until(asleep, "it sleeps")
        (await app.post("/start", {"n": 4})).json  # noqa: B018
        await until(lambda: "twice 1" in app.traced(), "the first attempt")
        await until(asleep, "it sleeps while its job waits")
        await until(lambda: "twice 2" in app.traced(), "the second attempt")


async def sleeping(app: Running) -> bool:
    states = ("ready", "draining", "starting")
    return not any([await app.replicas("Sleeper", state) for state in states])


async def test_clients():
    async with serving("jobs.py:Jobs") as app:
        await asyncio.to_thread(use_client, app.url)
        await asyncio.to_thread(use_connect, app.url)
        async with sk.AsyncClient(app.url) as client:
            job = await client.submit("steps", count=3)
            numbers = [event.number async for event in job.events()]
            assert numbers == [1, 2, 3, 4, 5, 6]
            assert await job.result(20) == 1
            assert (await job.status()).status == "succeeded"
            job = await client.submit("block", seconds=60)
            await job.cancel()
            try:
                await job.result(20)
            except sk.errors.Conflict as error:
                assert error.reason == "cancelled"
            await job.retry()
            await job.cancel()
        for path in ("/openapi.json", "/docs"):
            assert (await app.get(path)).status == 200
        metrics = await app.metrics()
        done = 'endpoint="steps",service="Jobs"'
        assert metrics[f"servekit_job_run_seconds_count{{{done}}}"] >= 3
        assert await app.total("servekit_jobs_ended_total", 'status="cancelled"') >= 2
        assert await app.total("servekit_requests_total", 'code="202"') >= 5


def use_client(url: str) -> None:
    with sk.Client(url) as client:
        job = client.submit("array", n=5)
        np.testing.assert_array_equal(job.result(20), np.arange(5, dtype=np.float32))
        job = client.submit("steps", count=3, idempotency_key="k")
        assert client.submit("steps", count=3, idempotency_key="k").id == job.id
        assert [event.number for event in job.events()] == [1, 2, 3, 4, 5, 6]
        assert job.status().status == "succeeded"
        job = client.submit("block", seconds=60)
        try:
            job.result(0.1)
        except TimeoutError:
            job.cancel()
        else:
            raise AssertionError
        try:
            client.submit("steps", count="x")
        except sk.errors.InvalidInput as error:
            assert error.fields[0]["path"] == "count"
        else:
            raise AssertionError


def use_connect(url: str) -> None:
    with sk.connect(load(f"{APPS}/jobs.py:Jobs"), url, timeout_s=30) as jobs:
        np.testing.assert_array_equal(jobs.array.remote(4).result(20), np.arange(4))
        job = jobs.steps.submit(3, every_s=0.01).result(20)
        assert [event.number for event in job.events().iter_sync()][-1] == 6
        assert job.result(20) == 1
        assert job.status().result(20).status == "succeeded"
        assert jobs.block(0.01) == "done"
        assert asyncio.run(jobs.steps(2)) == 1
        running = jobs.block.submit(60).result(20)
        running.cancel().result(20)


async def test_the_command():
    async with serving("jobs.py:Jobs") as app:
        id_ = await submit(app, "block", seconds=600)

        async def jobs(*words: str) -> str:
            command = [sys.executable, "-m", "servekit", "jobs", *words, "--url", app.url]
            done = await asyncio.to_thread(
                subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False
            )
            return done.stdout + done.stderr

        assert id_ in await jobs("list")
        assert await jobs("list", "steps") == "no jobs\n"
        assert json.loads(await jobs("list", "--json"))["block"][0]["id"] == id_
        assert "running" in await jobs("show", "block", id_)
        assert "asked to stop" in await jobs("cancel", "block", id_)
        await ends(app, "block", id_)
        assert "queued" in await jobs("retry", "block", id_)
        assert json.loads(await jobs("cancel", "block", id_, "--json"))["id"] == id_
        assert "there is no job 'nobody'" in await jobs("show", "block", "nobody")
