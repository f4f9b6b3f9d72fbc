"""What a cluster could not hold is refused, with who asks for what, and what there is."""

from typing import Any

import pytest

from servekit.errors import ResourceError
from servekit.spec.app import ServiceSpec
from servekit.spec.policy import Placement, Resources

NODES: list[dict[str, Any]] = [
    {"id": "a" * 32, "address": "10.0.0.1", "resources": {"CPU": 4.0}, "labels": {}},
    {
        "id": "b" * 32,
        "address": "10.0.0.2",
        "resources": {"CPU": 2.0, "GPU": 5.0, "accelerator_type:L4": 1.0},
        "labels": {"zone": "a"},
    },
]


@pytest.fixture(scope="module", autouse=True)
def apps_run_there():
    """Need no cluster."""


def check(spec: ServiceSpec, number: int) -> None:
    from servekit.engine.ray import cluster  # here its warnings are forgiven

    cluster.check([(spec, number)], [cluster.Node(**node) for node in NODES])


def wants(**given) -> ServiceSpec:
    placement = given.pop("placement", Placement())
    return ServiceSpec(name="S", target="t:S", resources=Resources(**given), placement=placement)


@pytest.mark.parametrize(
    ("spec", "number"),
    [
        (wants(), 40),
        (wants(cpu=4), 1),
        (wants(gpu=0.5), 10),
        (wants(gpu=2, placement=Placement(accelerator="L4", labels={"zone": "a"})), 2),
        (wants(placement=Placement(bundles=({"CPU": 4}, {"CPU": 2}), strategy="SPREAD")), 1),
    ],
)
def test_what_fits(spec, number):
    check(spec, number)


@pytest.mark.parametrize(
    ("spec", "number", "said"),
    [
        (wants(cpu=3), 4, "the app asks for 12 CPU, and the cluster has 6 CPU: "),
        (wants(cpu=5), 1, "S asks for 5 CPU on one node, and no node has that: "),
        (wants(gpu=8), 1, "S asks for 0.01 CPU, 8 GPU on one node, and no node has that: "),
        (
            wants(placement=Placement(labels={"zone": "moon"})),
            1,
            "S asks for a node with the labels {'zone': 'moon'}, and there is none: ",
        ),
        (
            wants(gpu=1, placement=Placement(accelerator="H100")),
            1,
            "S asks for 0.01 CPU, 1 GPU, 0.001 accelerator_type:H100 on one node, and no node",
        ),
        (
            wants(cpu=4, placement=Placement(labels={"zone": "a"})),
            1,
            "S asks for 4 CPU on one node, and no node has that: ",
        ),
        (
            wants(placement=Placement(bundles=({"CPU": 1, "GPU": 6},))),
            1,
            "S asks for 1 CPU, 6 GPU on one node, and no node has that: ",
        ),
    ],
)
def test_what_does_not_fit(spec, number, said):
    with pytest.raises(ResourceError) as caught:
        check(spec, number)
    assert str(caught.value).startswith(said)
