"""`servekit keys`: what it prints, and what it does to a file that people edit, too."""

import json
import os
import stat

import pytest

from servekit.cli.main import run
from servekit.gateway.keys import Keys


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "dumb")
    return tmp_path / "keys.toml"


@pytest.fixture
def keys(file, capsys):
    """Return `keys(word, …)`: runs it on the file; gives what it wrote to stdout."""

    def call(*words: str, code: int = 0) -> str:
        assert run(["keys", *words, "--file", str(file)]) == code
        caught = capsys.readouterr()
        return caught.err if code else caught.out

    return call


def names(file) -> list[str]:
    return [key.name for key in Keys.read(file)]


def test_a_key_is_printed_once_and_only_its_hash_is_kept(file, keys):
    printed = keys("add", "team-a", "--rate", "10/s", "--burst", "20", "--max-ongoing", "4")
    key = printed.strip()
    assert printed == f"{key}\n"
    [found] = Keys.read(file)
    assert Keys.read(file).check(key.encode()) == found
    assert (found.name, found.rate.per_s, found.rate.burst, found.max_ongoing) == (
        "team-a",
        10.0,
        20,
        4,
    )
    assert key.split("_")[2] not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_a_person_wrote_stays_to_the_byte(file, keys):
    keys("add", "a")
    before = file.read_text().replace("[[key]]", "# Ours.\n[[key]]  # first") + "# the end"
    file.write_text(before)
    keys("add", "b")
    assert file.read_text().startswith(f"{before}\n\n[[key]]\n")
    assert names(file) == ["a", "b"]


def test_modes_and_links_stay(file, keys, tmp_path):
    real = tmp_path / "real.toml"
    real.touch(mode=0o640)
    os.chmod(real, 0o640)
    file.symlink_to(real)
    keys("add", "a")
    keys("add", "b")
    keys("remove", "a")
    assert file.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert names(file) == ["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.toml", "real.toml"]


def test_a_list(file, keys):
    keys("add", "a", "--rate", "600/m")
    keys("add", "b", "--max-ongoing", "3")
    a, b = Keys.read(file)
    lines = [line.split() for line in keys("list").splitlines()]
    assert lines == [
        ["name", "id", "rate", "burst", "at", "once"],
        ["a", a.id, "10/s", "10", "any"],
        ["b", b.id, "any", "3"],
    ]
    assert json.loads(keys("list", "--json")) == [
        {"name": "a", "id": a.id, "rate_per_s": 10.0, "burst": 10, "max_ongoing": None},
        {"name": "b", "id": b.id, "rate_per_s": None, "burst": None, "max_ongoing": 3},
    ]


def test_an_empty_list(file, keys):
    file.touch()
    assert keys("list").startswith(f"{file} has no keys")


COMMENTED = """# All our keys.

# The first team.
[[key]]
name = "a"  # [[key]]
id = "aaaaaaaa"
hash = "sha256:{0}"

# The second team: rate agreed in May.
[[ key ]]
name = "b"
id = "bbbbbbbb"
hash = "sha256:{0}"
rate = "1/s"


[[key]]
id = "cccccccc"
name = "c"
hash = "sha256:{0}"
# the end
""".format("ab" * 32)


@pytest.mark.parametrize("name", ["a", "b", "c", "bbbbbbbb"])
def test_removing_one_leaves_all_else(file, keys, name):
    file.write_text(COMMENTED)
    keys("remove", name)
    gone = name[0]
    assert names(file) == [other for other in "abc" if other != gone]
    left = file.read_text().splitlines()
    lost = [line for line in COMMENTED.splitlines() if line.strip() and line not in left]
    assert len(lost) <= 5
    assert not any(line.startswith("#") for line in lost)
    assert [line for line in left if line in COMMENTED.splitlines()] == left


def test_all_can_be_removed_one_by_one(file, keys):
    file.write_text(COMMENTED)
    for name in "bca":
        keys("remove", name)
    assert names(file) == []
    assert [line for line in file.read_text().splitlines() if line] == [
        "# All our keys.",
        "# The first team.",
        "# The second team: rate agreed in May.",
        "# the end",
    ]


ENTRY_A = '[[key]]\nname = "a"\nid = "aaaaaaaa"\nhash = "sha256:{0}"\n'


@pytest.mark.parametrize(
    "text",
    [
        'key = [{{name = "a", id = "aaaaaaaa", hash = "sha256:{0}"}}]\n',
        ENTRY_A.replace("[[key]]", '[["key"]]'),
        ENTRY_A + '[["key"]]\nname = "b"\nid = "bbbbbbbb"\nhash = "sha256:{0}"\n',
    ],
)
def test_what_it_can_not_edit_it_leaves_alone(file, keys, text):
    text = text.format("ab" * 32)
    file.write_text(text)
    assert "only a person can edit" in keys("remove", "a", code=1)
    assert file.read_text() == text


def test_a_name_of_several_keys_needs_an_id(file, keys):
    keys("add", "a")
    keys("add", "a")
    first, second = Keys.read(file)
    said = keys("remove", "a", code=1)
    assert f"2 keys are called 'a'; give an id: {first.id}, {second.id}" in said
    keys("remove", first.id)
    assert [key.id for key in Keys.read(file)] == [second.id]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("add", "two words"), "name = 'two words': need 1 to 64 letters"),
        (("add", 'a"\nid = "b'), "need 1 to 64 letters"),
        (("add", "b", "--rate", "10"), "rate: '10' is no rate above 0"),
        (("add", "b", "--rate", '1/s"\nmax_ongoing = 9#'), "is no rate above 0"),
        (("add", "b", "--burst", "3"), "has no meaning without rate"),
        (("add", "b", "--rate", "1/s", "--burst", "0"), "burst = 0: need a whole number"),
        (("remove", "teem"), "there is no key 'teem'. Did you mean 'team'?"),
    ],
)
def test_mistakes_change_nothing(file, keys, words, message):
    keys("add", "team")
    before = file.read_text()
    said = keys(*words, code=1)
    assert said.startswith("error: ")
    assert message in said
    assert file.read_text() == before


def test_a_broken_file_is_not_added_to(file, keys):
    file.write_text("[[key]]\nname = 1\n")
    assert "key 1: name = 1: need" in keys("add", "a", code=1)
    assert file.read_text() == "[[key]]\nname = 1\n"


def test_files_that_are_not_there(file, keys, tmp_path):
    for word in ("list", "remove"):
        assert f"can't read {file}" in keys(word, *(["a"] if word == "remove" else []), code=1)
    file.mkdir()
    assert "can't read" in keys("add", "a", code=1)


def test_the_file_of_the_settings(file, capsys, monkeypatch):
    assert run(["keys", "list"]) == 1
    assert "give --file keys.toml, or set api_keys" in capsys.readouterr().err
    monkeypatch.setenv("SERVEKIT_API_KEYS", "keys.toml")
    assert run(["keys", "add", "a"]) == 0
    assert names(file) == ["a"]


def test_help_has_an_example_for_each(capsys):
    for word in ("add", "list", "remove"):
        assert run(["keys", word, "--help"]) == 0
        assert f"Example: servekit keys {word}" in " ".join(capsys.readouterr().out.split())
