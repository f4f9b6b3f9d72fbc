"""A lock installed as the files of an image: the same files each time, whoever installs them and where.

They are for another machine: nothing of this one is in them, neither paths nor times, and what
installers note about themselves is left out. Bytecode comes along, as an image's root is read-only;
it is trusted without a look at its source (`unchecked-hash`), so it needs no times either.
"""

import base64
import csv
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from servekit.errors import ConfigError
from servekit.packaging import uv

_NOTES = ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json")
"""Files that installers write about themselves."""


def site(
    lock: Path, *, python: str, platform: str, at: str, interpreter: Path, cache: Path
) -> Path:
    """Return a folder with what a lock has, as it is to be in an image.

    Args:
        lock: A `pylock.toml`, with the wheels beside it that it names.
        python: Version of Python, like `"3.12"`.
        platform: Like `"linux/amd64"`.
        at: Where the folder is in the image, absolute.
        interpreter: A Python of that version, which writes the bytecode.
        cache: Where such folders are kept.

    Raises:
        ConfigError: Something can't be installed.
    """
    key = hashlib.sha256(lock.read_bytes() + f"{python} {platform} {at}".encode()).hexdigest()[:16]
    home = cache / key
    if not home.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache, prefix=".installing-"))
        try:
            _install(lock, made, python=python, platform=platform, interpreter=interpreter)
            _normalise(made, at)
            compile_all(made, at, interpreter)
            try:
                made.rename(home)
            except OSError:
                if not home.is_dir():  # else another process was faster
                    raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return home


def compile_all(folder: Path, at: str, interpreter: Path) -> None:
    """Write the bytecode of all modules below a folder.

    Args:
        folder: Here.
        at: Where it is in the image.
        interpreter: Whose bytecode.
    """
    done = subprocess.run(  # noqa: S603
        [
            *(interpreter, "-I", "-m", "compileall", "-qq", "-j", "1", "-f"),
            *("--invalidation-mode", "unchecked-hash", "-s", folder, "-p", at, folder),
        ],
        env={"PYTHONHASHSEED": "0"},
        check=False,
    )
    if done.returncode not in (0, 1):  # 1: some file is for another Python, and is never imported
        raise ConfigError(f"{interpreter} could not compile {folder}: exit code {done.returncode}")


def _install(lock: Path, into: Path, *, python: str, platform: str, interpreter: Path) -> None:
    uv.run(
        *("pip", "sync", lock.name, "--prefix", into, "--python", interpreter),
        *("--python-version", python, "--python-platform", uv.PLATFORMS[platform]),
        *("--require-hashes", "--only-binary", ":all:", "--link-mode", "copy"),
        cwd=lock.parent,
        doing=f"install what {lock} has for {platform}",
    )
    for marker in (".lock", "CACHEDIR.TAG", ".gitignore"):
        (into / marker).unlink(missing_ok=True)


def _normalise(folder: Path, at: str) -> None:
    scripts = folder / "bin"
    for script in sorted(scripts.iterdir()) if scripts.is_dir() else ():
        first, newline, rest = script.read_bytes().partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            script.write_bytes(b"#!" + f"{at}/bin/python".encode() + newline + rest)
    for info in sorted(folder.glob("lib/python*/site-packages/*.dist-info")):
        _forget_installer(info)


def _forget_installer(info: Path) -> None:
    """Leave out what installers note, and say the truth of the rest in RECORD."""
    for name in _NOTES:
        (info / name).unlink(missing_ok=True)
    record = info / "RECORD"
    if not record.is_file():
        return
    with record.open(newline="", encoding="utf-8") as opened:
        names = sorted({row[0] for row in csv.reader(opened) if row})
    with record.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        for name in names:
            path = info.parent / name
            if path == record:
                writer.writerow([name, "", ""])
            elif path.is_file():
                writer.writerow([name, _hash(path), path.stat().st_size])


def _hash(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
