"""`--target kubernetes` of `servekit deploy`, `status`, `rollback`, `logs` and `delete`."""

import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from servekit.cli.build import bundle_of
from servekit.cli.console import Line, Steps, rows, write
from servekit.cli.containerize import image_of
from servekit.errors import ConfigError
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.packaging.bundle import Bundle
    from servekit.packaging.kubernetes.deployment import Deployment, Plan
    from servekit.packaging.kubernetes.order import Order
    from servekit.packaging.kubernetes.overlay import Overlay as OverlayFile

_PANEL = "Kubernetes"

Overlay = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TOML: all but the app.", rich_help_panel=_PANEL),
]
ImageReference = Annotated[
    str,
    typer.Option(metavar="REFERENCE", help="In a registry, of this app.", rich_help_panel=_PANEL),
]
PushTo = Annotated[
    str,
    typer.Option(metavar="REFERENCE", help="Make it and send it.", rich_help_panel=_PANEL),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print the YAML: of Docker, a Compose file.")
]
Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="Else default.", rich_help_panel=_PANEL)
]
Context = Annotated[str, typer.Option(help="Of the kubeconfig.", rich_help_panel=_PANEL)]


class Place(NamedTuple):
    """A namespace of the cluster of a context; "" is the usual one."""

    namespace: str
    context: str


def deploy(
    app: str,
    settings: Settings,
    place: Place,
    *,
    name: str,
    overlay: Path | None,
    image: str,
    push: str,
    base: str,
    plan: bool,
    dry_run: bool,
) -> None:
    """Have a cluster run an app, or its new code; or print what it would be told."""
    from servekit.packaging.kubernetes.manifests import manifests  # noqa: PLC0415
    from servekit.packaging.kubernetes.record import Revision  # noqa: PLC0415
    from servekit.packaging.yaml import to_yaml  # noqa: PLC0415

    if bool(image) == bool(push):
        raise ConfigError(
            "say which image: --image REFERENCE is one in a registry; --push REFERENCE --base … "
            "makes it and sends it"
        )
    began = time.monotonic()
    with Steps() as steps:
        wanted = _overlay(overlay, place.namespace)
        bundle = bundle_of(app, settings, steps)
        there = image or push
        if push and not (plan or dry_run):
            there = _pushed(bundle, push, base, settings, steps, with_models=wanted.models is None)
        order = _order(bundle, there, name, wanted)
        revision = Revision(image=there, objects=manifests(order))
    if dry_run:
        sys.stdout.write(to_yaml(revision.objects))
        return
    deployment = _deployment(place, order.overlay.namespace, order.name)
    write(*rows(_plan(deployment.plan(revision))))
    if plan:
        return
    with Steps() as steps:
        deployment.carry_out(revision, timeout_s=settings.start_timeout_s, told=steps.step)
    took = f"  {time.monotonic() - began:.1f} s"
    where = f"in {order.overlay.namespace}"
    write([(order.name, "bold"), (" is ready ", ""), (where, "cyan"), (took, "dim")])


def status(name: str | None, place: Place) -> None:
    """Show the pods of apps in a namespace."""
    from servekit.packaging.kubernetes.api import Cluster  # noqa: PLC0415
    from servekit.packaging.kubernetes.record import Record  # noqa: PLC0415

    cluster = Cluster.connect(place.context)
    namespace = place.namespace or "default"
    table: list[Line] = []
    for record in Record.all(cluster, namespace):
        if name not in (None, record.name):
            continue
        pods = _deployment(place, namespace, record.name).states()
        if not pods:
            table.append([(record.name, "bold"), ("no pods", "dim"), ("", ""), ("", "")])
        table += [
            [(record.name, "bold"), (pod.name, ""), (pod.state, ""), (pod.image, "dim")]
            for pod in pods
        ]
    write(*rows(table) if table else [[(f"no app of ours is in namespace {namespace}", "")]])


def rollback(name: str | None, place: Place, settings: Settings) -> None:
    """Go back to what was there before the last deploy."""
    deployment = the_one(name, place)
    with Steps() as steps:
        revision = deployment.rollback(timeout_s=settings.start_timeout_s, told=steps.step)
    write([(deployment.name, "bold"), (f" is back at {revision.image}", "")])


