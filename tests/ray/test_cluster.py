"""Several nodes: replicas are spread, and neither a node, a controller nor a gateway that goes costs a call."""

import os
import signal

import pytest

from tests.flow.harness import PATIENCE_S, serving, until
from tests.flow.load import Load
from tests.ray.conftest import raylet_of

DOOR = {"SERVEKIT_GATEWAY_NODES": "door=yes"}


async def spread(app, service: str) -> set[int]:
    """Return the nodes of a service's replicas, as the pids of their raylets."""
    return {raylet_of(pid) for pid in (await app.replicas(service)).values()}


async def there_are(app, service: str, count: int) -> None:
    async def look():
        return len(await app.replicas(service)) == count

    await until(look, f"{count} replicas of {service}")


@pytest.fixture(scope="module")
def nodes(cluster):
    return [cluster.add(resources={"model": 2}) for _ in range(2)]


async def test_calls_between_nodes(cluster, nodes):
    """By TCP with the app's secret; each node has a gateway, and all share the port."""
    async with serving("spread.py:Root") as app:
        await there_are(app, "Child", 2)

        async def doors():
            return len((await app.status()).gateways) == cluster.size()

        await until(doors, "each node has a gateway")
        assert len(await spread(app, "Child")) == 2
        async with Load(app, "/echo", rate=60) as load:
            await load.goes_on(150)
        assert load.check().keys() == {"200"}
        children = (await app.status()).services[0].replicas
        assert all(replica.finished for replica in children)


async def goes_elsewhere(cluster, take_away, timeout_s: float) -> None:
    """Take a node away under load: no call is lost, and what ran there runs elsewhere in time."""
    node = cluster.add(resources={"model": 2})
    async with serving("spread.py:Three", env=DOOR) as app:
        await there_are(app, "Three", 3)
        assert len(await spread(app, "Three")) == 3
        async with Load(app, "/echo", rate=60) as load:
            await load.goes_on(100)
            before = await app.replicas("Three")
            take_away(node)
            await load.goes_on(100)

            async def others():
                there = await app.replicas("Three")
                return len(there) == 3 and there.keys() != before.keys()

            await until(others, "there are three again", timeout_s=timeout_s)
            await load.goes_on(100)
        assert load.check().keys() == {"200"}
    cluster.kill(node)


async def test_a_node_is_killed(cluster, nodes):
    """Calls on board there are made again elsewhere."""
    await goes_elsewhere(cluster, cluster.kill, timeout_s=30)


async def test_a_node_is_drained(cluster, nodes):
    await goes_elsewhere(cluster, cluster.drain, timeout_s=PATIENCE_S)


async def test_ray_serve_s_controller_is_killed(cluster):
    async with serving("graph.py:Root", env=DOOR) as app:
        await there_are(app, "Root", 2)
        before = await app.replicas("Root")
        async with Load(app, "/echo", rate=60) as load:
            await load.goes_on(100)
            os.kill(cluster.controller(), signal.SIGKILL)
            await load.goes_on(300)
            code, text = await app.command("scale", "Child=3", "--wait")
            assert code == 0, text
            await load.goes_on(100)
        assert load.check().keys() == {"200"}
        assert await app.replicas("Root") == before
