"""The reader of JSON Lines: one object a line, its ids exact up to 64 bits, its times exact to their digits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from helm_rl.errors import UserError
from helm_rl.workloads.readers.mapping import CHAIN, SECOND_BLOCK, Mapping
from helm_rl.workloads.readers.rows import Drops, Facts, Rows, shown
from helm_rl.workloads.readers.source import Progress, Source
from helm_rl.workloads.readers.tables import Cells, Columns

_LINES_AT_A_TIME = 8192
_BYTES_AT_A_TIME = 16 << 20  # of lines, which bound the memory that they take as columns
_MAX_TOKENS = 2**31 - 1
_MOST_REPEATS = 1 << 24  # lines among which repeats are looked for


class _Decimal(str):
    """A JSON number that is not whole, by its digits."""


class _BadLine(Exception):
    """A line that is no request: the cause, and what follows the place in a message."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(cause)
        self.cause = cause
        self.message = message


def read_jsonl(
    path: Path, mapping: Mapping, columns: Columns, arrivals: bool, progress: Progress | None
) -> Iterator[Rows]:
    """Yield the rows of a JSON Lines file; `arrivals`: times are given, so that the log may lack them.

    An object's item may be one id or a list of them. Raises UserError for what is no text and for a file cut off within
    a line; other lines that are no requests are counted in the columns' drops.
    """
    batch = _Batch(path, mapping, columns, arrivals)
    line = blank = 0
    first_blank = 0
    with Source(path, progress) as source:
        for chunk in source.lines():
            for raw in chunk.splitlines(keepends=True) if b"\r" not in chunk else _split(chunk):
                line += 1
                if not raw.strip():
                    blank += 1
                    first_blank = first_blank or line
                    continue
                if blank:
                    columns.drops.add("blank lines", path, first_blank, ": a blank line", blank)
                    blank = 0
                batch.add(raw, line)
                if len(batch.place) >= _LINES_AT_A_TIME or batch.size >= _BYTES_AT_A_TIME:
                    yield from batch.flush()
    yield from batch.flush()
    batch.note_mixed()
    columns.drops.check_file(
        path, batch.rows, batch.bad, f"has no request in it; a {mapping.name} log has one JSON object a line"
    )


def _split(chunk: bytes) -> list[bytes]:
    """Cut at newlines alone."""
    lines = chunk.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


