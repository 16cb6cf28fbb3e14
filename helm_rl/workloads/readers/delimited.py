"""Kernels that cut delimited text into cells, and cells into whole numbers and times, without a float on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.jit import inner, kernel

Bytes = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

MOST_CELLS = 4096  # in a row

# State of a row.
SOUND, COLUMNS, OPEN_QUOTE, INNER_QUOTE, HEADER = 0, 1, 2, 3, 4
# State of a cell.
EMPTY, NOT_NUMBER, RANGE = 1, 2, 3

_MOST_OPEN = 16  # lines after which a quote that closes is that of another cell

_NEWLINE, _RETURN, _QUOTE, _SPACE, _TAB = 10, 13, 34, 32, 9
_MAX_U64 = np.uint64(2**64 - 1)
_TEN = np.uint64(10)


@kernel
def split_rows(
    data: Bytes,
    begin: int,
    separator: Bytes,
    wanted: Int64Array,
    columns: int,
    greedy: int,
    quoted: bool,
    starts: npt.NDArray[np.int32],
    ends: npt.NDArray[np.int32],
    line: npt.NDArray[np.int32],
    state: Bytes,
    cells: npt.NDArray[np.int32],
    cuts: Int64Array,
    blanks: Int64Array,
    opened: Int64Array,
) -> tuple[int, int, int]:
    """Find the wanted cells of the rows from byte `begin` on, one line each, until the outputs are full.

    Args:
        data: whole lines, the last one perhaps without a newline.
        separator: of one byte or more.
        wanted: (w,) positions of columns; columns: how many a row must have.
        greedy: position of the column whose cells may hold separators, -1: none does.
        quoted: whether a cell that starts with '"' runs to the closing one.
        starts, ends, line, state, cells: (w, rows), (w, rows), (rows,) ...; a cell is data[start:end] without blanks
            and quotes around it; line counts from that of `begin`; cells: how many the row has.
        cuts: (MOST_CELLS + 1,) scratch.
        blanks: (2,) blank lines before the last row found, and after it; added to: the second moves to the first when a
            row follows.
        opened: (2,) cells of the row whose last cell's quote does not close on its line (0: none), and lines since; the
            line that closes it and has the other cells is no row, and marked as the first is.

    Returns the rows found, the lines passed, and the byte after them.
    """
    size = data.size
    first = separator[0]
    width = separator.size
    plain = width == 1 and not quoted
    i = begin
    row = 0
    lines = 0
    while i < size and row < state.size:
        row_start = i
        n = 0
        cuts[0] = i
        found = SOUND
        content = False
        if plain:
            n, passed, i = _cut_plain(data, i, first, cuts)
            content = n > 0
            if passed > n:
                found = COLUMNS
            if not content:
                for j in range(row_start, i):
                    content |= data[j] > _SPACE
        while i < size and not plain:
            c = data[i]
            if c == _NEWLINE:
                break
            if c == first and _matches(data, i, separator):
                if n < MOST_CELLS - 1:
                    n += 1
                    cuts[n] = i + width
                else:
                    found = COLUMNS
                i += width
                content = True
                continue
            if c > _SPACE:
                content = True
                if quoted and c == _QUOTE and _opens(data, cuts[n], i):
                    i += 1
                    while i < size and data[i] != _NEWLINE:
                        if data[i] == _QUOTE:
                            if i + 1 < size and data[i + 1] == _QUOTE:
                                i += 1
                            else:
                                break
                        i += 1
                    if i >= size or data[i] == _NEWLINE:
                        found = OPEN_QUOTE
                        break
            i += 1
        row_end = i
        i += 1
        if row_end > row_start and data[row_end - 1] == _RETURN:
            row_end -= 1
        if not content:
            blanks[1] += 1
            lines += 1
            continue
        blanks[0] += blanks[1]
        blanks[1] = 0
        n += 1
        cuts[n] = row_end + width
        extra = 0
        if quoted:
            if opened[0] > 0:
                opened[1] += 1
                after = _after_quote(data, row_start, row_end, separator)
                if after >= 0 and opened[0] + after == columns:
                    found = OPEN_QUOTE
                    opened[0] = 0
                elif after != -1 or opened[1] > _MOST_OPEN:
                    opened[0] = 0
            elif found == OPEN_QUOTE:
                opened[0] = n
                opened[1] = 0
        if found == SOUND and n != columns:
            if greedy >= 0 and n > columns:
                extra = n - columns
            else:
                found = COLUMNS
        if found == SOUND:
            for k in range(wanted.size):
                at = wanted[k]
                last = at + 1
                if greedy >= 0:
                    if at > greedy:
                        at += extra
                    if last > greedy:
                        last += extra
                low = cuts[at]
                high = cuts[last] - width
                while low < high and (data[low] == _SPACE or data[low] == _TAB):
                    low += 1
                while low < high and (data[high - 1] == _SPACE or data[high - 1] == _TAB):
                    high -= 1
                if quoted and high - low >= 2 and data[low] == _QUOTE and data[high - 1] == _QUOTE:
                    low += 1
                    high -= 1
                    for j in range(low, high):
                        if data[j] == _QUOTE:
                            found = INNER_QUOTE
                starts[k, row] = low
                ends[k, row] = high
        if found != SOUND:
            for k in range(wanted.size):
                starts[k, row] = 0
                ends[k, row] = 0
        line[row] = lines
        state[row] = found
        cells[row] = n
        row += 1
        lines += 1
    return row, lines, min(i, size)


@inner
def _after_quote(data: Bytes, begin: int, end: int, separator: Bytes) -> int:
    """Return the separators after the quote that closes a cell which the line goes on with.

    -1: no quote closes it on this line; -2: what follows the quote shows that the line is none of the cell.
    """
    i = begin
    while i < end and (data[i] != _QUOTE or (i + 1 < end and data[i + 1] == _QUOTE)):
        i += 2 if data[i] == _QUOTE else 1
    if i >= end:
        return -1
    i += 1
    if i < end and not (data[i] == separator[0] and _matches(data, i, separator)):
        return -2
    count = 0
    for j in range(i, end):
        count += data[j] == separator[0] and _matches(data, j, separator)
    return count


@inner
def _cut_plain(data: Bytes, begin: int, separator: int, cuts: Int64Array) -> tuple[int, int, int]:
    """Write where each cell after the first begins, up to the end of the line; no branch depends on the text but that.

    Returns how many were written, how many there are, and the place of the line's end.
    """
    i = np.uint64(begin)
    size = np.uint64(data.size)
    one = np.uint64(1)
    n = np.uint64(0)
    passed = np.uint64(0)
    most = np.uint64(MOST_CELLS - 2)
    while i < size:
        c = data[i]
        if c == _NEWLINE:
            break
        i += one
        hit = np.uint64(c == separator)
        passed += hit
        cuts[min(passed, most) + np.uint64(c != separator)] = i
    n = min(passed, most)
    return np.int64(n), np.int64(passed), np.int64(i)  # type: ignore[return-value]


@inner
def _matches(data: Bytes, i: int, separator: Bytes) -> bool:
    if i + separator.size > data.size:
        return False
    same = True
    for k in range(1, separator.size):
        same &= data[i + k] == separator[k]
    return same


@inner
def _opens(data: Bytes, start: int, i: int) -> bool:
    """Whether nothing but blanks stands between the start of the cell and i."""
    blank = True
    for j in range(start, i):
        blank &= data[j] == _SPACE or data[j] == _TAB
    return blank


_MISSING = np.frombuffer(b"-\0\0\0NA\0\0NULLnullNaN\0nan\0None\\N\0\0", dtype=np.uint8).copy().reshape(-1, 4)


def mark_missing(data: Bytes, start: npt.NDArray[np.int32], end: npt.NDArray[np.int32], state: Bytes) -> None:
    """Set the state of cells that spell out that there is no value (-, NA, NULL, None, NaN, \\N) to EMPTY."""
    _mark_missing(data, start, end, _MISSING, state)


@kernel
def _mark_missing(data: Bytes, start: Any, end: Any, words: Bytes, state: Bytes) -> None:
    for row in range(start.size):
        size = end[row] - start[row]
        if size < 1 or size > 4:
            continue
        for k in range(words.shape[0]):
            same = True
            for j in range(4):
                have = data[start[row] + j] if j < size else 0
                same &= have == words[k, j]
            if same:
                state[row] = EMPTY


@kernel
def parse_whole(
    data: Bytes, start: npt.NDArray[np.int32], end: npt.NDArray[np.int32], out: npt.NDArray[np.uint64], state: Bytes
) -> tuple[int, int, int]:
    """Read whole numbers from -2^63 to 2^64 - 1; `out` has their 64 bits, state EMPTY, NOT_NUMBER, RANGE or 0.

    A fraction of zeros ("7.0") is whole. Returns how many sound ones are negative, how many exceed 2^63 - 1, and how
    many are not written as Python would write them (leading zeros, "+", a fraction).
    """
    negatives = 0
    large = 0
    odd = 0
    for row in range(start.size):
        i = int(start[row])
        stop = int(end[row])
        out[row] = np.uint64(0)
        if i == stop:
            state[row] = EMPTY
            continue
        negative = data[i] == 45
        plain = True
        if negative or data[i] == 43:
            plain = negative
            i += 1
        begin = i
        value = np.uint64(0)
        over = False
        while i < stop:
            digit = np.uint64(data[i]) - np.uint64(48)
            if digit > np.uint64(9):
                break
            if i - begin >= 19 and value > (_MAX_U64 - digit) // _TEN:
                over = True
            value = value * _TEN + digit
            i += 1
        digits = i - begin
        if digits > 1 and data[begin] == 48:
            plain = False
        if digits > 0 and i < stop and data[i] == 46:
            plain = False
            i += 1
            while i < stop and data[i] == 48:
                i += 1
        if digits == 0 or i != stop:
            state[row] = NOT_NUMBER
            continue
        if negative and value > np.uint64(2**63):
            over = True
        if over:
            state[row] = RANGE
            continue
        state[row] = 0
        if negative:
            if value == np.uint64(0):
                plain = False
            value = np.uint64(0) - value
            negatives += 1
        elif value > np.uint64(2**63 - 1):
            large += 1
        if not plain:
            odd += 1
        out[row] = value
    return negatives, large, odd


@kernel
def parse_decimal_time(
    data: Bytes,
    start: npt.NDArray[np.int32],
    end: npt.NDArray[np.int32],
    power: int,
    out: Int64Array,
    state: Bytes,
) -> tuple[int, int]:
    """Read times written as decimal numbers of 10^power ns; `out` is in ns, exact to half of one.

    Returns how many are written with an exponent, and the largest number of decimals seen, below 0 where an exponent
    hides digits before the point (-9 at least).
    """
    exponents = 0
    most_decimals = -9
    for row in range(start.size):
        i = int(start[row])
        stop = int(end[row])
        out[row] = 0
        if i == stop:
            state[row] = EMPTY
            continue
        negative = data[i] == 45
        if negative or data[i] == 43:
            i += 1
        value = np.uint64(0)
        digits = 0
        kept = 0  # digits in `value` after leading zeros
        beyond = 0  # digits before the point that `value` could not take
        half = False  # the first digit left out is 5 or more
        decimals = 0
        point = False
        sound = True
        while i < stop:
            c = data[i]
            if c == 46 and not point:
                point = True
            elif 48 <= c <= 57:
                digits += 1
                if kept < 19:
                    value = value * _TEN + (np.uint64(c) - np.uint64(48))
                    if value > np.uint64(0):
                        kept += 1
                    if point:
                        decimals += 1
                else:
                    if kept == 19:
                        half = c >= 53
                        kept += 1
                    if not point:
                        beyond += 1
            else:
                break
            i += 1
        exponent = 0
        if digits > 0 and i < stop and (data[i] == 101 or data[i] == 69):
            i += 1
            down = False
            if i < stop and (data[i] == 45 or data[i] == 43):
                down = data[i] == 45
                i += 1
            begin = i
            while i < stop and 48 <= data[i] <= 57:
                if exponent < 10_000:
                    exponent = exponent * 10 + (int(data[i]) - 48)
                i += 1
            sound = i > begin
            if down:
                exponent = -exponent
            exponents += 1
        if digits == 0 or i != stop or not sound:
            state[row] = NOT_NUMBER
            continue
        shift = power + exponent + beyond - decimals
        over = False
        if value == np.uint64(0):
            shift = 0
        while shift > 0 and not over:
            if value > np.uint64(2**63 - 1) // _TEN:
                over = True
            value = value * _TEN
            shift -= 1
        if shift < 0:
            half = False
            while shift < 0 and value > np.uint64(0):
                half = bool(value % _TEN >= np.uint64(5))
                value = value // _TEN
                shift += 1
            if shift < 0:
                half = False
        if half and not over:
            value += np.uint64(1)
        if over or value > np.uint64(2**62):
            state[row] = RANGE
            continue
        state[row] = 0
        most_decimals = max(most_decimals, decimals - exponent)
        out[row] = -np.int64(value) if negative else np.int64(value)
    return exponents, most_decimals


@inner
def _digits(data: Bytes, i: int, count: int, stop: int) -> int:
    """Return the number of `count` digits at i, or -1."""
    if i + count > stop:
        return -1
    value = 0
    for j in range(i, i + count):
        if data[j] < 48 or data[j] > 57:
            return -1
        value = value * 10 + (int(data[j]) - 48)
    return value


@inner
def _days_in(year: int, month: int) -> int:
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month in (4, 6, 9, 11) else 31


@inner
def _days_from_1970(year: int, month: int, day: int) -> int:
    """Days of the proleptic Gregorian calendar, counted in 400-year eras of years that begin in March."""
    if month <= 2:
        year -= 1
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


@kernel
def parse_iso_time(
    data: Bytes, start: npt.NDArray[np.int32], end: npt.NDArray[np.int32], out: Int64Array, state: Bytes
) -> tuple[int, int]:
    """Read ISO 8601 times ("2023-11-16 18:17:03.9799600", with T, Z or an offset, or a date alone) as ns since 1970.

    Up to 9 decimals, of any number; without a zone a time is read as UTC. Returns how many have no zone, and the
    largest number of decimals.
    """
    zoneless = 0
    most_decimals = 0
    for row in range(start.size):
        i = int(start[row])
        stop = int(end[row])
        out[row] = 0
        if i == stop:
            state[row] = EMPTY
            continue
        state[row] = NOT_NUMBER
        year = _digits(data, i, 4, stop)
        month = _digits(data, i + 5, 2, stop)
        day = _digits(data, i + 8, 2, stop)
        if year < 0 or month < 1 or month > 12 or day < 1 or data[i + 4] != 45 or data[i + 7] != 45:
            continue
        if day > _days_in(year, month):
            continue
        i += 10
        seconds = 0
        nanoseconds = 0
        decimals = 0
        zone = False
        offset = 0
        sound = True
        if i < stop:
            hour = _digits(data, i + 1, 2, stop)
            minute = _digits(data, i + 4, 2, stop)
            second = _digits(data, i + 7, 2, stop)
            if (data[i] != 32 and data[i] != 84) or hour < 0 or hour > 23 or minute < 0 or minute > 59:
                continue
            if second < 0 or second > 60 or data[i + 3] != 58 or data[i + 6] != 58:
                continue
            seconds = hour * 3600 + minute * 60 + second
            i += 9
            if i < stop and data[i] == 46:
                i += 1
                scale = 100_000_000
                while i < stop and 48 <= data[i] <= 57:
                    nanoseconds += (int(data[i]) - 48) * scale
                    scale //= 10
                    decimals += 1
                    i += 1
                if decimals == 0 or decimals > 9:
                    continue
            if i < stop and data[i] == 32:
                i += 1
            if i < stop:
                if data[i] == 90:
                    zone = True
                    i += 1
                elif data[i] == 43 or data[i] == 45:
                    sign = -1 if data[i] == 45 else 1
                    hours = _digits(data, i + 1, 2, stop)
                    i += 3
                    minutes = 0
                    if i < stop:
                        if data[i] == 58:
                            i += 1
                        minutes = _digits(data, i, 2, stop)
                        i += 2
                    sound = 0 <= hours <= 23 and 0 <= minutes <= 59
                    offset = sign * (hours * 3600 + minutes * 60)
                    zone = True
        if i != stop or not sound:
            continue
        if year < 1824 or year > 2115:  # what 2^62 ns reach
            state[row] = RANGE
            continue
        state[row] = 0
        if not zone:
            zoneless += 1
        most_decimals = max(most_decimals, decimals)
        days = _days_from_1970(year, month, day)
        out[row] = (days * 86_400 + seconds - offset) * 1_000_000_000 + nanoseconds
    return zoneless, most_decimals
