"""`Engine`: what runs an app, here or on a cluster, as the commands see it."""

from collections.abc import Mapping
from typing import Protocol

from servekit.engine.control import AppStatus
from servekit.engine.description import Described
from servekit.spec.app import AppSpec


class Engine(Protocol):
    """One running app.

    Attributes:
        url: Where its gateways listen.
        app: What is served now.
    """

    url: str
    app: AppSpec

    @property
    def ready(self) -> bool:
        """Whether a gateway says so to who asks."""
        ...

    async def start(self) -> None:
        """Start everything; returns when every service is ready.

        Raises:
            ResourceError: There is less than the app asks for.
            SetupError: A replica could not start; nothing is left running.
        """
        ...

    async def roll(self, described: Described) -> list[str]:
        """Go over to another revision without losing a call; returns the services that changed.

        Raises:
            AuthorError: A new replica could not start; the old revision goes on.
        """
        ...

    async def scale(self, wanted: Mapping[str, int | tuple[int, int]]) -> None:
        """Have other numbers of replicas, each until its service's code changes.

        Args:
            wanted: By service: a number, or bounds where the load decides.

        Raises:
            NotFound: There is no such service.
            ConfigError: A service takes no such number.
            ResourceError: There is less; nothing has changed.
        """
        ...

    def status(self) -> AppStatus:
        """Return what runs as far as is known, also while it starts."""
        ...

    async def look(self) -> AppStatus:
        """Look what runs now."""
        ...

    async def leave(self) -> None:
        """Say that the app is not ready any more, but go on as before."""
        ...

    async def stop(self) -> None:
        """Finish the requests on board, then end everything that was started."""
        ...

    def kill(self) -> None:
        """End all processes at once."""
        ...
