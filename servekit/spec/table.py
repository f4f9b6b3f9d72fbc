"""Tables as a type of parameters and results: `pandas.DataFrame` and `pyarrow.Table`.

They travel as an Arrow stream, as CSV, or in JSON as one object for each row. pyarrow is imported by
the calls, never by this module. Bodies are hostile: what was read is validated in full, and a stream
with compressed buffers is refused, as it would say by itself how much memory it wants.
"""

import io
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal, cast

from servekit.core.call import BINARY, Buffer
from servekit.errors import SpecError
from servekit.spec.media import Media
from servekit.spec.raw import CSV, RawError

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


@dataclass(frozen=True)
class TableMedia(Media):
    """Of a table hint.

    Attributes:
        library: What the method gets.
    """

    library: Literal["pandas", "pyarrow"]

    form = "table"
    wanted = "a list of rows, each an object"
    json_schema: ClassVar[dict[str, Any]] = {
        "type": "array",
        "items": {"type": "object"},
        "description": "A table: one object for each row.",
    }

    def read_raw(self, media_type: str, data: Buffer) -> Any:
        """Read an Arrow stream or CSV.

        Raises:
            RawError: It is none.
        """
        pa = _arrow()
        try:
            if media_type == CSV:
                table = pa.csv.read_csv(io.BytesIO(data))
            else:
                for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(data)):
                    if is_compressed(message.metadata.to_pybytes()):
                        raise RawError("table_compressed", "send the Arrow stream uncompressed")
                table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
                table.validate(full=True)
        except (pa.ArrowException, struct.error, IndexError, OSError, ValueError) as error:
            if isinstance(error, RawError):
                raise
            name = "CSV" if media_type == CSV else "an Arrow stream"
            raise RawError("table_type", f"wanted {name}: {str(error)[:200]}") from None
        return self._own(table)

    def write_raw(self, media_type: str, value: Any) -> bytes:
        """Write an Arrow stream, or CSV."""
        pa = _arrow()
        table = self._to_arrow(value)
        into = io.BytesIO()
        if media_type == CSV:
            pa.csv.write_csv(table, into)
        else:
            with pa.ipc.new_stream(into, table.schema) as stream:
                stream.write_table(table)
        return into.getvalue()

    def check(self, value: object) -> None:
        """Check that a value is a table of the declared library."""
        if not isinstance(value, _type(self.library)):
            raise RawError(
                "table_type", f"wanted a {self.library} table, got {type(value).__name__}"
            )

    def from_tree(self, value: Any) -> Any:
        """Return the table of rows in JSON."""
        pa = _arrow()
        rows = cast("list[object]", value) if isinstance(value, list) else [None]
        if not all(isinstance(row, dict) for row in rows):
            raise RawError("table_type", f"wanted {self.wanted}")
        try:
            return self._own(pa.Table.from_pylist(rows))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise RawError("table_type", f"the rows make no table: {str(error)[:200]}") from None

    def to_tree(self, value: Any) -> Any:
        """Return a table's rows."""
        return self._to_arrow(value).to_pylist()

    def get(self, holder: dict[str, Any], data: Any) -> Any:
        """Return the table of a stand-in and its segment; a form's part says if it is CSV."""
        if getattr(data, "content_type", BINARY) == CSV or str(getattr(data, "name", "")).endswith(
            ".csv"
        ):
            return self.read_raw(CSV, data.read())
        return super().get(holder, data)

    def _own(self, table: Any) -> Any:
        return table.to_pandas() if self.library == "pandas" else table

    def _to_arrow(self, value: Any) -> Any:
        pa = _arrow()
        if self.library == "pyarrow":
            return value
        return pa.Table.from_pandas(value, preserve_index=False)


def table_media(hint: Any) -> TableMedia | None:
    """Return the media of a hint that is a table type, or None.

    Raises:
        SpecError: pyarrow, by which all tables travel, is missing.
    """
    if hint is _type("pyarrow"):
        return TableMedia("pyarrow")
    if hint is not _type("pandas"):
        return None
    try:
        _arrow()
    except ImportError:
        raise SpecError("tables travel by way of pyarrow; pip install pyarrow") from None
    return TableMedia("pandas")


def _arrow() -> Any:
    """Return pyarrow, which has no types of its own."""
    import_module("pyarrow.csv")
    return import_module("pyarrow")


def _type(library: Literal["pandas", "pyarrow"]) -> Any:
    name = {"pandas": "DataFrame", "pyarrow": "Table"}[library]
    return getattr(sys.modules.get(library), name, _Never)


class _Never:
    """Stands for the type of a library that nobody has imported."""


def is_compressed(metadata: bytes) -> bool:
    """Return whether a message of an Arrow stream has compressed buffers.

    Reads just that out of its flatbuffer. Source: Arrow columnar format, `Message.fbs`; FlatBuffers
    internals, "Tables".

    Raises:
        struct.error: It is no flatbuffer.
    """
    root = _u32(metadata, 0)
    kinds = list(_field(metadata, root, 1))
    kind = metadata[kinds[0]] if kinds else 0
    for batch in _table(metadata, root, 2):
        if kind == _RECORD_BATCH:
            return any(_field(metadata, batch, 3))
        if kind == _DICTIONARY_BATCH:
            return any(any(_field(metadata, data, 3)) for data in _table(metadata, batch, 1))
    return False


def _u32(data: bytes, at: int) -> int:
    value: int = struct.unpack_from("<I", data, at)[0]
    return value


def _field(data: bytes, table: int, number: int) -> Iterator[int]:
    """Yield where a table's field is, if it is there."""
    vtable: int = table - struct.unpack_from("<i", data, table)[0]
    size: int = struct.unpack_from("<H", data, vtable)[0]
    if 4 + 2 * number < size:
        offset: int = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
        if offset:
            yield table + offset


def _table(data: bytes, table: int, number: int) -> Iterator[int]:
    """Yield where the table is that a table's field refers to, if it is there."""
    for at in _field(data, table, number):
        yield at + _u32(data, at)
