"""What a replica measures of itself: for the router, the scaler and `/metrics`."""

from servekit.observe.families import Families
from servekit.observe.metrics import Counter

_SMOOTHING = 0.1


class Pace:
    """How fast a replica works through its calls.

    Attributes:
        unit_s: Seconds that one more call adds to the wait in the steady state: the mean run time
            over the number of calls that run at once (Little's law), smoothed. The very first is
            forgotten at the second: it fills caches and loads libraries.
    """

    def __init__(self) -> None:
        self.unit_s = 0.0
        self._seen = 0

    def ran(self, seconds: float, at_once: float) -> None:
        """Take note that work took `seconds` while `at_once` calls shared the replica."""
        unit = seconds / at_once if at_once > 1 else seconds
        if self._seen < 2:
            self._seen += 1
            self.unit_s = unit
        else:
            self.unit_s += _SMOOTHING * (unit - self.unit_s)


class Meter:
    """Figures of one endpoint.

    Attributes:
        ongoing: Calls on board, queued and running.
        running: Those of them that run.
        finished: Calls that have left again, well or not.
    """

    def __init__(
        self, families: Families, pace: Pace, *, service: str, endpoint: str, version: str
    ) -> None:
        self.ongoing = 0
        self.running = 0
        self.finished = 0
        self.ran = pace.ran
        self.pace = pace
        self._families = families
        self._labels = {"service": service, "endpoint": endpoint}
        self._version = version
        self._request_seconds = families.request_seconds.labels(**self._labels)
        self._in_flight = families.in_flight.labels(**self._labels)
        self._queued = families.queued.labels(**self._labels)
        self.queue_seconds = families.queue_seconds.labels(**self._labels)
        self._codes: dict[int, Counter] = {}

    def answered(self, code: int, seconds: float) -> None:
        """Count a call of another service; clients' calls are the gateway's to count."""
        counter = self._codes.get(code)
        if counter is None:
            counter = self._codes[code] = self._families.requests.labels(
                **self._labels, version=self._version, code=code
            )
        counter.inc()
        self._request_seconds.observe(seconds)

    def shed(self, reason: str) -> None:
        """Count a call that was refused before it ran."""
        self._families.shed.labels(**self._labels, reason=reason).inc()

    def publish(self) -> None:
        """Bring the gauges up to date."""
        self._in_flight.set(self.running)
        self._queued.set(max(0, self.ongoing - self.running))
