"""Real content blocks through the embedding cache as LRU, against libCacheSim's replay of the same blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from eval.engine import peers
from eval.engine.caches import LRU, Compiled, look_up, make_cache, ratios
from eval.engine.loads import Keys
from helm_rl.figures import Figure
from helm_rl.workloads.readers import read_trace
from helm_rl.workloads.trace import Trace

Advance = Callable[[str], None]

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
PAGES = 50
GOAL = 0.005


def read_blocks(path: Path) -> Trace:
    """Read a Mooncake log; its items are the blocks, request by request. UserError names the first thing wrong."""
    return read_trace(path, "mooncake")


def hit_ratio(trace: Trace, slots: int, one_by_one: bool) -> float:
    """Return the hits per block of the engine's LRU from empty, a batch a request as the simulator calls it.

    Args:
        trace: requests whose items are the keys.
        slots: of the cache, a multiple of PAGES.
        one_by_one: a batch for each block instead.
    """
    pool, emb = make_cache(slots, policy=LRU, pages=PAGES)
    keys = trace.item_values
    if one_by_one:
        Compiled(pool, emb, 1).look_up(keys)
    else:
        for start, stop in zip(trace.item_offsets[:-1].tolist(), trace.item_offsets[1:].tolist(), strict=True):
            look_up(emb, keys[start:stop], max(1, stop - start))
    return 1.0 - ratios(emb).misses


def measure_blocks(trace: Trace, sizes: tuple[int, ...], advance: Advance) -> dict[str, Figure]:
    """Compare hit ratios at each size and without bound, which is as many slots as there are blocks.

    The figure with a goal is that of the requests' batches, as the simulator has them.
    """
    keys: Keys = trace.item_values
    unique = int(np.unique(keys).size)
    unbounded = -(-unique // PAGES) * PAGES
    names = {str(size): size for size in sizes} | {"unbounded": unbounded}
    figures: dict[str, Figure] = {}
    with peers.LibCacheSimTrace(keys) as replay:
        for name, slots in names.items():
            advance(f"blocks in {slots:,} slots")
            exact = 1.0 - peers.libcachesim_miss_ratio("LRU", slots, replay)
            batched, single = hit_ratio(trace, slots, False), hit_ratio(trace, slots, True)
            figures[f"model.blocks_lru_error.{name}"] = Figure(abs(batched - exact), "", "lower", GOAL)
            figures[f"model.blocks_lru_error.{name}.one_by_one"] = Figure(abs(single - exact), "", "lower")
            figures[f"model.blocks_hit_ratio.{name}"] = Figure(batched, "", "higher")
            figures[f"model.blocks_hit_ratio.{name}.one_by_one"] = Figure(single, "", "higher")
            figures[f"model.blocks_hit_ratio.{name}.libcachesim_lru"] = Figure(exact, "", "higher")
    return figures
