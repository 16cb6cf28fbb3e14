"""Results of a map on disk: one line of JSON each, appended as they come, so that a stopped run can go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from helm_rl.errors import UserError
from helm_rl.files import write_text

Row = dict[str, Any]
OPTIONS = "options.json"
RESULTS = "results.jsonl"


class Store:
    """The folder of one map.

    Args:
        folder: made if it does not exist; it must be empty or hold a map.
        options: what results depend on; a folder with other options is refused.

    Raises:
        UserError: a foreign folder, other options (it names them), or lines that are not results.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder = folder
        self._path = folder / RESULTS
        self.rows: dict[tuple[str, int], Row] = {}
        options = json.loads(json.dumps(options))  # tuples become lists, as they will be read
        stored = folder / OPTIONS
        if stored.exists():
            _refuse_others(stored, options)
        else:
            if folder.is_dir() and any(folder.iterdir()):
                raise UserError(f"{folder} holds other files and no map; name a new folder")
            if folder.exists() and not folder.is_dir():
                raise UserError(f"{folder} is not a folder; name one for the map's results")
            folder.mkdir(parents=True, exist_ok=True)
            write_text(stored, json.dumps(options, indent=2, sort_keys=True) + "\n")
        self._read()

    def add(self, row: Row) -> None:
        """Append one result; its identity is (key, seed), seed 0 if it has none."""
        with open(self._path, "ab") as file:
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[_identity(row)] = row

    def get(self, key: str, seed: int = 0) -> Row | None:
        """Return a result, None if it is not there yet."""
        return self.rows.get((key, seed))

    def _read(self) -> None:
        """Read what is there; a last line that was not finished is cut off."""
        if not self._path.exists():
            return
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                self.rows[_identity(row)] = row
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                raise UserError(
                    f"{self._path}, line {number}: not a result of this command; delete the line, it will be measured "
                    "again"
                ) from None
        if whole < len(data):
            os.truncate(self._path, whole)


def _identity(row: Row) -> tuple[str, int]:
    return str(row["key"]), int(row.get("seed", 0))


def _refuse_others(path: Path, options: dict[str, Any]) -> None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError
        names = sorted({*stored, *options})
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{path} cannot be read as the options of a map; name another --output") from None
    differ = [name for name in names if stored.get(name) != options.get(name)]
    if differ:
        name = differ[0]
        rest = f" (and {', '.join(differ[1:])})" if len(differ) > 1 else ""
        raise UserError(
            f"{path.parent} holds a map with {name} = {_short(stored.get(name))}, and this one has "
            f"{_short(options.get(name))}{rest}; name another --output, or give the same options"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."
