"""From ids, whole numbers or text, to dense codes, exactly; in the end codes follow the order of the ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.hashing import mix
from cache_engine.jit import inner, kernel
from helm_rl.errors import UserError
from helm_rl.workloads.trace import Ids, StringIds

Int32Array = npt.NDArray[np.int32]
_MOST = 2**31 - 1
_START = 1 << 12
_FULL = 0.6
_MOST_NEW_BYTES = 64 << 20  # of texts added at once


class Codes:
    """A growing dictionary of the ids of one column; a code is the place of its id in order of first appearance.

    Ids begin as 64-bit numbers; the first text turns all of them into text, which loses nothing: callers add numbers
    only where they are written as Python writes them, or where the column is one of numbers.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.text: bool | None = None  # None: nothing was added
        self.negative = self.large = False
        self.count = 0
        self._table = np.zeros((_START, 2), dtype=np.uint64)  # id or hash, code + 1 (0: free)
        self._ids = np.zeros(_START, dtype=np.uint64)
        self._offsets = np.zeros(_START + 1, dtype=np.int64)
        self._arena = np.zeros(0, dtype=np.uint8)

    def add_numbers(self, values: npt.NDArray[np.uint64], negative: bool, large: bool) -> Int32Array:
        """Return codes (n,) of 64-bit patterns; negative, large: whether some are below 0 or above 2^63 - 1."""
        if self.text:
            return self.add_texts(*_texts_of(values, negative))
        self.text = False
        self.negative |= negative
        self.large |= large
        if self.negative and self.large:
            raise UserError(f"field {self.name}: ids below 0 and ids above 2^63 - 1 in one log; map it as text")
        codes = np.empty(values.size, dtype=np.int32)
        done = 0
        while True:
            self.count, done = _intern_numbers(self._table, self._ids, self.count, values, codes, done)
            if done == values.size:
                return codes
            self._grow()

    def add_texts(self, data: npt.NDArray[np.uint8], start: Any, end: Any) -> Int32Array:
        """Return codes (n,) of the texts data[start[i]:end[i]]; texts may share bytes."""
        if self.text is False:
            self._to_text()
        self.text = True
        start, end = start.astype(np.int64), end.astype(np.int64)
        size = int((end - start).sum())
        if size > _MOST_NEW_BYTES and start.size > 1:  # room is made for all as if none were known
            half = start.size // 2
            parts = [self.add_texts(data, start[:half], end[:half]), self.add_texts(data, start[half:], end[half:])]
            return np.concatenate(parts)
        need = int(self._offsets[self.count]) + size
        if need > self._arena.size:
            arena = np.zeros(max(need, 2 * self._arena.size), dtype=np.uint8)
            arena[: self._arena.size] = self._arena
            self._arena = arena
        codes = np.empty(start.size, dtype=np.int32)
        done = 0
        while True:
            self.count, done = _intern_texts(
                self._table, self._offsets, self._arena, self.count, data, start, end, codes, done
            )
            if done == start.size:
                return codes
            self._grow()

    def ordered(self, kept: npt.NDArray[np.bool_] | None = None) -> tuple[Ids, Int32Array]:
        """Return the ids in order, and the place of each code in it: (k,) and (count,), -1 for what is not kept."""
        which = np.arange(self.count) if kept is None else np.flatnonzero(kept)
        if self.text:
            order = self._text_order(which)
            ids: Ids = _take_texts(self._offsets, self._arena, which[order])
        else:
            numbers = self._ids[: self.count][which]
            found = numbers if self.large else numbers.view(np.int64)
            order = np.argsort(found)
            ids = found[order]
        place = np.full(self.count, -1, dtype=np.int32)
        place[which[order]] = np.arange(which.size, dtype=np.int32)
        return ids, place

    def free(self) -> None:
        """Give the memory back; nothing can be added or ordered afterwards."""
        self._table = np.zeros((0, 2), dtype=np.uint64)
        self._ids, self._arena = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint8)
        self._offsets = np.zeros(1, dtype=np.int64)

    def _grow(self) -> None:
        if self.count >= _MOST // 2:
            raise UserError(f"field {self.name}: more than {_MOST // 2} different ids, more than a trace can hold")
        if self.count >= self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._offsets = np.concatenate([self._offsets, np.zeros(self._ids.size + 1 - self._offsets.size, np.int64)])
        if self.count >= int(self._table.shape[0] * _FULL):
            table = np.zeros((2 * self._table.shape[0], 2), dtype=np.uint64)
            _rehash(self._table, table, bool(self.text))
            self._table = table

    def _to_text(self) -> None:
        ids = self._ids[: self.count].copy()
        self._table = np.zeros_like(self._table)
        count, self.count, self.text = self.count, 0, None
        codes = self.add_texts(*_texts_of(ids, self.negative))
        assert np.array_equal(codes, np.arange(count))

    def _text_order(self, which: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        import pyarrow as pa
        import pyarrow.compute as pc

        texts = _take_texts(self._offsets, self._arena, which)
        cells = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), which.size, [None, pa.py_buffer(texts.offsets), pa.py_buffer(texts.data)]
        )
        return pc.sort_indices(cells).to_numpy().astype(np.int64)


