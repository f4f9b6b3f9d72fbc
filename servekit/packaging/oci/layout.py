"""Images to files: a folder, or one tar that engines load.

An OCI layout either way. The tar has Docker's `manifest.json` too, which names the same blobs, so that
`docker load`, `podman load` and `skopeo copy oci-archive:…` all take it. Both come whole or not at
all, and the same image has the same bytes.
"""

import secrets
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.oci.archive import IMAGE_NAME, REF_NAME, DockerImage
from servekit.packaging.oci.blobs import Progress
from servekit.packaging.oci.documents import OCI_INDEX, Descriptor, Index, encode
from servekit.packaging.oci.image import Image
from servekit.packaging.oci.reference import Reference

_VERSION: Final = b'{"imageLayoutVersion":"1.0.0"}'
_BLOCK: Final = 512


class _Member(NamedTuple):
    name: str
    size: int
    content: Iterable[bytes]


def write_folder(
    image: Image,
    folder: Path,
    *,
    names: Sequence[Reference] = (),
    progress: Progress | None = None,
) -> None:
    """Write an OCI layout to a folder.

    Args:
        image: What is written.
        folder: A new one, or an empty one.
        names: What the image is called in it.
        progress: Is told the bytes of blobs.

    Raises:
        ConfigError: The folder has something in it, or can't be written; or a blob can't be had.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already; delete it, or write to another folder")
    made = _beside(folder)
    try:
        (made / "blobs" / "sha256").mkdir(parents=True)
        for member in _members(image, names, progress):
            with (made / member.name).open("wb") as file:
                file.writelines(member.content)
        made.replace(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_tar(
    image: Image,
    file: Path,
    *,
    names: Sequence[Reference] = (),
    progress: Progress | None = None,
) -> None:
    """Write a tar that engines load; what was in the file before is gone. Arguments as `write_folder`.

    Raises:
        ConfigError: The file can't be written, or a blob can't be had.
    """
    docker = DockerImage(
        config=_blob(image.manifest.config),
        layers=[_blob(layer.descriptor) for layer in image.layers],
        repo_tags=[_full(name) for name in names],
    )
    extra = _Member("manifest.json", *_whole(encode([docker])))
    made = _beside(file)
    try:
        with made.open("xb") as tar:
            for member in sorted([*_members(image, names, progress), extra]):
                info = tarfile.TarInfo(member.name)
                info.size = member.size
                tar.write(info.tobuf(tarfile.USTAR_FORMAT))
                tar.writelines(member.content)
                tar.write(bytes(-member.size % _BLOCK))
            tar.write(bytes(2 * _BLOCK))
        made.replace(file)
    except OSError as error:
        raise _unwritable(file, error) from error
    finally:
        made.unlink(missing_ok=True)


def _members(
    image: Image, names: Sequence[Reference], progress: Progress | None
) -> Iterator[_Member]:
    """Yield what is in a layout; the content of blobs is to be read in this order."""
    found = {one.digest: one for one in (image.descriptor, image.manifest.config)}
    found |= {layer.descriptor.digest: layer.descriptor for layer in image.layers}
    total = sum(descriptor.size for descriptor in found.values())
    done = 0

    def content(descriptor: Descriptor) -> Iterator[bytes]:
        nonlocal done
        image.ensure(descriptor)
        for chunk in image.blobs.chunks(descriptor):
            yield chunk
            done += len(chunk)
            if progress is not None:
                progress(done, total)

    for _, descriptor in sorted(found.items()):
        yield _Member(_blob(descriptor), descriptor.size, content(descriptor))
    yield _Member("index.json", *_whole(encode(_index(image, names))))
    yield _Member("oci-layout", *_whole(_VERSION))


def _index(image: Image, names: Sequence[Reference]) -> Index:
    plain = msgspec.structs.replace(image.descriptor, platform=image.config.platform)
    tagged = [
        msgspec.structs.replace(
            plain, annotations={REF_NAME: name.tag or "latest", IMAGE_NAME: _full(name)}
        )
        for name in names
    ]
    return Index(schema_version=2, media_type=OCI_INDEX, manifests=tagged or [plain])


def _full(name: Reference) -> str:
    return f"{name.name}:{name.tag or 'latest'}"


def _blob(descriptor: Descriptor) -> str:
    return f"blobs/{descriptor.digest.replace(':', '/')}"


def _whole(data: bytes) -> tuple[int, list[bytes]]:
    return len(data), [data]


def _beside(path: Path) -> Path:
    """Return a new name in the same folder, for what becomes `path` when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}")


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} can't be written: {error.strerror or error}")
