"""The jobs of an app, seen from its supervisor: where they are kept, and how many wait.

Jobs that wait are load, also for a service that sleeps and has nobody to tell of them.
"""

from collections.abc import Mapping
from pathlib import Path
from time import time

from servekit.errors import ConfigError, Unavailable
from servekit.jobs.sqlite import FILE, SqliteStore
from servekit.jobs.store import TaskCount
from servekit.observe.families import Families
from servekit.observe.log import get_logger
from servekit.spec.app import AppSpec, ServiceSpec

_log = get_logger("servekit.supervisor")


class Backlog:
    """What is queued for the tasks of an app; nothing is opened or made for one that has none.

    Args:
        folder: Where jobs are kept.
        families: Gets the figures.
    """

    def __init__(self, folder: Path, families: Families) -> None:
        self._folder = folder.absolute()
        self._families = families
        self._store: SqliteStore | None = None
        self._counted: set[tuple[str, str]] = set()

    async def serve(self, app: AppSpec) -> None:
        """Make and open the file, if the app has tasks.

        Raises:
            ConfigError: That can't be done.
        """
        if self._store is not None or not any(service.has_tasks for service in app.services):
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"jobs_dir = {self._folder}: can't be made: {error.strerror}"
            ) from error
        store = SqliteStore(self._folder / FILE)
        await store.open()
        self._store = store

    def file(self, service: ServiceSpec) -> str:
        """Return the file for a service's replicas; "" if they need none."""
        return str(self._folder / FILE) if service.has_tasks else ""

    async def look(self) -> Mapping[str, int]:
        """Return how many jobs could be claimed now, by service."""
        if self._store is None:
            return {}
        try:
            counts = await self._store.counts(now=time())
        except Unavailable as error:
            _log.error("jobs not counted", why=error.message)
            return {}
        self._publish(counts)
        ready: dict[str, int] = {}
        for count in counts:
            ready[count.service] = ready.get(count.service, 0) + count.ready
        return ready

    def _publish(self, counts: list[TaskCount]) -> None:
        none = {task: TaskCount(*task, queued=0, running=0, ready=0) for task in self._counted}
        open_ = none | {(count.service, count.task): count for count in counts}
        self._counted = set(open_)
        for (service, task), count in open_.items():
            labels = {"service": service, "endpoint": task}
            self._families.jobs.labels(**labels, status="queued").set(count.queued)
            self._families.jobs.labels(**labels, status="running").set(count.running)

    async def close(self) -> None:
        """Close the file."""
        if self._store is not None:
            await self._store.close()
            self._store = None
