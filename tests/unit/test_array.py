"""Array annotations: what they say, what they let in, and what they refuse."""

import io
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter, ValidationError

from servekit.errors import SpecError
from servekit.spec.array import Array, spec_of
from servekit.spec.tensor import (
    ITEM_BYTES,
    ArrayError,
    from_buffer,
    from_lists,
    read_npy,
    to_buffer,
    write_npy,
)

arrays = hnp.arrays(
    dtype=st.sampled_from([*ITEM_BYTES]), shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)
)


def from_json(spec, value):
    return TypeAdapter(spec).validate_json(json.dumps(value))


# ---- the annotation


def test_it_reads_as_what_it_says():
    assert str(Array["float32", "N 3 224 224"]) == "float32 of shape (N, 3, 224, 224)"
    assert str(Array["int8", "N"]) == "int8 of shape (N,)"
    assert str(Array["bool", ""]) == "bool of shape ()"
    assert str(Array["any", "... 3"]) == "any dtype of shape (..., 3)"
    assert Array["float32"] == Array["float32", "..."]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (("float31", "N"), "Did you mean 'float32'"),
        (("complex64", "N"), "unknown dtype"),
        (("float32", "N,3"), "separated by blanks"),
        (("float32", "N ..."), "first token"),
        (("float32", "-1"), "is no dim"),
        (("float32", 3), "as text"),
        (("float32", "N", "M"), "as text"),
        (("float32", "a " * 33), "over 32 dims"),
    ],
)
def test_a_bad_annotation_is_refused_where_it_is_written(item, message):
    with pytest.raises(SpecError, match=message):
        Array[item]


def test_it_composes_with_other_types():
    spec = Array["float32", "2"]
    for hint in (spec | None, None | spec, list[spec], dict[str, spec], Annotated[Any, spec]):
        TypeAdapter(hint)
    assert from_json(spec | None, None) is None


def test_it_works_as_a_field_of_models_and_dataclasses():
    class Model(BaseModel):
        x: Array["float32", "2"]
        y: Annotated[np.ndarray, Array["int8", "N"]]

    @dataclass
    class Data:
        x: Annotated[NDArray[np.float32], Array["any", "2"]]

    model = Model.model_validate_json('{"x": [1, 2], "y": [3]}')
    assert model.x.dtype == np.float32
    assert model.y.dtype == np.int8
    assert TypeAdapter(Data).validate_json('{"x": [1, 2]}').x.dtype == np.float32


def test_plain_hints():
    assert str(spec_of(np.ndarray)) == "any dtype of shape (...)"
    assert str(spec_of(NDArray[np.float32])) == "float32 of shape (...)"
    assert str(spec_of(np.ndarray[Any, np.dtype[np.int8]])) == "int8 of shape (...)"
    assert spec_of(NDArray[Any]) == spec_of(NDArray[np.floating]) == spec_of(np.ndarray)
    assert spec_of(int) is None
    with pytest.raises(SpecError, match="complex64 can't travel"):
        spec_of(NDArray[np.complex64])


def test_annotated_must_agree():
    spec = Array["float32", "N"]
    assert spec.narrowed(NDArray[np.float32]) == spec
    assert Array["any", "N"].narrowed(NDArray[np.float32]) == spec
    with pytest.raises(SpecError, match="the type says float64"):
        spec.narrowed(NDArray[np.float64])
    with pytest.raises(SpecError, match="describes arrays"):
        spec.narrowed(int)


# ---- values


@pytest.mark.parametrize(
    ("dims", "good", "bad"),
    [
        ("N 3", [(0, 3), (5, 3)], [(3,), (3, 4), (1, 2, 3), ()]),
        ("", [()], [(1,)]),
        ("N N", [(2, 2)], [(2, 3)]),
        ("... 3", [(3,), (2, 3), (4, 2, 3)], [(), (2,)]),
        ("...", [(), (1, 2)], []),
    ],
)
def test_shapes(dims, good, bad):
    spec = Array["float32", dims]
    for shape in good:
        spec.check(np.zeros(shape, np.float32))
    for shape in bad:
        with pytest.raises(ArrayError, match=r"wanted float32 of shape .*, got shape"):
            spec.check(np.zeros(shape, np.float32))


