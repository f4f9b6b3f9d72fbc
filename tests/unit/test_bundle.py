"""Bundles: equal content has equal bytes, and nothing that a stranger wrote leads out of the folder."""

import io
import random
import tarfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import ConfigError
from servekit.packaging import manifest as m
from servekit.packaging.bundle import Bundle, files_of, is_bundle, keep, read
from servekit.packaging.manifest import Manifest, check_path
from servekit.spec.app import AppSpec

APP = AppSpec(root="S", services=())


def make(folder: Path, content: dict[str, bytes]) -> Bundle:
    """Write a bundle's folder."""
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return Bundle(folder, write(folder))


def write(folder: Path) -> Manifest:
    """Write the manifest of what is in a folder."""
    manifest = Manifest(
        name="s",
        target="app:S",
        python="3.11",
        platform="linux/amd64",
        app=APP,
        files={k: v for k, v in files_of(folder).items() if k != m.NAME},
    )
    (folder / m.NAME).write_bytes(manifest.to_json())
    return manifest


def test_files_that_go_another_way(bundle, tmp_path):
    """They are compared with the manifest all the same."""
    file = tmp_path / "small.bundle"
    bundle.pack(file, without={"code/app.py"})
    with pytest.raises(ConfigError, match="has 'code/run' where its manifest has 'code/app.py'"):
        read(file, tmp_path / "cache")
    digest = bundle.manifest.files["code/app.py"].sha256
    (tmp_path / "wrong").write_bytes(b"x = 2\n")
    with pytest.raises(ConfigError, match="^there: code/app.py is not the file"):
        read(file, tmp_path / "cache", beside={digest: tmp_path / "wrong"}, where="there")
    right = {digest: bundle.folder / "code/app.py"}
    assert read(file, tmp_path / "cache", beside=right).digest == bundle.digest


@pytest.fixture
def bundle(tmp_path):
    made = make(tmp_path / "made", {"code/app.py": b"x = 1\n", "code/run": b"#!/bin/sh\n"})
    (made.folder / "code/run").chmod(0o755)
    return Bundle(made.folder, write(made.folder))


