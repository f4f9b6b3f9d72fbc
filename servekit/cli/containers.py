"""`--target docker` of `servekit deploy`, `status`, `rollback`, `logs` and `delete`."""

import sys
import time
from typing import TYPE_CHECKING

from servekit.cli.build import bundle_of
from servekit.cli.console import Line, Steps, rows, write
from servekit.cli.containerize import image_of, local_name
from servekit.core.units import parse_bytes
from servekit.errors import ConfigError
from servekit.settings import Settings, given

if TYPE_CHECKING:
    from servekit.packaging.bundle import Bundle
    from servekit.packaging.docker.deployment import Deployment
    from servekit.packaging.docker.order import Order


def deploy(
    app: str,
    settings: Settings,
    *,
    name: str,
    base: str,
    build_network: str,
    replicas: int,
    network: str,
    memory: str,
    cpus: float,
    plan: bool,
    dry_run: bool,
) -> None:
    """Run an app's containers, or its new ones in place of the old; or print them for Compose."""
    import msgspec  # noqa: PLC0415

    from servekit.packaging.docker.compose import compose  # noqa: PLC0415
    from servekit.packaging.docker.deployment import Deployment, connect  # noqa: PLC0415
    from servekit.packaging.docker.load import load  # noqa: PLC0415
    from servekit.packaging.docker.order import Order  # noqa: PLC0415
    from servekit.packaging.needs import needs_of  # noqa: PLC0415

    began = time.monotonic()
    client = None if dry_run else connect()
    with Steps() as steps:
        bundle = bundle_of(app, settings, steps)
        called = name or bundle.manifest.name
        named = local_name(bundle, called)
        order = Order(
            name=called,
            image=f"{named.name}:{named.tag}",
            port=settings.port,
            address=settings.host,
            network=network,
            replicas=replicas,
            gpus=needs_of(bundle.manifest.app).gpus,
            memory=parse_bytes(memory, where="--memory") if memory else 0,
            cpus=cpus,
            drain_delay_s=settings.drain_delay_s,
            drain_s=settings.drain_s,
        )
        if client is None:
            sys.stdout.write(compose(order, secrets=bundle.manifest.image.secret_names))
            return
        secrets = _secrets(bundle)
        made = image_of(
            bundle, base, settings, steps, connect=lambda: client, network=build_network
        )
        steps.step("loading the image")
        image = load(client, made.image, names=[named], progress=steps.progress)
        order = msgspec.structs.replace(order, image=image)
        deployment = Deployment(client, called)
        lines = _plan(order, deployment)
        if not plan:
            deployment.carry_out(
                order, secrets=secrets, timeout_s=settings.start_timeout_s, told=steps.step
            )
    write(*rows(lines))
    if not plan:
        url = f"http://{settings.host}:{settings.port}"
        took = f"  {time.monotonic() - began:.1f} s"
        write([(called, "bold"), (" is ready at ", ""), (url, "cyan"), (took, "dim")])


def status(name: str | None) -> None:
    """Show the containers of apps on the engine."""
    from servekit.packaging.docker.deployment import Deployment, connect, deployed  # noqa: PLC0415

    client = connect()
    table: list[Line] = []
    for one in deployed(client):
        if name in (None, one):
            found = Deployment(client, one)
            order = found.order()
            where = f"http://{order.address}:{order.port}" if order else ""
            for container in found.containers():
                health = container.attrs["State"].get("Health", {}).get("Status", "")
                state = health if container.status == "running" and health else container.status
                table.append(
                    [(one, "bold"), (str(container.name), ""), (state, ""), (where, "cyan")]
                )
    write(*rows(table) if table else [[("no app of ours runs on this engine", "")]])


def rollback(name: str | None, settings: Settings) -> None:
    """Go back to the image that ran before."""
    deployment = the_one(name)
    with Steps() as steps:
        order = deployment.rollback(timeout_s=settings.start_timeout_s, told=steps.step)
    write([(deployment.name, "bold"), (f" is back at {order.image[:19]}", "")])


def logs(name: str | None, *, follow: bool) -> None:
    """Print what the containers have printed; to follow is for one alone."""
    found = the_one(name).containers()
    if follow and found:
        for chunk in found[-1].logs(stream=True, follow=True):
            sys.stdout.write(chunk.decode(errors="replace"))
            sys.stdout.flush()
        return
    for container in found:
        for line in container.logs().decode(errors="replace").splitlines():
            sys.stdout.write(f"{container.name}  {line}\n")


def delete(name: str | None) -> None:
    """End an app."""
    deployment = the_one(name)
    deployment.delete()
    write([(deployment.name, "bold"), (" has ended", "")])


def the_one(name: str | None) -> "Deployment":
    """Return the one app that is meant.

    Raises:
        ConfigError: There is none, or there are several.
    """
    from servekit.packaging.docker.deployment import Deployment, connect, deployed  # noqa: PLC0415

    client = connect()
    names = deployed(client)
    if name is not None and name not in names:
        raise ConfigError(f"no app {name!r} runs on this engine; there are: {', '.join(names)}")
    if name is None and len(names) != 1:
        raise ConfigError(f"{len(names)} apps run on this engine; choose one by --app")
    return Deployment(client, name or names[0])


def _secrets(bundle: "Bundle") -> dict[str, str]:
    names = bundle.manifest.image.secret_names
    values = given(names)
    missing = [name for name in names if name not in values]
    if missing:
        raise ConfigError(
            f"{bundle.manifest.name} is run with {missing[0]}, which is not set here; set it where "
            "you deploy"
        )
    return values


def _plan(order: "Order", deployment: "Deployment") -> list[Line]:
    before = deployment.order()
    if before is None:
        return [[("+", "green"), (order.name, "bold"), (f"{order.replicas} containers start", "")]]
    if before.revision != order.revision:
        return [[("~", "yellow"), (order.name, "bold"), (f"{order.replicas} in turn", "")]]
    return [[("=", "dim"), (order.name, "bold"), (f"stays, {order.replicas} containers", "dim")]]
