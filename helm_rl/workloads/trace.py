"""The trace: requests in columns, what is known about them, and their form on disk (Parquet).

One Parquet row is one request. Tables of another length (the dictionaries from codes to source ids, feature
tables) are cut into as many consecutive lists as there are rows, one list a row: a reader that concatenates
a list column has the table back.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helm_rl.errors import UserError
from helm_rl.files import atomic_file, refuse_existing
from helm_rl.memory import free_bytes

FORMAT_VERSION = 1
ROW_GROUP = 65_536  # requests
_GROUP_VALUES = 1 << 22  # items, beyond which a row group has fewer requests
SEGMENT_NS = 60_000_000_000
MOST_SEGMENTS = 100_000  # 69 days of 60 s
BASE = "base"

CANDIDATES = "candidates"
"""The feature table, int64 (requests, n), of the items that each request scores, where a log was given candidates."""

_META_KEY = b"helm_rl.trace"
_MAX_META_BYTES = 16 << 20
_TIME_LIMIT_NS = 1 << 62  # so that the difference of two times fits int64
_TABLE_PREFIX = "table."
_ROWS_AT_A_TIME = 1 << 18
_COLUMNS: dict[str, str] = {
    "arrival_ns": "int64",
    "user": "int64",
    "tenant": "int32",
    "phase": "int32",
    "history_tokens": "int32",
    "new_tokens": "int32",
}

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class StringIds:
    """Ids that are text: entry i is the UTF-8 text in bytes [offsets[i], offsets[i + 1]) of `data`."""

    offsets: Int64Array  # (n + 1,)
    data: npt.NDArray[np.uint8]

    @staticmethod
    def of(texts: Sequence[str]) -> StringIds:
        """Pack texts."""
        raw = [text.encode("utf-8") for text in texts]
        offsets = np.zeros(len(raw) + 1, dtype=np.int64)
        np.cumsum([len(text) for text in raw], out=offsets[1:])
        return StringIds(offsets, np.frombuffer(b"".join(raw), dtype=np.uint8))

    @property
    def size(self) -> int:
        """The number of ids."""
        return self.offsets.size - 1

    def __getitem__(self, index: Any) -> npt.NDArray[np.object_]:
        """Return the texts of the codes `index` (an array, or a slice) as str objects."""
        codes = np.arange(self.size)[index]
        data = self.data.tobytes() if codes.size > 1000 else None
        found = np.empty(codes.size, dtype=object)
        for i, code in enumerate(codes.tolist()):
            low, high = int(self.offsets[code]), int(self.offsets[code + 1])
            found[i] = (data[low:high] if data is not None else self.data[low:high].tobytes()).decode("utf-8")
        return found

    def tolist(self) -> list[str]:
        """Return all texts."""
        return list(self[:])


Ids = npt.NDArray[Any] | StringIds
"""Ids of a source by their code: int64, uint64 or text."""


class UnsoundTraceError(UserError):
    """What was about to be written is no sound trace: a fault of the program, not of its user's log."""


