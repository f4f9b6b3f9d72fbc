"""One registry, over the HTTP API of the distribution specification.

Manifests and blobs come out, checked against their digests, and go in, as the bytes that they are. What
breaks in the middle is done again; a download goes on where it was.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote, urlencode

from servekit.errors import ConfigError
from servekit.packaging.oci.authorization import Scopes
from servekit.packaging.oci.blobs import CHUNK, Blobs, Progress
from servekit.packaging.oci.credentials import Credentials, docker_credentials
from servekit.packaging.oci.documents import (
    INDEXES,
    MANIFESTS,
    MAX_DOCUMENT,
    Descriptor,
    digest_of,
    media_type_of,
)
from servekit.packaging.oci.reference import check_registry
from servekit.packaging.oci.session import Session, Trouble, body_of


class Registry:
    """A connection to one registry; one thread uses it at a time.

    Args:
        host: `host` or `host:port`.
        credentials: Who we are there; None is anonymous.
        ca: A file with more certificates to trust.
        chunk_bytes: Send blobs in pieces of so many bytes, for a proxy that limits bodies. By default
            they are sent as a whole, which every registry takes.
        sleep: Waits between attempts.

    Raises:
        ConfigError: It is no host. In all methods: the registry refuses, can't be reached, or sends
            what it should not.
    """

    def __init__(
        self,
        host: str,
        *,
        credentials: Credentials | None = None,
        ca: Path | None = None,
        chunk_bytes: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        check_registry(host, where="registry")
        self.host = host
        self._chunk_bytes = chunk_bytes
        self._session = Session(host, credentials=credentials, ca=ca, sleep=sleep)

    @classmethod
    def logged_in(cls, host: str) -> Self:
        """Connect to a registry as who `docker login` says we are."""
        config = Path.home() / ".docker" / "config.json"
        return cls(host, credentials=docker_credentials(config, host))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._session.close()

    # -- manifests ---------------------------------------------------------------------------

    def digest(self, repository: str, target: str) -> str | None:
        """Return a manifest's digest by its tag; None if it is not there, "" if nobody says it."""
        url = self._url(repository, "manifests", target)

        def step() -> str | None:
            with self._session.open("HEAD", url, _pull(repository)) as response:
                if response.status_code == 404:
                    return None
                self._session.expect(response, 200, what=f"{repository} {target}")
                return str(response.headers.get("docker-content-digest", ""))

        return self._session.tried(step)

    def manifest(self, repository: str, target: str) -> tuple[Descriptor, bytes]:
        """Return a manifest or an index, and its bytes as they are.

        Args:
            repository: Its repository.
            target: Its tag or digest.
        """
        url = self._url(repository, "manifests", target)
        what = f"{repository} {target}"

        def step() -> tuple[Descriptor, bytes]:
            with self._session.open("GET", url, _pull(repository), follow=True) as response:
                self._session.expect(response, 200, what=what)
                raw = body_of(response, MAX_DOCUMENT)
            found = digest_of(raw)
            said = response.headers.get("docker-content-digest", found)
            if found not in (said, target) or (target.startswith("sha256:") and found != target):
                raise ConfigError(
                    f"{self.host} sends {found} as {what}, and says that it is {said}"
                )
            kind = response.headers.get("content-type", "").partition(";")[0].strip()
            kind = media_type_of(raw, where=f"{self.host}: {what}") or kind
            return Descriptor(media_type=kind, digest=found, size=len(raw)), raw

        return self._session.tried(step)

    def put_manifest(
        self, repository: str, target: str, descriptor: Descriptor, raw: bytes
    ) -> None:
        """Write a manifest, under a tag or its digest; what it names must be there."""
        url = self._url(repository, "manifests", target)
        headers = {"content-type": descriptor.media_type}

        def step() -> None:
            with self._session.open(
                "PUT", url, _push(repository), headers=headers, content=raw
            ) as response:
                self._session.expect(response, 201, 202, what=f"{repository} {target}")
                said = response.headers.get("docker-content-digest", descriptor.digest)
            if said != descriptor.digest:
                raise ConfigError(f"{self.host} made {said} of {descriptor.digest}")

        self._session.tried(step)

    # -- blobs -------------------------------------------------------------------------------

    def has(self, repository: str, descriptor: Descriptor) -> bool:
        """Return whether a blob is in a repository."""

        def step() -> bool:
            url = self._url(repository, "blobs", descriptor.digest)
            with self._session.open("HEAD", url, _push(repository), follow=True) as response:
                if response.status_code == 404:
                    return False
                self._session.expect(response, 200, what=f"{repository} {descriptor.digest}")
                return True

        return self._session.tried(step)

    def fetch(
        self,
        repository: str,
        descriptor: Descriptor,
        blobs: Blobs,
        progress: Progress | None = None,
    ) -> None:
        """Bring a blob, a manifest or an index into the blobs; a broken download is continued."""
        is_manifest = descriptor.media_type in INDEXES | MANIFESTS
        kind = "manifests" if is_manifest else "blobs"
        url = self._url(repository, kind, descriptor.digest)
        with blobs.writer(descriptor) as blob:

            def step() -> None:
                if blob.size == descriptor.size > 0:
                    return
                headers = {"range": f"bytes={blob.size}-"} if blob.size else {}
                with self._session.open(
                    "GET", url, _pull(repository), headers=headers, follow=True
                ) as response:
                    self._session.expect(
                        response, 200, 206, what=f"{repository} {descriptor.digest}"
                    )
                    start = f"bytes {blob.size}-"
                    if not response.headers.get("content-range", "").startswith(start):
                        blob.restart()
                    for chunk in response.iter_raw(CHUNK):
                        if blob.size + len(chunk) > descriptor.size:
                            raise ConfigError(
                                f"{self.host} sends more than the {descriptor.size} bytes of "
                                f"{descriptor.digest}"
                            )
                        blob.write(chunk)
                        if progress is not None:
                            progress(blob.size, descriptor.size)
                if blob.size < descriptor.size:
                    raise Trouble("the answer ended early")

            self._session.tried(step)

    def mount(self, repository: str, descriptor: Descriptor, source: str) -> bool:
        """Have a blob of another repository in this one, if the registry can; return whether."""
        query = urlencode({"mount": descriptor.digest, "from": source})
        url = f"{self._url(repository, 'blobs', 'uploads/')}?{query}"

        def step() -> bool:
            with self._session.open("POST", url, (*_push(repository), *_pull(source))) as response:
                self._session.expect(response, 201, 202, what=f"{repository} {descriptor.digest}")
                return response.status_code == 201

        return self._session.tried(step)

    def upload(
        self,
        repository: str,
        descriptor: Descriptor,
        blobs: Blobs,
        progress: Progress | None = None,
    ) -> None:
        """Write a blob; from its start again, if that breaks."""
        scopes = _push(repository)
        what = f"{repository} {descriptor.digest}"

        def step() -> None:
            url = self._url(repository, "blobs", "uploads/")
            with self._session.open("POST", url, scopes) as response:
                self._session.expect(response, 202, what=what)
                url = self._session.location(response)
            sent = 0
            for size, content in self._pieces(blobs, descriptor, progress):
                headers = {"content-type": "application/octet-stream", "content-length": str(size)}
                if size < descriptor.size:
                    headers["content-range"] = f"{sent}-{sent + size - 1}"
                sent += size
                with self._session.open(
                    "PATCH", url, scopes, headers=headers, content=content
                ) as response:
                    self._session.expect(response, 202, 204, what=what)
                    url = self._session.location(response)
            url += f"{'&' if '?' in url else '?'}digest={quote(descriptor.digest, '')}"
            with self._session.open(
                "PUT", url, scopes, headers={"content-length": "0"}
            ) as response:
                self._session.expect(response, 201, 204, what=what)

        self._session.tried(step)

    def _pieces(
        self, blobs: Blobs, descriptor: Descriptor, progress: Progress | None
    ) -> Iterator[tuple[int, bytes | Iterator[bytes]]]:
        """Yield the size and the content of each request that a blob is sent in."""

        def chunks() -> Iterator[bytes]:
            done = 0
            for chunk in blobs.chunks(descriptor):
                yield chunk
                done += len(chunk)
                if progress is not None:
                    progress(done, descriptor.size)

        if self._chunk_bytes is None or descriptor.size <= self._chunk_bytes:
            yield descriptor.size, chunks()
            return
        piece = bytearray()
        for chunk in chunks():
            piece += chunk
            while len(piece) >= self._chunk_bytes:
                yield self._chunk_bytes, bytes(piece[: self._chunk_bytes])
                del piece[: self._chunk_bytes]
        if piece:
            yield len(piece), bytes(piece)

    def _url(self, repository: str, *parts: str) -> str:
        return self._session.root + "/".join((repository, *parts))


def _pull(repository: str) -> Scopes:
    return (f"repository:{repository}:pull",)


def _push(repository: str) -> Scopes:
    return (f"repository:{repository}:pull,push",)
