"""A call's input under way: chunks go to the peer as it asks for them.

Nothing is read before the peer's first credit, so a call that was refused unstarted can still be
sent to another replica with all of its input.
"""

import asyncio
from collections.abc import Callable, Sequence

from servekit.core.aio import aclose
from servekit.core.call import Buffer, Call, Payload
from servekit.errors import BadRequest, CallError
from servekit.observe.log import get_logger
from servekit.wire.frames import Kind, encode
from servekit.wire.payloads import encode_error
from servekit.wire.streams import OutgoingStream

_log = get_logger("servekit.wire")


class Feed:
    """The input of one call.

    Args:
        loop: The loop it belongs to.
        send: Takes the buffers of a frame.
        frame: Makes the frame of chunks that leave together.
        id_: Of the call on its connection.
        call: Its `chunks` are sent.
        blocked: Returns what to wait for while the peer does not read, else None.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[Sequence[Buffer]], None],
        frame: Callable[[int, list[Payload]], list[Buffer]],
        id_: int,
        call: Call,
        blocked: Callable[[], asyncio.Future[None] | None],
    ) -> None:
        self._loop = loop
        self._send = send
        self._id = id_
        self._call = call
        self._blocked = blocked
        self._task: asyncio.Task[None] | None = None
        self._window = OutgoingStream(loop, lambda chunks: send(frame(id_, chunks)), granted=0)

    def grant(self, credit: int) -> None:
        """Take note that the peer has room for that much more; the first time, begin."""
        self._window.grant(credit)
        if self._task is None:
            self._call.idempotent = False  # what has been read can't be sent again
            self._task = self._loop.create_task(self._run())

    def stop(self) -> None:
        """Stop reading: nobody wants the rest."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        chunks = self._call.chunks
        assert chunks is not None
        try:
            await self._window.send_all(chunks, self._blocked)
            self._send(encode(Kind.INPUT_END, self._id))
        except CallError as error:
            self._fail(error)
        except Exception:  # noqa: BLE001  (whoever made the chunks; the peer must not wait for ever)
            _log.exception("input failed", request_id=self._call.request_id)
            self._fail(BadRequest("the input broke off", reason="input_failed"))
        finally:
            await aclose(chunks)

    def _fail(self, error: CallError) -> None:
        self._window.flush()
        self._send(encode_error(Kind.INPUT_END, self._id, error))
