"""Where models come from: each kind of source puts its files into a folder."""

import fnmatch
import importlib
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from servekit.errors import ConfigError
from servekit.spec.model import ModelSpec


class Fetched(NamedTuple):
    """What a source is: the commit of a repository, and whether it is one file, not a folder."""

    revision: str = ""
    is_file: bool = False


Fetch = Callable[[ModelSpec, Path], Fetched]
"""Puts the files of a source into an empty folder."""

_TIMEOUT_S = 60.0
_MLFLOW = ("models", "runs", "mlflow-artifacts")


def fetcher(spec: ModelSpec) -> Fetch:
    """Return what fetches a source."""
    match spec.scheme:
        case "http" | "https":
            return _web
        case "hf":
            return _hugging_face
        case scheme if scheme in _MLFLOW:
            return _mlflow
        case _:
            return _fsspec


def _web(spec: ModelSpec, into: Path) -> Fetched:
    name = PurePosixPath(unquote(urlsplit(spec.source).path)).name or "model"
    try:
        with (
            urllib.request.urlopen(spec.source, timeout=_TIMEOUT_S) as answer,  # noqa: S310
            (into / name).open("wb") as file,
        ):
            shutil.copyfileobj(answer, file, 1 << 20)
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError(f"{spec.source} can't be fetched: {reason}") from None
    return Fetched(is_file=True)


def _hugging_face(spec: ModelSpec, into: Path) -> Fetched:
    try:
        from huggingface_hub import HfApi, snapshot_download  # pyright: ignore[reportUnknownVariableType]  # noqa: PLC0415
    except ImportError:
        raise _not_installed(spec, "models") from None
    repository = spec.source.removeprefix("hf://")
    try:
        commit = HfApi().model_info(repository, revision=spec.revision).sha or spec.revision
        snapshot_download(
            repository,
            revision=commit,
            allow_patterns=[*spec.include] or None,
            ignore_patterns=[*spec.exclude] or None,
            local_dir=into,
        )
    except (OSError, ValueError) as error:  # its own errors are such
        raise ConfigError(f"{spec.title} can't be fetched: {error}") from None
    shutil.rmtree(into / ".cache", ignore_errors=True)  # its own notes
    return Fetched(commit)


def _mlflow(spec: ModelSpec, into: Path) -> Fetched:
    try:
        from mlflow.artifacts import download_artifacts  # noqa: PLC0415
        from mlflow.exceptions import MlflowException  # noqa: PLC0415
    except ImportError:
        raise _not_installed(spec, "mlflow") from None
    try:
        found = Path(download_artifacts(artifact_uri=spec.source, dst_path=str(into)))
    except (MlflowException, OSError) as error:
        raise ConfigError(f"{spec.source} can't be fetched: {error}") from None
    _lift(found, into)
    for path in [*files(into)]:
        if not _is_wanted(spec, path.relative_to(into).as_posix()):
            path.unlink()
    return Fetched()


def _fsspec(spec: ModelSpec, into: Path) -> Fetched:
    try:
        fsspec: Any = importlib.import_module("fsspec.core")  # it has no types
    except ImportError:
        raise _not_installed(spec, "models") from None
    try:
        system, root = fsspec.url_to_fs(spec.source)
        is_file = bool(system.isfile(root))
        for found in system.find(root):
            name = PurePosixPath(found).name if is_file else found[len(root) :].lstrip("/")
            if ".." in PurePosixPath(name).parts:
                raise ConfigError(f"{spec.source} has a file {name!r}, which leads elsewhere")
            if _is_wanted(spec, name):
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                system.get_file(found, str(into / name))
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"{spec.source} can't be fetched: {error}") from None
    return Fetched(is_file=is_file)


def _lift(found: Path, into: Path) -> None:
    """Have what lies in a folder of its own lie directly in `into`."""
    if found.is_dir() and found != into:
        for inner in [*found.iterdir()]:
            inner.rename(into / inner.name)
        while found != into:
            found.rmdir()
            found = found.parent


def _is_wanted(spec: ModelSpec, name: str) -> bool:
    taken = not spec.include or any(fnmatch.fnmatchcase(name, p) for p in spec.include)
    return taken and not any(fnmatch.fnmatchcase(name, p) for p in spec.exclude)


def files(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, in order."""
    yield from sorted(path for path in folder.rglob("*") if path.is_file())


def _not_installed(spec: ModelSpec, extra: str) -> ConfigError:
    return ConfigError(f"{spec.source} needs more: pip install 'servekit[{extra}]'")
