"""Rows admitted in the background: one copy of at most CHUNK_BYTES at a time, published when it is done."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from cache_engine.backends.device import CHUNK_BYTES
from cache_engine.backends.protocol import EmbeddingBackend, Fetch

Keys = tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]  # tables and ids


class Refill:
    """Rows that wait for their turn. Hold the pool's lock over each call.

    A copy lands beside the slots, so no slot and no page waits for it, and lookups that come between are served as if
    it were not there. Once it is done its rows are admitted as one batch.
    """

    def __init__(self, backend: EmbeddingBackend, row_bytes: int) -> None:
        self._backend = backend
        self._rows_per_chunk = max(1, CHUNK_BYTES // row_bytes)
        self._queue: deque[Keys] = deque()
        self._fetch: Fetch | None = None
        self._error: Exception | None = None
        self.copied = 0  # rows whose copy was begun

    @property
    def waiting(self) -> int:
        """Rows not yet admitted, that on their way included."""
        rows = sum(keys.size for _, keys in self._queue)
        return rows + (self._fetch.keys.size if self._fetch is not None else 0)

    def add(self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64]) -> None:
        """Append rows; copies of one are fetched once."""
        order = np.lexsort((keys, tables))  # stable: of copies the first one comes first
        new = np.ones(keys.size, np.bool_)
        new[1:] = (np.diff(keys[order]) != 0) | (np.diff(tables[order]) != 0)
        first = np.sort(order[new])
        for at in range(0, first.size, self._rows_per_chunk):
            chosen = first[at : at + self._rows_per_chunk]
            self._queue.append((tables[chosen], keys[chosen]))

    def admit(self, wait: bool = False) -> None:
        """Admit the rows on their way if they have come, or after waiting for them."""
        if self._fetch is None or not (wait or self._fetch.event.done()):
            return
        if wait:
            self._fetch.event.wait()
        fetch, self._fetch = self._fetch, None
        self._backend.admit(fetch)

    def start(self) -> None:
        """Begin the next copy, unless one is on its way; rows that are cached by now are passed over.

        Rows that cannot be read are given up; `check` tells of them.
        """
        while self._fetch is None and self._queue:
            tables, keys = self._queue.popleft()
            missing = ~self._backend.contains(tables, keys)
            if not missing.any():
                continue
            try:
                self._fetch = self._backend.fetch(tables[missing], keys[missing])
            except Exception as e:
                self._error = e
            else:
                self.copied += self._fetch.keys.size

    def restart(self) -> None:
        """Copy the rows on their way once more: their table may have changed since."""
        if self._fetch is not None:
            self._queue.appendleft((self._fetch.tables, self._fetch.keys))
            self._fetch = None

    def check(self) -> None:
        """Raise what reading a table raised, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def take_copied(self) -> int:
        """Return how many rows were copied and start anew."""
        copied, self.copied = self.copied, 0
        return copied

    def close(self) -> None:
        """Forget what waits."""
        self._queue.clear()
        self._fetch = None
