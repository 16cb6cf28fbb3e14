"""The generic reader: a CSV file and a mapping make rows of codes and times."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.workloads.readers import delimited
from helm_rl.workloads.readers.codes import Codes
from helm_rl.workloads.readers.mapping import SEPARATOR_WORDS, UNIT_POWERS, Mapping
from helm_rl.workloads.readers.rows import Dictionaries, Drops, Facts, Int32Array, Int64Array, Rows, shown
from helm_rl.workloads.readers.source import Progress, Source

_ROWS_AT_A_TIME = 1 << 16
_NUMBER = re.compile(r'"?[+-]?\d+(\.\d*)?"?')
_NEGATIVE, _OTHER_UNIT = 4, 5  # states of a cell, beside those of delimited
_NO_ITEMS, _BLOCKS = 8, 9  # states of a row, beside those of delimited
_MAX_INT32 = 2**31 - 1
_UNIX_S = (631_152_000, 4_102_444_800)  # 1990 to 2100
_PARTS = ("time", "user", "item", "tenant", "tokens", "request")

Bytes = npt.NDArray[np.uint8]


@dataclass
class Cells:
    """One column of some rows: row i is data[start[i]:end[i]]."""

    data: Bytes
    start: Int32Array
    end: Int32Array

    def take(self, rows: npt.NDArray[np.bool_]) -> Cells:
        """Return some of the rows."""
        return Cells(self.data, self.start[rows], self.end[rows])

    def text(self, row: int) -> str:
        """Return the text of one row."""
        return self.data[self.start[row] : self.end[row]].tobytes().decode("utf-8", "backslashreplace")


class Columns:
    """Turns the cells of columns into rows of codes and times, and accounts for those that cannot be."""

    def __init__(self, mapping: Mapping, books: Dictionaries, drops: Drops, facts: Facts, guessed: bool) -> None:
        """guessed: the format was told by the content, not by the user, so that times must bear it out."""
        self.mapping = mapping
        self.books = books
        self.drops = drops
        self.facts = facts
        self.guessed = guessed
        self._unit: str = "" if mapping.unit == "auto" else mapping.unit
        self._given = ""  # the unit that the file at hand states itself
        self.floats = False  # times of the file at hand are floats, of which the text has all digits
        self._unix = mapping.unix
        self._sound_before = False  # times of an earlier piece bore the unit out
        self._number = 0  # rows so far, the time where there is none

    def take(
        self,
        path: Path,
        cells: dict[str, Cells],
        state: Bytes,
        place: Int64Array,
        faults: dict[int, tuple[str, str]],
        extra: Rows | None = None,
    ) -> tuple[Rows, int]:
        """Return the sound rows, and how many were dropped.

        cells: by part, each of n rows; state: (n,) 0 where a row is sound so far, else a key of `faults` < 10, whose
        values are the cause and, with {row}, what is said; place: (n,) line numbers; extra: columns that are ready.
        """
        mapping, n = self.mapping, state.size
        bad = state.copy()
        if extra is not None and extra.lengths is not None and not mapping.tokens:
            bad[(bad == 0) & (extra.lengths == 0)] = _NO_ITEMS
        numbers: dict[str, npt.NDArray[np.uint64]] = {}
        plain: dict[str, tuple[int, int, int]] = {}
        time_ns: Int64Array | None = None
        for index, part in enumerate(_PARTS):
            if part not in cells:
                continue
            column = cells[part]
            found = np.zeros(n, dtype=np.uint8)
            if part == "time":
                time_ns = self._times(path, column, found)
                if self._unix and time_ns.size and time_ns.min() < 0:
                    found[(time_ns < 0) & (found == 0)] = _NEGATIVE
            elif self._kind(part) == "text":
                found[column.start == column.end] = 0 if part == "tenant" else delimited.EMPTY
                if part == "user" and mapping.fresh_if_empty:
                    found[:] = 0
                elif part == "user":
                    delimited.mark_missing(column.data, column.start, column.end, found)
            else:
                values = np.zeros(n, dtype=np.uint64)
                plain[part] = delimited.parse_whole(column.data, column.start, column.end, values, found)
                numbers[part] = values
                if part in ("tenant", "tokens"):
                    low = 1 if part == "tokens" else 0
                    outside = (values.view(np.int64) < low) | (values.view(np.int64) > _MAX_INT32)
                    if self._kind(part) == "whole":
                        found[outside & (found == 0)] = delimited.RANGE
                    elif outside.any():
                        plain[part] = (1, 1, 1)
                if part in ("user", "item") and self._kind(part) == "auto" and not mapping.fresh_if_empty:
                    delimited.mark_missing(column.data, column.start, column.end, found)
                if self._kind(part) == "auto":
                    odd = bool(plain[part][2]) or bool((found > delimited.EMPTY).any())
                    plain[part] = (*plain[part][:2], int(odd))
                    found[found > delimited.EMPTY] = 0
                    if part == "tenant":
                        plain[part] = (*plain[part][:2], int(odd or bool((found == delimited.EMPTY).any())))
                        found[:] = 0
            if found.any():
                fresh = (bad == 0) & (found > 0)
                bad[fresh] = found[fresh] + 10 * (index + 1)
        if mapping.blocks and mapping.item and "tokens" in numbers:
            self._check_blocks(bad, numbers["tokens"], None if extra is None else extra.lengths)
        dropped = int(np.count_nonzero(bad))
        if dropped:
            self._account(path, cells, bad, place, faults)
            good = bad == 0
            cells = {part: column.take(good) for part, column in cells.items()}
            numbers = {part: values[good] for part, values in numbers.items()}
            time_ns = None if time_ns is None else time_ns[good]
            place = place[good]
            if extra is not None:
                self.facts.recount |= extra.item is not None
                extra = _subset(extra, good)
        rows = extra or Rows(np.zeros(0, dtype=np.int64))
        if rows.lengths is not None:
            if (rows.lengths == 1).all() and self.facts.plain:
                rows.lengths = None
            self.facts.plain &= rows.lengths is None
        count = place.size
        if time_ns is None:
            self.facts.timeless = True
            time_ns = np.arange(self._number, self._number + count, dtype=np.int64)
        self._number += count
        rows.time_ns = time_ns
        for part in ("user", "item", "tenant", "request"):
            if part in cells:
                setattr(rows, part, self._codes(part, cells[part], numbers.get(part), plain.get(part), place))
        if "tokens" in cells:
            rows.tokens = numbers["tokens"].astype(np.int32)
        self.facts.rows += count
        return rows, dropped

    def see_unit(self, unit: str) -> None:
        """Take times to be in this unit, which the file itself says; "": as the mapping says."""
        self._given = unit

    def _check_blocks(self, bad: Bytes, tokens: npt.NDArray[np.uint64], lengths: Int32Array | None) -> None:
        """Mark rows that have not as many content blocks as their tokens make."""
        asked = -(-tokens.view(np.int64) // self.mapping.blocks)
        bad[(bad == 0) & (asked != (1 if lengths is None else lengths))] = _BLOCKS

    def _kind(self, part: str) -> str:
        mapping = self.mapping
        if part == "tokens":
            return "whole"
        return {"user": mapping.user_kind, "item": mapping.item_kind, "tenant": mapping.tenant_kind}.get(part, "auto")

    def _codes(
        self,
        part: str,
        cells: Cells,
        numbers: npt.NDArray[np.uint64] | None,
        plain: tuple[int, int, int] | None,
        place: Int64Array,
    ) -> Int32Array:
        book: Codes = getattr(self.books, part)
        kind = self._kind(part)
        if kind == "whole" or (kind == "auto" and plain is not None and not plain[2] and not book.text):
            assert numbers is not None
            assert plain is not None
            return book.add_numbers(numbers, plain[0] > 0, plain[1] > 0)
        if part == "user" and self.mapping.fresh_if_empty:
            cells = self._fill(cells, place)
        return book.add_texts(cells.data, cells.start, cells.end)

    def _fill(self, cells: Cells, place: Int64Array) -> Cells:
        """Give each row without a user one of its own, named after the row."""
        empty = np.flatnonzero(cells.start == cells.end)
        if not empty.size:
            return cells
        names = [f"(row {self.facts.rows + int(i) + 1})".encode() for i in empty]
        self.facts.fresh += empty.size
        ends = np.cumsum([len(name) for name in names]) + cells.data.size
        start, end = cells.start.copy(), cells.end.copy()
        end[empty] = ends
        start[empty] = np.concatenate([[cells.data.size], ends[:-1]])
        return Cells(np.concatenate([cells.data, np.frombuffer(b"".join(names), np.uint8)]), start, end)

    def _times(self, path: Path, cells: Cells, found: Bytes) -> Int64Array:
        time_ns = np.empty(found.size, dtype=np.int64)
        told = not self._unit and not self._given
        if told:
            self._unit = self.facts.unit = self._unit_of(path, cells)
        unit = self._given or self._unit
        if unit == "iso":
            zoneless, decimals = delimited.parse_iso_time(cells.data, cells.start, cells.end, time_ns, found)
            self.facts.zoneless += zoneless
            power = 9
        else:
            power = UNIT_POWERS[unit]
            exponents, decimals = delimited.parse_decimal_time(
                cells.data, cells.start, cells.end, power, time_ns, found
            )
            self.facts.exponents += 0 if self.floats else exponents
        self.facts.saw_step(10 ** max(0, power - decimals))
        if unit != "iso" and not self._given and (found == 0).any():
            if told and self.mapping.unit == "auto":  # times that count from 1970 go on doing so
                self._unix |= self._within(int(np.median(time_ns[found == 0])))
            if self._unix:
                self._check_unit(path, time_ns, found)
        return time_ns

    def _within(self, time_ns: int) -> bool:
        return _UNIX_S[0] <= time_ns // 10**9 < _UNIX_S[1]

    def _unit_of(self, path: Path, cells: Cells) -> str:
        """Tell the unit of times by the size of the middle one."""
        values, found = np.empty(cells.start.size, dtype=np.int64), np.zeros(cells.start.size, dtype=np.uint8)
        delimited.parse_iso_time(cells.data, cells.start, cells.end, values, found)
        if 2 * np.count_nonzero(found == 0) > found.size:
            return "iso"
        delimited.parse_decimal_time(cells.data, cells.start, cells.end, 0, values, found)
        if not (found == 0).any():
            return "s"
        middle = abs(int(np.median(values[found == 0])))
        return "s" if middle < 10**11 else "ms" if middle < 10**14 else "us" if middle < 10**17 else "ns"

    def _check_unit(self, path: Path, time_ns: Int64Array, found: Bytes) -> None:
        """Refuse times that make sense in another unit alone: the names are right, the data are others.

        A few of them among others that are sound are marked in `found`.
        """
        sound = found == 0
        low, high = _UNIX_S[0] * 10**9, min(_UNIX_S[1] * 10**9, 2**62)
        outside = sound & ((time_ns < low) | (time_ns >= high))
        if not outside.any():
            self._sound_before = True
            return
        middle = self._likely(int(np.median(time_ns[sound])))
        name = self.mapping.time
        if self._unit in middle:
            self._sound_before = True
            for first, last in self._elsewhere():
                found[outside & (time_ns >= first) & (time_ns < last)] = _OTHER_UNIT
            return
        if not middle:
            self.facts.note(f"{name} lies before 1990 or after 2100: is it in {self._unit}?")
            return
        if self._sound_before:
            raise UserError(f"{path}: {name} is in {self._unit} at first, and looks like {middle[0]} further on")
        if self.guessed:
            raise UserError(
                f"{path}: its names are {self.mapping.name}'s, but {name} looks like {middle[0]}, not {self._unit}; "
                f"pass --format {self.mapping.name} to read it as {self._unit} all the same, or --map"
            )
        self.facts.note(f"{name} looks like {middle[0]}, and was read as {self._unit}")

    def _likely(self, time_ns: int) -> list[str]:
        """Return the units in which a time that was read in ours would lie between 1990 and 2100."""
        value = time_ns // 10 ** UNIT_POWERS[self._unit]
        return [unit for unit, power in UNIT_POWERS.items() if self._within(value * 10**power)]

    def _elsewhere(self) -> list[tuple[int, int]]:
        """Return, for each other unit, from where to where our times would lie between 1990 and 2100 in it."""
        ours = 10 ** UNIT_POWERS[self._unit]
        scales = [10**power for unit, power in UNIT_POWERS.items() if unit != self._unit]
        spans = [(_UNIX_S[0] * 10**9 * ours // scale, _UNIX_S[1] * 10**9 * ours // scale) for scale in scales]
        return [(low, min(high, 2**62)) for low, high in spans if low < 2**62]

    def _account(
        self, path: Path, cells: dict[str, Cells], bad: Bytes, place: Int64Array, faults: dict[int, tuple[str, str]]
    ) -> None:
        names = self.mapping.named()
        codes, first, counts = np.unique(bad, return_index=True, return_counts=True)
        for at in np.argsort(first):
            code, row, count = int(codes[at]), int(first[at]), int(counts[at])
            if code == 0:
                continue
            line = int(place[row])
            if code in (_NO_ITEMS, _BLOCKS):
                item, tokens = self.mapping.item, self.mapping.tokens
                cause = "no items" if code == _NO_ITEMS else f"{item} does not fit {tokens}"
                said = (
                    "a list without an item"
                    if code == _NO_ITEMS
                    else (f"not as many ids as {tokens} makes blocks of {self.mapping.blocks} tokens (--block-tokens)")
                )
                self.drops.add(cause, path, line, f", field {item}: {said}", count)
                continue
            if code < 10:
                cause, said = faults[code]
                self.drops.add(cause, path, line, said.replace("{row}", str(row)), count)
                continue
            part = _PARTS[code // 10 - 1]
            name = names[part] if self.mapping.header else f"{names[part]} ({part})"
            cause, what = self._said(part, code % 10)
            cell = cells[part].text(row)
            message = f", field {name}: {shown(cell) if cell else 'an empty cell'} {what}"
            self.drops.add(f"{name} {cause}", path, line, message, count)

    def _said(self, part: str, state: int) -> tuple[str, str]:
        """Return the cause and what is said of the cell."""
        unit = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}.get(self._unit, "")
        whole = f"a number of {unit}" if part == "time" and unit else "a whole number"
        if part == "time" and self._unit == "iso":
            whole = "a time like 2023-11-16 18:17:03.9799600"
        if state == _OTHER_UNIT:
            return "in another unit", f"makes sense in another unit alone, not in {self._unit}"
        if state == _NEGATIVE:
            return "before 1970", "lies before 1970"
        if state == delimited.EMPTY:
            return "empty", f"is not {'an id' if self._kind(part) != 'whole' and part != 'time' else whole}"
        if state == delimited.RANGE:
            years = f"146 years, if it is in {unit}"
            limits = {"tenant": f"0..{_MAX_INT32}", "tokens": f"1..{_MAX_INT32}", "time": years}
            limit = limits.get(part, "-2^63..2^64 - 1")
            return "out of range", f"is outside {limit}"
        return f"not {whole}", f"is not {whole}"


def _subset(rows: Rows, good: npt.NDArray[np.bool_]) -> Rows:
    if rows.lengths is None:
        return Rows(rows.time_ns)
    item = rows.item
    return Rows(
        rows.time_ns, item=None if item is None else item[np.repeat(good, rows.lengths)], lengths=rows.lengths[good]
    )


def read_csv(
    path: Path, mapping: Mapping, columns: Columns, arrivals: bool, progress: Progress | None
) -> Iterator[Rows]:
    """Yield the rows of a CSV file.

    arrivals: times are given, so that the log may lack them. Raises UserError for a header that is missing or has not
    the columns, for another separator, for what is no text, and for a file cut off within a row.
    """
    with Source(path, progress) as source:
        chunks = source.lines()
        chunk = next(chunks, b"").removeprefix(b"\xef\xbb\xbf")
        line = 1
        while chunk and not (first := chunk[: chunk.find(b"\n") + 1 or len(chunk)]).strip():
            chunk = chunk[len(first) :] or next(chunks, b"")
            line += 1
        if line > 1:
            columns.drops.add("blank lines", path, 1, ": a blank line", line - 1)
        layout = _Layout(path, mapping, chunk, arrivals, line)
        header = b""
        if mapping.header:
            cut = chunk.find(b"\n") + 1 or len(chunk)
            header, chunk = chunk[:cut].rstrip(b"\r\n"), chunk[cut:]
            line += 1
        cutter = _Cutter(layout, header)
        rows = bad = 0
        while True:
            _check_text(path, chunk, line)
            for part, dropped, found in cutter.cut(path, chunk, line, columns):
                rows, bad = rows + found, bad + dropped
                if part.time_ns.size:
                    yield part
            line = cutter.line
            following = next(chunks, None)
            if following is None:
                break
            chunk = following
    blank = int(cutter.blanks[0])
    if blank:
        columns.drops.add("blank lines", path, cutter.first_blank, ": a blank line", blank)
    empty = "has a header and no row below it" if mapping.header else "has no row in it"
    columns.drops.check_file(path, rows, bad, empty)


class _Layout:
    """Where the wanted columns stand in the rows of one file."""

    def __init__(self, path: Path, mapping: Mapping, start: bytes, arrivals: bool, line: int) -> None:
        """line: the number of the first line of `start`."""
        self.mapping = mapping
        self.line = line
        raw = start.split(b"\n", 1)[0][: 1 << 20]
        try:
            first = raw.decode("utf-8").removesuffix("\r").strip(" ")
        except UnicodeDecodeError:
            raise UserError(f"{path}, line {self.line}: not UTF-8 text") from None
        if mapping.comment:
            first = first.removeprefix(mapping.comment).strip(" ")
        wanted = dict(mapping.named())
        optional = (*mapping.optional, *((mapping.time,) if arrivals else ()))
        self.separator = mapping.separator or _separator_of(path, mapping, first, list(wanted.values()))
        short = (first if len(first) <= 160 else first[:157] + "...").replace("\r", " ")
        cells = cells_of(first, self.separator)
        if mapping.header:
            self._check_header(path, cells, first, [name for name in wanted.values() if name not in optional], short)
            self.place = {part: cells.index(name) for part, name in wanted.items() if name in cells}
            self.columns = len(cells)
        else:
            self.columns = mapping.columns or len(cells)
            self.place = {part: int(name) - 1 for part, name in wanted.items()}
            self._check_first_row(path, cells, start, short)
        if "time" not in self.place and not arrivals:
            raise UserError(
                f"{path}, line {self.line}: column {mapping.time or 'time'} is missing from the header found "
                f"({short}); "
                "a log without times needs --arrivals RATE"
            )
        self.greedy = int(mapping.greedy) - 1 if mapping.greedy else -1

    def _check_header(self, path: Path, cells: list[str], first: str, needed: list[str], short: str) -> None:
        missing = [name for name in needed if name not in cells]
        if missing:
            for separator, word in SEPARATOR_WORDS.items():
                if separator != self.separator and set(needed) <= set(cells_of(first, separator)):
                    raise UserError(
                        f"{path}, line {self.line}: columns are separated by {word}; "
                        f"a {self.mapping.name} log has {SEPARATOR_WORDS.get(self.separator, repr(self.separator))}"
                    )
            if _NUMBER.fullmatch(cells[0]):
                raise UserError(f"{path}, line {self.line}: a header is missing, the first line is data ({short})")
            raise UserError(f"{path}, line {self.line}: column {missing[0]} is missing from the header found ({short})")
        for name in cells:
            if name in needed and cells.count(name) > 1:
                raise UserError(f"{path}, line {self.line}: column {name} is there {cells.count(name)} times")

    def _check_first_row(self, path: Path, cells: list[str], start: bytes, short: str) -> None:
        if max(self.place.values()) >= self.columns or (self.columns != len(cells) and not self.mapping.greedy):
            for separator, word in SEPARATOR_WORDS.items():
                others = len(cells_of(short, separator))
                if separator != self.separator and others > 1 and others >= self.columns and len(cells) == 1:
                    raise UserError(
                        f"{path}, line {self.line}: columns are separated by {word}, not {self.separator!r}"
                    )
            if max(self.place.values()) >= len(cells):
                raise UserError(
                    f"{path}, line {self.line}: {len(cells)} columns, where {max(self.place.values()) + 1} are needed"
                )
        second = start.split(b"\n", 2)[1:2]
        below = cells_of(second[0].decode("utf-8", "replace").strip(), self.separator) if second else []
        at = [place for place in self.place.values() if place < min(len(cells), len(below))]
        if "time" in self.place and self.mapping.unit != "iso":
            at = [place for place in at if place == self.place["time"]]
        # Names above numbers: of the times, or where there are none of every column.
        if at and all(not _NUMBER.match(cells[place]) and _NUMBER.match(below[place]) for place in at):
            raise UserError(f"{path}, line {self.line}: a header ({short}), where a {self.mapping.name} log has none")


class _Cutter:
    """Cuts chunks of one file into rows, in arrays that are used again."""

    def __init__(self, layout: _Layout, header: bytes) -> None:
        """header: the line that files joined without a thought have again where the next one begins; b"": none."""
        self.layout = layout
        self._header = header
        self.line = 0  # of the next chunk
        self.blanks = np.zeros(2, dtype=np.int64)
        self._opened = np.zeros(2, dtype=np.int64)
        self.first_blank = 0
        self._parts = list(layout.place)
        self._wanted = np.array([layout.place[part] for part in self._parts], dtype=np.int64)
        self._separator = np.frombuffer(layout.separator.encode(), dtype=np.uint8)
        shape = (len(self._parts), _ROWS_AT_A_TIME)
        self._starts, self._ends = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self._line, self._cells = np.zeros(_ROWS_AT_A_TIME, np.int32), np.zeros(_ROWS_AT_A_TIME, np.int32)
        self._state = np.zeros(_ROWS_AT_A_TIME, np.uint8)
        self._cuts = np.zeros(delimited.MOST_CELLS + 1, np.int64)

    def cut(self, path: Path, chunk: bytes, line: int, columns: Columns) -> Iterator[tuple[Rows, int, int]]:
        """Yield rows, how many were dropped, and how many there were; `line` is that of the chunk's first."""
        data = np.frombuffer(chunk, dtype=np.uint8)
        layout = self.layout
        quoted = layout.mapping.quoted and (b'"' in chunk or self._opened[0] > 0)
        begin = 0
        headers = line + np.array(_lines_that_are(chunk, self._header), dtype=np.int64)
        while begin < data.size:
            blanks_before = int(self.blanks.sum())
            n, lines, begin = delimited.split_rows(
                data,
                begin,
                self._separator,
                self._wanted,
                layout.columns,
                layout.greedy,
                quoted,
                self._starts,
                self._ends,
                self._line,
                self._state,
                self._cells,
                self._cuts,
                self.blanks,
                self._opened,
            )
            place = self._line[:n].astype(np.int64) + line
            if not self.first_blank and int(self.blanks.sum()) > blanks_before:
                seen = set(place.tolist())
                self.first_blank = next(k for k in range(line, line + lines) if k not in seen)
            line += lines
            state = self._state[:n]
            if headers.size:
                state[np.isin(place, headers)] = delimited.HEADER
            faults: dict[int, tuple[str, str]] = {}
            if state.any():
                faults = self._faults(path, chunk, state, place, begin == data.size, columns)
            cells = {part: Cells(data, self._starts[k, :n], self._ends[k, :n]) for k, part in enumerate(self._parts)}
            rows, dropped = columns.take(path, cells, state, place, faults)
            yield rows, dropped, n
        self.line = line

    def _faults(
        self, path: Path, chunk: bytes, state: Bytes, place: Int64Array, last: bool, columns: Columns
    ) -> dict[int, tuple[str, str]]:
        layout = self.layout
        where = "the header has" if layout.mapping.header else f"a {layout.mapping.name} log has"
        found = {
            delimited.OPEN_QUOTE: ("a quoted cell that does not end on its line",) * 2,
            delimited.INNER_QUOTE: ("a quote within a quoted cell",) * 2,
            delimited.HEADER: ("the header again",) * 2,
        }
        faults = {code: (cause, f": {said}") for code, (cause, said) in found.items()}
        wrong = np.flatnonzero(state == delimited.COLUMNS)
        if wrong.size:
            row = int(wrong[0])
            said = f": {int(self._cells[row])} columns, where {where} {layout.columns}"
            faults[delimited.COLUMNS] = ("the number of columns", said)
            end = int(wrong[-1])
            if last and end == state.size - 1 and not chunk.endswith(b"\n") and self._cells[end] < layout.columns:
                count = int(self._cells[end])
                if place[end] > 2 or end > 0:
                    raise UserError(
                        f"{path}, line {int(place[end])}: {count} columns, where {where} {layout.columns} "
                        "(is the file cut off here?)"
                    )
        return faults


