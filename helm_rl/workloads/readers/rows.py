"""What every reader yields: rows of a log in columns, dictionaries of its ids, and an account of what was left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.workloads.readers.codes import Codes

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass
class Rows:
    """n rows in the order of the log. A column that the log lacks is None; codes are those of Dictionaries."""

    time_ns: Int64Array  # (n,); the row's number where the log has no times
    user: Int32Array | None = None  # (n,)
    item: Int32Array | None = None  # (n,), or (lengths.sum(),)
    lengths: Int32Array | None = None  # (n,) items of each row; None: one each
    tenant: Int32Array | None = None  # (n,)
    tokens: Int32Array | None = None  # (n,) of the history
    request: Int32Array | None = None  # (n,)


@dataclass
class Dictionaries:
    """The ids of a log's columns."""

    user: Codes = field(default_factory=lambda: Codes("user"))
    item: Codes = field(default_factory=lambda: Codes("item"))
    tenant: Codes = field(default_factory=lambda: Codes("tenant"))
    request: Codes = field(default_factory=lambda: Codes("request"))


@dataclass
class Facts:
    """What was noticed while reading."""

    rows: int = 0  # sound ones
    exponents: int = 0  # times written with an exponent
    zoneless: int = 0  # ISO times without a zone
    repeated_lines: int = 0  # JSON lines that repeat an earlier one
    lone: int = 0  # requests whose only block stands for the user
    fresh: int = 0  # rows with an empty user
    late: int = 0  # chats that came after one which follows them, and follow another themselves
    timeless: bool = False  # a file has no times: those of its rows are their numbers
    unit: str = ""  # of the times, where it was told by their size
    step_ns: int = 1  # one step of the last digit of the times seen
    recount: bool = False  # rows were dropped whose items are in the dictionary
    plain: bool = True  # one item a row
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a step, once."""
        if text not in self.notes:
            self.notes.append(text)

    def saw_step(self, step_ns: int) -> None:
        """Take in the resolution of some times: that of all is the finest."""
        self.step_ns = step_ns if self.rows == 0 else min(self.step_ns, step_ns)


class Drops:
    """Rows left out, counted by cause; the first of each cause is remembered."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.counts: dict[str, int] = {}
        self._first: dict[str, str] = {}
        self._file: dict[str, str] = {}  # the first fault of each file

    def add(self, cause: str, path: Path, line: int, message: str, count: int = 1, unit: str = "line") -> None:
        """Count rows. message follows the place: ", field x: ..." or ": ...". Raises UserError if strict."""
        place = f"{path}, {unit} {line}{message}"
        if self.strict:
            raise UserError(place)
        self.counts[cause] = self.counts.get(cause, 0) + count
        self._first.setdefault(cause, f"{path.name}, {unit} {line}")
        self._file.setdefault(str(path), place)

    def check_file(self, path: Path, rows: int, bad: int, empty: str) -> None:
        """Raise UserError for a file of which more than half is no good, or which has no row (`empty` says so)."""
        if rows == 0:
            raise UserError(f"{path} {empty}")
        if 2 * bad > rows:
            first = self._file[str(path)]
            raise UserError(f"{first}; {bad} of its {rows} rows cannot be read: is the format right?")

    def as_meta(self) -> dict[str, int]:
        """Return the counts by cause and first place."""
        return {
            f"{cause} (first: {self._first[cause]})" if cause in self._first else cause: count
            for cause, count in self.counts.items()
        }


def shown(value: object, most: int = 40) -> str:
    """Return a value as it is shown in a message."""
    text = value if isinstance(value, str) else str(value)
    text = text if len(text) <= most else text[: most - 3] + "..."
    return repr(text) if isinstance(value, str) else text
