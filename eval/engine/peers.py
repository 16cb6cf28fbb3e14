"""Caches of others, run in the same process on the same keys: libCacheSim (C) and cachetools (Python)."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from eval.engine.loads import ORACLE_GENERAL, Keys

LIBCACHESIM = "libcachesim"
CACHETOOLS = "cachetools"
LIBCACHESIM_POLICIES = ("LRU", "Sieve", "S3FIFO")


def installed(name: str) -> bool:
    """Whether the Python package is there."""
    return importlib.util.find_spec(name) is not None


class LibCacheSimTrace:
    """Keys in a file that libCacheSim maps and reads in C: 24 bytes a request, every object one unit large."""

    def __init__(self, keys: Keys) -> None:
        import libcachesim

        self._folder = tempfile.TemporaryDirectory(prefix="helm-rl-bench-")
        path = Path(self._folder.name) / "keys.oracleGeneral.bin"
        with path.open("wb") as file:
            for start in range(0, keys.size, 1 << 20):
                part = keys[start : start + (1 << 20)]
                records = np.zeros(part.size, ORACLE_GENERAL)
                records["id"] = part.view(np.uint64) + np.uint64(1)  # 0 is not an id there
                records["size"] = 1
                records["next"] = -1
                records.tofile(file)
        self.size = keys.size
        self._reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)

    def __enter__(self) -> LibCacheSimTrace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._folder.cleanup()

    def run(self, cache: Any, start: int, n: int) -> tuple[float, float]:
        """Process n requests from `start` on; return the seconds, reading the file included, and the miss ratio."""
        begun = time.perf_counter()
        miss_ratio, _ = cache.process_trace(self._reader, start, n)
        return time.perf_counter() - begun, miss_ratio


def libcachesim_cache(policy: str, slots: int, hashpower: int) -> Any:
    """Return an empty cache; its hash table begins with 2**hashpower places."""
    import libcachesim

    return getattr(libcachesim, policy)(slots, hashpower=hashpower)


def fastest_libcachesim(policy: str, slots: int, trace: LibCacheSimTrace, n: int) -> tuple[Any, int]:
    """Process the first n requests at hashpowers log2(slots) to log2(slots) + 4; return the fastest cache, and its."""
    smallest = (slots - 1).bit_length()
    best: tuple[float, Any, int] | None = None
    for hashpower in range(smallest, smallest + 5):
        cache = libcachesim_cache(policy, slots, hashpower)
        trace.run(cache, 0, n // 2)
        seconds, _ = trace.run(cache, n // 2, n - n // 2)
        if best is None or seconds < best[0]:
            best = (seconds, cache, hashpower)
    assert best is not None
    return best[1], best[2]


def libcachesim_miss_ratio(policy: str, slots: int, trace: LibCacheSimTrace, start: int = 0) -> float:
    """Return the miss ratio from request `start` on, after those before."""
    cache = libcachesim_cache(policy, slots, (slots - 1).bit_length() + 2)
    if start:
        trace.run(cache, 0, start)
    return trace.run(cache, start, trace.size - start)[1]


class CacheTools:
    """cachetools.LRUCache in a plain loop."""

    def __init__(self, slots: int) -> None:
        import cachetools

        self._cache: Any = cachetools.LRUCache(slots)

    def look_up(self, keys: list[int]) -> float:
        """Look the keys up and insert what is missing; return the seconds that it took."""
        cache = self._cache
        begun = time.perf_counter()
        for key in keys:
            try:
                cache[key]
            except KeyError:
                cache[key] = None
        return time.perf_counter() - begun
