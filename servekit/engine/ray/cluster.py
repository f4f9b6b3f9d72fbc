"""A Ray cluster: started here or joined, and what it offers against what an app asks for."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
import ray
import ray.exceptions
from ray import serve
from ray._private.state import state  # nothing public says which nodes drain
from ray.util.client import ray as client

from servekit.engine.ray.build import actor_options, runtime_env
from servekit.errors import ConfigError, ResourceError
from servekit.spec.app import ServiceSpec
from servekit.version import __version__

Number: TypeAlias = tuple[ServiceSpec, int]
"""A service, and how many replicas it is to have."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One machine, or what acts as one.

    Attributes:
        resources: What it has in all, by Ray's names: `CPU`, `GPU`, `memory`, …
    """

    id: str
    address: str
    resources: dict[str, float]
    labels: dict[str, str]


def join(address: str | None) -> None:
    """Start Ray on this machine, or join a cluster; once joined, this process stays in it.

    Args:
        address: `auto`, `host:port` or `ray://host:port`; None starts one here, which ends with us.

    Raises:
        ConfigError: There is no cluster, or it does not know us.
    """
    if ray.is_initialized():
        return
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except ConnectionError as error:
        raise ConfigError(
            f"can't reach a Ray cluster at {address}: there is none (`ray start --head` starts one), "
            "it asks for a token (set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to its own), or this "
            "machine is none of its nodes (then it is ray://HEAD:10001)"
        ) from error
    except (RuntimeError, ValueError) as error:
        if "token" in str(error).lower():
            raise ConfigError(
                f"the Ray cluster at {address} asks for a token: set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to what it was started with"
            ) from error
        raise ConfigError(f"can't use the Ray cluster at {address}: {error}") from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")


def inventory() -> tuple[Node, ...]:
    """Return the nodes that are there."""
    return tuple(
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            resources=node["Resources"],
            labels=node["Labels"],
        )
        for node in ray.nodes()
        if node["Alive"]
    )


def lasting(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the nodes that have these labels, and are not about to leave; sorted.

    By way of a Ray client nothing says which are: the app's controller will see.
    """
    leaving = {} if client.is_connected() else state.get_draining_nodes()
    return tuple(
        sorted(
            node.id
            for node in inventory()
            if node.id not in leaving and labels.items() <= node.labels.items()
        )
    )


def check(numbers: Iterable[Number], nodes: Iterable[Node]) -> None:
    """Refuse what the cluster could not hold if it were empty.

    Raises:
        ResourceError: A replica fits on no node, or all of them don't fit together.
    """
    nodes = tuple(nodes)
    total: dict[str, float] = {}
    for spec, number in numbers:
        labels = spec.placement.labels
        able = [node for node in nodes if labels.items() <= node.labels.items()]
        if not able:
            raise ResourceError(
                f"{spec.name} asks for a node with the labels {labels}, and there is none: "
                f"{describe(nodes)}"
            )
        for asked in _bundles(spec):
            if not any(_fits(asked, node.resources) for node in able):
                raise ResourceError(
                    f"{spec.name} asks for {_words(asked)} on one node, and no node has that: "
                    f"{describe(able)}"
                )
            for name, amount in asked.items():
                total[name] = total.get(name, 0.0) + amount * number
    there = _sum(node.resources for node in nodes)
    if not _fits(total, there):
        raise ResourceError(
            f"the app asks for {_words(total)}, and the cluster has {_words(there, total)}: "
            f"{describe(nodes)}; lower what its services ask for, or their replicas"
        )


async def check_environments(specs: Iterable[ServiceSpec], *, timeout_s: float = 60.0) -> None:
    """Refuse environments in which no replica would ever start, or hang while it tries.

    Raises:
        ConfigError: An interpreter is not there or lacks what it needs, or an environment can't be
            made in time.
    """
    for spec in specs:
        if spec.placement.python or spec.placement.runtime_env:
            await asyncio.to_thread(_check_environment, spec, timeout_s)


def _check_environment(spec: ServiceSpec, timeout_s: float) -> None:
    options: dict[str, Any] = {"num_cpus": 0, "label_selector": spec.placement.labels}
    if python := spec.placement.python:
        # In a process of its own first: Ray would wait for ever for a worker that has no Ray.
        problem = ray.get(_try.options(**options).remote(python))
        if problem:
            raise ConfigError(f"{spec.name}: Placement(python={python!r}): {problem}")
    task = _versions.options(**options, runtime_env=runtime_env(spec, {})).remote()
    try:
        found = ray.get(task, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(task, force=True)
        raise ConfigError(
            f"{spec.name}: no process started in its runtime_env within {timeout_s:g} s; Ray's "
            "runtime_env logs on the nodes say why"
        ) from None
    except (ray.exceptions.RayError, ImportError) as error:
        raise ConfigError(f"{spec.name}: its runtime_env can't be used: {error}") from error
    if found != (own := _own_versions()):
        raise ConfigError(
            f"{spec.name}: its environment has {found}, and this process {own}; they must agree"
        )


def _own_versions() -> str:
    python = ".".join(map(str, sys.version_info[:2]))
    return f"Python {python}, Ray {ray.__version__}, servekit {__version__}"


@ray.remote
def _versions() -> str:
    return _own_versions()


@ray.remote
def _try(python: str) -> str:
    """Return what is wrong with an interpreter on this node; "" if nothing is."""
    try:
        done = subprocess.run(  # noqa: S603  (the app's author has chosen it)
            [python, "-c", "import ray, servekit"],
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"can't be run: {error}"
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def has_room(numbers: Iterable[Number]) -> bool:
    """Return whether so many replicas would fit beside what runs now."""
    asked = _sum(
        {name: amount * number for name, amount in bundle.items()}
        for spec, number in numbers
        for bundle in _bundles(spec)
    )
    return _fits(asked, ray.available_resources())


def describe(nodes: Iterable[Node]) -> str:
    """Return the nodes and what they have."""
    names = ("CPU", "GPU", "memory")
    return "; ".join(
        f"{node.address} {node.id[:12]}: "
        + _words({n: v for n, v in node.resources.items() if n in names or not _is_own(n)})
        for node in nodes
    )


def _bundles(spec: ServiceSpec) -> list[dict[str, float]]:
    """Return what one replica reserves, by node."""
    if not spec.placement.bundles:
        return [_asked(spec)]
    if spec.placement.strategy == "STRICT_PACK":
        return [_sum(spec.placement.bundles)]
    return list(spec.placement.bundles)


def _asked(spec: ServiceSpec) -> dict[str, float]:
    options = actor_options(spec)
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    asked = {names[name]: float(value) for name, value in options.items() if name in names}
    if kind := spec.placement.accelerator:
        asked[f"accelerator_type:{kind}"] = 0.001
    return asked | {name: float(value) for name, value in spec.placement.resources.items()}


def _fits(asked: Mapping[str, float], there: Mapping[str, float]) -> bool:
    return all(amount <= there.get(name, 0.0) + 1e-6 for name, amount in asked.items())


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _is_own(name: str) -> bool:
    return name.startswith(("node:", "object_store"))


def _words(amounts: Mapping[str, Any], only: Iterable[str] | None = None) -> str:
    shown = amounts if only is None else {name: amounts.get(name, 0.0) for name in only}
    return ", ".join(
        f"{amount / 2**30:.3g} GiB of memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in sorted(shown.items())
    )


def leave() -> None:
    """Leave the cluster; one that was started here ends."""
    ray.shutdown()
