"""An app on a Docker engine: deploy, look, roll back, end. The engine's labels are all the state there is."""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from servekit.errors import ConfigError, SetupError
from servekit.packaging.containerize import PROBE
from servekit.packaging.docker.order import (
    APP,
    NUMBER,
    ORDER,
    REVISION,
    Order,
    app_container,
    environment,
    port_container,
)

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

_POLL_S = 0.3
_TIMEOUT_S = 600
"""To load or to commit many GB takes the engine as long without a word."""
_TAIL = 40
"""Lines of a container's log that an error shows."""


def connect() -> "DockerClient":
    """Return the engine that the environment names, as the `docker` command finds it.

    Raises:
        ConfigError: There is none, or the SDK is not installed.
    """
    try:
        import docker  # noqa: PLC0415
    except ImportError:
        raise ConfigError("this needs Docker's SDK: pip install 'servekit[docker]'") from None
    from docker.errors import DockerException  # noqa: PLC0415

    try:
        client = docker.from_env(timeout=_TIMEOUT_S)
        client.ping()
    except DockerException as error:
        raise ConfigError(
            f"no Docker engine answers ({error}); start it, or set DOCKER_HOST"
        ) from None
    return client


def deployed(client: "DockerClient") -> list[str]:
    """Return the names of all apps of ours on an engine."""
    found = client.containers.list(all=True, filters={"label": APP})
    return sorted({container.labels[APP] for container in found})


