"""How much one party may ask: so often, and so much at once.

Who the party is (an API key, a tenant, an address) is the caller's affair: here it is text. Times
go in, decisions come out.
"""

from collections import OrderedDict
from typing import NamedTuple


class Rate(NamedTuple):
    """How often something may happen.

    Attributes:
        per_s: Events per second in the long run, above 0.
        burst: Events that may come at once after a pause, 1 or more.
    """

    per_s: float
    burst: int


class RateLimiter:
    """The generic cell rate algorithm, for any number of parties.

    The form of "virtual scheduling" (ITU-T Recommendation I.371, Annex A; ATM Forum, Traffic
    Management Specification 4.0, section 4.4.2): for each party one number is kept, the time at
    which its next event would be due if they came evenly spaced. An event may be early by the time
    that the rest of a burst takes. It admits what a token bucket admits that holds `burst` tokens.

    Args:
        share: Part of every rate and burst that is admitted here, above 0 and up to 1, where
            several processes admit side by side.
        max_parties: Parties that are remembered. Beyond, the one that was not seen for longest is
            forgotten: it starts anew, with a whole burst. One that has rested has that anyway.
    """

    def __init__(self, *, share: float = 1.0, max_parties: int = 65_536) -> None:
        self._share = share
        self._max_parties = max_parties
        self._due: OrderedDict[str, float] = OrderedDict()

    def admit(self, party: str, rate: Rate, at: float) -> float:
        """Take an event, or refuse it; one that is refused does not count.

        Args:
            party: Whose it is.
            rate: What that party may do; it may differ from call to call.
            at: Now, in seconds, on a clock that never goes back.

        Returns:
            0.0 if it is admitted, else the seconds after which it would be.
        """
        interval_s = 1 / (rate.per_s * self._share)
        early_s = max(rate.burst * self._share - 1, 0.0) * interval_s
        due = max(self._due.get(party, at), at)
        wait_s = due - early_s - at
        if wait_s <= 0:
            self._due[party] = due + interval_s
            wait_s = 0.0
        self._due.move_to_end(party)
        if len(self._due) > self._max_parties:
            self._due.popitem(last=False)
        return wait_s

    def __len__(self) -> int:
        return len(self._due)


class OngoingLimiter:
    """How much may run at once, by party; nothing is kept of a party for which nothing runs.

    Args:
        share: Part of every limit that is admitted here, rounded down, but at least 1.
    """

    def __init__(self, *, share: float = 1.0) -> None:
        self._share = share
        self._ongoing: dict[str, int] = {}

    def enter(self, party: str, limit: int) -> bool:
        """Return whether one more may run; if so, `leave` must follow."""
        ongoing = self._ongoing.get(party, 0)
        if ongoing >= max(1, int(limit * self._share)):
            return False
        self._ongoing[party] = ongoing + 1
        return True

    def leave(self, party: str) -> None:
        """Take note that one has ended."""
        ongoing = self._ongoing[party] - 1
        if ongoing:
            self._ongoing[party] = ongoing
        else:
            del self._ongoing[party]

    def __len__(self) -> int:
        return len(self._ongoing)
