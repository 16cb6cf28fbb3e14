"""The generic reader of Parquet files: columns of whole numbers, text, times, or lists of ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from helm_rl.errors import UserError
from helm_rl.workloads.readers.mapping import Mapping
from helm_rl.workloads.readers.rows import Rows
from helm_rl.workloads.readers.source import Progress
from helm_rl.workloads.readers.tables import Cells, Columns
from helm_rl.workloads.trace import first_line

_ROWS_AT_A_TIME = 1 << 16
_VALUES_AT_A_TIME = 1 << 21  # of lists
_BYTES_AT_A_TIME = 64 << 20  # of what the file says its columns take


def names_of(path: Path) -> list[str]:
    """Return the columns of a Parquet file; raise UserError if it is damaged, or a trace already."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.names
            if b"helm_rl.trace" in (file.metadata.metadata or {}):
                raise UserError(f"{path} is a trace already; it needs no conversion")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged or not a whole Parquet file: {first_line(error)}") from None
    return list(found)


def read_parquet(
    path: Path, mapping: Mapping, columns: Columns, arrivals: bool, progress: Progress | None
) -> Iterator[Rows]:
    """Yield the rows of a Parquet file. Raises UserError for columns that are missing or of another type."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    there = names_of(path)
    optional = (*mapping.optional, *((mapping.time,) if arrivals else ()))
    wanted = {part: name for part, name in mapping.named().items() if name in there or name not in optional}
    for name in wanted.values():
        if name not in there:
            raise UserError(f"{path}: column {name} is missing (its columns: {', '.join(there[:12])})")
        if there.count(name) > 1:
            raise UserError(f"{path}: column {name} is there {there.count(name)} times; rename all but one")
    columns.see_unit("")
    columns.floats = False
    if "time" not in wanted and not arrivals:
        raise UserError(f"{path}: a log without times needs --arrivals RATE")
    size = path.stat().st_size
    rows = bad = told = 0
    try:
        names = list(dict.fromkeys(wanted.values()))
        with pq.ParquetFile(path, pre_buffer=False, read_dictionary=_texts_of(path, names)) as file:
            total = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(_batch_rows(file, names), columns=names, use_threads=False):
                batch.validate(full=True)
                n = batch.num_rows
                place = np.arange(rows + 1, rows + n + 1, dtype=np.int64)
                extra = Rows(np.zeros(0, dtype=np.int64))
                cells = {}
                for part, name in wanted.items():
                    column = batch.column(batch.schema.get_field_index(name))
                    kind = column.type
                    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
                        if part != "item":
                            raise UserError(f"{path}: column {name} holds lists, where {part} is one value")
                        extra.item, extra.lengths = _lists(path, name, column, columns)
                    else:
                        cells[part] = _cells_of(path, name, column, part, columns)
                part_rows, dropped = columns.take(path, cells, np.zeros(n, dtype=np.uint8), place, {}, extra)
                rows, bad = rows + n, bad + dropped
                if progress:
                    progress(size * rows // total - told)
                    told = size * rows // total
                if part_rows.time_ns.size:
                    yield part_rows
    except pa.ArrowMemoryError:
        raise MemoryError(f"{path}: a piece of it does not fit into memory") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {first_line(error)}") from None
    columns.see_unit("")
    columns.floats = False
    columns.drops.check_file(path, rows, bad, "has no row in it")


def _texts_of(path: Path, names: list[str]) -> list[str]:
    """Return the columns of text, which are read with each text once a batch: rows may share one of any length."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(path)
    kinds = {name: schema.field(name).type for name in names}
    return [name for name, kind in kinds.items() if pa.types.is_string(kind) or pa.types.is_large_string(kind)]


