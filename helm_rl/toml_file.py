"""TOML files of the user's, read with checks, and where in one a field stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helm_rl.errors import UserError

_MAX_FILE_BYTES = 1 << 20


def read_toml(path: Path, what: str, least: str) -> tuple[str, dict[str, Any]]:
    """Return the text of a TOML file and what is in it; UserError, which names file and line, where it is none.

    what, least: say in errors what should be there, such as "a scenario", and the fields that it has at least.
    """
    text = _read(path, what, least)
    try:
        return text, tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {str(error)[:300]}") from None
    except ValueError as error:  # such as an integer of thousands of digits
        raise UserError(f"{path}: a value cannot be read: {str(error)[:300]}") from None


def _read(path: Path, what: str, least: str) -> str:
    try:
        if not path.is_file():
            raise UserError(f"{path} is not a file; {what} is a TOML file")
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise UserError(f"{path} holds {size} bytes, too many for {what} (a TOML file of at most 1 MiB)")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not data.strip():
        raise UserError(f"{path} is empty; {what} is a TOML file with at least {least}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8 text; {what} is a TOML file") from None


_HEADER = re.compile(r"^\s*(\[\[?)\s*([A-Za-z0-9_.\-\s]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\-\s]+?)\s*=")


def line_of(text: str, location: Sequence[str | int]) -> int | None:
    """Find the line of a key, or of the nearest table around it; None where the file's style hides it."""
    table: list[str | int] = []
    counts: dict[str, int] = {}
    lines: dict[tuple[str | int, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            name = [part.strip() for part in header[2].split(".")]
            table = list(name)
            if header[1] == "[[":
                dotted = ".".join(name)
                counts[dotted] = counts.get(dotted, -1) + 1
                table.append(counts[dotted])
            lines.setdefault(tuple(table), number)
        elif key := _KEY.match(line):
            parts = [part.strip() for part in key[1].split(".")]
            lines.setdefault((*table, *parts), number)
    for length in range(len(location), 0, -1):
        if found := lines.get(tuple(location[:length])):
            return found
    return None
