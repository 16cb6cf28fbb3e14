"""How fast this machine multiplies, gathers rows and brings keys and values back: medians of repeated runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine import EmbeddingCache, HbmPool, KvCache
from helm_rl.profiles.fit import least_squares

PEAK_EDGE = {"cpu": 1024, "cuda": 8192}
GATHER_ROWS = 4096
ONBOARD_PAGES = (1, 2, 4, 8)
_REPEATS = 15


def peak_gflop_s(backend: str, value_bytes: int) -> float:
    """Return the GFLOP/s of a large square product, in float32 (4 bytes) or bf16 (2); on the CPU of one thread."""
    import torch

    dtype = torch.float32 if value_bytes == 4 else torch.bfloat16
    edge = PEAK_EDGE[backend]
    left = torch.ones((edge, edge), dtype=dtype, device=backend)
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, left, out=out)
        if backend == "cuda":
            torch.cuda.synchronize()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return 2e-9 * edge**3 / median_s(multiply)
    finally:
        torch.set_num_threads(threads)


def gather_gb_s(tables: Sequence[npt.NDArray[np.uint8]], backend: str) -> float:
    """Return the GB/s at which rows of host tables that are missed in an embedding cache come, one lookup at a time."""
    rows, row_bytes = tables[0].shape
    pool = HbmPool(8, -(-row_bytes * GATHER_ROWS // 64) * 64, ("emb",), backend=backend)
    try:
        emb = EmbeddingCache(pool, row_bytes=row_bytes, tables=tables)
        pool.set_goals({"emb": 8}, 0)
        pool.migrate(8)
        rng = np.random.default_rng(0)
        fetched = []

        def look_up() -> None:
            ids, numbers = rng.integers(0, rows, GATHER_ROWS), rng.integers(0, len(tables), GATHER_ROWS)
            begun = time.perf_counter()
            answer = emb.lookup(ids, numbers)
            if pool.device is not None:
                pool.device.record().wait()
            fetched.append(answer.fetched * row_bytes / (time.perf_counter() - begun))

        median_s(look_up)
        return float(np.median(fetched)) * 1e-9
    finally:
        pool.close()


def onboarding(page_bytes: int, backend: str) -> tuple[float, float]:
    """Return the fixed ms of bringing a user's KV pages back from host memory, and the GB/s at which they come."""
    most = max(ONBOARD_PAGES)
    pool = HbmPool(2 * most + 2, page_bytes, backend=backend)
    try:
        EmbeddingCache(pool, row_bytes=page_bytes, tables=[np.zeros((1, page_bytes), np.uint8)])
        kv = KvCache(pool, token_bytes=page_bytes, host_pages=most)
        pool.set_target(0.0, 0)
        pool.migrate(pool.pages)
        ms = []
        for pages in ONBOARD_PAGES:

            def bring_back(pages: int = pages) -> float:
                kv.drop(0)
                kv.extend(0, pages)
                kv.offload(pool.owned("kv"))
                begun = time.perf_counter()
                came = kv.onboard(0, pages)
                took = time.perf_counter() - begun
                assert came == pages
                return took

            ms.append(1e3 * float(np.median([bring_back() for _ in range(1 + _REPEATS)][1:])))
        moved = np.array(ONBOARD_PAGES) * float(page_bytes)
        return _line(moved, np.array(ms))
    finally:
        pool.close()


def _line(moved: npt.NDArray[np.float64], ms: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the fixed ms, at least 0, and the GB/s of moving so many bytes in so long, [n] each.

    Of small pages the fixed cost is nearly all, and a few that were disturbed can make more look faster: then, as where
    it comes out below 0, all time counts as that of the bytes.
    """
    fixed_ms, ms_per_byte = least_squares([np.ones(moved.size), moved], ms)
    if fixed_ms < 0 or ms_per_byte <= 0:
        fixed_ms, (ms_per_byte,) = 0.0, least_squares([moved], ms)
    return fixed_ms, 1e-6 / ms_per_byte


def median_s(work: Callable[[], Any]) -> float:
    """Return the median seconds of a call, after one in advance."""
    work()
    times = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return float(np.median(times))
