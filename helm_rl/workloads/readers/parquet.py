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

_ROWS_AT_A_TIME = 1 << 16


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
        raise UserError(f"{path} is damaged or not a whole Parquet file: {_line(error)}") from None
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
    if "time" not in wanted and not arrivals:
        raise UserError(f"{path}: a log without times needs --arrivals RATE")
    size = path.stat().st_size
    rows = bad = told = 0
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            total = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(
                _ROWS_AT_A_TIME, columns=list(dict.fromkeys(wanted.values())), use_threads=False
            ):
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
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is damaged: {_line(error)}") from None
    columns.drops.check_file(path, rows, bad, "has no row in it")


def _cells_of(path: Path, name: str, column: Any, part: str, columns: Columns) -> Cells:
    """Write a column out as text, which is exact for every type taken here; empty cells are empty text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
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
    texts = pc.fill_null(column.cast(pa.large_string()), "")
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
        return book.add_texts(cells.data, cells.start, cells.end), lengths
    raise UserError(f"{path}: column {name} holds lists of {flat.type}, not of ids")


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