def packed(members: list[tuple[tarfile.TarInfo | str, bytes]]) -> bytes:
    """Return a tar of members in this order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member, data in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def refused(tmp_path: Path, data: bytes, match: str) -> None:
    """Check that a file is refused, and leaves nothing."""
    file, cache = tmp_path / "bad.bundle", tmp_path / "cache"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=match):
        read(file, cache)
    assert not cache.exists() or not [*cache.iterdir()]
    assert {p.name for p in tmp_path.iterdir()} <= {"bad.bundle", "cache", "made"}


def test_packed_and_read_it_is_the_same(bundle, tmp_path):
    for name in ("one", "two"):
        bundle.pack(tmp_path / f"{name}.bundle")
    one, two = (tmp_path / f"{name}.bundle" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    found = read(one, tmp_path / "cache")
    assert found.manifest == bundle.manifest
    found.verify()
    assert (found.folder / "code/run").stat().st_mode & 0o777 == 0o755
    assert (found.folder / "code/app.py").read_bytes() == b"x = 1\n"
    assert read(two, tmp_path / "cache").folder == found.folder


def test_a_folder_is_read_where_it_is(bundle, tmp_path):
    assert read(bundle.folder, tmp_path / "cache").folder == bundle.folder
    assert is_bundle(str(bundle.folder))
    assert not is_bundle(str(bundle.folder / "code"))
    assert is_bundle("s.bundle")


def test_an_equal_one_is_kept_once(bundle, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    first = keep(make(cache / "a", {"code/app.py": b"1"}).folder, bundle.manifest, cache)
    second = keep(make(cache / "b", {"code/app.py": b"1"}).folder, bundle.manifest, cache)
    assert first.folder == second.folder == cache / bundle.digest


def test_what_is_not_as_the_manifest_says(bundle):
    cases = {
        "is not the file": lambda p: p.write_bytes(b"x = 2\n"),
        "is missing": lambda p: p.unlink(),
        "does not belong": lambda p: p.with_name("more.py").write_bytes(b""),
    }
    for match, change in cases.items():
        change(bundle.folder / "code/app.py")
        with pytest.raises(ConfigError, match=match):
            bundle.verify()
        (bundle.folder / "code/app.py").write_bytes(b"x = 1\n")
        (bundle.folder / "code/more.py").unlink(missing_ok=True)
    (bundle.folder / "code/app.py").chmod(0o755)
    with pytest.raises(ConfigError, match="is not the file"):
        bundle.verify()


def test_a_link_does_not_belong(bundle, tmp_path):
    target = tmp_path / "app.py"
    target.write_bytes(b"x = 1\n")
    (bundle.folder / "code/app.py").unlink()
    (bundle.folder / "code/app.py").symlink_to(target)
    with pytest.raises(ConfigError, match="does not belong"):
        bundle.verify()


@pytest.mark.parametrize(
    "path",
    ["", "/", "/etc/passwd", "..", "../x", "a/../b", "a//b", "a/", "./a", "a\\b", "a\nb", "a\0b", m.NAME, "x" * 256],
)  # fmt: skip
def test_paths_that_lead_elsewhere(path, bundle, tmp_path):
    with pytest.raises(ConfigError, match="is no path in a bundle"):
        check_path(path, "here")
    files = {path: next(iter(bundle.manifest.files.values()))}
    document = msgspec.structs.replace(bundle.manifest, files=files).to_json()
    refused(tmp_path, packed([(m.NAME, document)]), "is no path in a bundle")


@given(st.text(max_size=30))
def test_a_path_that_is_taken_stays_inside(text):
    try:
        check_path(text, "here")
    except ConfigError:
        return
    assert (Path("/a/b") / text).is_relative_to("/a/b")
    assert ".." not in (Path("/a/b") / text).parts


def test_hostile_archives(bundle, tmp_path):
    document = bundle.manifest.to_json()
    app, run = b"x = 1\n", b"#!/bin/sh\n"
    link = tarfile.TarInfo("code/app.py")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hard = tarfile.TarInfo("code/app.py")
    hard.type, hard.linkname = tarfile.LNKTYPE, m.NAME
    device = tarfile.TarInfo("code/app.py")
    device.type = tarfile.CHRTYPE
    first = tarfile.TarInfo(m.NAME)
    first.type, first.linkname = tarfile.SYMTYPE, "/etc/passwd"
    huge = msgspec.structs.replace(
        bundle.manifest, files={"code/app.py": m.File(sha256="0" * 64, size=1 << 60)}
    )
    cases = {
        "does not start": [("code/app.py", app)],
        "does not start with": [(first, b"")],
        "can't be read": [(m.NAME, b"[]")],
        "not as servekit writes": [(m.NAME, document + b" ")],
        "is the most": [(m.NAME, huge.to_json())],
        "has its end where": [(m.NAME, document)],
        "has 'code/run' where": [(m.NAME, document), ("code/run", run), ("code/app.py", app)],
        "has 'code/app.py' where": [(m.NAME, document), (link, b"")],
        "has 'code/app.py'": [(m.NAME, document), (hard, b"")],
        "'code/app.py' where": [(m.NAME, document), (device, b"")],
        "is not the file": [(m.NAME, document), ("code/app.py", b"x = 2\n")],
        "more than its manifest": [
            (m.NAME, document), ("code/app.py", app), ("code/run", run), ("x", b""),
        ],
    }  # fmt: skip
    for match, members in cases.items():
        refused(tmp_path, packed(members), match)
    refused(tmp_path, b"", "is no bundle")
    refused(tmp_path, random.Random(1).randbytes(5000), "is no bundle")


def test_another_format_is_named(bundle, tmp_path):
    document = msgspec.structs.replace(bundle.manifest, format=2).to_json()
    changed = document.replace(b'"python"', b'"pythons"')
    refused(tmp_path, packed([(m.NAME, changed)]), "is of format 2, and this servekit reads 1")


@given(data=st.data())
def test_any_damage_is_found(data, tmp_path_factory):
    """A byte is changed, bytes are cut off or added: it is refused, or it says the same."""
    folder = tmp_path_factory.mktemp("damage")
    bundle = make(folder / "made", {"code/app.py": b"x = 1\n", "code/a": bytes(600)})
    file = folder / "s.bundle"
    bundle.pack(file)
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "add"]))
    damaged = {
        "flip": whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :],
        "cut": whole[:at],
        "add": whole[:at] + data.draw(st.binary(min_size=1, max_size=600)) + whole[at:],
    }[kind]
    file.write_bytes(damaged)
    try:
        found = read(file, folder / "cache")
    except ConfigError:
        return
    found.verify()
    assert found.manifest == bundle.manifest
