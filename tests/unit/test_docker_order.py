"""What containers are created with: a pure function of the order, locked down, and without its secrets."""

import msgspec
import pytest

from servekit.errors import ConfigError
from servekit.packaging.docker.compose import compose
from servekit.packaging.docker.deployment import _check
from servekit.packaging.docker.order import (
    ORDER,
    Order,
    app_container,
    port_container,
)

ORDERED = Order(name="wave", image="sha256:1", port=8080)


def test_containers_share_the_network_of_one_that_holds_the_port():
    held = port_container(ORDERED)
    assert held["ports"] == {"3000/tcp": ("127.0.0.1", 8080)}
    assert held["network"] == "bridge"
    for number in (1, 2):
        given = app_container(ORDERED, number, {})
        assert given["network_mode"] == "container:wave-port"
        assert "ports" not in given
        assert given["environment"]["SERVEKIT_PORT"] == "3000"
        assert given["environment"]["SERVEKIT_HOST"] == "0.0.0.0"
        assert given["volumes"]["wave-doors"]["bind"] == "/run/servekit"
    assert app_container(ORDERED, 1, {})["name"] != app_container(ORDERED, 2, {})["name"]


def test_on_the_host_s_network_the_app_has_the_port_itself():
    order = msgspec.structs.replace(ORDERED, network="host")
    assert "ports" not in port_container(order)
    variables = app_container(order, 1, {})["environment"]
    assert (variables["SERVEKIT_HOST"], variables["SERVEKIT_PORT"]) == ("127.0.0.1", "8080")


@pytest.mark.parametrize("make", [port_container, lambda order: app_container(order, 1, {})])
def test_all_are_locked_down(make):
    given = make(ORDERED)
    assert given["read_only"] is True
    assert given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges:true"]
    assert given["pids_limit"] > 0


def test_secrets_are_in_no_label():
    given = app_container(ORDERED, 1, {"HF_TOKEN": "hidden"})
    assert given["environment"]["HF_TOKEN"] == "hidden"
    assert "hidden" not in str(given["labels"])


def test_limits_and_devices():
    order = msgspec.structs.replace(ORDERED, memory=1 << 30, cpus=1.5, gpus=2)
    given = app_container(order, 1, {})
    assert (given["mem_limit"], given["nano_cpus"]) == (1 << 30, 1_500_000_000)
    [devices] = given["device_requests"]
    assert (devices["Count"], devices["Capabilities"]) == (2, [["gpu"]])
    assert not {"mem_limit", "nano_cpus", "device_requests"} & app_container(ORDERED, 1, {}).keys()


def test_the_order_is_in_a_label_and_the_revision_is_of_what_runs():
    text = app_container(ORDERED, 1, {})["labels"][ORDER]
    assert msgspec.json.decode(text, type=Order) == ORDERED
    same = msgspec.structs.replace(ORDERED, replicas=3, before="sha256:0")
    assert same.revision == ORDERED.revision
    assert msgspec.structs.replace(ORDERED, image="sha256:2").revision != ORDERED.revision
    assert msgspec.structs.replace(ORDERED, memory=5).revision != ORDERED.revision


def test_an_engine_waits_longer_than_the_app_drains():
    order = msgspec.structs.replace(ORDERED, drain_delay_s=5.0, drain_s=60.0)
    assert order.stop_s > 65


@pytest.mark.parametrize("change", [{"port": 0}, {"port": 70000}, {"replicas": 0}])
def test_what_can_not_be(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        Order(**{"name": "wave", "image": "i", "port": 1, **change})


@pytest.mark.parametrize("change", [{"port": 8081}, {"address": "0.0.0.0"}, {"network": "host"}])
def test_another_place_needs_a_new_start(change):
    _check(ORDERED, msgspec.structs.replace(ORDERED, image="sha256:2", replicas=5))
    with pytest.raises(ConfigError, match=r"wave is at port 8080 of 127\.0\.0\.1 \(bridge\)"):
        _check(ORDERED, msgspec.structs.replace(ORDERED, **change))


def test_compose_has_the_same_containers():
    yaml = pytest.importorskip("yaml")
    order = msgspec.structs.replace(
        ORDERED, image="servekit/wave:1", replicas=2, gpus=1, memory=1 << 30, cpus=1.5
    )
    found = yaml.safe_load(compose(order, secrets=["HF_TOKEN"]))
    port, first, second = found["services"].values()
    given = app_container(order, 1, {})
    for name in ("image", "read_only", "cap_drop", "security_opt", "pids_limit", "shm_size"):
        assert first[name] == given[name]
    assert first["environment"] == {**given["environment"], "HF_TOKEN": None}
    assert (first["mem_limit"], first["cpus"]) == (1 << 30, 1.5)
    assert first["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1
    assert first["network_mode"] == second["network_mode"] == "service:port"
    assert port["ports"] == ["127.0.0.1:8080:3000"]
    assert second["depends_on"]["app-1"] == {"condition": "service_healthy"}
    assert "app-1" not in first["depends_on"]
    own = yaml.safe_load(compose(msgspec.structs.replace(order, network="net")))
    assert own["networks"] == {"net": {"external": True}}
    host = yaml.safe_load(compose(msgspec.structs.replace(order, network="host")))
    assert "ports" not in host["services"]["port"]
