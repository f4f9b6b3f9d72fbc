"""MessagePack for `double(values: Array["float32", "N 2"])`: ext type 1 is an array."""

import msgspec

from tests.corpus.foreign import FOREIGN
from tests.corpus.nasty import Nasty, rows

pack = msgspec.msgpack.encode


def ext(code: int, data: bytes) -> bytes:
    return pack({"values": msgspec.msgpack.Ext(code, data)})


def array(dtype: object, shape: object, data: bytes = b"") -> bytes:
    header = pack([dtype, shape])
    return ext(1, len(header).to_bytes(2, "little") + header + data)


MSGPACK = [
    *rows(
        never_used=b"\xc1",
        half=b"\x81\xa6values",
        deep=b"\x91" * 100_000,
        deep_maps=b"\x81\xa1a" * 100_000,
        array_of_4_gib=b"\x81\xa6values\xdd\xff\xff\xff\xff",
        map_of_4_gib=b"\xdf\xff\xff\xff\xff",
        bytes_of_4_gib=b"\x81\xa6values\xc6\xff\xff\xff\xff",
        text_of_4_gib=b"\xdb\xff\xff\xff\xff",
        ext_of_4_gib=b"\x81\xa6values\xc9\xff\xff\xff\xff\x01",
        text_no_utf_8=b"\x81\xa6values\xa1\xff",
        key_no_text=(b"\x81\xc0\x01", "values"),
        key_is_a_map=b"\x81\x80\x01",
        tail=pack({"values": [[1.0, 2.0]]}) + b"\x00",
        unknown_ext=ext(2, b"x"),
        timestamp=b"\x81\xa6values\xd6\xff\x00\x00\x00\x00" + b"\x00",
        ext_empty=ext(1, b""),
        ext_header_cut=ext(1, b"\xff\xff"),
        ext_header_null=ext(1, b"\x01\x00\xc0"),
        ext_header_deep=ext(1, b"\x10\x27" + b"\x91" * 10_000),
        negative_shape=array("float32", [-1, 2]),
        huge_shape=array("float32", [2**62, 2]),
        huge_shapes=array("float32", [2**62, 2**62, 2**62]),
        shape_that_overflows=array("float32", [2**32, 2**32], b"\0" * 16),
        none_of_many=array("float32", [0, 2**63 - 1]),
        too_many_dims=array("float32", [1] * 40, b"\0" * 4),
        shape_of_text=array("float32", ["2", "2"], b"\0" * 16),
        shape_of_floats=array("float32", [1.5, 2], b"\0" * 12),
        shape_no_list=array("float32", 2, b"\0" * 8),
        objects=array("object", [1], b"\0" * 8),
        object_code=array("|O", [1], b"\0" * 8),
        other_byte_order=array(">f4", [1, 2], b"\0" * 8),
        records=array("f4,f4", [1], b"\0" * 8),
        complex_numbers=array("complex64", [1, 1], b"\0" * 8),
        strings=array("U10", [1], b"\0" * 40),
        dtype_no_text=array(4, [1, 2], b"\0" * 8),
        dtype_long=array("f" * 60_000, [1, 2], b"\0" * 8),
        too_few_bytes=array("float32", [2, 2], b"\0" * 15),
        too_many_bytes=array("float32", [2, 2], b"\0" * 17),
        wrong_dtype=(array("float64", [1, 2], b"\0" * 16), "values"),
        wrong_shape=(array("float32", [2, 3], b"\0" * 24), "values"),
        wrong_rank=(array("float32", [2], b"\0" * 8), "values"),
        nan=(pack({"values": [[1.0, float("nan")]]}), "values[0][1]"),
        infinite=(pack({"values": [[float("inf"), 1.0]]}), "values[0][0]"),
        ragged=(pack({"values": [[1.0, 2.0], [1.0]]}), "values[1]"),
        text=(pack({"values": "[[1, 2]]"}), "values"),
        bytes_for_an_array=(pack({"values": b"\0" * 16}), "values"),
        null=(pack({"values": None}), "values"),
        stand_in=(
            pack({"values": {"$servekit:segment": 0, "dtype": "float32", "shape": [1, 2]}}),
            "values",
        ),
        missing=(pack({}), "values"),
        unknown=(pack({"values": [[1.0, 2.0]], "x": 1}), "x"),
        not_a_map=(pack([]), ""),
    ),
    *(Nasty(name, body) for name, body in FOREIGN.items()),
]
