"""`model`: a service names the files of a model, and has their path before its `__init__` runs."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, overload

import msgspec

from servekit.errors import SpecError
from servekit.spec.place import at, place

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Files of a model; see `model`."""

    source: str
    revision: str = ""
    sha256: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.source:
            raise SpecError("source='': name a path or a URL")
        if self.sha256 and not _SHA256.fullmatch(self.sha256):
            raise SpecError(f"sha256={self.sha256!r}: need 64 hex digits, in lower case")
        if self.scheme in ("http", "https") and not self.sha256:
            raise SpecError(
                f"{self.source}: what a web server sends must be known; give its sha256="
            )
        if self.scheme == "hf" and not self.revision:
            raise SpecError(
                f"{self.source}: a repository changes; give revision=, best a commit's id"
            )
        if self.scheme != "hf" and self.revision:
            raise SpecError(f"{self.source}: revision= is for hf:// repositories")
        if self.scheme in ("", "http", "https") and (self.include or self.exclude):
            raise SpecError(f"{self.source}: include= and exclude= choose among several files")

    @property
    def scheme(self) -> str:
        """The URL's scheme; "" is a path."""
        match = _SCHEME.match(self.source)
        return match[1] if match else ""

    @property
    def title(self) -> str:
        """Source and revision, for people."""
        return f"{self.source}@{self.revision}" if self.revision else self.source


class Model:
    """What `model` leaves in the class: on an instance that servekit runs, a `Path`.

    It has no `__set__`, so a unit test may assign a path to the attribute of a plain instance.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.owner: type | None = None
        self.attribute = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner
        self.attribute = name

    @overload
    def __get__(self, obj: None, owner: type[Any] | None = ..., /) -> Self: ...
    @overload
    def __get__(self, obj: object, owner: type[Any] | None = ..., /) -> Path: ...
    def __get__(self, obj: object, owner: type[Any] | None = None, /) -> Any:
        if obj is None:
            return self
        raise AttributeError(
            f"{self.where} is there in a service that runs: take sk.local({place(type(obj))}), or, "
            f"in a unit test of a plain instance, assign a path to its attribute "
            f"{self.attribute!r} first",
            name=self.attribute,
            obj=obj,
        )

    @property
    def base(self) -> Path:
        """The folder that a relative path is from: its module's, or of a notebook the current one."""
        module = sys.modules.get(self.owner.__module__) if self.owner else None
        file = getattr(module, "__file__", None)
        return Path(file).parent if file else Path.cwd()

    def located(self) -> ModelSpec:
        """Return what is asked for, as it is said from the current folder, where that is above it."""
        if self.spec.scheme:
            return self.spec
        path = Path(os.path.normpath(self.base / Path(self.spec.source).expanduser()))
        here = Path.cwd()
        inner = path.relative_to(here) if path.is_relative_to(here) else path
        return msgspec.structs.replace(self.spec, source=inner.as_posix())

    @property
    def where(self) -> str:
        """`Class.attribute`, as the author wrote it."""
        return f"{place(self.owner)}.{self.attribute}" if self.owner else "an sk.model"

    def __repr__(self) -> str:
        return f"<model {self.where}: {self.spec.title}>"


def model(
    source: str,
    /,
    *,
    revision: str = "",
    sha256: str = "",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Model:
    """Name the files of a model: the attribute is their path, a file or a folder, read-only.

    What comes from elsewhere is fetched once for each machine, before `__init__` runs, and
    `servekit build` puts it into the bundle.

    Args:
        source: A path, from the folder of the module's file; `https://…` with its `sha256`;
            `hf://organisation/repository` at a `revision`; `models:/name/version` or `runs:/…` of
            MLflow; or another URL that fsspec knows, like `s3://bucket/model`.
        revision: Commit, tag or branch of a Hugging Face repository.
        sha256: Digest of a file; of a folder, the one that `servekit models list` shows.
        include: Patterns of the files to take of several, like `"*.safetensors"`; none is all.
        exclude: Patterns of those to leave out.

    Raises:
        SpecError: Nothing pins what is fetched, or a value can't be used.
    """
    with at("sk.model"):
        if source.startswith("hf://") and "@" in source:
            if revision:
                raise SpecError(f"{source}: the revision is given twice")
            source, _, revision = source.partition("@")
        spec = ModelSpec(
            source=source,
            revision=revision,
            sha256=sha256,
            include=tuple(include),
            exclude=tuple(exclude),
        )
    return Model(spec)
