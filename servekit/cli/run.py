"""`servekit serve` and `servekit dev`: an app on this machine, until a signal ends it."""

import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.console import Line, Spinner, is_terminal, rows, write
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.engine.base import Engine
    from servekit.engine.control import ServiceStatus
    from servekit.spec.app import AppSpec

Target = Annotated[
    str,
    typer.Argument(metavar="APP", help="Import string, file or bundle: app:Search, app.py:Search."),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on; else 127.0.0.1.")]
Port = Annotated[int | None, typer.Option(help="Port; 0 takes a free one, else 3000.")]
LogFormat = Annotated[
    str | None, typer.Option(metavar="console|json", help="Log lines for people, or JSON objects.")
]
LogLevel = Annotated[
    str | None, typer.Option(metavar="LEVEL", help="debug, info, warning, error or critical.")
]
EngineName = Annotated[
    str | None,
    typer.Option(metavar="local|ray", help="Processes of this machine, or actors on Ray."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="auto|HOST:PORT|ray://…", help="A Ray cluster to join; else one is started here."
    ),
]
GatewayWorkers = Annotated[
    int | None,
    typer.Option(metavar="N", help="Gateway processes that share the port; else 1."),
]
DrainDelayS = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="After SIGTERM, say so long that the app is not ready, and still answer; else 5.",
    ),
]
DrainS = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Longest wait for running calls at the end."),
]
TlsCert = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Certificate chain in PEM: serve HTTPS.")
]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Its key in PEM, not encrypted.")]


