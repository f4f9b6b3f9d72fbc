"""`servekit jobs`: the jobs of a running app's tasks, over HTTP."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from servekit.cli.call import app_url
from servekit.cli.console import Line, print_json, rows, write

if TYPE_CHECKING:
    from servekit.core.job import JobStatus

Task = Annotated[
    str, typer.Argument(metavar="TASK", help="Path of the task, like render or reports/render.")
]
Id = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
Url = Annotated[str | None, typer.Option(help="Where the app listens; else as the settings say.")]
Json = Annotated[bool, typer.Option("--json", help="Print the document as it is.")]

_STYLES = {"running": "cyan", "succeeded": "green", "failed": "red", "expired": "yellow"}

jobs = typer.Typer(help="List, show, cancel and retry jobs.")


@jobs.command("list")
def list_(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Path of a task; else all tasks.")
    ] = None,
    *,
    status: Annotated[str | None, typer.Option(help="Only jobs with this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most jobs of a task.")] = 20,
    url: Url = None,
    json: Json = False,
) -> None:
    """List jobs, the newest first."""
    import msgspec  # noqa: PLC0415

    from servekit.core.job import JobStatus  # noqa: PLC0415

    query = {"limit": str(limit), **({} if status is None else {"status": status})}
    base = app_url(url)
    found = {
        path: _ask("GET", base, f"{path}/jobs", query)
        for path in ([task.strip("/")] if task is not None else _tasks(base))
    }
    if json:
        print_json(msgspec.json.encode({p: msgspec.Raw(body) for p, body in found.items()}))
        return
    table: list[Line] = [
        [(text, "dim") for text in ("task", "id", "status", "attempt", "progress", "submitted")]
    ]
    for path, body in found.items():
        statuses = msgspec.json.decode(body, type=list[JobStatus])
        table.extend(_row(path, job) for job in statuses)
    if len(table) > 1:
        write(*rows(table))
    else:
        write([("no jobs", "")])


@jobs.command()
def show(task: Task, job: Id, *, url: Url = None, json: Json = False) -> None:
    """Show where a job is."""
    _show(_ask("GET", app_url(url), f"{task}/jobs/{job}"), json=json)


@jobs.command()
def cancel(task: Task, job: Id, *, url: Url = None, json: Json = False) -> None:
    """Drop a job that is queued, or ask one that runs to stop."""
    _show(_ask("POST", app_url(url), f"{task}/jobs/{job}/cancel"), json=json)


@jobs.command()
def retry(task: Task, job: Id, *, url: Url = None, json: Json = False) -> None:
    """Queue a job again that failed, was cancelled or has expired."""
    _show(_ask("POST", app_url(url), f"{task}/jobs/{job}/retry"), json=json)


def _ask(method: str, base: str, path: str, query: dict[str, str] | None = None) -> bytes:
    """Return the body of a good answer.

    Raises:
        CallError: It is none, or nobody answers.
    """
    import httpx  # noqa: PLC0415

    from servekit.client.exchange import answer, unreachable  # noqa: PLC0415
    from servekit.errors import ConfigError  # noqa: PLC0415

    url = f"{base}/{path.lstrip('/')}"
    headers = {"accept": "application/json"}
    try:
        response = httpx.request(method, url, params=query, headers=headers, timeout=30.0)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url} is no URL: {error}") from None
    except httpx.TransportError as error:
        raise unreachable(error, base) from error
    return bytes(answer(response).segments[0])


def _tasks(base: str) -> list[str]:
    """Return the paths of the app's tasks."""
    import msgspec  # noqa: PLC0415

    document: dict[str, Any] = msgspec.json.decode(_ask("GET", base, "openapi.json"))
    return [
        path.strip("/")
        for path, item in document["paths"].items()
        if item.get("post", {}).get("x-servekit", {}).get("kind") == "task"
    ]


def _show(body: bytes, *, json: bool) -> None:
    import msgspec  # noqa: PLC0415

    from servekit.core.job import JobStatus  # noqa: PLC0415

    if json:
        print_json(body)
        return
    job = msgspec.json.decode(body, type=JobStatus)
    facts = [
        ("id", job.id),
        ("status", job.status + (", asked to stop" if job.cancelling else "")),
        ("attempt", str(job.attempt)),
        ("position", "" if job.position is None else str(job.position)),
        ("submitted", _time(job.submitted_at)),
        ("started", _time(job.started_at)),
        ("finished", _time(job.finished_at)),
        ("progress", _progress(job)),
        ("error", "" if job.error is None else f"{job.error.code}: {job.error.message}"),
    ]
    styles = {"status": _STYLES.get(job.status, ""), "error": "red"}
    write(*rows([[(n, "dim"), (text, styles.get(n, ""))] for n, text in facts if text]))


def _row(path: str, job: "JobStatus") -> Line:
    return [
        (path, ""),
        (job.id, ""),
        (job.status, _STYLES.get(job.status, "")),
        (str(job.attempt), ""),
        (_progress(job) or "-", ""),
        (_time(job.submitted_at), "dim"),
    ]


def _progress(job: "JobStatus") -> str:
    progress = job.progress
    if progress is None:
        return ""
    share = "" if progress.fraction is None else f"{progress.fraction:.0%}"
    return "  ".join(part for part in (share, progress.message) if part)


def _time(at: datetime | None) -> str:
    return "" if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
