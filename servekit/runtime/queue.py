"""The waiting line of a batcher: entries in the order in which they should run.

Higher priority first, then the earliest deadline (those without one last), then arrival. Entries
with unequal keys never share a batch, so each key has a line of its own.
"""

from bisect import bisect_left, insort
from math import inf
from typing import TypeAlias


class Entry:
    """One call that waits for its turn.

    Attributes:
        id: Unique among the entries on board.
        rows: How much of `max_size` it takes.
        deadline: When its answer becomes worthless; None never.
        priority: Higher goes first, whatever the deadlines.
        key: A batch only holds entries with equal keys; hashable.
        arrived: When it arrived; the batcher sets it.
    """

    __slots__ = ("arrived", "deadline", "id", "key", "priority", "rows")

    def __init__(
        self,
        id: int,  # noqa: A002 - the field's name
        rows: int = 1,
        deadline: float | None = None,
        priority: int = 0,
        key: object = None,
    ) -> None:
        self.id = id
        self.rows = rows
        self.deadline = deadline
        self.priority = priority
        self.key = key
        self.arrived = 0.0

    def __repr__(self) -> str:
        return f"Entry({self.id}, rows={self.rows}, deadline={self.deadline})"


# Sorts by priority, deadline and arrival; the third member is unique, so entries never compare.
Ticket: TypeAlias = tuple[int, float, int, Entry]


class Line:
    """The waiting entries of one key, in order."""

    __slots__ = ("rows", "tickets")

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.rows = 0

    def rows_before(self, ticket: tuple[int, float] | Ticket) -> int:
        """Rows that go before `ticket`, taking all entries to be of mean size."""
        tickets = self.tickets
        return self.rows * bisect_left(tickets, ticket) // len(tickets)


class Queue:
    """The waiting entries of all keys.

    Sorted lists instead of heaps: they tell an entry's place in the line, batches leave as slices,
    and moving the few kilobytes of a bounded queue costs less than sifting a heap in Python.
    """

    __slots__ = ("_heads", "_lines", "_serial", "_tickets", "rows")

    def __init__(self) -> None:
        self._lines: dict[object, Line] = {}
        self._heads: list[Ticket] = []  # the first of each line, in order
        self._tickets: dict[int, Ticket] = {}
        self._serial = 0
        self.rows = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, id: int) -> bool:  # noqa: A002
        return id in self._tickets

    def ticket(self, entry: Entry) -> Ticket:
        """A place for `entry` in the order of all."""
        self._serial += 1
        deadline = entry.deadline
        return -entry.priority, inf if deadline is None else deadline, self._serial, entry

    def add(self, ticket: Ticket) -> None:
        """Queues an entry."""
        entry = ticket[3]
        self._tickets[entry.id] = ticket
        self.rows += entry.rows
        line = self._lines.get(entry.key)
        if line is None:
            line = self._lines[entry.key] = Line()
            line.tickets.append(ticket)
            insort(self._heads, ticket)
        elif ticket > line.tickets[-1]:
            line.tickets.append(ticket)
        else:
            head = line.tickets[0]
            insort(line.tickets, ticket)
            if ticket < head:
                del self._heads[bisect_left(self._heads, head)]
                insort(self._heads, ticket)
        line.rows += entry.rows

    def first(self) -> Line:
        """The line whose head is first of all; the queue must not be empty."""
        return self._lines[self._heads[0][3].key]

    def overtaken(self, ticket: Ticket) -> bool:
        """Whether another line's head goes before `ticket` of the first line."""
        return len(self._heads) > 1 and self._heads[1] < ticket

    def take(self, line: Line, count: int, rows: int) -> None:
        """Removes the first `count` entries of `line`, which have `rows` together."""
        self._cut(line, 0, count, rows)

    def discard(self, id: int) -> bool:  # noqa: A002
        """Removes an entry, if it waits."""
        ticket = self._tickets.get(id)
        if ticket is None:
            return False
        line = self._lines[ticket[3].key]
        index = bisect_left(line.tickets, ticket)
        self._cut(line, index, index + 1, ticket[3].rows)
        return True

    def rows_before(self, ticket: Ticket) -> int:
        """About how many rows go before `ticket`; exact for one key and equal sizes."""
        if not self._heads or ticket < self._heads[0]:
            return 0
        line = self._lines.get(ticket[3].key)
        if line is None or ticket > line.tickets[-1]:
            return self.rows
        # The other lines are taken to be like its own, which saves looking at all of them.
        return line.rows_before(ticket) * self.rows // line.rows

    @property
    def keys(self) -> int:
        """How many different keys wait."""
        return len(self._heads)

    def _cut(self, line: Line, start: int, stop: int, rows: int) -> None:
        tickets = line.tickets
        head = tickets[0]
        for ticket in tickets[start:stop]:
            del self._tickets[ticket[3].id]
        del tickets[start:stop]
        line.rows -= rows
        self.rows -= rows
        if start == 0:
            del self._heads[bisect_left(self._heads, head)]
            if tickets:
                insort(self._heads, tickets[0])
            else:
                del self._lines[head[3].key]
