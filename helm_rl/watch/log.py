"""The view of a control process by its log: lines of JSON, as they are written."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, deque
from datetime import datetime
from pathlib import Path
from typing import Any

from helm_rl.watch.frame import HISTORY, Events, Frame, Row, by_cause, clock, count, number, safe

_MOST_READ = 8 << 20
"""Bytes that one look reads, and of a log that was there before the last that are read at all."""
_MOST_LINE = 64 << 10
_MOST_CAUSES = 64
_TOLD_BY_ROWS = {"time", "level", "event", "policy_sha256", "layers", "metrics"}


class LogSource:
    """Follows one log; one that is not there yet may come, and one that was cut off or replaced is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0
        self._begin()

    def _begin(self) -> None:
        self._events = Events()
        self._state, self._warn = "nothing said yet", False
        self._alpha: deque[float] = deque(maxlen=HISTORY)
        self._started: dict[str, Any] = {}
        self._bundle: dict[str, Any] = {}
        self._masked: list[str] = []
        self._causes: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._held_from: str | None = None  # of a fallback that nothing has ended yet
        self._within = False  # a line too long to be one of ours
        self._ours = self._foreign = self._skipped = 0

    def look(self) -> Frame:
        """Read what is new."""
        try:
            self._read()
        except FileNotFoundError:
            state, warn = "no such file yet" if self._file is None else "the file has gone", True
        except OSError as error:
            state, warn = f"cannot be read: {error.strerror}", True
        else:
            state, warn = self._state, self._warn
        return Frame(f"control log {self._path}", state, warn, tuple(self._rows()), self._events.all())

    def _read(self) -> None:
        with self._path.open("rb") as file:
            at = self._path.stat()
            size = file.seek(0, 2)
            if self._file != (at.st_dev, at.st_ino) or size < self._offset:
                if self._file is not None:
                    self._begin()
                    self._events.add("the log begins anew")
                self._file, self._offset = (at.st_dev, at.st_ino), 0
            if size - self._offset > _MOST_READ:
                self._skipped += size - self._offset - _MOST_READ
                self._offset = size - _MOST_READ
            file.seek(self._offset)
            data = file.read(_MOST_READ)
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines()
        if self._within and whole:  # a line that was given up
            lines, self._within = lines[1:], False
        for line in lines:
            self._hear(line)
        if len(data) - whole > _MOST_LINE:  # no line of ours, and none to wait for
            self._foreign += not self._within
            self._within, whole = True, len(data)
        self._offset += whole

    def _hear(self, line: bytes) -> None:
        said: Any = None
        if len(line) <= _MOST_LINE:
            # Numbers of thousands of digits, brackets without end.
            with contextlib.suppress(ValueError, RecursionError):
                said = json.loads(line)
        if not isinstance(said, dict) or not isinstance(said.get("event"), str):
            self._foreign += bool(line.strip())
            return
        self._ours += 1
        event, warn = said["event"], said.get("level") in ("warning", "error")
        fields = [f"{name} {_plain(value)}" for name, value in said.items() if name not in _TOLD_BY_ROWS]
        self._events.add(f"{event}  {'  '.join(fields)}", _time_s(said.get("time")), warn)
        alpha: Any = said.get("alpha")
        if _is_number(alpha):
            self._alpha.append(float(alpha))
        self._take(event, said)

    def _take(self, event: str, said: dict[str, Any]) -> None:
        at = clock(_known(_time_s(said.get("time"))))
        if event == "start":
            self._started, self._causes, self._sums, self._held_from = said, Counter(), Counter(), None
            self._state, self._warn = f"controls since {at}", False
        elif event == "fallback":
            cause = _plain(said.get("cause"))[:60]
            self._causes[cause if cause in self._causes or len(self._causes) < _MOST_CAUSES else "others"] += 1
            self._held_from = self._held_from or at
            self._state, self._warn = f"alpha is left as it is since {at}: {cause}", True
        elif event == "recovered":
            self._sum("held", said.get("intervals"))
            self._held_from = None
            self._state, self._warn = f"decides again since {at}", False
        elif event in ("missed", "unapplied", "dropped"):
            self._sum(event, said.get({"missed": "intervals", "unapplied": "targets"}.get(event, "lines")))
        elif event == "masked" and isinstance(said.get("features"), list):
            self._masked = [_plain(name) for name in said["features"][:32]]
        elif event == "reload":
            self._sums[f"reload {_plain(said.get('result'))[:8]}"] += 1
        elif event == "stop":
            self._state, self._warn = f"stopped at {at}", False
        if event in ("start", "reload") and "policy_sha256" in said:
            self._bundle = said

    def _sum(self, name: str, value: Any) -> None:
        if _is_number(value) and 0 <= value < 2**53:
            self._sums[name] += int(value)

    def _rows(self) -> list[Row]:
        alpha = self._alpha[-1] if self._alpha else None
        rows = [
            Row("alpha, as last said", number(alpha, 3), tuple(self._alpha), 0.0, 1.0, brief=True),
            Row("fallbacks by cause", by_cause(dict(self._causes)) or "none", warn=bool(self._causes), brief=True),
            Row("intervals held", self._held(), warn=self._held_from is not None),
            Row("intervals missed", count(self._sums["missed"]), warn=self._sums["missed"] > 0, brief=True),
            Row("targets not taken", count(self._sums["unapplied"]), warn=self._sums["unapplied"] > 0),
            Row(
                "bundles loaded anew",
                f"{self._sums['reload ok']} good, {self._sums['reload bad']} bad",
                warn=self._sums["reload bad"] > 0,
            ),
            Row("masked signals", ", ".join(self._masked) or "none"),
        ]
        if self._bundle:
            rows.append(Row("bundle", f"{_plain(self._bundle.get('policy_sha256'))[:12]}, {self._layers()}"))
        if "url" in self._started:
            rows.append(Row("server", _plain(self._started["url"])))
        if "metrics" in self._started:
            rows.append(Row("live figures", f"helm-rl watch {_plain(self._started['metrics'])}"))
        if self._sums["dropped"]:
            rows.append(Row("lines dropped", count(self._sums["dropped"]), warn=True))
        if self._foreign:
            rows.append(Row("lines not of ours", count(self._foreign), warn=self._ours == 0))
        if self._skipped:
            rows.append(Row("not read", f"the first {self._skipped >> 20:,} MiB"))
        return rows

    def _held(self) -> str:
        """Return how many intervals left alpha as it was; of those now, the log tells the number when they are over."""
        known = self._sums["held"]
        if self._held_from is None:
            return count(known)
        return f"{count(known)} before, " * (known > 0) + f"all from {self._held_from} on"

    def _layers(self) -> str:
        return _plain(self._bundle.get("layers"))[:60]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_plain(each) for each in value[:32] if not isinstance(each, list | dict))
    return "-" if value is None or isinstance(value, dict) else safe(str(value))


def _time_s(value: Any) -> float:
    """Return the time that a line tells, NaN where it is none."""
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _known(time_s: float) -> float | None:
    return time_s if math.isfinite(time_s) else None
