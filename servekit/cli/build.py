"""`servekit build` and `inspect`: an app becomes a bundle, and what is in one."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.console import Line, Steps, print_json, rows, write
from servekit.cli.run import Target
from servekit.core.units import shown_bytes
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.packaging.bundle import Bundle
    from servekit.packaging.manifest import Manifest

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="PATH", help="File, or with / at its end folder; else dist/…"
    ),
]
Index = Annotated[str, typer.Option(metavar="URL", help="Package index in place of the usual one.")]
FindLinks = Annotated[
    list[str] | None,
    typer.Option(metavar="PLACE", help="A folder or page with wheels; may be given again."),
]
TorchBackend = Annotated[
    str, typer.Option(metavar="cpu|cu130|auto|…", help="Which builds of PyTorch.")
]
Locked = Annotated[bool, typer.Option("--locked", help="Resolve nothing: there is a lock file.")]
AllowSecret = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Files that may look as if they had secrets."),
]
Here = Annotated[
    bool,
    typer.Option("--import", help="Import the app here, not in an environment of its own."),
]


def build(
    app: Target,
    *,
    output: Output = None,
    name: Annotated[str, typer.Option(help="Its name; else its root service's.")] = "",
    tag: Annotated[str, typer.Option(help="In the file's name; else the digest's start.")] = "",
    index: Index = "",
    find_links: FindLinks = None,
    torch_backend: TorchBackend = "",
    locked: Locked = False,
    allow_secret: AllowSecret = None,
    import_here: Here = False,
) -> None:
    """Make one file of an app and all that it needs.

    What it depends on need not be installed here. Equal projects make equal bytes.
    """
    settings = Settings.load()
    began = time.monotonic()
    with Steps() as steps:
        bundle = bundle_of(
            app,
            settings,
            steps,
            name=name,
            index=index,
            find_links=find_links,
            torch_backend=torch_backend,
            locked=locked,
            allow_secret=allow_secret,
            import_here=import_here,
        )
        path = _written(bundle, output, tag)
    took = f"{time.monotonic() - began:.1f} s"
    size = shown_bytes(bundle.manifest.size)
    write([("built ", ""), (str(path), "bold"), (f"  {size}  {took}", "dim")])
    write([("sha256:", "dim"), (bundle.digest, "dim")])


def inspect(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle's file or folder.")],
    *,
    json: Annotated[bool, typer.Option("--json", help="Print its manifest.")] = False,
) -> None:
    """Show what is in a bundle.

    All of it is compared with its digests first.
    """
    from servekit.packaging.bundle import read  # noqa: PLC0415

    settings = Settings.load()
    found = read(bundle, settings.cache_dir / "bundles")
    if json:
        print_json(found.manifest.to_json())
    else:
        write(*rows(list(_facts(found.manifest))))


def bundle_of(
    app: str,
    settings: Settings,
    steps: Steps,
    *,
    name: str = "",
    index: str = "",
    find_links: list[str] | None = None,
    torch_backend: str = "",
    locked: bool = False,
    allow_secret: list[str] | None = None,
    import_here: bool = False,
) -> "Bundle":
    """Return the bundle of an app, or the one that is given in its place."""
    from servekit.packaging.build import Request  # noqa: PLC0415
    from servekit.packaging.build import build as built  # noqa: PLC0415
    from servekit.packaging.bundle import is_bundle, read  # noqa: PLC0415
    from servekit.packaging.lock import Options  # noqa: PLC0415
    from servekit.store.store import Store  # noqa: PLC0415

    if is_bundle(app):
        return read(Path(app), settings.cache_dir / "bundles")
    request = Request(
        target=app,
        cwd=Path.cwd(),
        cache=settings.cache_dir,
        models=Store.of(settings),
        name=name,
        lock=Options(
            index=index,
            find_links=tuple(find_links or ()),
            torch_backend=torch_backend,
            locked=locked,
        ),
        allowed=tuple(allow_secret or ()),
        import_here=import_here,
        told=steps.step,
    )
    return built(request)


def _written(bundle: "Bundle", output: Path | None, tag: str) -> Path:
    """Put a bundle where it is wanted; returns where that is."""
    from servekit.packaging.bundle import SUFFIX  # noqa: PLC0415

    title = f"{bundle.manifest.name}-{tag}" if tag else bundle.title
    path = output or Path("dist") / f"{title}{SUFFIX}"
    put(bundle, path)
    return path


def put(bundle: "Bundle", path: Path) -> None:
    """Write a bundle as a file, or, to a path with another suffix, as a folder."""
    import shutil  # noqa: PLC0415

    from servekit.packaging.bundle import SUFFIX  # noqa: PLC0415

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == SUFFIX:
        bundle.pack(path)
    else:
        shutil.copytree(bundle.folder, path)


def _facts(manifest: "Manifest") -> list[Line]:
    folders: dict[str, list[int]] = {}
    for path, file in manifest.files.items():
        folders.setdefault(path.partition("/")[0], []).append(file.size)
    facts = [
        ("name", manifest.name),
        ("digest", f"sha256:{manifest.digest}"),
        ("app", manifest.target),
        ("services", ", ".join(service.name for service in manifest.app.services)),
        ("python", f"{manifest.python} on {manifest.platform}"),
        ("built by", f"servekit {manifest.servekit}"),
    ]
    facts += [
        (folder, f"{shown_bytes(sum(sizes))} in {len(sizes)} files")
        for folder, sizes in folders.items()
    ]
    return [[(name, "dim"), (text, "")] for name, text in facts]
