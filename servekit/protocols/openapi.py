"""The OpenAPI 3.1 document of an app."""

from typing import Any

from servekit.spec.app import AppSpec


def document(app: AppSpec) -> dict[str, Any]:
    """Return the document."""
    return {"openapi": "3.1.0", "info": {"title": app.root, "version": app.revision}, "paths": {}}
