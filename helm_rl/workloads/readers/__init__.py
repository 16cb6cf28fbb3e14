"""Readers of public logs: each format's files become a trace, as a stream or in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helm_rl.workloads.readers.arrivals import ReadOptions
from helm_rl.workloads.readers.conversion import OpenWriter, TraceParts, convert_log
from helm_rl.workloads.readers.detect import FORMATS, detect_format
from helm_rl.workloads.readers.mapping import Mapping, parse_mapping
from helm_rl.workloads.trace import Ids, Trace

__all__ = ["FORMATS", "Mapping", "ReadOptions", "convert_log", "detect_format", "parse_mapping", "read_trace"]


def read_trace(path: str | Path | Sequence[str | Path], format: str | None = None, **options: Any) -> Trace:
    """Read one log, of one file or of several that belong together, as a trace in memory.

    format: the format's name, one of FORMATS; None: told by the content. options: the fields of ReadOptions. Raises
    UserError for files that are missing, empty, damaged or of another format, naming file, line and field, and for
    options out of range.
    """
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(part) for part in path]
    made: list[TraceParts] = []

    def keep(tables: dict[str, Ids], candidates: int) -> TraceParts:
        made.append(TraceParts(tables, candidates))
        return made[0]

    opened: OpenWriter = keep
    convert_log(paths, format, ReadOptions(**options), opened)
    trace = made[0].trace()
    trace.validate()
    return trace
