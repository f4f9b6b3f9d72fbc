"""`servekit deploy`, `rollback`, `logs` and `delete`: an app on Ray, Docker or Kubernetes, where it stays."""

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from servekit.cli import containers, kubernetes
from servekit.cli.console import Line, rows, write
from servekit.cli.containerize import Base, BuildNetwork
from servekit.cli.kubernetes import (
    Context,
    DryRun,
    ImageReference,
    Namespace,
    Overlay,
    Place,
    PushTo,
)
from servekit.cli.run import Host, LogFormat, LogLevel, Port, Target, enter_bundle
from servekit.errors import ConfigError
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.engine.ray.deploy import Deployment, Plan

RayAddress = Annotated[
    str | None,
    typer.Option(metavar="auto|HOST:PORT|ray://…", help="The Ray cluster; else auto."),
]
Name = Annotated[
    str | None, typer.Option("--app", metavar="NAME", help="Its name; else the one that runs.")
]
Where = Annotated[
    Literal["ray", "docker", "kubernetes"],
    typer.Option("--target", help="A Ray or Kubernetes cluster, or a Docker engine."),
]
_POLL_S = 0.5

_ONLY = {
    "ray_address": ("ray",),
    "host": ("ray", "docker"),
    "port": ("ray", "docker"),
    "log_format": ("ray",),
    "log_level": ("ray",),
    "base": ("docker", "kubernetes"),
    "build_network": ("docker",),
    "replicas": ("docker",),
    "network": ("docker",),
    "memory": ("docker",),
    "cpus": ("docker",),
    "overlay": ("kubernetes",),
    "image": ("kubernetes",),
    "push": ("kubernetes",),
    "namespace": ("kubernetes",),
    "context": ("kubernetes",),
    "dry_run": ("docker", "kubernetes"),
}
"""Options that are for some targets."""


def deploy(
    ctx: typer.Context,
    app: Target,
    *,
    target: Where = "ray",
    ray_address: RayAddress = None,
    name: Annotated[
        str | None, typer.Option("--app", metavar="NAME", help="Its name; else its root service's.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only show what would change.")] = False,
    host: Host = None,
    port: Port = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
    base: Base = "",
    build_network: BuildNetwork = "",
    replicas: Annotated[
        int, typer.Option(help="Containers, each the whole app.", rich_help_panel="Docker")
    ] = 1,
    network: Annotated[
        str, typer.Option(metavar="bridge|host|NAME", help="Theirs.", rich_help_panel="Docker")
    ] = "bridge",
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Of one.", rich_help_panel="Docker")
    ] = "",
    cpus: Annotated[float, typer.Option(help="Cores of one.", rich_help_panel="Docker")] = 0.0,
    overlay: Overlay = None,
    image: ImageReference = "",
    push: PushTo = "",
    namespace: Namespace = "",
    context: Context = "",
    dry_run: DryRun = False,
) -> None:
    """Run an app on Ray, Docker or Kubernetes, or its new code.

    Shows first what will restart, and loses no call. Returns when everything is ready; if a replica
    does not start, what ran before goes on, and the exit code is 1.
    """
    from servekit.engine.description import describe_elsewhere  # noqa: PLC0415

    _check_options(ctx, target)
    settings = Settings.load(
        ray_address=ray_address,
        host=host,
        port=port,
        log_format=log_format,
        log_level=log_level,
    )
    if target == "docker":
        containers.deploy(
            app,
            settings,
            name=name or "",
            base=base,
            build_network=build_network,
            replicas=replicas,
            network=network,
            memory=memory,
            cpus=cpus,
            plan=plan,
            dry_run=dry_run,
        )
        return
    if target == "kubernetes":
        kubernetes.deploy(
            app,
            settings,
            Place(namespace, context),
            name=name or "",
            overlay=overlay,
            image=image,
            push=push,
            base=base,
            plan=plan,
            dry_run=dry_run,
        )
        return
    enter_bundle(app, settings)
    described = asyncio.run(describe_elsewhere(app))
    _join(settings)
    from servekit.engine.ray.deploy import (  # noqa: PLC0415
        Deployment,
        order_of,
        revision,
    )

    wanted = order_of(app, revision(described), settings, name=name or "")
    deployment = Deployment(wanted.common.app)
    order, changes = deployment.next(wanted, deployment.order())
    write(*rows(list(_plan(changes))))
    if plan:
        return
    began = time.monotonic()
    asyncio.run(deployment.carry_out(order, timeout_s=settings.start_timeout_s))
    took = f"  {time.monotonic() - began:.1f} s"
    write(
        [(deployment.name, "bold"), (" is ready at ", ""), (order.front.url, "cyan"), (took, "dim")]
    )


