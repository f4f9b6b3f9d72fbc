"""Layers: entries go in, a tar goes into the blobs, the same bytes each time.

Sorted, with the parents that are missing, owned by root, all of one time. A path that comes twice, or
that lies in what is no directory, is refused. `LayerCache` knows which entries have been a layer
before.
"""

import hashlib
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.oci.blobs import CHUNK, Blobs, BlobWriter, Progress
from servekit.packaging.oci.compression import LayerWriter, method
from servekit.packaging.oci.documents import (
    OCI_LAYER,
    OCI_LAYER_GZIP,
    Descriptor,
    Layer,
    encode,
)
from servekit.packaging.oci.entry import Entry

_FORMAT: Final = 1
"""Changes with the bytes that are written for the same entries."""
_BLOCK: Final = 512
_TYPES: Final = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}


def write_layer(
    blobs: Blobs,
    entries: Iterable[Entry],
    *,
    epoch: int,
    compress: bool = True,
    progress: Progress | None = None,
) -> Layer:
    """Write a layer.

    Args:
        blobs: Where to.
        entries: What is in it, in any order.
        epoch: The time of everything in it, in seconds since 1970 (`SOURCE_DATE_EPOCH`).
        compress: By gzip; it is no use for weights, which hardly shrink.
        progress: Is told the bytes of files.

    Raises:
        ConfigError: The entries contradict each other, or a file can't be read, is not what its
            digest says, or changed meanwhile.
    """
    return _write(blobs, _complete(entries), epoch, compress, progress)


class LayerCache:
    """Layers that were written before, by what is in them; kept beside the blobs.

    Args:
        blobs: Where layers are.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def layer(
        self,
        entries: Iterable[Entry],
        *,
        epoch: int,
        compress: bool = True,
        progress: Progress | None = None,
    ) -> tuple[Layer, bool]:
        """Return the layer of some entries, and whether it was there already.

        Files are read to compare them, unless their entries have a digest. Arguments and errors are
        those of `write_layer`.
        """
        complete = [entry.hashed() for entry in _complete(entries)]
        key = [
            [f"layer {_FORMAT}", method(compress=compress), str(epoch)],
            *([e.path, e.kind, oct(e.mode), e.digest or e.target] for e in complete),
        ]
        known = self.get(key)
        if known is not None:
            return known, True
        layer = _write(self._blobs, complete, epoch, compress, progress)
        self.put(key, layer)
        return layer, False

    def tar(self, chunks: Iterable[bytes], diff_id: str) -> Layer:
        """Return the layer of a tar that is there already, with all that is in it.

        Args:
            chunks: The tar, not compressed; it is not read if it was a layer before.
            diff_id: Its digest.

        Raises:
            ConfigError: It has another digest.
        """
        key = [["tar", method(compress=True), diff_id]]
        layer = self.get(key)
        if layer is None:
            with self._blobs.writer() as blob:
                tar = LayerWriter(blob, compress=True)
                for chunk in chunks:
                    tar.write(chunk)
                if (found := tar.close()) != diff_id:
                    raise ConfigError(f"a layer unpacks to {found} instead of {diff_id}")
            layer = _layer(blob, diff_id, compress=True)
            self.put(key, layer)
        return layer

    def get(self, key: Sequence[Sequence[str]]) -> Layer | None:
        """Return the layer that was put under a key, if its blob is still there."""
        try:
            layer = msgspec.json.decode(self._path(key).read_bytes(), type=Layer)
        except (OSError, msgspec.DecodeError):
            return None
        return layer if self._blobs.has(layer.descriptor) else None

    def put(self, key: Sequence[Sequence[str]], layer: Layer) -> None:
        """Remember a layer."""
        self._blobs.note(self._path(key), encode(layer))

    def _path(self, key: Sequence[Sequence[str]]) -> Path:
        digest = hashlib.sha256(msgspec.json.encode(key))
        return self._blobs.root / "layers" / f"{digest.hexdigest()}.json"


def _complete(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries in order, each with its parents before it."""
    known: dict[str, Entry] = {}
    for entry in entries:
        if entry.path in known:
            raise ConfigError(f"{entry.path!r} is twice in a layer")
        known[entry.path] = entry
    for path in list(known):
        parent = path.rpartition("/")[0]
        while parent and parent not in known:
            known[parent] = Entry.directory(parent)
            parent = parent.rpartition("/")[0]
        if parent and known[parent].kind != "directory":
            raise ConfigError(f"{path!r} can't be in {parent!r}, which is a {known[parent].kind}")
    return sorted(known.values(), key=lambda entry: entry.path)


def _write(
    blobs: Blobs, entries: list[Entry], epoch: int, compress: bool, progress: Progress | None
) -> Layer:
    total = sum(_size(entry) for entry in entries) if progress is not None else 0
    done = 0
    with blobs.writer() as blob:
        tar = LayerWriter(blob, compress=compress)
        for entry in entries:
            if entry.kind != "file":
                tar.write(_header(entry, 0, epoch))
                continue
            with entry.open() as (file, size):
                tar.write(_header(entry, size, epoch))
                digest = hashlib.sha256()
                left = size
                while left and (chunk := file.read(min(left, CHUNK))):
                    digest.update(chunk)
                    tar.write(chunk)
                    left -= len(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(done, total)
                if left or file.read(1):
                    raise ConfigError(f"{entry.content!s} changed while it was written to an image")
                if entry.digest and entry.digest != f"sha256:{digest.hexdigest()}":
                    raise ConfigError(
                        f"{entry.path!r} has digest sha256:{digest.hexdigest()} instead of "
                        f"{entry.digest}"
                    )
            tar.write(bytes(-size % _BLOCK))
        tar.write(bytes(2 * _BLOCK))
        diff_id = tar.close()
    return _layer(blob, diff_id, compress=compress)


def _layer(blob: BlobWriter, diff_id: str, *, compress: bool) -> Layer:
    media_type = OCI_LAYER_GZIP if compress else OCI_LAYER
    descriptor = Descriptor(media_type=media_type, digest=blob.digest, size=blob.size)
    return Layer(descriptor=descriptor, diff_id=diff_id)


def _header(entry: Entry, size: int, epoch: int) -> bytes:
    info = tarfile.TarInfo(entry.path)
    info.type = _TYPES[entry.kind]
    info.mode = entry.mode
    info.size = size
    info.mtime = epoch
    info.linkname = entry.target
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _size(entry: Entry) -> int:
    if isinstance(entry.content, bytes):
        return len(entry.content)
    with entry.open() as (_, size):
        return size
