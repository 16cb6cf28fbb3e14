"""Readers of public logs: each makes a Trace of files in one format."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from helm_rl.errors import UserError
from helm_rl.workloads.readers import kuairand, mooncake
from helm_rl.workloads.readers.arrivals import ReadOptions
from helm_rl.workloads.trace import Trace

__all__ = ["Format", "ReadOptions", "detect_format", "read_trace"]

Format = Literal["mooncake", "kuairand"]

_READERS: dict[str, Callable[[list[Path], ReadOptions], Trace]] = {"mooncake": mooncake.read, "kuairand": kuairand.read}
_LOOK_BYTES = 1 << 16
_DATA_ROW = re.compile(rb"-?\d+(,-?\d*){3,}\s*$")  # a KuaiRand log without its header
_OTHER_KINDS = (
    (b"PAR1", "a Parquet file; if it is a trace it needs no conversion"),
    (b"\x1f\x8b", "compressed by gzip; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it first"),
    (b"PK\x03\x04", "a zip archive; unpack it first"),
)


def read_trace(path: str | Path | Sequence[str | Path], format: Format | None = None, **options: Any) -> Trace:
    """Read one log, of one file or of several that belong together, as a trace.

    format: the format's name; None: told by the content. options: the fields of ReadOptions. Raises UserError for files
    that are missing, empty, damaged or of another format, naming file, line and field, and for options out of range.
    """
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(part) for part in path]
    asked = ReadOptions(**options)
    asked.check()
    if not paths:
        raise UserError("name at least one file to convert")
    if format is not None and format not in _READERS:
        raise UserError(f"format {format!r} is not one of {', '.join(get_args(Format))}")
    found = [_tell(part, start) if format is None else format for part, start in [(p, _look(p)) for p in paths]]
    for part, other in zip(paths, found, strict=True):
        if other != found[0]:
            raise UserError(f"{part} is a {other} log and {paths[0]} a {found[0]} log; convert them one at a time")
    try:
        trace = _READERS[found[0]](paths, asked)
    except OSError as error:
        raise UserError(f"{error.filename or paths[0]} cannot be read: {error.strerror}") from None
    trace.validate()
    return trace


def detect_format(path: str | Path) -> Format:
    """Tell the format of a log by its first line. Raises UserError if it is none that can be read."""
    return _tell(Path(path), _look(Path(path)))


def _look(path: Path) -> bytes:
    """Return the start of a log, which is text; raise UserError for what cannot be one."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if not path.is_file():
        raise UserError(f"{path} is not a file")
    try:
        with open(path, "rb") as file:
            start = file.read(_LOOK_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not start:
        raise UserError(f"{path} is empty")
    for magic, what in _OTHER_KINDS:
        if start.startswith(magic):
            raise UserError(f"{path} is {what}")
    if b"\0" in start:
        line = start.count(b"\n", 0, start.index(b"\0")) + 1
        raise UserError(f"{path}, line {line}: not text; a log is JSON Lines (Mooncake) or CSV (KuaiRand)")
    start = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise UserError(f"{path} holds nothing but blanks")
    return start


def _tell(path: Path, start: bytes) -> Format:
    line = start.splitlines()[0]
    if line.startswith(b"{"):
        return "mooncake"
    if any(name in line for name in (b"user_id", b"video_id", b"time_ms")) or _DATA_ROW.match(line):
        return "kuairand"
    shown = line[:60].decode("utf-8", "backslashreplace")
    raise UserError(
        f"{path}, line 1: {shown!r} is the start of no format known: a Mooncake log has a JSON object a line, "
        "a KuaiRand log the CSV header user_id,video_id,..."
    )
