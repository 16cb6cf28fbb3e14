"""Reader of KuaiRand logs: comma-separated rows, one video shown to one user, several rows to a request.

Format: https://github.com/chongminggao/KuaiRand. A request is the rows that share user and time. The text is read in
chunks of whole lines, each parsed by Arrow; a chunk that Arrow refuses is searched for the line at fault.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from helm_rl.errors import UserError
from helm_rl.workloads.readers.arrivals import ReadOptions, place
from helm_rl.workloads.trace import Int64Array, Trace, TraceMeta, gather, running_total

_CHUNK_BYTES = 16 << 20
_MAX_LINE_BYTES = 1 << 20
_MS = 1_000_000
_MAX_MS = 2**63 // _MS - 1
_NEEDED = ("user_id", "video_id", "time_ms")
_TENANT = "tab"
_WHOLE = re.compile(r"[ \t]*-?[0-9]{1,19}[ \t]*")
_SECONDS_BELOW_MS = 100_000_000_000  # 1973: no log of video views is older


def read(paths: list[Path], options: ReadOptions) -> Trace:
    """Read the files of one log, in any order, as one. Raises UserError naming file, line and field of a fault.

    Content is "items": a user's history is his rows so far. Rows that repeat (user_id, video_id, time_ms) are dropped
    and counted. The tenant is `tab`, that of a request's first row, or 0 if the log has no such column.
    """
    tables = [_read_file(path, options) for path in paths]
    user_id, video_id, time_ms, tab = (np.concatenate(columns) for columns in zip(*tables, strict=True))
    rows = time_ms.size

    order = np.lexsort((user_id, time_ms))  # stable: rows of a request stay in the log's order
    user_id, video_id, time_ms, tab = user_id[order], video_id[order], time_ms[order], tab[order]
    opens = np.ones(rows, dtype=bool)
    opens[1:] = (time_ms[1:] != time_ms[:-1]) | (user_id[1:] != user_id[:-1])
    kept = _first_of_repeats(np.cumsum(opens), video_id)
    repeats = rows - int(np.count_nonzero(kept))
    # The first row of a request is never a repeat, so that `opens` still marks every request.
    user_id, video_id, time_ms, tab, opens = (column[kept] for column in (user_id, video_id, time_ms, tab, opens))
    first = np.flatnonzero(opens)
    offsets = np.append(first, opens.size).astype(np.int64)

    steps = [f"{rows} rows in {first.size} requests: rows that share user_id and time_ms"]
    early = _times_early(tables)
    if early:
        steps.append(f"sorted by time: {early} of {rows} rows came before the one above them")
    if int(np.median(time_ms)) < _SECONDS_BELOW_MS:
        steps.append("time_ms lies before 1973: is it in seconds?")
    placed = place(time_ms[first] * _MS, _MS, options)
    offsets, videos = gather(offsets, video_id, placed.order)
    user_ids, user = np.unique(user_id[first][placed.order], return_inverse=True)
    item_ids, items = np.unique(videos, return_inverse=True)
    user, items = user.astype(np.int64), items.astype(np.int64)
    new_tokens = np.diff(offsets)
    history = running_total(user, new_tokens)
    if history.max() >= 2**31:
        raise UserError(f"{paths[0]}: one user has {history.max()} rows; a history holds at most {2**31 - 1}")
    dropped = dict(placed.dropped)
    if repeats:
        dropped["rows that repeat user_id, video_id and time_ms"] = repeats
    return Trace(
        arrival_ns=placed.arrival_ns,
        user=user,
        tenant=tab[first][placed.order].astype(np.int32),
        phase=np.zeros(user.size, dtype=np.int32),
        history_tokens=history.astype(np.int32),
        new_tokens=new_tokens.astype(np.int32),
        item_offsets=offsets,
        item_values=items,
        user_ids=user_ids,
        item_ids=item_ids,
        meta=TraceMeta(
            name=paths[0].stem,
            source="kuairand",
            origin_ns=placed.origin_ns,
            measure_from_ns=placed.measure_from_ns,
            users=user_ids.size,
            items=item_ids.size,
            content="items",
            phases=(placed.phase,),
            seed=options.seed if options.spread else None,
            steps=(*steps, *placed.steps),
            dropped=dropped,
        ),
    )


def _first_of_repeats(request: Int64Array, video: Int64Array) -> Any:
    """Return which rows are the first of their (request, video); bool (rows,)."""
    order = np.lexsort((video, request))
    repeat = np.zeros(request.size, dtype=bool)
    repeat[1:] = (request[order][1:] == request[order][:-1]) & (video[order][1:] == video[order][:-1])
    kept = np.empty(request.size, dtype=bool)
    kept[order] = ~repeat
    return kept


def _times_early(tables: list[tuple[Int64Array, ...]]) -> int:
    time_ms = np.concatenate([table[2] for table in tables])
    return int(np.count_nonzero(time_ms[1:] < time_ms[:-1]))


def _read_file(path: Path, options: ReadOptions) -> tuple[Int64Array, ...]:
    """Return user_id, video_id, time_ms and tab of all rows, each int64 (rows,)."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    with open(path, "rb") as file:
        names = _header(path, file)
        wanted = [*_NEEDED, *((_TENANT,) if _TENANT in names else ())]
        convert = arrow_csv.ConvertOptions(
            include_columns=wanted,
            column_types={name: pa.int64() for name in wanted},
            null_values=[],
            strings_can_be_null=False,
        )
        parts: list[list[Int64Array]] = []
        line = 2
        for chunk in _chunks(path, file, options):
            if b"\0" in chunk or not chunk.isascii():
                _refuse_binary(path, chunk, line)
            if chunk.strip():
                try:
                    table = arrow_csv.read_csv(
                        pa.BufferReader(chunk),
                        read_options=arrow_csv.ReadOptions(column_names=names),
                        convert_options=convert,
                    )
                except pa.ArrowException as error:
                    _explain(path, chunk, line, names, wanted, str(error))
                parts.append([table[name].to_numpy() for name in wanted])
                _check_ranges(path, chunk, line, names, wanted, parts[-1])
            line += chunk.count(b"\n")
    if not parts:
        raise UserError(f"{path} has a header and no row below it")
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    if len(columns) == len(_NEEDED):
        columns.append(np.zeros(columns[0].size, dtype=np.int64))
    return tuple(columns)