def test_nothing_is_cast():
    spec = Array["float32", "N"]
    for value, message in [
        (np.zeros(2), "wanted dtype float32, got float64"),
        ([1.0, 2.0], "wanted a numpy array .*, got list"),
        (None, "got NoneType"),
    ]:
        with pytest.raises(ArrayError, match=message):
            spec.check(value)
    with pytest.raises(ArrayError, match="wanted dtype one of bool"):
        Array["any", "N"].check(np.array(["a"]))


def test_a_scalar_of_numpy_is_an_array_without_dims():
    Array["float32", ""].check(np.float32(3))


# ---- JSON lists


@pytest.mark.parametrize(
    ("dtype", "dims", "value", "wanted"),
    [
        ("float32", "N", [1, 2.5], [1, 2.5]),
        ("float64", "", 3, 3.0),
        ("uint64", "N", [2**64 - 1], [2**64 - 1]),
        ("int64", "N", [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        ("bool", "N", [True, False], [True, False]),
        ("float32", "N 2", [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ("float16", "N", [65504], [65504]),
    ],
)
def test_lists(dtype, dims, value, wanted):
    got = from_json(Array[dtype, dims], value)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, np.array(wanted, dtype))


def test_an_empty_list_has_the_declared_dims_below():
    assert from_json(Array["float32", "N 3"], []).shape == (0, 3)
    assert from_json(Array["float32", "N M"], []).shape == (0, 0)
    with pytest.raises(ValidationError, match="got shape"):
        from_json(Array["float32", "2 3"], [])


def test_without_a_dtype_the_values_choose():
    spec = Array["any", "..."]
    assert from_json(spec, [[1, 2]]).dtype == np.int64
    assert from_json(spec, [1, 2.0]).dtype == np.float64
    assert from_json(spec, [True]).dtype == np.bool_
    assert from_json(spec, []).dtype == np.float64


@pytest.mark.parametrize(
    ("dtype", "value", "path", "message"),
    [
        ("float32", [1, True], (1,), "valid number"),
        ("float32", [1, "2"], (1,), "valid number"),
        ("float32", [[1], [None]], (1, 0), "valid number"),
        ("float32", [[1, 2], [3]], (1,), "wanted 2 items, got 1"),
        ("float32", [[[1], [2]], [[1], [2, 3]]], (1, 1), "wanted 1 items, got 2"),
        ("float32", [0, 1e39], (1,), "doesn't fit into float32"),
        ("float16", [[0, 65520]], (0, 1), "doesn't fit into float16"),
        ("int8", [1, 128], (1,), "less than or equal to 127"),
        ("uint8", [-1], (0,), "greater than or equal to 0"),
        ("uint64", [2**64], (0,), "less than or equal"),
        ("int32", [1, 2.0], (1,), "valid integer"),
        ("int32", [True], (0,), "valid integer"),
        ("bool", [1], (0,), "valid boolean"),
        ("any", [1, True], (1,), "valid number"),
        ("any", [2**63], (), "doesn't fit into int64"),
        ("any", [10**400], (0,), "valid number"),
        ("float32", [[1], 2], (1,), "valid array"),
        ("float32", {"a": 1}, (), "wanted an array"),
        ("float32", None, (), "valid number"),
    ],
)
def test_lists_refused(dtype, value, path, message):
    with pytest.raises(ValidationError, match=message) as caught:
        from_json(list[Array[dtype, "..."]], [value])
    (error,) = caught.value.errors()
    assert error["loc"] == (0, *path)


def test_deep_lists_are_refused():
    value = 1
    for _ in range(40):
        value = [value]
    with pytest.raises(ArrayError, match="nested deeper"):
        from_lists(value, "float32")


# ---- bytes


@given(arrays)
def test_bytes_round_trip_without_a_copy(array):
    data = to_buffer(array)
    assert data.nbytes == array.nbytes
    back = from_buffer(data, array.dtype.name, array.shape)
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()
    if array.ndim and array.size:
        assert np.shares_memory(back, data)
        assert np.shares_memory(data, array)


@given(arrays)
def test_npy_round_trip(array):
    back = read_npy(write_npy(array))
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()


def test_strided_and_big_endian_arrays_are_put_in_order():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert bytes(to_buffer(array.T)) == array.T.copy().tobytes()
    assert bytes(to_buffer(array.astype(">i4"))) == array.tobytes()


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "|b1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_any_order(dtype, order):
    array = np.asarray(np.arange(24).reshape(2, 3, 4), dtype=dtype, order=order)
    file = io.BytesIO()
    np.save(file, array)
    back = read_npy(memoryview(file.getvalue()))
    np.testing.assert_array_equal(back, array)
    assert back.dtype == np.dtype(dtype).newbyteorder("=")


def npy(header: bytes, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"PK\x03\x04",
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", b"\0" * 8),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", b"\0" * 13),
        npy(b"{'descr': '>f4', 'fortran_order': False, 'shape': (3,)}", b"\0" * 13),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", b"\0" * 4),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -1)}", b"\0" * 4),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1000000)}"),
        npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"cos\nsystem\n."),
        npy(b"{'descr': '<c8', 'fortran_order': False, 'shape': (1,)}", b"\0" * 8),
        npy(b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", b"\0" * 4),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': 3}", b"\0" * 12),
        npy(b"__import__('os')"),
        npy(b"(" * 5000),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", b"\0" * 4, b"\x09\x00"),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"{" * 100,
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")
def test_hostile_npy(data):
    with pytest.raises(ArrayError):
        read_npy(data)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", [-1]),
        ("float32", [2**62, 2**62]),
        ("float32", [3]),
        ("object", [1]),
        ("float32", [1] * 33),
        ("float32", [0, 2**63]),
    ],
)
def test_hostile_shapes_are_refused_before_anything_is_allocated(dtype, shape):
    data = b"" if 0 in shape else b"\0" * 4 * (len(shape) == 33) or b"\0" * 8
    with pytest.raises(ArrayError):
        from_buffer(data, dtype, shape)


