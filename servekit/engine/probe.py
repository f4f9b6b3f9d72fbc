"""`python -m servekit.engine.probe`: whether the app of this container is ready; exit code 0 is yes.

An engine asks this often. It asks the app's own socket, not its port, which several apps may share.
"""

import asyncio
import sys

import msgspec

from servekit.engine.admin import ask
from servekit.errors import CallError, WireError
from servekit.settings import Settings


async def is_ready(settings: Settings) -> bool:
    """Return whether an app here says that all of it is up, and that it does not leave."""
    for path in settings.runtime_dir.glob("servekit-*/admin.sock"):
        try:
            status = await ask(path, "status")
        except (OSError, WireError, CallError, msgspec.MsgspecError):
            continue
        states = {service.state for service in status.services}
        gateways = {gateway.state for gateway in status.gateways}
        if states <= {"up", "asleep"} and "ready" in gateways:
            return True
    return False


if __name__ == "__main__":
    sys.exit(not asyncio.run(is_ready(Settings.load())))
