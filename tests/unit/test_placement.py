"""The GPU allocator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.engine.placement import Device, Placement
from servekit.errors import ResourceError

TWO = (Device(id="0", memory=40 * 2**30), Device(id="1", memory=40 * 2**30))


def test_no_gpu_needs_no_device():
    assert Placement(()).place("A-0", 0) == ()


def test_shares_fill_the_fullest_device_first():
    placement = Placement(TWO)
    assert placement.place("A-0", 0.25) == ("0",)
    assert placement.place("B-0", 0.9) == ("1",)
    assert placement.place("C-0", 0.5) == ("0",)
    assert placement.place("D-0", 0.1) == ("1",)
    assert placement.statistics() == {"0": {"A-0": 0.25, "C-0": 0.5}, "1": {"B-0": 0.9, "D-0": 0.1}}


@pytest.mark.parametrize(("share", "count"), [(0.3, 3), (0.1, 10), (1 / 3, 3), (1 / 7, 7)])
def test_shares_that_add_up_to_one_fit(share, count):
    placement = Placement(TWO[:1])
    for number in range(count):
        assert placement.place(f"A-{number}", share) == ("0",)
    with pytest.raises(ResourceError):
        placement.place("A-more", share)


def test_whole_numbers_take_devices_that_nobody_uses():
    placement = Placement((*TWO, Device(id="2")))
    assert placement.place("A-0", 0.1) == ("0",)
    assert placement.place("B-0", 2) == ("1", "2")
    assert placement.place("A-1", 0.9) == ("0",)
    placement.release("B-0")
    assert placement.place("C-0", 1) == ("1",)


@pytest.mark.parametrize(
    ("inventory", "asked", "message"),
    [
        ((), 1, "Embedder asks gpu=1; this machine has no GPU"),
        ((), 0.5, "Embedder asks gpu=0.5; this machine has no GPU"),
        (TWO[:1], 2, "Embedder asks gpu=2; this machine has 1 GPU (0: 40 GiB, 0.5 in use)"),
        (TWO[:1], 0.6, "Embedder asks gpu=0.6; this machine has 1 GPU (0: 40 GiB, 0.5 in use)"),
        (
            (*TWO[:1], Device(id="1")),
            2.0,
            "Embedder asks gpu=2; this machine has 2 GPUs (0: 40 GiB, 0.5 in use; 1: 0 in use)",
        ),
    ],
)
def test_what_cannot_be_met_is_refused_with_what_there_is(inventory, asked, message):
    placement = Placement(inventory)
    if inventory:
        placement.place("Other", 0.5)
    before = placement.statistics()
    with pytest.raises(ResourceError) as caught:
        placement.place("Embedder", asked)
    assert str(caught.value) == message
    assert placement.statistics() == before


def test_slices_are_devices_but_a_process_gets_one():
    cut = (Device(id="MIG-a", is_slice=True), Device(id="MIG-b", is_slice=True), Device(id="2"))
    placement = Placement(cut)
    assert placement.place("A-0", 0.5) == ("MIG-a",)
    assert placement.place("B-0", 1) == ("MIG-b",)
    with pytest.raises(ResourceError, match="C-0 asks gpu=2; this machine has 3 GPUs"):
        placement.place("C-0", 2)
    assert Placement((*cut, Device(id="3"))).place("C-0", 2) == ("2", "3")


def test_what_is_reserved_is_handed_over():
    placement = Placement(TWO)
    placement.place_all({"A #1": 0.5, "B #1": 1})
    assert placement.hand_over("A #1", "A-7") == ("1",)
    assert placement.hand_over("B #1", "B-8") == ("0",)
    assert placement.statistics() == {"0": {"B-8": 1.0}, "1": {"A-7": 0.5}}
    placement.release("A-7")
    assert placement.place("C-0", 1) == ("1",)


def test_a_replica_is_placed_once_and_released_any_number_of_times():
    placement = Placement(TWO)
    placement.place("A-0", 2)
    with pytest.raises(ResourceError, match="A-0 has its GPUs already"):
        placement.place("A-0", 0.5)
    placement.release("A-0")
    placement.release("A-0")
    assert placement.place("A-0", 2) == ("0", "1")


def test_all_are_placed_the_largest_first():
    # One at a time, in this order, the second share would take the device that B needs.
    requests = {"A-0": 0.6, "A-1": 0.4, "C-0": 0.0, "B-0": 1.0}
    assert Placement(TWO).place_all(requests) == {
        "A-0": ("1",),
        "A-1": ("1",),
        "C-0": (),
        "B-0": ("0",),
    }


def test_all_are_placed_or_none():
    placement = Placement(TWO)
    placement.place("X", 0.5)
    before = placement.statistics()
    with pytest.raises(ResourceError, match="A-1 asks gpu=1"):
        placement.place_all({"A-0": 1, "A-1": 1, "A-2": 0.1})
    assert placement.statistics() == before


gpus = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 3.0]), st.floats(0.01, 0.99))


@settings(deadline=None)
@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 8), st.one_of(st.none(), gpus)), max_size=40),
)
def test_no_device_is_ever_given_away_twice(count, steps):
    placement = Placement(tuple(Device(id=str(index)) for index in range(count)))
    held: dict[str, tuple[float, tuple[str, ...]]] = {}
    for number, gpu in steps:
        replica = f"A-{number}"
        if gpu is None or replica in held:
            placement.release(replica)
            held.pop(replica, None)
            continue
        used = {id_ for _, ids in held.values() for id_ in ids}
        try:
            ids = placement.place(replica, gpu)
        except ResourceError:
            free = count - len(used)
            assert free < max(gpu, 1)
            continue
        assert len(ids) == (gpu if gpu >= 1 else bool(gpu))
        assert gpu < 1 or not used & set(ids)
        if ids:
            held[replica] = (gpu, ids)
        for id_ in placement.statistics():
            total = sum(min(share, 1) for share, mine in held.values() if id_ in mine)
            assert placement.used(id_) == pytest.approx(total)
            assert total <= 1 + 1e-5
    for replica in list(held):
        placement.release(replica)
    assert all(not holders for holders in placement.statistics().values())
