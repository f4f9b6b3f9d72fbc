"""Buffers that are about to be filled anyway."""

import ctypes

_new = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)


def room(size: int) -> bytearray:
    """Return a bytearray of `size` bytes with anything in it: fill all of it before it is read.

    `bytearray(size)` writes zeros first, which for a large array costs as much as one more copy.
    """
    made: bytearray = _new(None, size)
    return made