def logs(name: str | None, place: Place, *, follow: bool) -> None:
    """Print what the pods have printed."""
    from servekit.packaging.kubernetes.order import NAME  # noqa: PLC0415

    deployment = the_one(name, place)
    if follow:
        raise ConfigError(
            "kubectl follows several pods at once: kubectl logs --follow --prefix --namespace "
            f"{deployment.namespace} --selector {NAME}={deployment.name}"
        )
    for pod, line in deployment.logs():
        sys.stdout.write(f"{pod}  {line}\n")


def delete(name: str | None, place: Place) -> None:
    """End an app; what has its data stays."""
    deployment = the_one(name, place)
    kept = deployment.delete()
    write([(deployment.name, "bold"), (" has ended", "")])
    for ref in kept:
        command = f"kubectl delete pvc {ref.name} --namespace {ref.namespace}"
        write([(f"its data stays: {command}", "dim")])


def the_one(name: str | None, place: Place) -> "Deployment":
    """Return the one app that is meant.

    Raises:
        ConfigError: There is none, or there are several.
    """
    from servekit.packaging.kubernetes.api import Cluster  # noqa: PLC0415
    from servekit.packaging.kubernetes.record import Record  # noqa: PLC0415

    namespace = place.namespace or "default"
    names = [record.name for record in Record.all(Cluster.connect(place.context), namespace)]
    there = ", ".join(names) or "none"
    if name is not None and name not in names:
        raise ConfigError(f"no app {name!r} is in namespace {namespace}; there are: {there}")
    if name is None and len(names) != 1:
        raise ConfigError(
            f"{len(names)} apps are in namespace {namespace}; choose one by --app, or another "
            f"--namespace: {there}"
        )
    return _deployment(place, namespace, name or names[0])


def _deployment(place: Place, namespace: str, name: str) -> "Deployment":
    from servekit.packaging.kubernetes.api import Cluster  # noqa: PLC0415
    from servekit.packaging.kubernetes.deployment import Deployment  # noqa: PLC0415

    return Deployment(Cluster.connect(place.context), namespace, name)


def _overlay(path: Path | None, namespace: str) -> "OverlayFile":
    import msgspec  # noqa: PLC0415

    from servekit.packaging.kubernetes.overlay import Overlay as OverlayFile  # noqa: PLC0415

    found = OverlayFile() if path is None else OverlayFile.read(path)
    return msgspec.structs.replace(found, namespace=namespace) if namespace else found


def _order(bundle: "Bundle", image: str, name: str, overlay: "OverlayFile") -> "Order":
    from servekit.packaging.kubernetes.order import Order  # noqa: PLC0415

    manifest = bundle.manifest
    return Order(
        name=name or manifest.name.replace("_", "-"),
        image=image,
        target=manifest.target,
        app=manifest.app,
        version=bundle.digest[:12],
        ray=_version(bundle, "ray"),
        overlay=overlay,
    )


def _version(bundle: "Bundle", package: str) -> str:
    """Return the version of a package in a bundle's lock; "" is none."""
    from servekit.packaging.manifest import LOCK  # noqa: PLC0415

    lock = tomllib.loads((bundle.folder / LOCK).read_text("utf-8"))
    found = (one.get("version", "") for one in lock["packages"] if one["name"] == package)
    return next(found, "")


def _pushed(
    bundle: "Bundle", push: str, base: str, settings: Settings, steps: Steps, *, with_models: bool
) -> str:
    """Make the image of a bundle and send it; returns its reference by digest."""
    from servekit.packaging.oci.reference import Reference  # noqa: PLC0415
    from servekit.packaging.oci.registry import Registry  # noqa: PLC0415
    from servekit.packaging.oci.transfer import push_image  # noqa: PLC0415

    target = Reference.parse(push)
    image = image_of(bundle, base, settings, steps, with_models=with_models).image
    steps.step(f"sending it to {target.registry}")
    with Registry.logged_in(target.registry) as registry:
        push_image(registry, target, image, progress=steps.progress)
    return f"{target.name}@{image.descriptor.digest}"


def _plan(plan: "Plan") -> list[Line]:
    signs = (("+", "green"), ("~", "yellow"), ("=", "dim"), ("-", "red"))
    return [
        [sign, (ref.kind, ""), (ref.name, "bold")]
        for sign, refs in zip(signs, plan, strict=True)
        for ref in refs
    ]
