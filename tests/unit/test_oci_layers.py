"""Layers: the same bytes each time, read as others read them; strangers' tars are read or refused."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import ConfigError
from servekit.packaging.oci import base
from servekit.packaging.oci.blobs import Blobs
from servekit.packaging.oci.compression import inflated
from servekit.packaging.oci.documents import Descriptor, Platform, digest_of
from servekit.packaging.oci.entry import Entry, walk
from servekit.packaging.oci.layer import LayerCache, write_layer
from servekit.packaging.oci.rootfs import RootFiles, index_layer
from servekit.packaging.oci.tar import TarReader

NAMES = st.sampled_from(["a", "b", "é", "x" * 120, "c d"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    return Blobs(tmp_path_factory.mktemp("blobs"))


def tree(paths: dict[str, bytes]) -> dict[str, bytes]:
    """Return only the files that can be together: none lies below another one."""
    return {p: d for p, d in paths.items() if not any(q.startswith(f"{p}/") for q in paths)}


@given(files=st.dictionaries(PATHS, st.binary(max_size=2000), max_size=6).map(tree), flip=...)
def test_a_layer_is_what_goes_in(files: dict[str, bytes], flip: bool, blobs):
    entries = [Entry.file(path, data) for path, data in files.items()]
    one = write_layer(blobs, entries, epoch=7)
    two = write_layer(blobs, entries[::-1] if flip else entries, epoch=7)
    assert one == two
    raw = gzip.decompress(blobs.path(one.descriptor.digest).read_bytes())
    assert digest_of(raw) == one.diff_id
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        members = tar.getmembers()
        assert {m.name: tar.extractfile(m).read() for m in members if m.isreg()} == files
        assert {(m.uid, m.gid, m.mtime) for m in members} <= {(0, 0, 7)}
        assert [m.name for m in members] == sorted(m.name for m in members)
    index, diff_id = index_layer([raw], where="here")
    assert diff_id == one.diff_id
    assert {e.path: e.size for e in index if e.kind == "file"} == {
        path: len(data) for path, data in files.items()
    }


def test_a_layer_that_was_written_is_not_written_again(blobs, tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"x")
    cache = LayerCache(blobs)
    first, cached = cache.layer([Entry.file("f", file)], epoch=0)
    assert not cached
    assert cache.layer([Entry.file("f", file)], epoch=0) == (first, True)
    file.write_bytes(b"y")
    assert cache.layer([Entry.file("f", file)], epoch=0)[1] is False
    assert cache.layer([Entry.file("f", b"x")], epoch=1)[1] is False
    blobs.path(first.descriptor.digest).unlink()
    assert cache.layer([Entry.file("f", b"x")], epoch=0) == (first, False)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: [Entry.file("a", b""), Entry.file("a", b"")], "is twice"),
        (lambda: [Entry.file("a", b""), Entry.file("a/b", b"")], "can't be in 'a'"),
        (lambda: [Entry.symlink("a", "b"), Entry.file("a/b", b"")], "which is a symlink"),
        (lambda: [Entry.file("../a", b"")], "can't be in an image"),
        (lambda: [Entry.file("/a", b"")], "can't be in an image"),
        (lambda: [Entry.file("a//b", b"")], "can't be in an image"),
        (lambda: [Entry.file(".wh.a", b"")], "deleted files"),
        (lambda: [Entry.file("a" * 256, b"")], "too long"),
        (lambda: [Entry.symlink("a", "")], "can't point to"),
        (lambda: [Entry.file("a", Path("/nowhere"))], "can't be read"),
        (lambda: [Entry.file("a", b"x", digest=digest_of(b"y"))], "instead of"),
    ],
)
def test_entries_that_contradict(make, said, blobs):
    with pytest.raises(ConfigError) as refused:
        write_layer(blobs, make(), epoch=0)
    assert said in str(refused.value)


def test_a_folder_is_taken_as_it_is(blobs, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/run").write_text("#!")
    (tmp_path / "bin/run").chmod(0o700)
    (tmp_path / "link").symlink_to("bin/run")
    entries = {e.path: e for e in walk(tmp_path, "app")}
    assert entries.keys() == {"app/bin", "app/bin/run", "app/link"}
    assert entries["app/bin/run"].mode == 0o755
    assert entries["app/link"].target == "bin/run"
    assert {e.path for e in walk(tmp_path, "app", keep=lambda p: p != "bin")} == {"app/link"}


# -- tars of strangers --------------------------------------------------------------------------


def packed(members: list[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def info(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = kind
    made.linkname = target
    return made


def split(raw: bytes, at: int) -> list[bytes]:
    return [raw[i : i + at] for i in range(0, len(raw), at)]


@given(
    files=st.dictionaries(PATHS, st.binary(max_size=1500), max_size=5),
    form=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    at=st.integers(1, 3000),
)
def test_every_kind_of_tar_is_read(files, form, at):
    try:
        raw = packed([(info(path), data) for path, data in files.items()], form)
    except ValueError:  # a name that ustar can't have
        return
    tar = TarReader(split(raw, at), where="here")
    assert {member.path: b"".join(tar.content()) for member in tar} == files


@given(data=st.data())
def test_a_damaged_tar_is_read_or_refused(data):
    raw = bytearray(packed([(info("a/b"), b"x" * 700), (info("é" * 80), b"y")]))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(0, len(raw))) :]
    tar = TarReader(inflated([bytes(raw)], where="here"), where="here")
    try:
        for member in tar:
            assert ".." not in member.path.split("/")
            assert not member.path.startswith("/")
            b"".join(tar.content())
    except ConfigError as error:
        assert str(error).startswith("here")


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (info("../a"), "outside of it"),
        (info("a/../../b"), "outside of it"),
        (info("/a"), "outside of it"),
        (info("a", tarfile.LNKTYPE, "../b"), "outside of it"),
        (info("a", b"S"), "of the type b'S'"),
    ],
)
def test_members_that_are_refused(member, said):
    with pytest.raises(ConfigError) as refused:
        list(TarReader([packed([(member, b"")])], where="here"))
    assert said in str(refused.value)


def test_headers_without_end():
    block = info("x", b"x")
    block.size = 0
    header = block.tobuf(tarfile.USTAR_FORMAT)
    with pytest.raises(ConfigError, match="a chain of extended headers"):
        list(TarReader([header] * 50, where="here"))
    block.size = 1 << 30
    with pytest.raises(ConfigError, match="an extended header of 1073741824 bytes"):
        list(TarReader([block.tobuf(tarfile.GNU_FORMAT)], where="here"))


def test_compressed_tars(blobs):
    raw = packed([(info("a"), b"x" * 100)])
    whole = gzip.compress(raw[:700]) + gzip.compress(raw[700:]) + bytes(100)
    assert b"".join(inflated(split(whole, 50), where="here")) == raw
    with pytest.raises(ConfigError, match="ends in the middle"):
        list(inflated([whole[:30]], where="here"))
    with pytest.raises(ConfigError, match="no gzip file"):
        list(inflated([whole[:10] + b"\xff" * 400], where="here"))
    with pytest.raises(ConfigError, match="zstd"):
        list(inflated([b"\x28\xb5\x2f\xfd", b"rest"], where="here"))


# -- stacked ------------------------------------------------------------------------------------


def layer(*members: tarfile.TarInfo):
    return index_layer([packed([(member, b"") for member in members])], where="here")[0]


def test_upper_layers_hide_lower_ones():
    lower = layer(
        info("etc/a"), info("etc/b"), info("opt/x/y"), info("lib", tarfile.SYMTYPE, "usr")
    )
    upper = layer(info("etc/.wh.a"), info("opt/x/.wh..wh..opq"), info("opt/x/z"), info("usr/q"))
    files = RootFiles([lower, upper])
    assert files.names("etc") == ["b"]
    assert files.names("/opt/x") == ["z"]
    assert files.find("lib/q").path == "usr/q"
    assert files.find("lib/q").layer == 1
    assert files.find("lib", follow=False).kind == "symlink"
    assert files.find("etc/../../etc/b").path == "etc/b"
    assert files.find("etc/a") is None
    with pytest.raises(ConfigError, match="write 'usr/new'"):
        files.check([Entry.file("lib/new", b"")])


def test_links_in_a_circle_lead_nowhere():
    files = RootFiles([layer(info("a", tarfile.SYMTYPE, "b"), info("b", tarfile.SYMTYPE, "/a"))])
    assert files.find("a") is None
    assert files.find("a/c") is None


def test_a_hard_link_is_its_file():
    files = RootFiles([layer(info("a"), info("b", tarfile.LNKTYPE, "a"))])
    assert (files.find("b").kind, files.find("b").target) == ("file", "a")
    with pytest.raises(ConfigError, match="a link to nothing"):
        layer(info("b", tarfile.LNKTYPE, "a"))


# -- blobs --------------------------------------------------------------------------------------


def test_a_blob_is_what_was_expected_or_is_not_there(tmp_path):
    blobs = Blobs(tmp_path)
    wanted = Descriptor(media_type="x", digest=digest_of(b"right"), size=5)
    with pytest.raises(ConfigError, match="^instead of"), blobs.writer(wanted) as blob:
        blob.write(b"wrong")
    assert not blobs.has(wanted)
    assert [*(tmp_path / "partial").iterdir()] == []
    with blobs.writer(wanted) as blob:
        blob.write(b"wro")
        blob.restart()
        blob.write(b"right")
    assert blobs.read(wanted) == b"right"
    blobs.path(wanted.digest).write_bytes(b"rigth")
    with pytest.raises(ConfigError, match="was damaged, and is removed"):
        blobs.read(wanted)
    assert not blobs.has(wanted)
    with pytest.raises(ConfigError, match="has no blob"):
        blobs.read(wanted)
    for digest in ("sha256:..", "../x", f"sha256:{'0' * 63}/"):
        with pytest.raises(ConfigError, match="is no digest"):
            blobs.path(digest)


def test_a_root_filesystem_is_read_again_only_when_it_is_another(tmp_path, monkeypatch):
    blobs = Blobs(tmp_path / "blobs")
    path = tmp_path / "base.tar"
    read = []

    def counted(*args, **more):
        read.append(args)
        return index_layer(*args, **more)

    monkeypatch.setattr(base, "index_layer", counted)

    def opened(name):
        if name:
            (tmp_path / name).write_text(name)
            with tarfile.open(path, "w") as tar:
                tar.add(tmp_path / name, name)
        return base.open_base(path, blobs, platform=Platform("linux", "amd64"))

    first = opened("one")
    assert opened("").descriptor == first.descriptor
    assert len(read) == 1
    other = opened("another")
    assert other.descriptor != first.descriptor
    assert other.files.find("another") is not None
    for layer in other.layers:
        blobs.path(layer.descriptor.digest).unlink()  # as a cache that was tidied up
    assert opened("").descriptor == other.descriptor
    assert len(read) == 3