def _check_text(path: Path, chunk: bytes, line: int) -> None:
    """Raise for what is not text, naming the line; text beyond ASCII is none of a log's numbers, but legal."""
    zero = chunk.find(b"\0")
    bad = zero
    if not chunk.isascii():
        try:
            chunk.decode("utf-8")
        except UnicodeDecodeError as error:
            bad = error.start if zero < 0 else min(zero, error.start)
    if bad >= 0:
        raise UserError(f"{path}, line {line + chunk.count(10, 0, bad)}: not UTF-8 text")


def _lines_that_are(chunk: bytes, text: bytes) -> list[int]:
    """Return the lines of a chunk, counted from 0, that are this text, after a byte order mark or not."""
    if not text or text not in chunk:
        return []
    bounded = b"\n" + chunk + b"\n"
    places = []
    for start, end in itertools.product((b"\n", b"\n\xef\xbb\xbf"), (b"\n", b"\r\n")):
        line, at = start + text + end, -1
        while (at := bounded.find(line, at + 1)) >= 0:
            places.append(at)
    places.sort()
    return np.cumsum([bounded.count(10, low, high) for low, high in itertools.pairwise([0, *places])]).tolist()


def cells_of(line: str, separator: str) -> list[str]:
    """Cut a header or a first row, without the blanks and quotes around its cells."""
    return [cell.strip().strip('"').strip() for cell in line.split(separator)]


def _separator_of(path: Path, mapping: Mapping, first: str, wanted: list[str]) -> str:
    """Tell the separator of a file: the one that finds the columns, or the most columns where there is no header."""
    order = ("\t", "::", ",", ";", "|", " ")
    if mapping.header:
        for separator in order:
            if set(wanted) - set(mapping.optional) <= set(cells_of(first, separator)):
                return separator
        return ","
    return max(order, key=lambda separator: (len(cells_of(first, separator)), -order.index(separator)))