def rollback(
    *,
    target: Where = "ray",
    ray_address: RayAddress = None,
    name: Name = None,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Go back to what ran before the last deploy, without losing a call."""
    settings = Settings.load(ray_address=ray_address)
    if target == "docker":
        containers.rollback(name, settings)
        return
    if target == "kubernetes":
        kubernetes.rollback(name, Place(namespace, context), settings)
        return
    deployment = _the_one(settings, name)
    asyncio.run(deployment.rollback(timeout_s=settings.start_timeout_s))
    write([(deployment.name, "bold"), (f" is back at revision {deployment.status().revision}", "")])


def logs(
    *,
    target: Where = "ray",
    ray_address: RayAddress = None,
    name: Name = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Print what the processes of an app have printed.

    On Ray each keeps its last 2,000 lines.
    """
    if target == "docker":
        containers.logs(name, follow=follow)
        return
    if target == "kubernetes":
        kubernetes.logs(name, Place(namespace, context), follow=follow)
        return
    deployment = _the_one(Settings.load(ray_address=ray_address), name)
    seen: dict[str, int] = {}
    while True:
        for process, lines in sorted(deployment.logs(seen).items()):
            for line in lines:
                sys.stdout.write(f"{process}  {line}\n")
        sys.stdout.flush()
        if not follow:
            return
        time.sleep(_POLL_S)


def delete(
    *,
    target: Where = "ray",
    ray_address: RayAddress = None,
    name: Name = None,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """End an app, when its running calls have finished."""
    if target == "docker":
        containers.delete(name)
        return
    if target == "kubernetes":
        kubernetes.delete(name, Place(namespace, context))
        return
    deployment = _the_one(Settings.load(ray_address=ray_address), name)
    deployment.delete()
    write([(deployment.name, "bold"), (" has ended", "")])


def _check_options(ctx: typer.Context, target: str) -> None:
    """Refuse options that another target takes, which would do nothing here."""
    for name, targets in _ONLY.items():
        source = ctx.get_parameter_source(name)
        if target not in targets and source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            instead = "; settings are in [settings] of the overlay" * (target == "kubernetes")
            raise ConfigError(
                f"{option} is for --target {' and '.join(targets)}, not for {target}{instead}"
            )


def _join(settings: Settings) -> None:
    from servekit.engine.deploy import needs_ray  # noqa: PLC0415

    needs_ray()
    from servekit.engine.ray import cluster  # noqa: PLC0415

    cluster.join(settings.ray_address or "auto")


def _the_one(settings: Settings, name: str | None) -> "Deployment":
    _join(settings)
    from servekit.engine.ray.deploy import Deployment, deployed  # noqa: PLC0415

    names = deployed()
    if name is None and len(names) != 1:
        there = ", ".join(names)
        raise ConfigError(
            f"{len(names)} apps run on this cluster; choose one by --app: {there}"
            if names
            else "no app runs on this cluster; servekit deploy app:Service starts one"
        )
    found = Deployment(name or names[0])
    if found.name not in names:
        raise found.absent()
    return found


def _plan(plan: "Plan") -> list[Line]:
    crowded = "no room beside the old replicas, which leave first"
    lines: list[Line] = [[("+", "green"), (name, "bold"), ("starts", "")] for name in plan.starts]
    lines += [
        [("~", "yellow"), (one, "bold"), ("restarts", ""), (crowded * (one in plan.crowded), "dim")]
        for one in plan.restarts
    ]
    lines += [[("~", "cyan"), (name, "bold"), ("takes other arguments", "")] for name in plan.tunes]
    lines += [[("~", "cyan"), (name, "bold"), ("is resized", "")] for name in plan.resizes]
    lines += [[("-", "red"), (name, "bold"), ("ends", "")] for name in plan.ends]
    return lines + [[("=", "dim"), (name, "bold"), ("stays", "dim")] for name in plan.stays]