def test_raw_bytes_find_one_free_dim():
    spec = Array["float32", "N 3"]
    assert spec.from_raw(bytes(24)).shape == (2, 3)
    assert Array["float32", "2 3"].from_raw(bytes(24)).shape == (2, 3)
    assert Array["float32", ""].from_raw(bytes(4)).shape == ()
    assert spec.from_raw(b"").shape == (0, 3)
    with pytest.raises(ArrayError, match="takes a multiple of 12 bytes, got 25"):
        spec.from_raw(bytes(25))
    with pytest.raises(ArrayError, match="takes 24 bytes, got 25"):
        Array["float32", "2 3"].from_raw(bytes(25))
    for dims in ("N M", "N N", "...", "... 3"):
        with pytest.raises(ArrayError, match="don't say which shape"):
            Array["float32", dims].from_raw(bytes(24))
    with pytest.raises(ArrayError):
        Array["float32", "N 0"].from_raw(bytes(24))


# ---- torch


@pytest.mark.slow
def test_torch_tensors():
    import torch  # here, since it takes seconds

    spec = spec_of(torch.Tensor)
    assert spec.library == "torch"
    assert Array["float32", "N"].narrowed(torch.Tensor).library == "torch"
    got = from_json(spec, [[1.0, 2.0]])
    assert isinstance(got, torch.Tensor)
    got += 1  # Its memory is its own.
    TypeAdapter(spec).validate_python(got)
    assert json.loads(TypeAdapter(spec).dump_json(got.requires_grad_())) == [[2.0, 3.0]]
    read_only = spec.from_raw if spec.dtype else spec.own
    assert isinstance(read_only(from_buffer(bytes(8), "float32", [2])), torch.Tensor)
    with pytest.raises(ArrayError, match="got bfloat16"):
        spec.check(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ArrayError, match=r"wanted a torch\.Tensor"):
        spec.check(np.zeros(2))
    with pytest.raises(ArrayError, match="wanted a numpy array"):
        Array["float32", "N"].check(torch.zeros(2))


def test_importing_the_module_imports_neither_numpy_nor_pydantic():
    import subprocess

    code = (
        "import sys, servekit.spec.array, servekit.spec.schema, servekit.spec.item\n"
        "servekit.spec.array.Array['float32', 'N']\n"
        "sys.exit(bool({'numpy', 'pydantic', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