_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TracePhase(BaseModel):
    """A labelled stretch of the trace, [start_ns, end_ns), and the part of the load that belongs to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    start_ns: int
    end_ns: int
    hot_fraction: float = Field(default=0.0, ge=0, le=1)  # share of its items drawn from the hot set
    hot_items: int = Field(default=0, ge=0)
    hot_first: int = Field(default=0, ge=0)  # the hot set is codes [hot_first, hot_first + hot_items), uniform
    rate: _Finite | None = None  # requests/s asked of the generator, at the start; None: recorded, not generated
    rate_end: _Finite | None = None  # requests/s at the end, where it drifts
    ramp_s: _Finite = 0.0  # it comes up over its first, and goes down over its last, ramp_s
    factor: _Finite | None = None  # all load while it lasts over all load in the 5 min before; None: unknown

    @property
    def drifts(self) -> bool:
        """Whether its rate changes while it lasts."""
        return self.rate_end is not None and self.rate_end != self.rate


class TraceMeta(BaseModel):
    """What is known about a trace beside its columns; kept as JSON in the Parquet schema's metadata."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int = FORMAT_VERSION
    name: str
    source: str  # "generator", or the format that was converted
    origin_ns: int  # arrival_ns = 0 on the source's clock
    measure_from_ns: int  # arrivals before it are warm-up
    users: int = Field(ge=1)  # user codes are 0..users-1
    items: int = Field(ge=1)  # item codes are 0..items-1
    content: Literal["law", "items", "blocks"]
    block_tokens: int = Field(default=0, ge=0)  # content "blocks": tokens per block
    zipf_items: float | None = None  # content "law": exponent of the popularity of items
    law_items: int | None = None  # content "law": items under the law
    phases: tuple[TracePhase, ...] = Field(min_length=1)  # phases[0] is the base load, over the whole trace
    seed: int | None = None
    scenario_hash: str | None = None
    steps: tuple[str, ...] = ()  # what was added to, or done to, the source
    dropped: dict[str, int] = Field(default_factory=dict)  # rows of the source left out, by reason


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the measured part over which one best alpha is sought."""

    label: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, eq=False)
class Trace:
    """n requests in order of arrival, their m item references, and the meta data.

    Content says what `item_values` are, and so which embedding rows a history reads:
    "law": the codes of its new events; the rows of a history follow from (user, token) through the Zipf law;
    "items": the codes of its new events; a user's history is all his item_values so far, in order;
    "blocks": the content blocks of its whole history, `block_tokens` tokens each; rows follow from the block's id.
    """

    arrival_ns: Int64Array  # (n,) scheduled; relative to meta.origin_ns; negative is possible; not decreasing
    user: Int64Array  # (n,) dense codes
    tenant: Int32Array  # (n,)
    phase: Int32Array  # (n,) index into meta.phases
    history_tokens: Int32Array  # (n,) the user's history at this request, its newest events included
    new_tokens: Int32Array  # (n,) events appended since the user's previous request
    item_offsets: Int64Array  # (n + 1,)
    item_values: Int64Array  # (m,) dense codes
    meta: TraceMeta
    feature_tables: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # small side tables, by name
    user_ids: Ids | None = None  # (users,) int64, uint64 or text: code -> id in the source; None: codes are ids
    item_ids: Ids | None = None  # (items,)

    def __len__(self) -> int:
        return int(self.arrival_ns.size)

    @property
    def end_ns(self) -> int:
        """The end of the trace: that of its base load."""
        return self.meta.phases[0].end_ns

    def hash(self) -> str:
        """Return the sha256 (hex) over every column, every side table and the meta data."""
        digest = hashlib.sha256(_meta_json(self.meta).encode("utf-8"))
        for name, array in self._arrays():
            digest.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def segments(self) -> list[Segment]:
        """Cut the measured part at phase edges, and in pieces of 60 s where the load drifts or has no phases.

        The label of a segment joins those of the phases live in it by "+"; it is "base" where there is none. A
        remainder below 30 s belongs to the piece before it.
        """
        start_ns, end_ns = self.meta.measure_from_ns, self.end_ns
        base, *phases = self.meta.phases
        phases = [phase for phase in phases if phase.end_ns > phase.start_ns]
        cuts = {start_ns, end_ns}
        for phase in phases:
            cuts.update(time for time in (phase.start_ns, phase.end_ns) if start_ns < time < end_ns)
        edges = sorted(cuts)
        segments: list[Segment] = []
        for left, right in itertools.pairwise(edges):
            live = [phase for phase in phases if phase.start_ns <= left and phase.end_ns >= right]
            label = "+".join(phase.label for phase in live) or BASE
            pieces = 1
            if base.drifts or not phases or any(phase.drifts for phase in live):
                whole, rest = divmod(right - left, SEGMENT_NS)
                pieces = max(1, whole + (2 * rest >= SEGMENT_NS))
            if len(segments) + pieces > MOST_SEGMENTS:
                raise UserError(
                    f"trace {self.meta.name} is measured over {(end_ns - start_ns) / 1e9:,.0f} s, more than "
                    f"{MOST_SEGMENTS:,} segments; cut it (trace convert has --start-s and --end-s)"
                )
            for piece in range(pieces):
                stop = right if piece == pieces - 1 else left + (piece + 1) * SEGMENT_NS
                segments.append(Segment(label, left + piece * SEGMENT_NS, stop))
        return segments

    def between(self, start_ns: int, end_ns: int) -> Trace:
        """Return the requests with start_ns <= arrival < end_ns, phases and measured part cut to that window.

        Codes, histories and dictionaries stay as they are. Raises UserError if no request is left.
        """
        first, last = (int(i) for i in np.searchsorted(self.arrival_ns, [start_ns, end_ns], side="left"))
        if first >= last:
            raise UserError(f"no request of trace {self.meta.name} lies in [{start_ns / 1e9:g}, {end_ns / 1e9:g}) s")

        def clip(time_ns: int) -> int:
            return min(max(time_ns, start_ns), end_ns)

        phases = tuple(
            phase.model_copy(update={"start_ns": clip(phase.start_ns), "end_ns": clip(phase.end_ns)})
            for phase in self.meta.phases
        )
        step = f"cut to [{start_ns / 1e9:g}, {end_ns / 1e9:g}) s"
        meta = self.meta.model_copy(
            update={
                "phases": phases,
                "measure_from_ns": clip(self.meta.measure_from_ns),
                "steps": (*self.meta.steps, step),
            }
        )
        low, high = int(self.item_offsets[first]), int(self.item_offsets[last])
        columns = {name: getattr(self, name)[first:last] for name in _COLUMNS}
        tables = dict(self.feature_tables)
        if CANDIDATES in tables:
            tables[CANDIDATES] = tables[CANDIDATES][first:last]
        return replace(
            self,
            **columns,
            feature_tables=tables,
            item_offsets=self.item_offsets[first : last + 1] - low,
            item_values=self.item_values[low:high],
            meta=meta,
        )

    def validate(self) -> None:
        """Check every invariant of columns and meta data; raise UserError naming the first that fails."""
        _check_meta(self.meta)
        _check_columns(self)
        for name, ids, size in (
            ("user_ids", self.user_ids, self.meta.users),
            ("item_ids", self.item_ids, self.meta.items),
        ):
            if ids is not None:
                if not isinstance(ids, StringIds):
                    _need(ids.dtype in (np.int64, np.uint64) and ids.ndim == 1, f"{name} must be int64 or uint64")
                _need(ids.size == size, f"{name} has {ids.size} entries for {size} codes")
        scored = self.feature_tables.get(CANDIDATES)
        if scored is not None:
            _need(scored.dtype == np.int64 and scored.ndim == 2, "candidates must be int64 of two dimensions")
            _need(scored.shape[0] == len(self), f"candidates has {scored.shape[0]} rows for {len(self)} requests")
            _need(not scored.size or (scored.min() >= 0 and scored.max() < self.meta.items), "candidates: no such item")

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the trace as Parquet, aside and then renamed.

        Raises UserError if an invariant fails or if `path` exists and `overwrite` is not set.
        """
        path = Path(path)
        refuse_existing(path, overwrite)
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file for the trace")
        self.validate()
        with atomic_file(path) as aside, TraceWriter(aside, self.tables(), meta=self.meta) as writer:
            for first in range(0, len(self), ROW_GROUP):
                last = min(first + ROW_GROUP, len(self))
                columns = {name: getattr(self, name)[first:last] for name in _COLUMNS}
                low, high = int(self.item_offsets[first]), int(self.item_offsets[last])
                offsets = self.item_offsets[first : last + 1] - low
                writer.append(columns, offsets, self.item_values[low:high], done=last / len(self))
            writer.finish()

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a whole trace. Raises UserError for anything but a sound trace file that fits in memory."""
        with _TraceFile(Path(path)) as file:
            file.refuse_larger_than_memory()
            trace = file.read()
        with _named(path):
            trace.validate()
        return trace

    @staticmethod
    def slices(path: str | Path, rows: int) -> Iterator[Trace]:
        """Yield the trace in consecutive slices of at most `rows` requests, in bounded memory.

        A slice has the columns of its requests and the meta data of the whole; dictionaries and feature
        tables are not in it (`load` has them). Raises UserError as `load` does, at the slice where the
        fault is met.
        """
        if rows < 1:
            raise UserError(f"a slice must hold at least 1 request, not {rows}")
        with _TraceFile(Path(path)) as file:
            latest = -_TIME_LIMIT_NS
            for part in file.batches(rows):
                with _named(path):
                    part.validate()
                    _need(int(part.arrival_ns[0]) >= latest, "arrival_ns decreases")
                latest = int(part.arrival_ns[-1])
                yield part

    @staticmethod
    def read_meta(path: str | Path) -> tuple[TraceMeta, int]:
        """Return the meta data of a trace file, and how many requests it has. Raises UserError as `load` does."""
        with _TraceFile(Path(path)) as file:
            return file.meta, int(file.file.metadata.num_rows)

    @staticmethod
    def read_tables(path: str | Path) -> dict[str, Ids]:
        """Return what stands beside the requests of a trace file, as `tables` does. Raises UserError as `load` does."""
        with _TraceFile(Path(path)) as file:
            return {name: file.read_table(name) for name in file.tables}

    def tables(self) -> dict[str, Ids]:
        """Return what stands beside the requests, by the name of its column on disk."""
        tables: dict[str, Ids] = {}
        if self.user_ids is not None:
            tables["user_ids"] = self.user_ids
        if self.item_ids is not None:
            tables["item_ids"] = self.item_ids
        return tables | {_TABLE_PREFIX + name: self.feature_tables[name] for name in sorted(self.feature_tables)}

    def _arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for name in (*_COLUMNS, "item_offsets", "item_values"):
            yield name, getattr(self, name)
        for name, table in self.tables().items():
            if isinstance(table, StringIds):
                yield f"{name}.offsets", table.offsets
                yield f"{name}.data", table.data
            else:
                yield name, table


class TraceWriter:
    """A trace written piece by piece, in memory of one row group: its requests in order, its meta data at the end.

    The tables beside the requests must be known from the start. Use it as a context manager, on a file aside
    (`helm_rl.files.atomic_file`): after a failure the file is not one.
    """

    def __init__(self, path: Path, tables: dict[str, Ids], candidates: int = 0, meta: TraceMeta | None = None) -> None:
        """Open the file.

        candidates: item codes that each request brings beside its columns (CANDIDATES); meta: where it is known now, it
        goes into the Arrow schema too, where other Parquet readers see it at once.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._tables = tables
        self._candidates = candidates
        self._written = dict.fromkeys(tables, 0)  # values of each table
        self._waiting: list[tuple[dict[str, npt.NDArray[Any]], Int64Array, Int64Array, npt.NDArray[Any] | None]] = []
        self._rows = self._values = 0  # waiting
        self.requests = 0  # so far
        self._done = 0.0  # share of the trace that was given
        self._share = 0.0  # and written
        fields = [pa.field(name, pa.type_for_alias(kind), nullable=False) for name, kind in _COLUMNS.items()]
        fields.append(pa.field("items", pa.list_(pa.int64()), nullable=False))
        for name, table in tables.items():
            text = isinstance(table, StringIds)
            kind = pa.string() if text else pa.from_numpy_dtype(table.dtype)  # type: ignore[union-attr]
            shape = json.dumps([table.size] if text else table.shape)  # type: ignore[union-attr]
            fields.append(pa.field(name, pa.list_(kind), nullable=False, metadata={"shape": shape}))
        if candidates:
            name, shape = _TABLE_PREFIX + CANDIDATES, json.dumps([-1, candidates])
            fields.append(pa.field(name, pa.list_(pa.int64()), nullable=False, metadata={"shape": shape}))
        self._schema = pa.schema(fields, metadata=None if meta is None else {_META_KEY: _meta_bytes(meta)})
        self._file = pq.ParquetWriter(
            path, self._schema, compression="zstd", use_dictionary=False, write_page_checksum=True
        )

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(
        self,
        columns: dict[str, npt.NDArray[Any]],
        item_offsets: Int64Array,
        item_values: Int64Array,
        candidates: npt.NDArray[np.int64] | None = None,
        done: float = 0.0,
    ) -> None:
        """Add n requests: the columns of Trace by name, (n,), their items, candidates (n, candidates).

        done: share of the trace written with them, by which the tables are cut evenly over the rows.
        """
        self._waiting.append((columns, item_offsets, item_values, candidates))
        self._rows += item_offsets.size - 1
        self._values += item_values.size
        self.requests += item_offsets.size - 1
        self._done = done
        if (
            self._rows > ROW_GROUP or self._values > _GROUP_VALUES
        ):  # the last request waits, so that the rest of the tables has a row to go to
            self._flush(whole_groups=True)

    def finish(self, meta: TraceMeta | None = None) -> None:
        """Write what waits, and the meta data if they were not known when the file was opened."""
        self._done = 1.0
        self._flush(whole_groups=False)
        if meta is not None:
            self._file.add_key_value_metadata({_META_KEY: _meta_bytes(meta)})

    def _flush(self, whole_groups: bool) -> None:
        columns = {name: np.concatenate([part[0][name] for part in self._waiting]) for name in _COLUMNS}
        lengths = np.concatenate([np.diff(part[1]) for part in self._waiting])
        offsets = np.zeros(lengths.size + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        values = np.concatenate([part[2] for part in self._waiting])
        scored = None
        if self._candidates:
            scored = np.concatenate([part[3] for part in self._waiting if part[3] is not None])
        count, begun = 0, self._share
        while count < self._rows:
            full = int(np.searchsorted(offsets, offsets[count] + _GROUP_VALUES, side="right")) - 1
            last = min(count + ROW_GROUP, max(full, count + 1), self._rows)
            if whole_groups and last == self._rows:
                break
            self._share = begun + (self._done - begun) * (last / self._rows)
            self._write_group(columns, offsets, values, scored, count, last)
            count = last
        low = int(offsets[count])
        rest = {name: column[count:].copy() for name, column in columns.items()}
        left = None if scored is None else scored[count:].copy()
        self._waiting = [(rest, offsets[count:] - low, values[low:].copy(), left)] if count < self._rows else []
        self._rows -= count
        self._values = values.size - low

    def _write_group(
        self,
        columns: dict[str, npt.NDArray[Any]],
        offsets: Int64Array,
        values: Int64Array,
        scored: npt.NDArray[np.int64] | None,
        first: int,
        last: int,
    ) -> None:
        import pyarrow as pa

        arrays = [pa.array(columns[name][first:last]) for name in _COLUMNS]
        arrays.append(_list_array("items", values, offsets[first : last + 1]))
        for name, table in self._tables.items():
            # Linear from where the group before ended to this one's share of the whole.
            start, rows = self._written[name], last - first
            end = table.size if self._share > 1 - 1e-12 else max(start, int(table.size * self._share))
            cuts = start + np.arange(rows + 1, dtype=np.int64) * (end - start) // rows
            self._written[name] = end
            flat = table if isinstance(table, StringIds) else table.reshape(-1)
            arrays.append(_list_array(name, flat, cuts))
        if scored is not None:
            part = scored[first:last]
            arrays.append(_list_array(CANDIDATES, part.reshape(-1), np.arange(last - first + 1) * self._candidates))
        self._file.write_batch(pa.record_batch(arrays, schema=self._schema), row_group_size=ROW_GROUP)


class PieceCheck:
    """Checks a trace piece by piece as it is written: each invariant of its columns, and the order of the pieces."""

    def __init__(self, meta: TraceMeta, tables: dict[str, Ids]) -> None:
        """meta: users, items and content as they will be; its base load may be wider than that of the whole."""
        self._meta = meta
        self._latest_ns = meta.phases[0].start_ns
        with _unsound():
            for name, ids in tables.items():
                if isinstance(ids, StringIds):
                    _check_text(name, ids)

    def check(self, columns: dict[str, Any], item_offsets: Int64Array, item_values: Int64Array) -> None:
        """Raise UnsoundTraceError for requests that no reader of traces would take."""
        with _unsound():
            _check_columns(Trace(**columns, item_offsets=item_offsets, item_values=item_values, meta=self._meta))
            _need(int(columns["arrival_ns"][0]) >= self._latest_ns, "arrival_ns decreases")
        self._latest_ns = int(columns["arrival_ns"][-1])

    def finish(self, meta: TraceMeta) -> None:
        """Raise UnsoundTraceError if the meta data do not fit what was checked."""
        with _unsound():
            _check_meta(meta)
            _need(self._latest_ns < meta.phases[0].end_ns, "the base load ends before the last request")


@contextmanager
def _unsound() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UnsoundTraceError(f"no sound trace would come of it, which is a fault of helm-rl: {error}") from None


def _check_text(name: str, ids: StringIds) -> None:
    import pyarrow as pa

    try:
        pa.LargeStringArray.from_buffers(ids.size, pa.py_buffer(ids.offsets), pa.py_buffer(ids.data)).validate(
            full=True
        )
    except pa.ArrowInvalid as error:
        raise UserError(f"{name}: {first_line(error)}") from None


def _list_array(name: str, values: Ids, offsets: Int64Array) -> Any:
    """Return values [offsets[i], offsets[i + 1]) as the list of row i."""
    import pyarrow as pa

    low, high = int(offsets[0]), int(offsets[-1])
    if high - low >= 2**31:
        raise UserError(f"column {name}: {high - low} values in one row group of {offsets.size - 1} requests, too many")
    if isinstance(values, StringIds):
        start, end = int(values.offsets[low]), int(values.offsets[high])
        if end - start >= 2**31:
            raise UserError(f"column {name}: {end - start} bytes of ids in one row group, too many")
        places = (values.offsets[low : high + 1] - start).astype(np.int32)
        cells = pa.StringArray.from_buffers(high - low, pa.py_buffer(places), pa.py_buffer(values.data[start:end]))
    else:
        cells = pa.array(values[low:high])
    return pa.ListArray.from_arrays(pa.array((offsets - low).astype(np.int32)), cells)


def gather(offsets: Int64Array, values: npt.NDArray[Any], order: Int64Array) -> tuple[Int64Array, npt.NDArray[Any]]:
    """Reorder ragged rows: return offsets (k + 1,) and values of the rows `order` (k,) of (offsets, values)."""
    lengths = np.diff(offsets)[order]
    new_offsets = np.zeros(order.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=new_offsets[1:])
    gathered = np.empty(new_offsets[-1], values.dtype)
    # In pieces, for a place of every value at once would take more memory than the values.
    for first in range(0, order.size, _ROWS_AT_A_TIME):
        rows = slice(first, min(first + _ROWS_AT_A_TIME, order.size))
        start, end = new_offsets[rows.start], new_offsets[rows.stop]
        take = np.arange(start, end, dtype=np.int64)
        take += np.repeat(offsets[:-1][order[rows]] - new_offsets[rows], lengths[rows])
        gathered[start:end] = values[take]
    return new_offsets, gathered


def _meta_json(meta: TraceMeta) -> str:
    return json.dumps(meta.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _meta_bytes(meta: TraceMeta) -> bytes:
    return _meta_json(meta).encode("utf-8")


def _need(truth: bool | np.bool_, message: str) -> None:
    if not truth:
        raise UserError(message)


class _named:
    """Put the file's name in front of what an inner check says."""

    def __init__(self, path: str | Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, UserError):
            raise UserError(f"{self.path} is not a sound trace: {error}") from None


def _check_meta(meta: TraceMeta) -> None:
    base = meta.phases[0]
    for index, phase in enumerate(meta.phases):
        inside = -_TIME_LIMIT_NS < phase.start_ns <= phase.end_ns < _TIME_LIMIT_NS
        _need(inside, f"phases[{index}] runs from {phase.start_ns} to {phase.end_ns} ns")
        _need(
            base.start_ns <= phase.start_ns and phase.end_ns <= base.end_ns,
            f"phases[{index}] ({phase.label}) leaves the trace, which is phases[0]",
        )
        if phase.hot_fraction > 0:
            _need(
                phase.hot_items >= 1 and phase.hot_first + phase.hot_items <= meta.items,
                f"phases[{index}] ({phase.label}): its hot set is not within the {meta.items} items",
            )
    _need(base.start_ns <= meta.measure_from_ns <= base.end_ns, "measure_from_ns lies outside the trace")
    _need(abs(meta.origin_ns) < 2**63, "origin_ns does not fit int64")
    _need(max(meta.users, meta.items) < 2**62, "users or items do not fit int64")
    if meta.content == "law":
        sound = meta.zipf_items is not None and math.isfinite(meta.zipf_items) and meta.zipf_items >= 0
        _need(sound, "content 'law' needs zipf_items, a number of at least 0")
        _need(meta.law_items is not None and 1 <= meta.law_items <= meta.items, "law_items must be 1 to items")
    if meta.content == "blocks":
        _need(meta.block_tokens >= 1, "content 'blocks' needs block_tokens of at least 1")


def _check_columns(trace: Trace) -> None:
    meta, n = trace.meta, len(trace)
    _need(n >= 1, "there is no request in it")
    for name, kind in _COLUMNS.items():
        column = getattr(trace, name)
        _need(column.dtype == kind and column.shape == (n,), f"{name} must be {kind} of shape ({n},)")
    offsets, values = trace.item_offsets, trace.item_values
    _need(
        offsets.dtype == np.int64 and offsets.shape == (n + 1,),
        f"item_offsets must be int64 of shape ({n + 1},)",
    )
    _need(values.dtype == np.int64 and values.ndim == 1, "item_values must be int64 of one dimension")
    _need(
        offsets[0] == 0 and offsets[-1] == values.size,
        "item_offsets must run from 0 to the number of item_values",
    )
    _need(np.all(offsets[1:] >= offsets[:-1]), "item_offsets decreases")

    def within(name: str, low: int, high: int, column: npt.NDArray[Any]) -> None:
        if column.size and (column.min() < low or column.max() >= high):
            row = int(np.argmax((column < low) | (column >= high)))
            raise UserError(f"{name}[{row}] = {column[row]} is outside {low}..{high - 1}")

    arrival = trace.arrival_ns
    within("arrival_ns", meta.phases[0].start_ns, meta.phases[0].end_ns, arrival)
    if np.any(arrival[1:] < arrival[:-1]):
        row = int(np.argmax(arrival[1:] < arrival[:-1])) + 1
        raise UserError(f"arrival_ns decreases at request {row}")
    within("user", 0, meta.users, trace.user)
    within("tenant", 0, 2**31, trace.tenant)
    within("phase", 0, len(meta.phases), trace.phase)
    within("history_tokens", 1, 2**31, trace.history_tokens)
    within("new_tokens", 0, 2**31, trace.new_tokens)
    within("item_values", 0, meta.items, values)
    _need(np.all(trace.new_tokens <= trace.history_tokens), "new_tokens exceeds history_tokens")
    counts = np.diff(offsets)
    if meta.content == "blocks":
        asked = -(-trace.history_tokens.astype(np.int64) // meta.block_tokens)
        _need(
            np.all(counts == asked),
            "the number of blocks of a request is not history_tokens / block_tokens, rounded up",
        )
    else:
        _need(np.all(counts == trace.new_tokens), "the number of items of a request is not its new_tokens")


class _TraceFile:
    """An open Parquet file whose schema and meta data have been found to be those of a trace."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        _refuse_other_files(path)
        try:
            self.file = pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path} is damaged or not a whole Parquet file: {first_line(error)}") from None
        try:
            self.meta = self._read_meta()
            self.tables = self._check_schema()
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> _TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _read_meta(self) -> TraceMeta:
        text = (self.file.metadata.metadata or {}).get(_META_KEY)
        if text is None:
            names = ", ".join(self.file.schema_arrow.names[:8])
            raise UserError(f"{self.path} is a Parquet file but not a helm-rl trace (its columns: {names})")
        if len(text) > _MAX_META_BYTES:
            raise UserError(f"{self.path}: its meta data hold {len(text)} bytes, too many for a trace")
        try:
            document = json.loads(text)
            version = document["format_version"]
            if isinstance(version, int) and version > FORMAT_VERSION:
                raise UserError(
                    f"{self.path} has trace format version {version}; this helm-rl reads up to {FORMAT_VERSION}"
                )
            if version != FORMAT_VERSION:
                raise UserError(f"{self.path}: format_version = {version!r} must be {FORMAT_VERSION}")
            meta = TraceMeta.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise UserError(f"{self.path}: its meta data are not those of a trace: {place}: {first['msg']}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{self.path}: its meta data are not the JSON of a trace") from None
        return meta

    def _check_schema(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the side tables."""
        import pyarrow as pa

        schema = self.file.schema_arrow
        wanted = {name: pa.type_for_alias(kind) for name, kind in _COLUMNS.items()}
        wanted["items"] = pa.list_(pa.int64())
        for name, kind in wanted.items():
            if schema.names.count(name) != 1:
                raise UserError(f"{self.path}: column {name} is missing (its columns: {', '.join(schema.names[:12])})")
            given = schema.field(name).type
            same = pa.types.is_list(given) and given.value_type == pa.int64() if name == "items" else given == kind
            if not same:
                raise UserError(f"{self.path}: column {name} has type {given} where a trace has {kind}")
        tables = {}
        for name in schema.names:
            if name in wanted:
                continue
            table = schema.field(name)
            known = name in ("user_ids", "item_ids") or name.startswith(_TABLE_PREFIX)
            if not known or schema.names.count(name) != 1 or not pa.types.is_list(table.type):
                raise UserError(f"{self.path}: column {name} is not one of a trace")
            value = table.type.value_type
            if name in ("user_ids", "item_ids") and pa.types.is_string(value):
                pass
            elif not (pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value)):
                raise UserError(f"{self.path}: column {name} holds {value}, not numbers")
            tables[name] = self._shape(name, (table.metadata or {}).get(b"shape", b""))
        if self.file.metadata.num_rows < 1:
            raise UserError(f"{self.path}: there is no request in it")
        return tables

    def _shape(self, name: str, text: bytes) -> tuple[int, ...]:
        try:
            shape = json.loads(text[:1000])
            if isinstance(shape, list) and len(shape) <= 8 and all(type(side) is int and side >= -1 for side in shape):
                if shape[:1] == [-1]:  # a row a request; how many was not known when it was begun
                    shape[0] = self.file.metadata.num_rows
                if min(shape, default=0) >= 0:
                    return tuple(shape)
        except ValueError:
            pass
        raise UserError(f"{self.path}: column {name} has no sound shape in its metadata")

    def refuse_larger_than_memory(self) -> None:
        """Refuse a file whose declared content cannot fit, before anything is allocated for it."""
        parts = self.file.metadata
        asked = sum(max(0, parts.row_group(i).total_byte_size) for i in range(parts.num_row_groups))
        asked = max(asked, parts.num_rows * 40)  # on disk columns may be encoded away; in memory they are not
        free = free_bytes()
        if 2 * asked > free:  # its parts, and the whole that is made of them
            raise UserError(
                f"{self.path} declares {parts.num_rows} requests in {asked / 2**30:.1f} GiB, of which reading takes "
                f"twice as much, and {free / 2**30:.1f} GiB of memory are free; make a shorter trace"
            )

    def batches(self, rows: int) -> Iterator[Trace]:
        """Yield parts of the columns, not yet validated beyond their types."""
        names = [*_COLUMNS, "items"]
        for batch in self._record_batches(rows, names):
            columns: dict[str, Any] = {name: self._plain(name, batch.column(name)) for name in _COLUMNS}
            offsets, values = self._lists("items", batch.column("items"))
            yield Trace(**columns, item_offsets=offsets, item_values=values, meta=self.meta)

    def read(self) -> Trace:
        """Return the whole, not yet validated beyond its types."""
        parts = list(self.batches(ROW_GROUP))
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in (*_COLUMNS, "item_values")
        }
        starts = np.cumsum([0, *(part.item_values.size for part in parts)])
        offsets = [part.item_offsets[:-1] + start for part, start in zip(parts, starts[:-1], strict=True)]
        offsets.append(starts[-1:])
        columns["item_offsets"] = np.concatenate(offsets, dtype=np.int64)
        tables = {name: self.read_table(name) for name in self.tables}
        return Trace(
            **columns,
            meta=self.meta,
            user_ids=tables.pop("user_ids", None),
            item_ids=tables.pop("item_ids", None),
            feature_tables={name.removeprefix(_TABLE_PREFIX): table for name, table in tables.items()},
        )

    def read_table(self, name: str) -> Any:
        """Return one of the tables beside the requests."""
        import pyarrow as pa

        shape = self.tables[name]

        if pa.types.is_string(self.file.schema_arrow.field(name).type.value_type):
            return self._read_texts(name, shape)
        parts = [self._lists(name, batch.column(name))[1] for batch in self._record_batches(ROW_GROUP, [name])]
        table = np.concatenate(parts)
        if table.size != math.prod(shape):
            raise UserError(
                f"{self.path}: column {name} has {table.size} values, which do not make up the shape {shape}"
            )
        return table.reshape(shape)

    def _read_texts(self, name: str, shape: tuple[int, ...]) -> StringIds:
        lengths, data = [], []
        for batch in self._record_batches(ROW_GROUP, [name]):
            column = batch.column(name)
            if column.null_count or column.flatten().null_count:
                raise UserError(f"{self.path}: column {name} has empty cells")
            cells = column.flatten()
            if not len(cells):
                continue
            _, places, text = cells.buffers()
            ends = np.frombuffer(places, dtype=np.int32)[cells.offset : cells.offset + len(cells) + 1]
            lengths.append(np.diff(ends.astype(np.int64)))
            whole = np.frombuffer(text, dtype=np.uint8) if text is not None else np.zeros(0, dtype=np.uint8)
            data.append(whole[ends[0] : ends[-1]].copy())
        offsets = np.zeros(sum(part.size for part in lengths) + 1, dtype=np.int64)
        if lengths:
            np.cumsum(np.concatenate(lengths), out=offsets[1:])
        if shape != (offsets.size - 1,):
            raise UserError(f"{self.path}: column {name} has {offsets.size - 1} ids where its shape says {shape}")
        return StringIds(offsets, np.concatenate([np.zeros(0, dtype=np.uint8), *data]))

    def _record_batches(self, rows: int, names: list[str]) -> Iterator[Any]:
        import pyarrow as pa

        found = 0
        try:
            for batch in self.file.iter_batches(batch_size=rows, columns=names, use_threads=False):
                batch.validate(full=True)
                found += batch.num_rows
                if batch.num_rows:
                    yield batch
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{self.path} is damaged: {first_line(error)}") from None
        declared = self.file.metadata.num_rows
        if found != declared:
            raise UserError(f"{self.path} is damaged: it declares {declared} requests and has {found}")

    def _plain(self, name: str, column: Any) -> npt.NDArray[Any]:
        if column.null_count:
            raise UserError(f"{self.path}: column {name} has empty cells")
        array: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return np.array(array)  # a copy: pyarrow's memory is read-only

    def _lists(self, name: str, column: Any) -> tuple[Int64Array, npt.NDArray[Any]]:
        if column.null_count:
            raise UserError(f"{self.path}: column {name} has empty cells")
        offsets = column.offsets.to_numpy().astype(np.int64)
        values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        return offsets - offsets[0], self._plain(name, values)


def _refuse_other_files(path: Path) -> None:
    """Name the usual mistakes before Parquet's own words for them."""
    if not path.exists():
        raise UserError(
            f"{path} does not exist; a trace is made by `helm-rl trace generate` or `helm-rl trace convert`"
        )
    if not path.is_file():
        raise UserError(f"{path} is not a file; a trace is one Parquet file")
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(4)
            file.seek(max(0, size - 4))
            end = file.read(4)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if size == 0:
        raise UserError(f"{path} is empty; a trace is a Parquet file")
    if start != b"PAR1":
        raise UserError(
            f"{path} is not a Parquet file, as every trace is; `helm-rl trace convert` makes a trace of a log, "
            f"`helm-rl trace generate` of a scenario"
        )
    if size < 12 or end != b"PAR1":
        raise UserError(f"{path} is a Parquet file without its end: it was cut off after {size} bytes")


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, cut to 200 characters."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
