"""The log of a control process: a line of JSON for each thing that happens, written without holding anything up."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import queue
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, BinaryIO, TextIO, cast

_MOST_WAITING = 1_000  # lines
_LAST_S = 1.0  # for what still waits at the end


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time (UTC), level, event, and the fields given as `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; numbers that are none become null."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        return json.dumps(
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in line.items()
            }
        )


@contextlib.contextmanager
def journal(stream: TextIO | None) -> Iterator[logging.Logger]:
    """Yield a logger that writes JSON lines to a stream on a thread of its own; None: nowhere.

    A pipe that nobody reads, or a disk that is full, costs lines and no interval. How many were dropped is told by an
    event of its own as soon as one can be written again.
    """
    logger = logging.Logger("helm-rl control", logging.INFO)
    if stream is None:
        logger.addHandler(logging.NullHandler())
        yield logger
        return
    behind = _Behind(stream)
    logger.addHandler(behind)
    try:
        yield logger
    finally:
        behind.finish()


def stderr() -> TextIO | None:
    """Return a file of our own over stderr's descriptor, None where it is closed.

    It has no buffer: the interpreter's own, which is flushed when the process ends, must not be held by a thread then.
    """
    try:
        raw = _Whole(sys.stderr.fileno(), "w", closefd=False)
    except (AttributeError, OSError, ValueError):
        return None
    return io.TextIOWrapper(cast(BinaryIO, raw), encoding="utf-8", write_through=True)


class _Whole(io.FileIO):
    """Writes all that it is given; after half a line, which a full disk has left, the next begins on one of its own."""

    _half = False

    def write(self, data: Any) -> int:
        """Write bytes; OSError if not all of them could be."""
        left = memoryview(b"\n" + data if self._half else data)
        while left:
            written = super().write(left)
            if not written:  # it does not block, and is full
                raise BlockingIOError
            self._half = left[written - 1] != ord("\n")
            left = left[written:]
        return len(data)


class _Behind(logging.Handler):
    """Writes records on a thread of its own, which holds no lock then; drops what would wait behind too many others."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self._stream = stream
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(_MOST_WAITING)
        self._dropped = 0
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="helm-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Let the record be written soon, or drop it."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            with self._counting:
                self._dropped += 1

    def finish(self) -> None:
        """Write what waits, but take no longer than a moment for it."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_LAST_S)
            self._thread.join(_LAST_S)

    def _work(self) -> None:
        while (record := self._waiting.get()) is not None:
            written = self._write(record)
            with self._counting:
                self._dropped += not written
                dropped = self._dropped
            fields = {"levelname": "WARNING", "msg": "dropped", "fields": {"lines": dropped}}
            if dropped and written and self._write(logging.makeLogRecord(fields)):
                with self._counting:
                    self._dropped -= dropped

    def _write(self, record: logging.LogRecord) -> bool:
        """Return whether it could be written: no other place could say so."""
        try:
            self._stream.write(self.format(record) + "\n")
        except (OSError, ValueError):
            return False
        return True
