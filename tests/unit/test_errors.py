"""The tree in the docstring is the real one, and call errors survive the way over the wire."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit import errors
from servekit.errors import CallError, InvalidInput, ServekitError, call_error, suggest

CALL_ERRORS = sorted(
    (c for c in CallError.__subclasses__() if c.__module__ == errors.__name__),
    key=lambda c: c.__name__,
)


def drawn() -> dict[str, tuple[str, int | None]]:
    """Return the docstring's tree: name → name of its base, and the status behind it."""
    assert errors.__doc__ is not None
    tree: dict[str, tuple[str, int | None]] = {}
    path: list[str] = ["Exception"]
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w+)(?:\s+(\d{3})\b)?", line)
        if match is None:
            continue
        depth = len(match[1]) // 4 + 1
        del path[depth:]
        tree[match[2]] = path[-1], int(match[3]) if match[3] else None
        path.append(match[2])
    return tree


def test_the_drawn_tree_is_the_real_one():
    real = {
        name: cls.__bases__[0].__name__
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, ServekitError)
    }
    assert {name: base for name, (base, _) in drawn().items()} == real


def test_the_drawn_statuses_are_the_real_ones():
    statuses = {name: status for name, (_, status) in drawn().items() if status is not None}
    assert statuses == {cls.__name__: cls.status for cls in CALL_ERRORS}


def test_every_call_error_has_a_code_of_its_own():
    codes = [cls.code for cls in (CallError, *CALL_ERRORS)]
    assert len(set(codes)) == len(codes) == len(errors._BY_CODE)
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)


@pytest.mark.parametrize("cls", CALL_ERRORS)
def test_every_class_says_what_it_is(cls):
    assert 400 <= cls.status < 600
    assert cls.__doc__
    assert cls.grpc.isupper()


def test_only_what_may_go_better_elsewhere_is_retryable():
    retryable = {cls.__name__ for cls in CALL_ERRORS if cls.retryable}
    assert retryable == {"Overloaded", "Unavailable", "ReplicaLost"}


plain = st.text(max_size=20)
fields = st.lists(
    st.fixed_dictionaries({"path": plain, "message": plain, "type": plain}), max_size=3
)


@given(
    cls=st.sampled_from([CallError, *CALL_ERRORS]),
    message=plain,
    reason=plain,
    retry_after_s=st.none() | st.floats(0, 1e6),
    fields=fields,
)
def test_details_and_back(cls, message, reason, retry_after_s, fields):
    sent = cls(message, reason=reason, retry_after_s=retry_after_s, fields=fields)
    got = call_error(**sent.details())
    assert type(got) is cls
    assert got.details() == sent.details()
    assert (got.message, got.reason, got.fields) == (message, reason or cls.code, tuple(fields))
    assert str(got) == message


def test_an_unknown_code_of_a_newer_peer_is_a_plain_call_error():
    error = call_error("from_the_future", "what?", reason="new")
    assert type(error) is CallError
    assert (error.status, error.reason) == (500, "new")


def test_a_mapping_of_fields_is_copied_into_the_body():
    field = {"path": "a.b", "message": "is wrong", "type": "value"}
    error = InvalidInput("bad", fields=[field])
    error.details()["fields"][0]["path"] = "changed"
    assert error.fields[0]["path"] == "a.b"


def test_suggest():
    assert suggest("predct", ["predict", "embed"]) == " Did you mean 'predict'?"
    assert suggest("xyz", ["predict", "embed"]) == ""
    assert suggest("xyz", []) == ""