def serve(
    target: Target,
    *,
    host: Host = None,
    port: Port = None,
    engine: EngineName = None,
    ray_address: RayAddress = None,
    gateway_workers: GatewayWorkers = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
    drain_delay_s: DrainDelayS = None,
    drain_s: DrainS = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Serve an app on this machine, for production.

    Ctrl-C or SIGTERM lets running calls finish, then ends everything. Options that are not given
    come from SERVEKIT_* variables, servekit.toml, and pyproject.toml's tool.servekit table.
    """
    settings = Settings.load(
        host=host,
        port=port,
        engine=engine,
        ray_address=ray_address,
        gateway_workers=gateway_workers,
        log_format=log_format,
        log_level=log_level,
        drain_delay_s=drain_delay_s,
        drain_s=drain_s,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    _run(target, settings, dev=False)


def dev(
    target: Target,
    *,
    host: Host = None,
    port: Port = None,
    engine: EngineName = None,
    ray_address: RayAddress = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
    drain_s: DrainS = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Serve an app while you work on it.

    Saving a file reloads what it changed, without losing calls; a playground tries endpoints.
    """
    _run(
        target,
        Settings.load(
            host=host,
            port=port,
            engine=engine,
            ray_address=ray_address,
            log_format=log_format,
            log_level=log_level,
            drain_s=drain_s,
            tls_cert=tls_cert,
            tls_key=tls_key,
        ),
        dev=True,
    )


def _run(target: str, settings: Settings, *, dev: bool) -> None:
    enter_bundle(target, settings)
    import uvloop  # noqa: PLC0415

    from servekit.engine.serve import serve  # noqa: PLC0415

    show = _Show(target, settings, dev=dev)

    async def main() -> None:
        try:
            await serve(
                target,
                settings,
                dev=dev,
                on_loading=show.loading,
                on_starting=show.starting,
                on_ready=show.ready,
                on_ending=show.ending,
            )
        finally:
            show.close()

    uvloop.run(main())
    show.ended()


def enter_bundle(path: str, settings: Settings) -> None:
    """If that is a bundle, go on as the bundle's own servekit, with the same command line."""
    if not Path(path).exists():
        return
    from servekit.packaging.bundle import is_bundle, read  # noqa: PLC0415
    from servekit.packaging.enter import enter  # noqa: PLC0415

    if not is_bundle(path):
        return
    bundle = read(Path(path), settings.cache_dir / "bundles")
    words = [bundle.manifest.target if word == path else word for word in sys.argv[1:]]
    enter(bundle, words, settings)


class _Show:
    """What a person sees of a running app."""

    def __init__(self, target: str, settings: Settings, *, dev: bool) -> None:
        from servekit.core.call import now  # noqa: PLC0415

        self._target = target
        self._settings = settings
        self._dev = dev
        self._now = now
        self._began = now()
        self._ready_after_s: dict[str, float] = {}
        self._spinner: Spinner | None = None
        self._engine: Engine | None = None
        self._was_ready = False

    def loading(self) -> None:
        from servekit.observe import log  # noqa: PLC0415

        log.configure(self._settings.log_format, self._settings.log_level, "supervisor")
        if is_terminal():
            # What these events say is on the screen already.
            logging.getLogger("servekit.supervisor").addFilter(self._is_news)
            self._spinner = Spinner(self._lines)

    def starting(self, engine: "Engine") -> None:
        self._engine = engine
        self._began = self._now()

    def ready(self, engine: "Engine") -> None:
        lines = self._lines("")
        self.close()
        self._was_ready = True
        banner = _banner(engine.url, engine.app, self._settings, dev=self._dev)
        if is_terminal():
            write(*lines, [], *banner, [])
        else:
            write(*banner)

    def ending(self, delay_s: float) -> None:
        if is_terminal():
            text = f"running calls have {self._settings.drain_s:g} s to finish"
            text += "; Ctrl-C ends them now"
            if delay_s:
                text = f"new calls are taken for {delay_s:g} s more; Ctrl-C skips that"
            write([], [("stopping  ", "bold"), (text, "dim")])

    def ended(self) -> None:
        if self._was_ready and is_terminal():
            write([("stopped", "bold")])

    def close(self) -> None:
        if self._spinner is not None:
            self._spinner.close()
            self._spinner = None
            logging.getLogger("servekit.supervisor").removeFilter(self._is_news)

    @staticmethod
    def _is_news(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO

    def _lines(self, mark: str) -> list[Line]:
        if self._engine is None:
            return [[(f"{mark}  ", "cyan"), (self._target, "bold"), ("  loading", "dim")]]
        elapsed = self._now() - self._began
        table = [self._row(service, mark, elapsed) for service in self._engine.status().services]
        return list(rows(table))

    def _row(self, service: "ServiceStatus", mark: str, elapsed: float) -> Line:
        name = (service.name, "bold")
        if not service.desired:
            return [("○", "dim"), name, ("asleep until its first call", "dim")]
        count = f"{service.desired} replicas" if service.desired > 1 else ""
        ready = sum(replica.state == "ready" for replica in service.replicas)
        if ready >= service.desired:
            took = self._ready_after_s.setdefault(service.name, elapsed)
            return [("✓", "green"), name, ("ready", ""), (f"{took:.1f} s", "dim"), (count, "dim")]
        count = f"{ready} of {count}" if count else ""
        return [(mark, "cyan"), name, ("loading", ""), (f"{elapsed:.1f} s", "dim"), (count, "dim")]


def _banner(url: str, app: "AppSpec", settings: Settings, *, dev: bool) -> list[Line]:
    """Return what to know of a running app: where it is, its routes, its pages."""
    here, *elsewhere = _urls(url, settings.host)
    pages = ["docs", "playground"] if dev else ["docs"]
    gap: list[Line] = [[]] if is_terminal() else []
    end = "saving a file reloads it, Ctrl-C stops it" if dev else "Ctrl-C stops it"
    return [
        [(app.root, "bold"), (" is serving at ", ""), (here, "bold cyan")],
        *([("and at ", ""), (other, "cyan")] for other in elsewhere),
        *gap,
        *rows(list(_routes(app)), indent="  "),
        *gap,
        *rows([[(page, "dim"), (f"{here}/{page}", "cyan")] for page in pages], indent="  "),
        *([[], [(end, "dim")]] if is_terminal() else []),
    ]


def _urls(url: str, host: str) -> list[str]:
    """Return where people reach the gateway; the address of all interfaces is none for them."""
    if host not in ("0.0.0.0", "::"):  # noqa: S104
        return [url]
    scheme, port = url.partition(":")[0], url.rpartition(":")[2]
    return [f"{scheme}://{name}:{port}" for name in ("127.0.0.1", socket.gethostname())]


def _routes(app: "AppSpec") -> Iterator[Line]:
    for service in reversed(app.services):
        if service.prefix is None:
            continue
        for endpoint in service.endpoints:
            if endpoint.internal:
                continue
            path = service.prefix.rstrip("/") + endpoint.path.rstrip("/") or "/"
            facts = {"stream": "streams", "task": "task"}.get(endpoint.kind, "")
            if endpoint.inbound is not None:
                facts = "streams both ways" if facts else "streams its input"
            if endpoint.batch is not None:
                facts = f"batched ≤{endpoint.batch.max_size}"
            yield [
                (endpoint.method, "dim"),
                (path, ""),
                (f"{service.name}.{endpoint.name}", "dim"),
                (facts, "dim"),
            ]
        for mount in service.mounts:
            path = service.prefix + mount.path
            yield [
                ("ANY", "dim"),
                (path, ""),
                (f"{service.name}.{mount.name}", "dim"),
                ("web app", "dim"),
            ]
