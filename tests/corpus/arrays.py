"""`.npy` files and raw bytes for `triple(values: Array["float32", "N 2"], /)`."""

import io

import numpy as np

from tests.corpus.foreign import FOREIGN
from tests.corpus.nasty import Nasty, rows


def npy(header: bytes, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + body


def described(descr: str, shape: str, body: bytes = b"") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
    return npy(text.encode(), body)


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


GOOD = saved(np.zeros((3, 2), np.float32))

_NPY = rows(
    empty=b"",
    magic_only=b"\x93NUMPY",
    version_9=npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2)}", b"", b"\x09\x00"),
    header_of_4_gib=b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"{" * 100,
    header_cut=GOOD[:40],
    header_runs=npy(b"__import__('os')._exit(66)"),
    header_deep=npy(b"(" * 5000),
    header_no_dict=npy(b"[1, 2]"),
    header_more_keys=npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), 'x': 1}"),
    header_no_utf_8=npy(b"{'descr': '\xff'}"),
    body_cut=GOOD[:-1],
    body_too_long=GOOD + b"\0",
    negative_shape=described("'<f4'", "(-1, 2)", b"\0" * 8),
    negative_shapes=described("'<f4'", "(-1, -2)", b"\0" * 8),
    huge_shape=described("'<f4'", "(1000000000000, 2)"),
    huge_shapes=described("'<f4'", "(9223372036854775807, 9223372036854775807)"),
    shape_overflows=described("'<f4'", "(4294967296, 4294967296)", b"\0" * 16),
    shape_no_tuple=described("'<f4'", "3", b"\0" * 12),
    shape_of_floats=described("'<f4'", "(1.5, 2)", b"\0" * 12),
    shape_of_bools=described("'<f4'", "(True, 2)", b"\0" * 8),
    objects=described("'|O'", "(1, 2)", b"cos\n_exit\n(I66\ntR."),
    records=described("[('a', '<f4')]", "(1, 2)", b"\0" * 8),
    complex_numbers=saved(np.zeros((1, 2), np.complex64)),
    strings=saved(np.array([["a", "b"]])),
    dates=saved(np.zeros((1, 2), "datetime64[s]")),
    no_bytes=described("'<V0'", "(1, 2)"),
    other_byte_order_cut=described("'>f4'", "(3, 2)", b"\0" * 23),
    wrong_dtype=saved(np.zeros((1, 2), np.float64)),
    wrong_shape=saved(np.zeros((2, 3), np.float32)),
    wrong_rank=saved(np.zeros(2, np.float32)),
    too_many_dims=described("'<f4'", str((1,) * 40), b"\0" * 4),
)
NPY = [Nasty(n.name, n.body, "") for n in _NPY] + [
    Nasty(name, body, "") for name, body in FOREIGN.items()
]

RAW = [
    Nasty("one byte", b"\0", ""),
    Nasty("half a number", b"\0" * 10, ""),
    Nasty("half a row", b"\0" * 12, ""),
    *(Nasty(name, body, "") for name, body in FOREIGN.items() if len(body) % 8),
]
"""Any bytes that divide are numbers, so only the length can be wrong."""
