"""What a container or a pod must have for a whole app."""

import pytest

import servekit as sk
from servekit.packaging.needs import needs_of
from servekit.spec.describe import describe


def app(**settings):
    @sk.service(**settings)
    class One:
        @sk.endpoint
        def run(self, x: int) -> int:
            return x

    return describe(One)


@pytest.mark.parametrize(
    ("settings", "gpus", "cpu", "memory"),
    [
        ({}, 0, 0, 0),
        ({"gpu": 0.3, "replicas": 3}, 1, 0, 0),
        ({"gpu": 0.6, "replicas": 3}, 3, 0, 0),  # 1.8 devices would do, if a share could be on two
        ({"gpu": 0.1, "replicas": 10}, 1, 0, 0),
        ({"gpu": 2, "replicas": 2}, 4, 0, 0),
        ({"gpu": 1, "replicas": sk.Autoscale(min=0, max=4)}, 1, 0, 0),
        ({"gpu": 1, "replicas": sk.Autoscale(min=2, max=4)}, 2, 0, 0),
        ({"cpu": 1.5, "memory": "1GiB", "replicas": 2}, 0, 3, 2 << 30),
    ],
)
def test_what_its_replicas_need_at_the_start(settings, gpus, cpu, memory):
    assert needs_of(app(**settings)) == (gpus, cpu, memory)


def test_services_share_devices():
    @sk.service(gpu=0.3, replicas=2)
    class Small:
        @sk.endpoint
        def run(self, x: int) -> int:
            return x

    @sk.service(gpu=1)
    class Root:
        small = sk.depends(Small)

        @sk.endpoint
        def run(self, x: int) -> int:
            return x

    assert needs_of(describe(Root)).gpus == 2
    assert needs_of(describe(Small)).gpus == 1
