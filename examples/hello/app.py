"""The smallest service: a class, a method, and types that callers can rely on."""

import servekit as sk


@sk.service
class Hello:
    @sk.endpoint
    def greet(self, name: str, times: int = 1) -> str:
        """Say hello, as often as you like."""
        return f"{'Hello, ' * times}{name}!"