def _header(path: Path, file: BinaryIO) -> list[str]:
    """Read the first line, and check that it is the header of such a log."""
    line = file.readline(_MAX_LINE_BYTES)
    try:
        text = line.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise UserError(f"{path}, line 1: not UTF-8 text; a KuaiRand log is a CSV file") from None
    names = [name.strip().strip('"') for name in text.split(",")]
    missing = [name for name in _NEEDED if name not in names]
    short = text if len(text) <= 160 else text[:157] + "..."
    if missing:
        for separator, word in ((";", "';'"), ("\t", "a tab"), ("|", "'|'"), ("::", "'::'"), (" ", "a space")):
            if set(_NEEDED) <= {name.strip().strip('"') for name in text.split(separator)}:
                raise UserError(f"{path}, line 1: columns are separated by {word}; a KuaiRand log has ','")
        if re.fullmatch(r'"?-?\d+(\.\d+)?"?', names[0]):
            raise UserError(f"{path}, line 1: a header is missing, the first line is data ({short})")
        raise UserError(f"{path}, line 1: column {missing[0]} is missing from the header found ({short})")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}, line 1: column {name} is there {names.count(name)} times")
    return names


def _chunks(path: Path, file: BinaryIO, options: ReadOptions) -> Any:
    """Yield the rest of the file in pieces of whole lines."""
    rest = b""
    while data := file.read(_CHUNK_BYTES):
        if options.progress:
            options.progress(len(data))
        cut = data.rfind(b"\n") + 1
        if cut == 0:
            rest += data
            if len(rest) > _CHUNK_BYTES + _MAX_LINE_BYTES:
                raise UserError(f"{path}: a line is longer than {_CHUNK_BYTES >> 20} MiB; a KuaiRand log is a CSV file")
            continue
        yield rest + data[:cut]
        rest = data[cut:]
    if rest:
        yield rest


def _refuse_binary(path: Path, chunk: bytes, line: int) -> None:
    """Raise for what is not text, naming the line; text beyond ASCII is none of a log's numbers, but legal."""
    zero = chunk.find(b"\0")
    try:
        chunk.decode("utf-8")
        bad = zero
    except UnicodeDecodeError as error:
        bad = error.start if zero < 0 else min(zero, error.start)
    if bad >= 0:
        raise UserError(f"{path}, line {line + chunk.count(bytes([10]), 0, bad)}: not UTF-8 text")


def _check_ranges(
    path: Path, chunk: bytes, line: int, names: list[str], wanted: list[str], columns: list[Int64Array]
) -> None:
    time_ms = columns[2]
    fits = time_ms.min() >= -_MAX_MS and time_ms.max() <= _MAX_MS
    if len(columns) > len(_NEEDED):
        fits = fits and columns[3].min() >= 0 and columns[3].max() < 2**31
    if not fits:
        _explain(path, chunk, line, names, wanted, "a number is out of range")


def _explain(path: Path, chunk: bytes, line: int, names: list[str], wanted: list[str], reason: str) -> NoReturn:
    """Search a refused chunk line by line, and raise for the first one at fault."""
    for number, raw in enumerate(chunk.split(b"\n"), start=line):
        text = raw.decode("utf-8").removesuffix("\r")
        if not text:
            continue
        try:
            cells = next(csv.reader(io.StringIO(text, newline="")), [])
        except csv.Error:
            raise UserError(f"{path}, line {number}: not a row of a CSV file: {text[:60]!r}") from None
        if len(cells) != len(names):
            last = number == line + chunk.count(b"\n")  # and no newline after it
            cut = " (is the file cut off here?)" if last and len(cells) < len(names) else ""
            raise UserError(f"{path}, line {number}: {len(cells)} columns, where the header has {len(names)}{cut}")
        for name in wanted:
            cell = cells[names.index(name)]
            low, high = -(2**63), 2**63 - 1
            if name == "time_ms":
                low, high = -_MAX_MS, _MAX_MS
            elif name == _TENANT:
                low, high = 0, 2**31 - 1
            if not _WHOLE.fullmatch(cell):
                what = "a whole number of milliseconds" if name == "time_ms" else "a whole number"
                shown = repr(cell if len(cell) <= 40 else cell[:37] + "...") if cell else "an empty cell"
                raise UserError(f"{path}, line {number}, field {name}: {shown} is not {what}")
            if not low <= int(cell) <= high:
                raise UserError(f"{path}, line {number}, field {name}: {cell} is outside {low}..{high}")
    raise UserError(f"{path}, lines {line} to {line + chunk.count(bytes([10]))}: {reason.splitlines()[0][:200]}")
