"""The files of an image: layers go in, one at a time and never unpacked; paths can be looked up.

What engines do when they stack layers is done here with names alone: a higher layer's file hides a
lower one, `.wh.x` deletes `x`, and `.wh..wh..opq` all that lower layers have in its folder. Links are
followed within the image; `..` stops at its root.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.oci.blobs import Blobs
from servekit.packaging.oci.compression import inflated
from servekit.packaging.oci.entry import Entry
from servekit.packaging.oci.tar import Kind, TarReader

_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"
_MAX_LINKS: Final = 40  # as Linux


class IndexEntry(msgspec.Struct, frozen=True, array_like=True):
    """One path of a layer.

    Attributes:
        target: What a symbolic link points to; of a file that is a hard link, the path in the same
            layer that has the content.
    """

    path: str
    kind: Kind
    mode: int
    size: int
    target: str


LayerIndex: TypeAlias = list[IndexEntry]


class Found(msgspec.Struct, frozen=True):
    """A path of an image, behind all links.

    Attributes:
        path: Where it really is, like `usr/bin/python3.11`.
        kind: `"file"`, `"directory"` or `"device"`; `"symlink"` if links were not to be followed.
        mode: Permissions.
        size: Bytes of a file.
        layer: Number of the layer that has it, from the lowest; -1 for a directory that none has.
        target: As in `IndexEntry`.
    """

    path: str
    kind: Kind
    mode: int
    size: int
    layer: int
    target: str


def index_layer(chunks: Iterable[bytes], *, where: str) -> tuple[LayerIndex, str]:
    """Return what is in a layer, and the digest of its tar.

    Args:
        chunks: Its bytes, compressed or not.
        where: What errors call it.

    Raises:
        ConfigError: It is no tar, or has what no tar should.
    """
    digest = hashlib.sha256()
    found: dict[str, IndexEntry] = {}
    for member in TarReader(_seen(inflated(chunks, where=where), digest.update), where=where):
        entry = IndexEntry(*member)
        if entry.kind == "hardlink":
            first = found.get(entry.target)
            if first is None or first.kind == "directory":
                raise ConfigError(f"{where}: {entry.path!r} is a link to nothing in its layer")
            target = first.target or first.path
            entry = IndexEntry(entry.path, first.kind, first.mode, first.size, target)
        found[entry.path] = entry
    return list(found.values()), f"sha256:{digest.hexdigest()}"


def read_index(blobs: Blobs, diff_id: str) -> LayerIndex | None:
    """Return what is in the layer of a tar, if `write_index` has kept it."""
    try:
        return msgspec.json.decode(_index_path(blobs, diff_id).read_bytes(), type=LayerIndex)
    except (OSError, msgspec.DecodeError):
        return None


def write_index(blobs: Blobs, diff_id: str, index: LayerIndex) -> None:
    """Keep what is in the layer of a tar."""
    blobs.note(_index_path(blobs, diff_id), msgspec.json.encode(index))


def _index_path(blobs: Blobs, diff_id: str) -> Path:
    return blobs.root / "index" / f"{diff_id.removeprefix('sha256:')}.json"


class RootFiles:
    """The files of stacked layers.

    Args:
        layers: What is in each, from the lowest up.
    """

    def __init__(self, layers: Iterable[LayerIndex]) -> None:
        self._root = _Node("directory", -1)
        for number, entries in enumerate(layers):
            self._delete(entries)
            for entry in entries:
                if entry.path and not _name(entry.path).startswith(_WHITEOUT):
                    self._add(entry, number)

    def find(self, path: str, *, follow: bool = True) -> Found | None:
        """Return what is at a path, or None.

        Args:
            path: From the root, with or without its '/'.
            follow: Follow a link that is the last part of it, too.
        """
        todo = path.split("/")[::-1]
        nodes, names = [self._root], list[str]()
        links = 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if names:
                    nodes.pop()
                    names.pop()
                continue
            child = nodes[-1].children.get(part)
            if child is None:
                return None
            if child.kind == "symlink" and (todo or follow):
                links += 1
                if links > _MAX_LINKS:
                    return None
                if child.target.startswith("/"):
                    nodes, names = [self._root], []
                todo.extend(child.target.split("/")[::-1])
                continue
            nodes.append(child)
            names.append(part)
        return nodes[-1].found("/".join(names))

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; none if it is no folder."""
        found = self.find(path)
        node = self._root
        for part in found.path.split("/") if found and found.path else ():
            node = node.children[part]
        return sorted(node.children) if found else []

    def check(self, entries: Iterable[Entry]) -> None:
        """Refuse entries whose folder is a link here.

        Engines either follow the link, or put a folder in its place, which hides what was behind it:
        with `lib/x` in a layer, all of a `/lib` that points to `usr/lib` is gone.

        Raises:
            ConfigError: An entry's folder is a link; it says where that leads.
        """
        right: set[str] = {""}
        for entry in entries:
            folder = entry.path if entry.kind == "directory" else entry.path.rpartition("/")[0]
            while folder not in right:
                right.add(folder)
                found = self.find(folder)
                if found is not None and found.path != folder:
                    raise ConfigError(
                        f"{entry.path!r}: the base has {folder!r} as a link to {found.path!r}; "
                        f"write {found.path + entry.path[len(folder) :]!r}"
                    )
                folder = folder.rpartition("/")[0]

    def _delete(self, entries: LayerIndex) -> None:
        """Delete what the whiteouts of a layer name; they are about the layers below."""
        for entry in entries:
            folder, _, name = entry.path.rpartition("/")
            if not name.startswith(_WHITEOUT):
                continue
            node: _Node | None = self._root
            for part in folder.split("/") if folder else ():
                node = node and node.children.get(part)
            if node is not None and name == _OPAQUE:
                node.children.clear()
            elif node is not None:
                node.children.pop(name.removeprefix(_WHITEOUT), None)

    def _add(self, entry: IndexEntry, layer: int) -> None:
        *folders, name = entry.path.split("/")
        node = self._root
        for part in folders:
            child = node.children.get(part)
            if child is None or child.kind != "directory":
                child = node.children[part] = _Node("directory", -1)
            node = child
        new = _Node(entry.kind, layer, entry.mode, entry.size, entry.target)
        old = node.children.get(name)
        if old is not None and old.kind == new.kind == "directory":
            new.children = old.children
        node.children[name] = new


class _Node:
    __slots__ = ("children", "kind", "layer", "mode", "size", "target")

    def __init__(
        self, kind: Kind, layer: int, mode: int = 0o755, size: int = 0, target: str = ""
    ) -> None:
        self.kind: Kind = kind
        self.layer = layer
        self.mode = mode
        self.size = size
        self.target = target
        self.children: dict[str, _Node] = {}

    def found(self, path: str) -> Found:
        return Found(path, self.kind, self.mode, self.size, self.layer, self.target)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _seen(chunks: Iterable[bytes], see: Callable[[bytes], None]) -> Iterator[bytes]:
    for chunk in chunks:
        see(chunk)
        yield chunk