class Deployment:
    """One app on an engine.

    Args:
        client: The engine.
        name: What the app is deployed as.
    """

    def __init__(self, client: "DockerClient", name: str) -> None:
        self._client = client
        self.name = name

    def containers(self) -> list["Container"]:
        """Return the app's containers, the oldest first; not the one that holds the port."""
        labels = [f"{APP}={self.name}", REVISION]
        found = self._client.containers.list(all=True, filters={"label": labels})
        return sorted(found, key=lambda container: container.attrs["Created"])

    def order(self) -> Order | None:
        """Return what runs now, if anything does."""
        found = self.containers()
        return _order(found[-1]) if found else None

    def carry_out(
        self,
        order: Order,
        *,
        secrets: Mapping[str, str] | None = None,
        timeout_s: float,
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Have an order run in place of what does: start, wait until it is ready, end the old, in turn.

        Raises:
            ConfigError: The port is another one than that of what runs.
            SetupError: A container did not become ready; the old ones go on.
        """
        old = self.containers()
        if old and (before := _order(old[-1])):
            _check(before, order)
            if before.image != order.image:
                order = msgspec.structs.replace(order, before=before.image)
        self._hold_port(order)
        kept = [one for one in old if one.labels[REVISION] == order.revision and _runs(one)]
        leaving = [one for one in old if one not in kept]
        serving = [one for one in leaving if _runs(one)]
        stopped: list[Container] = []
        new: list[Container] = []
        try:
            for number in _numbers(order, old, order.replicas - len(kept)):
                told(f"starting container {len(kept) + len(new) + 1} of {order.replicas}")
                new.append(self._start(order, number, dict(secrets or {})))
                self._until_ready(new[-1], timeout_s)
                if serving and len(serving) + len(kept) + len(new) > order.replicas:
                    told("stopping an old one")
                    stopped.append(serving.pop(0))
                    stopped[-1].stop(timeout=order.stop_s)
        except BaseException:
            told("going back to the old ones")
            self._go_back(new, stopped, order, timeout_s)
            raise
        for container in [*leaving, *kept[order.replicas :]]:
            told("ending an old one")
            self._end(container, order)

    def _go_back(
        self, new: list["Container"], stopped: list["Container"], order: Order, timeout_s: float
    ) -> None:
        """Have those that were stopped serve again, then let the new ones finish their calls."""
        ready = [one for one in new if self._is_ready(one)]
        for container in new:
            if container not in ready:
                container.remove(force=True)
        for container in stopped:
            container.start()
            self._until_ready(container, timeout_s)
        for container in ready:
            self._end(container, order)

    def _hold_port(self, order: Order) -> None:
        from docker.errors import APIError, NotFound  # noqa: PLC0415

        given = port_container(order)
        try:
            held = self._client.containers.get(given["name"])
        except NotFound:
            try:
                self._client.containers.create(**given).start()
            except APIError as error:
                self._remove(given["name"])
                raise ConfigError(
                    f"can't publish port {order.port} on {order.address}: {error.explanation}"
                ) from None
        else:
            if held.status != "running":
                held.start()

    def _start(self, order: Order, number: int, secrets: dict[str, str]) -> "Container":
        from docker.errors import APIError  # noqa: PLC0415

        given = app_container(order, number, secrets)
        try:
            container = self._client.containers.create(**given)
            container.start()
        except APIError as error:
            self._remove(given["name"])
            raise SetupError(f"{given['name']} can't start: {error.explanation}") from None
        return container

    def _until_ready(self, container: "Container", timeout_s: float) -> None:
        give_up = time.monotonic() + timeout_s
        while True:
            container.reload()
            if container.attrs["RestartCount"] or container.status not in ("created", "running"):
                why = "does not start"
            elif self._is_ready(container):
                return
            elif time.monotonic() > give_up:
                why = f"is not ready after {timeout_s:g} s"
            else:
                time.sleep(_POLL_S)
                continue
            trace = container.logs(tail=_TAIL).decode(errors="replace")
            raise SetupError(f"{container.name} {why}", trace=trace)

    def _is_ready(self, container: "Container") -> bool:
        from docker.errors import APIError  # noqa: PLC0415

        try:
            return container.exec_run([*PROBE]).exit_code == 0
        except APIError:  # it has ended meanwhile
            return False

    def _end(self, container: "Container", order: Order) -> None:
        container.stop(timeout=order.stop_s)
        container.remove()

    def _remove(self, name: str) -> None:
        from docker.errors import NotFound  # noqa: PLC0415

        try:
            self._client.containers.get(name).remove(force=True)
        except NotFound:
            return

    def rollback(self, *, timeout_s: float, told: Callable[[str], None]) -> Order:
        """Have the image run that ran before; returns the order.

        Raises:
            ConfigError: There was none, or the engine does not have it any more.
        """
        from docker.errors import ImageNotFound  # noqa: PLC0415

        now = self.order()
        if now is None or not now.before:
            raise ConfigError(f"{self.name}: nothing ran before what runs now")
        try:
            self._client.images.get(now.before)
        except ImageNotFound:
            raise ConfigError(
                f"{self.name}: the engine does not have the image {now.before} any more; deploy it"
            ) from None
        secrets = self._secrets(now)
        order = msgspec.structs.replace(now, image=now.before)
        self.carry_out(order, secrets=secrets, timeout_s=timeout_s, told=told)
        return order

    def _secrets(self, order: Order) -> dict[str, str]:
        """Return the variables that a container was given and that its order does not have."""
        own = self._client.images.get(order.image).attrs["Config"]["Env"]
        lines: list[str] = self.containers()[-1].attrs["Config"]["Env"]
        given = dict(line.split("=", 1) for line in lines if line not in own)
        return {name: value for name, value in given.items() if name not in environment(order)}

    def delete(self) -> None:
        """End the app when its running calls have finished, and remove all of it."""
        order = self.order()
        for container in self.containers():
            container.stop(timeout=order.stop_s if order else None)
            container.remove()
        self._remove(f"{self.name}-port")
        for volume in self._client.volumes.list(filters={"name": f"{self.name}-doors"}):
            if volume.name == f"{self.name}-doors":
                volume.remove()


def _order(container: "Container") -> Order:
    return msgspec.json.decode(container.labels[ORDER], type=Order)


def _numbers(order: Order, old: list["Container"], missing: int) -> list[int]:
    """Return the numbers of the containers to start; none has the name of one that is there."""
    taken = {int(one.labels[NUMBER]) for one in old if one.labels[REVISION] == order.revision}
    free = (number for number in itertools.count(1) if number not in taken)
    return list(itertools.islice(free, max(0, missing)))


def _runs(container: "Container") -> bool:
    return bool(container.status == "running")


def _check(before: Order, order: Order) -> None:
    """Refuse what the container that holds the port can't become."""
    there = before.port, before.address, before.network
    if there != (order.port, order.address, order.network):
        raise ConfigError(
            f"{order.name} is at port {before.port} of {before.address} ({before.network}); another "
            "place needs a new start: servekit delete --target docker first, or another --app"
        )
