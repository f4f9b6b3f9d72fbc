"""Which replicas may load at the same time: a pure state machine.

Loading a model takes cores and memory that serving it doesn't, so replicas take turns: those that
replace lost ones first, dependencies before those that call them, at most so many at once, and one that says how much memory it needs waits
while others load and too little is left. A service that a loading one depends on goes at once, as it
may be what that one waits for.
"""

from collections.abc import Callable
from typing import NamedTuple


class Start(NamedTuple):
    """One replica that wants to load.

    Attributes:
        number: Higher came later.
        service: Its service.
        rank: Lower goes first.
        memory: Bytes that it says it needs; 0 does not say.
        needs: The services that it depends on, directly or not.
        restart: It takes the place of one that was ready.
    """

    number: int
    service: str
    rank: int = 0
    memory: int = 0
    needs: frozenset[str] = frozenset()
    restart: bool = False


class Starts:
    """Those that wait and those that load.

    Args:
        parallel: How many may load at once.

    Attributes:
        short: The one that is next, but waits for memory.
    """

    def __init__(self, parallel: int) -> None:
        self._parallel = parallel
        self._waiting: list[Start] = []
        self._loading: list[Start] = []
        self.short: Start | None = None

    def ask(self, start: Start) -> None:
        """Queue a replica."""
        self._waiting.append(start)
        self._waiting.sort(key=lambda start: (not start.restart, start.rank, start.number))

    def end(self, start: Start) -> None:
        """Take note that a replica has loaded, or that it doesn't want to any more."""
        for group in (self._waiting, self._loading):
            if start in group:
                group.remove(start)

    def next(self, available: Callable[[], int | None]) -> Start | None:
        """Let the next replica load, if one may.

        Args:
            available: Returns the free memory in bytes, before those that load have taken theirs;
                None is not known. Asked only where it matters.
        """
        self.short = None
        chosen = next((start for start in self._waiting if self._is_waited_for(start)), None)
        if chosen is None and self._waiting and len(self._loading) < self._parallel:
            first = self._waiting[0]
            if self._has_memory(first, available):
                chosen = first
            else:
                self.short = first
        if chosen is not None:
            self._waiting.remove(chosen)
            self._loading.append(chosen)
        return chosen

    def _is_waited_for(self, start: Start) -> bool:
        return any(start.service in loading.needs for loading in self._loading)

    def _has_memory(self, start: Start, available: Callable[[], int | None]) -> bool:
        if not start.memory or not self._loading:
            return True  # with nobody else about to give or take, waiting would change nothing
        free = available()
        promised = sum(loading.memory for loading in self._loading)
        return free is None or free - promised >= start.memory