def _batch_rows(file: Any, names: list[str]) -> int:
    """Return how many rows are read at a time, by what the fullest row group says of its size and of its lists."""
    import pyarrow as pa

    kinds = {name: file.schema_arrow.field(name).type for name in names}
    lists = {name for name, kind in kinds.items() if pa.types.is_list(kind) or pa.types.is_large_list(kind)}
    leaves = [k for k in range(len(file.schema)) if file.schema.column(k).path.split(".")[0] in lists]
    most = _ROWS_AT_A_TIME
    for group in range(file.metadata.num_row_groups):
        part = file.metadata.row_group(group)
        rows = max(1, part.num_rows)
        most = min(most, _BYTES_AT_A_TIME * rows // max(1, part.total_byte_size))
        if leaves:  # read first, for that raises for a damaged footer, where asking for the meta data ends the process
            next(file.iter_batches(1, row_groups=[group], columns=list(lists), use_threads=False), None)
        for k in leaves:
            most = min(most, _VALUES_AT_A_TIME * rows // max(1, part.column(k).num_values))
    return max(1, most)


def _cells_of(path: Path, name: str, column: Any, part: str, columns: Columns) -> Cells:
    """Write a column out as text, which is exact for every type taken here; empty cells are empty text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_dictionary(kind):
        return _cells_of_dictionary(path, name, column, part, columns)
    if pa.types.is_floating(kind):
        column = _float_texts(name, column, part, columns)
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    elif pa.types.is_timestamp(kind) and part == "time":
        column = column.cast(pa.timestamp("ns")).cast(pa.int64())
        columns.see_unit("ns")
    known = (
        pa.types.is_integer,
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_floating,
        pa.types.is_boolean,
    )
    if not any(test(kind) for test in known) and not (pa.types.is_timestamp(kind) and part == "time"):
        raise UserError(f"{path}: column {name} holds {kind}, not whole numbers or text")
    return _cells(pc.fill_null(column.cast(pa.large_string()), ""))


def _cells_of_dictionary(path: Path, name: str, column: Any, part: str, columns: Columns) -> Cells:
    """Return cells that share the dictionary's bytes, so that a text that many rows have is there once."""
    import pyarrow as pa

    values = _cells_of(path, name, column.dictionary, part, columns)
    codes = column.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    start = np.append(values.start, np.int32(0))  # -1, no value, is the last: an empty text
    end = np.append(values.end, np.int32(0))
    return Cells(values.data, start[codes], end[codes])


def _float_texts(name: str, column: Any, part: str, columns: Columns) -> Any:
    """Write floats out exactly: whole ids as whole numbers, no id where there is no number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    narrow = column.type != pa.float64()
    column = column.cast(pa.float64())
    if part == "time":
        columns.floats = True  # an exponent in the text of one means nothing
        if narrow:
            columns.facts.note(f"{name} is kept as float32, 7 digits of each time: requests may fall together")
        return column
    texts = column.cast(pa.large_string())
    values = column.fill_null(np.nan).to_numpy(zero_copy_only=False)
    whole = (values == np.floor(values)) & (np.abs(values) < 2.0**63)
    digits = pa.array(np.where(whole, values, 0).astype(np.int64)).cast(pa.large_string())
    return pc.if_else(
        pa.array(whole), digits, pc.if_else(pa.array(np.isnan(values)), pa.scalar("", pa.large_string()), texts)
    )


def _cells(texts: Any) -> Cells:
    """Return a column of text, without nulls, as cells."""
    _, places, data = texts.buffers()
    ends = np.frombuffer(places, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    flat = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    return Cells(
        flat[ends[0] : ends[-1]], (ends[:-1] - ends[0]).astype(np.int32), (ends[1:] - ends[0]).astype(np.int32)
    )


def _lists(path: Path, name: str, column: Any, columns: Columns) -> tuple[Any, Any]:
    import pyarrow as pa

    if column.null_count or column.flatten().null_count:
        raise UserError(f"{path}: column {name} has empty cells")
    lengths = np.diff(column.offsets.to_numpy().astype(np.int64)).astype(np.int32)
    flat = column.flatten()
    book = columns.books.item
    if pa.types.is_integer(flat.type):
        signed = pa.types.is_signed_integer(flat.type)
        values = flat.cast(pa.int64() if signed else pa.uint64()).to_numpy(zero_copy_only=False)
        low = bool(signed and (values < 0).any())
        large = bool(not signed and (values >= 2**63).any())
        return book.add_numbers(np.ascontiguousarray(values).view(np.uint64), low, large), lengths
    if pa.types.is_string(flat.type) or pa.types.is_large_string(flat.type):
        cells = _cells_of(path, name, flat, "item", columns)
        if (cells.start == cells.end).any():
            raise UserError(f"{path}: column {name} has an empty text among its ids")
        return book.add_texts(cells.data, cells.start, cells.end), lengths
    raise UserError(f"{path}: column {name} holds lists of {flat.type}, not of ids")
