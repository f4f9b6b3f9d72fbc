"""Secrets that lie in a project, found before they end up in a bundle: file names and texts in, places out.

A search by form, not a proof: it finds private keys, tokens of known make, and files that hold
credentials by their names. What it shows of a secret is where it is, never the secret itself.
"""

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from servekit.errors import ConfigError

_FILES = {
    ".env": "environment variables",
    ".env.*": "environment variables",
    ".netrc": "passwords of hosts",
    ".pgpass": "passwords of databases",
    ".pypirc": "a token of a package index",
    "id_rsa": "a private key",
    "id_dsa": "a private key",
    "id_ecdsa": "a private key",
    "id_ed25519": "a private key",
    "*.p12": "a private key",
    "*.pfx": "a private key",
    "*.keystore": "a private key",
    "kubeconfig": "credentials of a cluster",
}
_TEXTS = {
    "a private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
    "an access key of AWS": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a token of GitHub": r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60,})",
    "a token of Hugging Face": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a key of Google": r"\bAIza[0-9A-Za-z_-]{35}\b",
    "a token of Slack": r"\bxox[abprs]-[0-9A-Za-z-]{20,}",
    "a token of PyPI": r"\bpypi-[A-Za-z0-9_-]{50,}",
    "a key of an LLM provider": r"\bsk-(?:[a-z]+-)*[A-Za-z0-9_-]{32,}\b",
    "an API key of servekit": r"\bsk_[0-9a-f]{12}_[0-9a-f]{64}\b",
    "a password in a URL": r"\b[a-z][a-z0-9+]{1,10}://[^/\s:@'\"{}$<>]+:[^/\s:@'\"{}$<>]{3,}@[\w.-]+",
}
_PATTERN = re.compile(b"|".join(b"(%s)" % text.encode() for text in _TEXTS.values()))
_KINDS = tuple(_TEXTS)
_LARGEST = 4 << 20
"""Bytes of a file that are searched; what is larger is data."""


class Secret(NamedTuple):
    """Where something is that looks like a secret; line 0 is the whole file."""

    file: PurePosixPath
    line: int
    kind: str

    def __str__(self) -> str:
        return f"{self.file}{f':{self.line}' if self.line else ''}: {self.kind}"


def search(root: Path, files: Iterable[PurePosixPath]) -> Iterator[Secret]:
    """Yield what looks like a secret.

    Args:
        root: The project's folder.
        files: Those to search, relative to it.
    """
    for file in files:
        for pattern, kind in _FILES.items():
            if fnmatch(file.name, pattern):
                yield Secret(file, 0, kind)
        with (root / file).open("rb") as opened:
            data = opened.read(_LARGEST)
        for match in _PATTERN.finditer(data):
            assert match.lastindex is not None
            line = data.count(b"\n", 0, match.start()) + 1
            yield Secret(file, line, _KINDS[match.lastindex - 1])


def refuse(found: Iterable[Secret], allowed: Iterable[str]) -> None:
    """Refuse secrets, but those in files that a pattern allows.

    Raises:
        ConfigError: There are some.
    """
    patterns = tuple(allowed)
    left = [one for one in found if not any(fnmatch(str(one.file), p) for p in patterns)]
    if left:
        raise ConfigError(
            f"{left[0]}, which would be in the bundle for everybody who has it\n"
            + "".join(f"  {one}\n" for one in left)
            + "take it out and read it from the environment, name the file in .servekitignore, or, "
            "if it is none, allow it: --allow-secret FILE"
        )
