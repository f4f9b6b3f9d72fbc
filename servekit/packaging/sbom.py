"""What a bundle is made of, for those who check supply chains: a lock in, a CycloneDX document out.

Source: CycloneDX 1.5, JSON. It has no serial number and no time, so equal bundles have equal ones.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from servekit.version import __version__

if TYPE_CHECKING:
    from servekit.packaging.lock import Lock


def document(name: str, lock: "Lock", models: Mapping[str, str]) -> bytes:
    """Return the document.

    Args:
        name: Of the app.
        lock: Its dependencies.
        models: Digests of its models, by their sources.
    """
    components: list[dict[str, Any]] = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{package.name}@{package.version}",
            "name": package.name,
            "version": str(package.version),
            "purl": f"pkg:pypi/{package.name}@{package.version}",
            "hashes": [
                {"alg": "SHA-256", "content": digest}
                for digest in sorted({w.hashes["sha256"] for w in package.wheels or ()})
            ],
        }
        for package in lock.packages
    ]
    components += [
        {
            "type": "machine-learning-model",
            "bom-ref": f"model:{digest}",
            "name": source,
            "version": digest[:12],
            "hashes": [{"alg": "SHA-256", "content": digest}],
        }
        for source, digest in sorted(models.items())
    ]
    return msgspec.json.encode(
        {
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "version": 1,
            "metadata": {
                "component": {"type": "application", "bom-ref": name, "name": name},
                "tools": {
                    "components": [
                        {"type": "application", "name": "servekit", "version": __version__}
                    ]
                },
            },
            "components": components,
        },
        order="sorted",
    )
