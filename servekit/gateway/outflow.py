"""What an exchange needs of its client's connection."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from servekit.core.call import Buffer
from servekit.gateway.bodies import Share
from servekit.gateway.http import Gateway
from servekit.gateway.status import status_line


class Outflow(HttpToolsProtocol):
    """uvicorn's protocol as an `exchange.Wire`."""

    _gateway: Gateway

    def write(self, data: Buffer) -> None:
        """Send bytes."""
        self.transport.write(data)

    def status_line(self, status: int) -> bytes:
        """Return the first line of an answer, with the headers that all answers have."""
        return status_line(status, self.server_state)

    async def drain(self) -> None:
        """Wait until the client reads again."""
        if self.flow.write_paused:
            await self.flow.drain()

    def share(self) -> Share:
        """Return an account for a large body."""
        return self._gateway.bodies.share()

    def pause_reading(self) -> None:
        """Let the client wait with the rest of its body."""
        self.flow.pause_reading()

    def resume_reading(self) -> None:
        """Take more of the body."""
        self.flow.resume_reading()

    def answered(self, *, keep_alive: bool) -> None:
        """Go on with the next request, or hang up."""
        if not keep_alive:
            self.transport.close()
        self.on_response_complete()

    def abort(self, *, at_once: bool) -> None:
        """Hang up within an answer, with or without what is not sent yet."""
        if at_once:
            self.transport.abort()
        else:
            self.transport.close()
