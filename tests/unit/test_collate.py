"""Joining items into a batch, and cutting its result up again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import InvalidOutput
from servekit.runtime.collate import join, padded_size, split
from servekit.spec.policy import BatchPolicy


def policy(**settings) -> BatchPolicy:
    return BatchPolicy(max_size=settings.pop("max_size", 16), **settings)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 4), (4, 4), (5, 16), (16, 16), (17, 17)])
def test_padded_size(rows, size):
    assert padded_size(rows, policy(pad_to=(1, 4, 16))) == size
    assert padded_size(rows, policy()) == rows


def test_lists_are_gathered_argument_by_argument():
    items = [("a", 1), ("b", 2), ("c", 3)]
    assert join(items, policy()) == (["a", "b", "c"], [1, 2, 3])


def test_lists_are_padded_with_the_last_item():
    columns = join([("a", 1), ("b", 2), ("c", 3)], policy(pad_to=(2, 4, 16)))
    assert columns == (["a", "b", "c", "c"], [1, 2, 3, 3])


def test_padding_is_no_result():
    padding = policy(pad_to=(4, 16))
    assert split(["A", "B", "B", "B"], [1, 1], padding, where="S.f") == ["A", "B"]


@pytest.mark.parametrize("result", [[], [1], [1, 2, 3], (1, 2, 3)])
def test_a_wrong_number_of_results(result):
    with pytest.raises(InvalidOutput, match=rf"S\.f returned {len(result)} results for 2 items"):
        split(result, [1, 1], policy(), where="S.f")


@pytest.mark.parametrize("result", [None, 3, "ab", b"ab", iter([1, 2]), {"a": 1, "b": 2}, {1, 2}])
def test_what_is_no_list_of_results(result):
    with pytest.raises(InvalidOutput, match=r"S\.f returned a \w+, not a list"):
        split(result, [1, 1], policy(), where="S.f")


def test_any_sequence_of_results_will_do():
    assert list(split((1, 2), [1, 1], policy(), where="S.f")) == [1, 2]
    assert list(split(np.array([1, 2]), [1, 1], policy(), where="S.f")) == [1, 2]


@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    axis=st.integers(0, 2),
    padded=st.booleans(),
)
def test_each_caller_gets_its_own_rows(rows, axis, padded):
    settings = policy(max_size=64, axis=axis, pad_to=(4, 32, 64) if padded else ())
    items = []
    for i, count in enumerate(rows):
        shape = [2, 3, 2]
        shape[axis] = count
        items.append(
            (np.full(shape, i, np.int32) + np.random.default_rng(i).integers(0, 9, shape) * 100,)
        )
    (batch,) = join(items, settings)
    total = sum(rows)
    assert batch.shape[axis] == padded_size(total, settings)
    if padded and batch.shape[axis] > total:
        last = np.take(batch, [total - 1], axis=axis)
        assert (np.take(batch, range(total, batch.shape[axis]), axis=axis) == last).all()
    parts = split(batch * 2, rows, settings, where="S.f")
    assert len(parts) == len(items)
    for part, (item,) in zip(parts, items, strict=True):
        np.testing.assert_array_equal(part, item * 2)


def test_a_single_array_is_not_copied():
    array = np.zeros((3, 2), np.float32)
    (batch,) = join([(array,)], policy(axis=0))
    assert batch is array


@pytest.mark.parametrize("result", [None, [[1, 2]], np.zeros((4, 2)), np.zeros(2), np.float32(1)])
def test_an_array_of_another_length(result):
    with pytest.raises(InvalidOutput, match=r"axis 1 must have 5 rows"):
        split(result, [2, 3], policy(axis=1), where="S.f")


def test_padding_counts_in_the_length_of_an_array():
    padding = policy(axis=0, pad_to=(8, 16))
    with pytest.raises(InvalidOutput, match="must have 8 rows"):
        split(np.zeros((5, 1)), [2, 3], padding, where="S.f")
    parts = split(np.arange(8), [2, 3], padding, where="S.f")
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3, 4]]
