"""Names, platforms and documents of images: one way to write each, and no stranger's leads astray."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import ConfigError
from servekit.packaging.oci.documents import (
    MAX_DOCUMENT,
    Descriptor,
    Index,
    Manifest,
    Platform,
    decode,
    digest_of,
    encode,
)
from servekit.packaging.oci.reference import Reference

HEX = "0" * 64
WORDS = st.text("abz09", min_size=1, max_size=4)
PARTS = st.builds("{}{}{}".format, WORDS, st.sampled_from([".", "_", "__", "--"]), WORDS)
TAGS = st.builds("{}{}".format, WORDS, st.text("aZ0_.-", max_size=4))
HOSTS = st.sampled_from(["localhost", "127.0.0.1:5000", "r.example.com", "[::1]:5000"])


@given(host=HOSTS, parts=st.lists(PARTS, min_size=1, max_size=3), tag=st.none() | TAGS)
def test_a_name_is_read_as_it_is_written(host, parts, tag):
    for digest in ("", f"sha256:{HEX}"):
        reference = Reference(host, "/".join(parts), tag or "", digest)
        assert Reference.parse(str(reference)) == reference
    assert Reference.parse(str(reference)).target == digest


@given(text=st.text(max_size=40))
def test_any_text_is_a_name_or_refused(text):
    try:
        reference = Reference.parse(text, default="")
    except ConfigError:
        return
    assert Reference.parse(str(reference), default="") == reference
    assert ".." not in reference.repository.split("/")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("python:3.11", "names no registry; write 'registry.example.com/python:3.11'"),
        ("r.io/Team/App", "like 'team/app'"),
        ("r.io/app:", "is no tag"),
        ("r.io/app:-x", "is no tag"),
        ("r.io/app@sha256:00", "is no digest"),
        ("https://r.io/app", "without a scheme"),
        ("r.io:99999/app", "is no registry"),
        ("r.io/../app", "is no repository"),
        ("r.io/" + "a" * 300, "more than 255"),
        ("user:pw@r.io/app", "is no digest"),
    ],
)
def test_names_that_are_none(text, said):
    with pytest.raises(ConfigError) as refused:
        Reference.parse(text)
    assert said in str(refused.value)


def test_platforms():
    arm = Platform.parse("linux/arm64/v8")
    assert str(arm) == "linux/arm64/v8"
    assert arm.takes(Platform.parse("linux/arm64"))
    assert not arm.takes(Platform.parse("linux/amd64"))
    assert not arm.takes(Platform.parse("linux/arm64/v7"))
    for text in ("linux", "linux/", "linux/a/b/c", "linux/x y"):
        with pytest.raises(ConfigError, match="is no platform"):
            Platform.parse(text)


def test_equal_documents_have_equal_bytes():
    descriptor = Descriptor(media_type="x", digest=digest_of(b"x"), size=1)
    manifest = Manifest(config=descriptor, layers=[descriptor], annotations={"b": "1", "a": "2"})
    raw = encode(manifest)
    assert decode(raw, Manifest, where="here") == manifest
    assert raw.index(b'"a"') < raw.index(b'"b"')
    assert b"artifactType" not in raw


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_a_document_or_refused(raw):
    for kind in (Manifest, Index):
        try:
            decode(raw, kind, where="here")
        except ConfigError as error:
            assert str(error).startswith("here is no ")


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "sha512:" + HEX},
        {"digest": f"sha256:{HEX}\n"},
        {"digest": "sha256:../../etc/passwd"},
        {"size": -1},
        {"size": "1"},
        {"mediaType": 1},
    ],
)
def test_descriptors_that_are_none(change):
    good = {"mediaType": "x", "digest": f"sha256:{HEX}", "size": 1}
    decode(msgspec.json.encode({"config": good, "layers": []}), Manifest, where="here")
    bad = msgspec.json.encode({"config": good | change, "layers": []})
    with pytest.raises(ConfigError, match="^here is no Manifest"):
        decode(bad, Manifest, where="here")


@pytest.mark.parametrize("raw", [b"[" * 100_000, b" " * (MAX_DOCUMENT + 1)])
def test_documents_that_are_too_much(raw):
    with pytest.raises(ConfigError, match="^here"):
        decode(raw, Manifest, where="here")
