"""Files and bodies of other formats: no parser may take them for its own, or run them."""

import io
import os
import pickle
import tarfile
import zipfile

import msgspec
import numpy as np


class Bomb:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return (os._exit, (66,))


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../etc/passwd", b"\0" * 1_000_000)
    return file.getvalue()


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("/etc/passwd"))
    return file.getvalue()


def _npy_of_objects() -> bytes:
    file = io.BytesIO()
    array = np.empty(1, dtype=object)
    array[0] = Bomb()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def _npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


FOREIGN = {
    "pickle 0": pickle.dumps(Bomb(), 0),
    "pickle 2": pickle.dumps(Bomb(), 2),
    "pickle 5": pickle.dumps(Bomb(), 5),
    "npy of objects": _npy_of_objects(),
    "npz": _npz(),
    "zip with a traversal, 1000:1": _zip(),
    "tar.gz with an absolute path": _tar(),
    "gzip header": b"\x1f\x8b\x08\0\0\0\0\0\0\3",
    "elf": b"\x7fELF\2\1\1" + b"\0" * 57,
    "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\xff\xff\xff\xff\xff\xff\xff\x08\6\0\0\0",
    "parquet": b"PAR1\x15\x04\x15\xff\xff\xff\xff\x0fPAR1",
    "arrow stream": b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    "html": b"<!doctype html><script>1</script>",
    "xml with entities": b'<!DOCTYPE x [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><x>&b;</x>',
    "yaml that runs": b"!!python/object/apply:os._exit [66]",
    "form": b"box=1&times=2",
    "multipart": b'--b\r\ncontent-disposition: form-data; name="box"\r\n\r\n{}\r\n--b--\r\n',
    "http": b"POST /area HTTP/1.1\r\nhost: x\r\n\r\n",
    "noise": bytes(range(256)),
    "nul": b"\0" * 1000,
}
"""By name."""

packed = msgspec.msgpack.encode
