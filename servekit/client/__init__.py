"""Calling a running app: `connect` with the service's class, `Client` and `AsyncClient` without."""

from servekit.client.typed import connect
from servekit.client.untyped import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "connect"]
