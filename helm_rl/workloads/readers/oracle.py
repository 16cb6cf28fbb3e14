"""The reader of libCacheSim's oracleGeneral: packed records of time, object, size and next access, without a header."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.workloads.readers.rows import Dictionaries, Drops, Facts, Rows
from helm_rl.workloads.readers.source import Progress, Source

RECORD = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
_RECORDS_AT_A_TIME = 1 << 16
_NEVER = 2**63 - 1


def looks_like(start: bytes) -> bool:
    """Whether bytes are the first records of such a trace: times in order, next accesses that lie ahead."""
    records = np.frombuffer(start[: len(start) // RECORD.itemsize * RECORD.itemsize], dtype=RECORD)
    return (
        records.size > 0
        and bool(records["object"].any())  # zeros are no trace
        and _sound(records, 0) == records.size
        and bool(np.all(np.diff(records["time"].astype(np.int64)) >= 0))
    )


def read_oracle(
    path: Path, books: Dictionaries, drops: Drops, facts: Facts, progress: Progress | None
) -> Iterator[Rows]:
    """Yield the records: the item is the object, which stands for the user too.

    Raises UserError for a file that is cut off within a record, and for records of which more than half cannot be such.
    """
    rows = bad = early = 0
    latest = 0
    with Source(path, progress) as source:
        rest = b""
        while data := source.read(_RECORDS_AT_A_TIME * RECORD.itemsize):
            data = rest + data
            whole = len(data) // RECORD.itemsize * RECORD.itemsize
            rest = data[whole:]
            records = np.frombuffer(data[:whole], dtype=RECORD)
            good = _is_sound(records, rows)
            times = records["time"].astype(np.int64)
            early += int(np.count_nonzero(np.diff(times, prepend=latest) < 0))
            latest = int(times[-1]) if times.size else latest
            if early > (rows + records.size) // 10 or (rows == 0 and records.size and not records["object"].any()):
                what = (
                    "every object is 0" if not early else f"times decrease at {early} of {rows + records.size} records"
                )
                raise UserError(f"{path} is no oracleGeneral trace: {what}")
            if not good.all():
                at = int(np.argmin(good))
                said = f": next access {int(records['next'][at])} does not lie ahead"
                count = int(np.count_nonzero(~good))
                drops.add("next access does not lie ahead", path, rows + at + 1, said, count, unit="record")
                bad += count
            rows += records.size
            records = records[good]
            facts.saw_step(1_000_000_000)
            facts.rows += records.size
            objects = np.ascontiguousarray(records["object"])
            item = books.item.add_numbers(objects, False, bool((objects >= 2**63).any()))
            if records.size:
                yield Rows(records["time"].astype(np.int64) * 1_000_000_000, item=item)
    if rest:
        raise UserError(f"{path} is cut off or no oracleGeneral trace: {len(rest)} bytes after {rows} records of 24")
    drops.check_file(path, rows, bad, "has no record in it")


def _is_sound(records: npt.NDArray[np.void], before: int) -> npt.NDArray[np.bool_]:
    """An access is the (before + i + 1)-th; the next one of its object lies ahead, or is -1, 0 or 2^63 - 1: none."""
    following = records["next"]
    number = np.arange(before + 1, before + 1 + records.size)
    # A piece cut out of a longer trace keeps the numbers of the whole, which are larger.
    return (following == -1) | (following == 0) | (following > number)


def _sound(records: npt.NDArray[np.void], before: int) -> int:
    return int(np.count_nonzero(_is_sound(records, before)))