def _texts_of(values: npt.NDArray[np.uint64], negative: bool) -> tuple[npt.NDArray[np.uint8], Any, Any]:
    """Write numbers out as text: data, start, end."""
    import pyarrow as pa

    numbers = pa.array(values.view(np.int64) if negative else values)
    texts = numbers.cast(pa.large_string())
    _, places, data = texts.buffers()
    offsets = np.frombuffer(places, dtype=np.int64)[: values.size + 1]
    flat = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    return flat, offsets[:-1], offsets[1:]


def _take_texts(
    offsets: npt.NDArray[np.int64], arena: npt.NDArray[np.uint8], which: npt.NDArray[np.int64]
) -> StringIds:
    lengths = offsets[which + 1] - offsets[which]
    places = np.zeros(which.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=places[1:])
    data = np.empty(int(places[-1]), dtype=np.uint8)
    _copy_texts(offsets, arena, which, places, data)
    return StringIds(places, data)


@kernel
def _copy_texts(offsets: Any, arena: Any, which: Any, places: Any, data: Any) -> None:
    for i in range(which.size):
        low = offsets[which[i]]
        for j in range(places[i + 1] - places[i]):
            data[places[i] + j] = arena[low + j]


@kernel
def _intern_numbers(table: Any, ids: Any, count: int, values: Any, codes: Any, done: int) -> tuple[int, int]:
    """Code values from `done` on until the table or `ids` is full; return the new count, and what is done."""
    mask = np.uint64(table.shape[0] - 1)
    limit = min(ids.size, int(table.shape[0] * _FULL))
    while done < values.size:
        value = values[done]
        at = mix(value) & mask
        while True:
            code = table[at, 1]
            if code == np.uint64(0):
                if count >= limit:
                    return count, done
                ids[count] = value
                count += 1
                table[at, 0] = value
                table[at, 1] = np.uint64(count)
                codes[done] = count - 1
                break
            if table[at, 0] == value:
                codes[done] = np.int64(code) - 1
                break
            at = (at + np.uint64(1)) & mask
        done += 1
    return count, done


@inner
def _hash_text(data: Any, low: int, high: int) -> np.uint64:
    state = np.uint64(high - low)
    word = np.uint64(0)
    filled = 0
    for i in range(low, high):
        word = (word << np.uint64(8)) | np.uint64(data[i])
        filled += 1
        if filled == 8:
            state = mix(state ^ word)
            word = np.uint64(0)
            filled = 0
    return mix(state ^ word)


@kernel
def _intern_texts(
    table: Any, offsets: Any, arena: Any, count: int, data: Any, start: Any, end: Any, codes: Any, done: int
) -> tuple[int, int]:
    mask = np.uint64(table.shape[0] - 1)
    limit = min(offsets.size - 1, int(table.shape[0] * _FULL))
    while done < start.size:
        low = start[done]
        length = end[done] - low
        key = _hash_text(data, low, end[done])
        at = key & mask
        while True:
            code = np.int64(table[at, 1])
            if code == 0:
                if count >= limit:
                    return count, done
                place = offsets[count]
                for j in range(length):
                    arena[place + j] = data[low + j]
                count += 1
                offsets[count] = place + length
                table[at, 0] = key
                table[at, 1] = np.uint64(count)
                codes[done] = count - 1
                break
            if table[at, 0] == key:
                place = offsets[code - 1]
                same = offsets[code] - place == length
                j = 0
                while same and j < length:
                    same = arena[place + j] == data[low + j]
                    j += 1
                if same:
                    codes[done] = code - 1
                    break
            at = (at + np.uint64(1)) & mask
        done += 1
    return count, done


@kernel
def _rehash(old: Any, new: Any, text: bool) -> None:
    mask = np.uint64(new.shape[0] - 1)
    for i in range(old.shape[0]):
        if old[i, 1] != np.uint64(0):
            at = (old[i, 0] if text else mix(old[i, 0])) & mask
            while new[at, 1] != np.uint64(0):
                at = (at + np.uint64(1)) & mask
            new[at, 0] = old[i, 0]
            new[at, 1] = old[i, 1]
