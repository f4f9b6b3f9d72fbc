"""The file of API keys, and the check of one that a client presents."""

import hashlib
import hmac

import pytest

from servekit.errors import ConfigError
from servekit.gateway.keys import Keys, new_key
from servekit.resilience.limits import Rate

HASH = "sha256:" + "ab" * 32
ENTRY = f'[[key]]\nname = "team-a"\nid = "abcd1234"\nhash = "{HASH}"\n'


def parse(text: str) -> Keys:
    return Keys.parse(text, where="keys.toml")


def a_file(*made: tuple[str, str, str]) -> Keys:
    entries = [
        f'[[key]]\nname = "k{number}"\nid = "{id_}"\nhash = "{digest}"\n'
        for number, (id_, _, digest) in enumerate(made)
    ]
    return parse("\n".join(entries))


def test_an_entry():
    [key] = parse(ENTRY + 'rate = "600/m"\nburst = 20\nmax_ongoing = 4\n')
    assert (key.name, key.id, key.digest) == ("team-a", "abcd1234", b"\xab" * 32)
    assert (key.rate, key.max_ongoing) == (Rate(10.0, 20), 4)


def test_limits_are_optional_and_a_burst_is_a_second_of_the_rate():
    [key] = parse(ENTRY)
    assert (key.rate, key.max_ongoing) == (None, None)
    assert next(iter(parse(ENTRY + 'rate = "2.5/s"'))).rate == Rate(2.5, 3)
    assert next(iter(parse(ENTRY + 'rate = "1/h"'))).rate.burst == 1


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "key = []"])
def test_a_file_without_keys_lets_nobody_in(text):
    keys = parse(text)
    assert list(keys) == []
    assert keys.check(new_key()[1].encode()) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key", "keys.toml: Expected '='"),
        ("[keys]", "keys.toml: 'keys' has no meaning here; a key is a table [[key]] with name, id"),
        ("[key]\nname = 'a'", "keys.toml: 'key' is no list of tables; write [[key]]"),
        ("key = 1", "keys.toml: 'key' is no list"),
        ("key = [1]", "keys.toml: key 1: is no table; write [[key]]"),
        ("[[key]]", "keys.toml: key 1: has no name; need 1 to 64 letters"),
        (ENTRY.replace("name", "nmae"), "key 1: there is no field 'nmae'. Did you mean 'name'?"),
        (ENTRY + "secret = 'x'", "key 1 (team-a): there is no field 'secret'."),
        (ENTRY.replace("team-a", ""), "key 1: name = '': need 1 to 64"),
        (ENTRY.replace("team-a", "a b"), "key 1: name = 'a b': need"),
        (ENTRY.replace("team-a", "a\\nb"), "key 1: name = 'a\\nb': need"),
        (ENTRY.replace("team-a", "x" * 65), "name = "),
        (ENTRY.replace('"team-a"', "7"), "key 1: name = 7: need"),
        (ENTRY.replace("abcd1234", "abc"), "key 1 (team-a): id = 'abc': need 8 to 64"),
        (ENTRY.replace("abcd1234", "abcd_1234"), "id = 'abcd_1234': need"),
        (ENTRY.replace(HASH, "ab" * 32), "(team-a): hash = 'abab"),
        (ENTRY.replace(HASH, "sha256:" + "AB" * 32), "hash = 'sha256:ABAB"),
        (ENTRY.replace(HASH, HASH + "ab"), "need 'sha256:' and 64 digits in lower-case hex"),
        (ENTRY + "rate = 10", "(team-a): rate = 10: need text like '10/s'"),
        (ENTRY + "rate = '10'", "(team-a): rate: '10' is no rate above 0; write it like '10/s'"),
        (ENTRY + "burst = 3", "burst = 3: has no meaning without rate"),
        (ENTRY + "rate = '1/s'\nburst = 0", "burst = 0: need a whole number from 1"),
        (ENTRY + "max_ongoing = true", "max_ongoing = True: need a whole number"),
        (ENTRY + "max_ongoing = 1.5", "max_ongoing = 1.5: need a whole number"),
        (ENTRY + "\n" + ENTRY, "key 2 (team-a): id = 'abcd1234': another key has it"),
    ],
)
def test_mistakes_are_named_with_the_entry_and_the_fix(text, message):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value).startswith("keys.toml: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("field", ["name", "id", "hash"])
def test_a_key_that_stands_in_the_file_itself_is_not_repeated(field):
    _, key, _ = new_key()
    old = {"name": "team-a", "id": "abcd1234", "hash": HASH}[field]
    with pytest.raises(ConfigError, match=f"{field} is a key itself") as caught:
        parse(ENTRY.replace(old, key))
    assert key[20:] not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"name = '\xff'"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "keys.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"api_keys: can't read .*keys\.toml"):
        Keys.read(path)


def test_a_new_key():
    keys = [new_key() for _ in range(50)]
    assert len({key for _, key, _ in keys}) == 50
    for id_, key, digest in keys:
        assert key.split("_")[:2] == ["sk", id_]
        assert len(bytes.fromhex(key.split("_")[2])) == 32
        assert digest == f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    assert [key.name for key in a_file(*keys)] == [f"k{number}" for number in range(50)]


def test_a_key_is_known_by_all_of_it():
    a, b = new_key(), new_key()
    keys = a_file(a, b)
    assert keys.check(a[1].encode()).name == "k0"
    assert keys.check(b[1].encode()).name == "k1"
    id_, secret = a[1].encode().split(b"_")[1:]
    for wrong in (
        b"",
        b"sk_",
        b"sk__",
        b"sk_" + id_,
        b"sk_" + id_ + b"_",
        b"sk_" + id_ + b"_" + secret[:-1],
        b"sk_" + id_ + b"_" + secret + b"0",
        b"sk_" + id_ + b"_" + secret.upper() + b" ",
        id_ + b"_" + secret,
        b"sk_" + b[0].encode() + b"_" + secret,
        a[2].encode(),
        b"\xff\xfe" * 40,
        b"sk_" + b"x" * 60_000,
    ):
        assert keys.check(wrong) is None


@pytest.mark.parametrize("presented", ["known", "wrong secret", "unknown id", "no id", "garbage"])
def test_each_check_is_one_comparison_of_equal_length_in_constant_time(presented, monkeypatch):
    id_, key, digest = new_key()
    text = {
        "known": key,
        "wrong secret": f"sk_{id_}_{'0' * 64}",
        "unknown id": new_key()[1],
        "no id": "sk_",
        "garbage": "x",
    }[presented]
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    found = a_file((id_, key, digest)).check(text.encode())
    assert (found is not None) == (presented == "known")
    assert compared == [(32, 32)]
