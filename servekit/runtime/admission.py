"""A call's way through the slots of its endpoint, and its traces in the figures."""

from servekit.core.call import Call, now
from servekit.errors import DeadlineExceeded
from servekit.runtime.meter import Meter
from servekit.runtime.slots import Slots


def still_in_time(call: Call, where: str) -> None:
    """Look at the clock right before a call's work begins: who waits no more must not be run for.

    Raises:
        DeadlineExceeded: The deadline passed, `where` the message says.
    """
    if call.deadline is not None and now() >= call.deadline:
        raise DeadlineExceeded(f"the deadline passed {where}", started=False)


class Admission:
    """Lets calls of one endpoint run, as many at once as there are slots.

    `enter` or else `wait`, and then `leave` exactly once, when the work has really ended.

    Args:
        slots: Limits how many calls run at once.
        meter: Gets the figures.
    """

    def __init__(self, slots: Slots, meter: Meter) -> None:
        self.slots = slots
        self.meter = meter

    def check(self) -> None:
        """Refuse early, before a body is decoded for nothing.

        Raises:
            Overloaded: No slot is free and the queue is full.
        """
        slots = self.slots
        if slots.running >= slots.limit:
            slots.check((slots.queued + 1) * self.meter.pace.unit_s)

    def enter(self, call: Call) -> bool:
        """Take a slot, if one is free.

        Raises:
            DeadlineExceeded: It is too late to begin.
        """
        still_in_time(call, "before the call ran")
        if not self.slots.take():
            return False
        meter = self.meter
        meter.ongoing += 1
        meter.running += 1
        meter.queue_seconds.observe(0.0)
        return True

    async def wait(self, call: Call) -> float:
        """Wait for a slot; returns for how many seconds.

        Raises:
            DeadlineExceeded: Its turn came too late.
        """
        meter = self.meter
        meter.ongoing += 1
        arrived = now()
        try:
            await self.slots.wait()
            waited = now() - arrived
            try:
                still_in_time(call, "in the queue")
            except DeadlineExceeded:
                self.slots.release()
                raise
        except BaseException:
            meter.ongoing -= 1
            raise
        meter.running += 1
        meter.queue_seconds.observe(waited)
        return waited

    def leave(self) -> None:
        """Give the slot back: the work has really ended."""
        self.slots.release()
        meter = self.meter
        meter.ongoing -= 1
        meter.running -= 1
        meter.finished += 1