class _Batch:
    """Some lines, as they become columns."""

    def __init__(self, path: Path, mapping: Mapping, columns: Columns, arrivals: bool) -> None:
        self.path = path
        self.mapping = mapping
        self.columns = columns
        self.drops: Drops = columns.drops
        self.facts: Facts = columns.facts
        self.rows = self.bad = 0
        self.size = 0  # bytes of the lines taken in
        self.place: list[int] = []
        self._paths = {part: tuple(name.split(".")) for part, name in mapping.named().items()}
        self._optional = {part for part, name in mapping.named().items() if name in mapping.optional}
        if arrivals:
            self._optional.add("time")
        self._texts: dict[str, list[str]] = {part: [] for part in self._paths if part != "item"}
        self._items: list[Any] = []
        self._lengths: list[int] = []
        self._seen: set[int] = set()
        self._roots: dict[str, str] = {}
        self._unseen: set[str] = set()  # parents that had not come when a chat named them
        self._kinds: dict[str, set[type]] = {"user": set(), "item": set(), "tenant": set(), "request": set()}
        if mapping.user in (SECOND_BLOCK, CHAIN):
            self._texts["user"] = []

    def add(self, raw: bytes, line: int) -> None:
        """Take in one line that is not blank."""
        self.rows += 1
        self.size += len(raw)
        try:
            self._take(raw, line)
        except _BadLine as bad:
            self.bad += 1
            self.drops.add(bad.cause, self.path, line, bad.message)

    def flush(self) -> Iterator[Rows]:
        """Yield what was taken in."""
        n = len(self.place)
        if not n:
            return
        cells = {part: _pack(texts) for part, texts in self._texts.items() if len(texts) == n}
        extra = Rows(np.zeros(0, dtype=np.int64))
        if "item" in self._paths:
            # Items first: their codes do not depend on which rows are dropped, only their dictionary would.
            extra.item, extra.lengths = self._item_codes()
        state, place = np.zeros(n, dtype=np.uint8), np.array(self.place, dtype=np.int64)
        rows, dropped = self.columns.take(self.path, cells, state, place, {}, extra)
        self.bad += dropped
        self.place, self._items, self._lengths, self.size = [], [], [], 0
        self._texts = {part: [] for part in self._texts}
        if rows.time_ns.size:
            yield rows

    def note_mixed(self) -> None:
        """Say where ids were written both as numbers and as text."""
        for part, kinds in self._kinds.items():
            if len(kinds) > 1:
                name = self.mapping.named()[part]
                self.facts.note(f"{name} has numbers and text; a number and the text of its digits are one id")

    def _take(self, raw: bytes, line: int) -> None:
        mapping = self.mapping
        document = self._document(raw, line)
        found = {part: self._find(document, part) for part in self._paths}
        texts: dict[str, str] = {}
        for part, value in found.items():
            if part == "item":
                continue
            if value is None and part in self._optional:
                continue
            texts[part] = self._text(part, value)
        items = self._item_list(found["item"]) if "item" in found else []
        if mapping.blocks:
            blocks = -(-int(texts["tokens"]) // mapping.blocks)
            if len(items) != blocks:
                self._fail(
                    f"{mapping.item} does not fit {mapping.tokens}",
                    f", field {mapping.item}: {len(items)} ids, where {mapping.tokens} {texts['tokens']} makes "
                    f"{blocks} blocks of {mapping.blocks} tokens (--block-tokens)",
                )
        if mapping.user == SECOND_BLOCK:
            texts["user"] = str(items[min(1, len(items) - 1)])
            self.facts.lone += len(items) == 1
        elif mapping.user == CHAIN:
            texts["user"] = self._root(document)
        for part, values in self._texts.items():
            if part in texts:
                values.append(texts[part])
            elif part in self._optional and part != "time":
                values.append("")
        self._items.extend(items)
        self._lengths.append(len(items))
        self.place.append(line)
        if (mapping.repeats_kept or type(found.get("item")) is list) and len(self._seen) < _MOST_REPEATS:
            mark = hash(raw.strip())
            self.facts.repeated_lines += mark in self._seen
            self._seen.add(mark)

    def _document(self, raw: bytes, line: int) -> dict[str, Any]:
        try:
            text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.path}, line {line}: not UTF-8 text") from None
        try:
            document = json.loads(
                text, parse_float=_Decimal, parse_constant=_refuse_constant, object_pairs_hook=_without_doubles
            )
        except _DoubleKeyError as error:
            key = shown(error.args[0])
            self._fail("a key given twice", f": key {key} is given twice in one object")
        except RecursionError:
            self._fail("not JSON", ": not the JSON of a request: it is nested too deeply")
        except ValueError as error:
            if "\0" in text:
                raise UserError(f"{self.path}, line {line}: not text; a log is JSON Lines or CSV") from None
            if not raw.endswith(b"\n") and text.lstrip().startswith("{"):
                raise UserError(
                    f"{self.path}, line {line}: not JSON: {str(error)[:120]} (is the file cut off here?)"
                ) from None
            self._fail("not JSON", f": not JSON: {str(error)[:120]}")
        if not isinstance(document, dict):
            self._fail("not an object", ": a request must be a JSON object, {...}")
        return document

    def _find(self, document: dict[str, Any], part: str) -> Any:
        value: Any = document
        for key in self._paths[part]:
            if not isinstance(value, dict) or key not in value:
                if part in self._optional:
                    return None
                name = ".".join(self._paths[part])
                there = ", ".join(map(str, list(document)[:12]))
                self._fail(f"{name} is missing", f", field {name} is missing (found: {shown(there, 60)})")
            value = value[key]
        return value

    def _text(self, part: str, value: Any) -> str:
        """Return a scalar by its digits or letters; the cells' own checks follow."""
        name = ".".join(self._paths[part])
        if part == "tokens":
            if type(value) is not int or not 1 <= value <= _MAX_TOKENS:
                self._fail(
                    f"{name} is not a whole number",
                    f", field {name}: {_short(value)} is not a whole number from 1 to {_MAX_TOKENS}",
                )
        elif type(value) not in (int, str, _Decimal):
            what = "a number" if part == "time" else "an id"
            self._fail(f"{name} is not {what}", f", field {name}: {_short(value)} is not {what}")
        text = str(value)
        self._check_text(name, text)
        if part == "time":
            return text.strip(" ")
        if part in self._kinds:
            self._kinds[part].add(str if type(value) is str else int)
        return text  # ids as they are: " 7" is not "7"

    def _check_text(self, name: str, text: str) -> None:
        """Refuse half of a surrogate pair, which JSON can write and UTF-8 cannot."""
        if text.isascii():
            return
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            self._fail(f"{name} is not text", f", field {name}: {_short(text)} has a lone surrogate, which no text has")

    def _item_list(self, value: Any) -> list[Any]:
        mapping = self.mapping
        ragged = isinstance(value, list)
        if mapping.blocks and not ragged:
            self._fail(
                f"{mapping.item} is not a list",
                f", field {mapping.item}: {_short(value)} is not a list of block ids",
            )
        values = value if ragged else [value]
        kinds = set(map(type, values))
        self._kinds["item"] |= kinds & {int, str}
        if kinds <= {int}:
            low = 0 if mapping.blocks else -(2**63)
            if values and (min(values) < low or max(values) >= 2**64):
                self._refuse_item(values, low)
        elif kinds <= {int, str} and mapping.item_kind != "whole":
            values = [str(one) for one in values]
            if "" in values:
                self._fail(f"{mapping.item} is empty", f", field {mapping.item}: an empty id is not an id")
            for one in values:
                self._check_text(mapping.item, one)
        else:
            self._refuse_item(values, 0 if mapping.blocks else -(2**63))
        return values

    def _refuse_item(self, values: list[Any], low: int) -> NoReturn:
        name = self.mapping.item
        for one in values:
            if type(one) is not int or not low <= one < 2**64:
                start = "0" if low == 0 else "-2^63"
                self._fail(
                    f"{name} is not a whole number",
                    f", field {name}: {_short(one)} is not a whole number from {start} to 2^64 - 1",
                )
        self._fail(f"{name} is not a list of ids", f", field {name}: {_short(values)} is not a list of ids")

    def _root(self, document: dict[str, Any]) -> str:
        """Return the chat in which a chain of chats began; a parent that the log has not is the root itself."""
        chat, parent = document.get("chat_id"), document.get("parent_chat_id", -1)
        for name, value in (("chat_id", chat), ("parent_chat_id", parent)):
            if type(value) not in (int, str):
                self._fail(f"{name} is not an id", f", field {name}: {_short(value)} is not an id")
            self._check_text(name, str(value))
        chat, parent = str(chat), str(parent)
        root = chat if parent == "-1" else self._roots.get(parent, parent)
        if parent != "-1" and parent not in self._roots:
            self._unseen.add(parent)
        self.facts.late += chat in self._unseen and root != chat
        self._roots[chat] = root
        return root

    def _item_codes(self) -> tuple[Any, Any]:
        book, items = self.columns.books.item, self._items
        lengths = np.array(self._lengths, dtype=np.int32)
        if all(type(one) is int for one in items):
            low, high = min(items, default=0), max(items, default=0)
            if not (low < 0 and high >= 2**63):
                values = np.array(items, dtype=np.uint64 if low >= 0 else np.int64)
                return book.add_numbers(values.view(np.uint64), low < 0, high >= 2**63), lengths
        cells = _pack([str(one) for one in items])
        return book.add_texts(cells.data, cells.start, cells.end), lengths

    def _fail(self, cause: str, message: str) -> NoReturn:
        raise _BadLine(cause, message)


class _DoubleKeyError(Exception):
    """An object has a key twice."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DoubleKeyError(next(key for key in keys if keys.count(key) > 1))
    return found


def _pack(texts: list[str]) -> Cells:
    raw = [text.encode("utf-8") for text in texts]
    ends = np.cumsum([len(text) for text in raw], dtype=np.int64)
    assert not raw or ends[-1] < 2**31, "a batch is cut by its bytes"
    start = np.concatenate([[0], ends[:-1]])
    return Cells(np.frombuffer(b"".join(raw), dtype=np.uint8), start.astype(np.int32), ends.astype(np.int32))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _short(value: object) -> str:
    text = str(value) if type(value) in (int, _Decimal) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
