"""Results of long measurements on disk: one line of JSON each, appended as they come, so that a stopped run goes on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from helm_rl.errors import UserError
from helm_rl.files import write_text

OPTIONS = "options.json"
RESULTS = "results.jsonl"

Row = dict[str, Any]
"""A result: plain JSON."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Kind:
    """What a folder of results is of.

    name: as a user knows it, such as "map"; files: all that such a folder holds; check: returns the row that a line
    holds, ValueError, which names the field, if it is none.
    """

    name: str
    files: Collection[str]
    check: Callable[[bytes], Row]


class Results:
    """The folder of one measurement, which no other process can open until `close`; a context manager closes it.

    Args:
        folder: made if it does not exist; it must be empty or hold such results.
        kind: what they are of.
        options: what results depend on; a folder with other options is refused.

    Raises:
        UserError: a foreign folder, other options (it names them), lines that are not results, or a folder that another
            process has open.
    """

    def __init__(self, folder: Path, kind: Kind, options: dict[str, Any]) -> None:
        self.folder = folder
        self._kind = kind
        self._path = folder / RESULTS
        self.rows: dict[tuple[str, int], Row] = {}
        options = json.loads(json.dumps(options))  # tuples become lists, as they will be read
        stored = folder / OPTIONS
        if stored.exists():
            _refuse_others(stored, kind, options)
        else:
            _refuse_foreign(folder, kind)
            folder.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(self._path, "a+")  # without a buffer: one result, one write
        try:
            self._lock()
            for left in _leftovers(folder, kind):
                left.unlink(missing_ok=True)
            if stored.exists():  # made, maybe, while this one waited for its turn
                _refuse_others(stored, kind, options)
            else:
                write_text(stored, json.dumps(options, indent=2, sort_keys=True) + "\n")
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes open the folder; what was read stays here."""
        self._file.close()

    def add(self, row: Row) -> None:
        """Append one result; its identity is (key, seed), seed 0 if it has none."""
        line = memoryview(json.dumps(row, allow_nan=False).encode() + b"\n")
        try:
            size = os.fstat(self._file.fileno()).st_size
            if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
                line = memoryview(b"\n" + line)  # never on a line that something else left unfinished
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.filename is None:  # a full disk names no file
                error.filename = str(self._path)
            raise
        self.rows[_identity(row)] = row

    def get(self, key: str, seed: int = 0) -> Row | None:
        """Return a result, None if it is not there yet."""
        return self.rows.get((key, seed))

    def _lock(self) -> None:
        """Keep the folder to this process; the system ends that with the process, however it dies."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.folder} is being measured by another process; wait for it, or name another --output"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # some network file systems have none: better results than none
                raise

    def _read(self) -> None:
        """Read what is there; a last line that was not finished is cut off."""
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                row = self._kind.check(line)
            except ValueError as error:
                raise UserError(
                    f"{self._path}, line {number}: not a result of this command ({error}); delete the line, it will "
                    "be measured again"
                ) from None
            self.rows[_identity(row)] = row
        if whole < len(data):
            os.truncate(self._path, whole)


def _identity(row: Row) -> tuple[str, int]:
    return str(row["key"]), int(row.get("seed", 0))


def _leftovers(folder: Path, kind: Kind) -> Iterator[Path]:
    """Files that were written aside (`helm_rl.files.atomic_file`) when their process was killed."""
    for name in kind.files:
        yield from folder.glob(f".{name}.????????.tmp")


def _refuse_foreign(folder: Path, kind: Kind) -> None:
    """Raise UserError unless `folder` could become such a one: new, empty, or left by a run killed as it began."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name one for the {kind.name}'s results")
    others = set(folder.iterdir()) - set(_leftovers(folder, kind))
    results = folder / RESULTS
    if results in others and results.is_file() and results.stat().st_size == 0:
        others.remove(results)
    if others:
        raise UserError(f"{folder} holds other files and no {kind.name}; name a new folder")


def read_options(path: Path, kind: Kind) -> Row:
    """Return the options that a folder's results depend on; UserError if they cannot be read as such."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError
        return stored
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{path} cannot be read as the options of a {kind.name}; name another --output") from None


def _refuse_others(path: Path, kind: Kind, options: dict[str, Any]) -> None:
    stored = read_options(path, kind)
    differ = [name for name in sorted({*stored, *options}) if stored.get(name) != options.get(name)]
    if differ:
        name = differ[0]
        rest = f" (and {', '.join(differ[1:])})" if len(differ) > 1 else ""
        raise UserError(
            f"{path.parent} holds a {kind.name} with {name} = {_short(stored.get(name))}, and this one has "
            f"{_short(options.get(name))}{rest}; name another --output, or give the same options"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."
