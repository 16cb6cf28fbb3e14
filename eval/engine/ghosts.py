"""Ghosts: their gains against caches that really had the pages, their error bars, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from cache_engine import EmbeddingCache, HbmPool
from cache_engine.ghost import Ghost
from eval.engine import peers
from eval.engine.caches import LRU, Compiled, look_up, make_cache, policies
from eval.engine.loads import Keys, Load
from helm_rl.figures import Figure

Advance = Callable[[str], None]

PAGES = 512  # that the cache has, of twice as many in the pool
ROWS_PER_PAGE = 256
STEPS = (16, 64)
BATCH = 1_000
ERROR_GOAL = 0.2
WITHIN_GOAL = 0.9  # share of truths within two standard errors; .95 are expected, of a hundred samples give or take .04
COST_GOAL = 0.03


def measure_gains(loads: Sequence[Load], requests: int, samples: int, advance: Advance) -> dict[str, Figure]:
    """Compare predicted gains of 16 and 64 pages with those of the engine's caches, per policy, and of exact LRU.

    Args:
        loads: streams of keys.
        requests: those counted, after half as many that warm up.
        samples: further ghosts, each of another sample of the keys, that tell how often two standard errors hold.
        advance: called with what is done next, 2 + samples times a stream.
    """
    figures: dict[str, Figure] = {}
    worst: dict[str, float] = {}
    within: dict[str, list[bool]] = {}
    for load in loads:
        advance(f"caches of three sizes on {load.name}")
        keys = load.make(requests + requests // 2)
        warm, counted = np.split(keys, [keys.size // 3 // BATCH * BATCH])
        gains = {p: _true_gains(warm, counted, p) for p in policies()}
        advance(f"exact LRU on {load.name}")
        if peers.installed(peers.LIBCACHESIM):
            with peers.LibCacheSimTrace(keys) as trace:
                ratio = {
                    pages: peers.libcachesim_miss_ratio("LRU", (PAGES + pages) * ROWS_PER_PAGE, trace, warm.size)
                    for pages in (0, *STEPS)
                }
            gains["exact_lru"] = {pages: ratio[0] - ratio[pages] for pages in STEPS}
        for k in range(1 + samples):
            if k:
                advance(f"sample {k} of {load.name}")
            ghost = _ghost(warm, counted, k)
            for pages in STEPS:
                said = ghost.gain(pages)
                for truth, by_pages in gains.items():
                    error = said.hits_per_request / by_pages[pages] - 1 if by_pages[pages] else math.inf
                    within.setdefault(truth, []).append(
                        abs(said.hits_per_request - by_pages[pages]) <= 2 * said.standard_error
                    )
                    if k == 0:
                        worst[truth] = max(worst.get(truth, 0.0), abs(error))
                        figures[f"engine.ghost_gain_error.{load.name}.{pages}.{truth}"] = Figure(error, "", "lower")
                if k == 0:
                    figures[f"engine.ghost_gain.{load.name}.{pages}"] = Figure(said.hits_per_request, "", "higher")
                    figures[f"engine.ghost_standard_error.{load.name}.{pages}"] = Figure(
                        said.standard_error, "", "lower"
                    )
    figures["engine.ghost_gain_error"] = Figure(worst[LRU], "", "lower", ERROR_GOAL)
    for truth in worst:
        if truth != LRU:
            figures[f"engine.ghost_gain_error.{truth}"] = Figure(worst[truth], "", "lower")
        name = "engine.ghost_within_two_errors"
        name = name if truth == LRU else f"{name}.{truth}"
        figures[name] = Figure(float(np.mean(within[truth])), "", "higher", WITHIN_GOAL if truth == LRU else None)
    return figures


def measure_cost(keys: Keys, policy: str, rounds: int, advance: Advance) -> dict[str, Figure]:
    """Serve the same keys by turns with and without a ghost, through the public call, in short rounds."""
    advance("cost of a ghost")
    plain, ghosted = (_cache(PAGES, policy, ghost=on)[1] for on in (False, True))
    for emb in (plain, ghosted):
        look_up(emb, keys, BATCH)
    ratios = []
    per_round = keys.size // rounds
    for k in range(rounds):
        part = keys[k * per_round : (k + 1) * per_round]
        if k % 2:
            without, having = look_up(plain, part, BATCH), look_up(ghosted, part, BATCH)
        else:
            having, without = look_up(ghosted, part, BATCH), look_up(plain, part, BATCH)
        ratios.append(having / without - 1)
    return {
        "engine.ghost_cost": Figure(float(np.median(ratios)), "", "lower", COST_GOAL),
        # That of a median, from the quartiles: other work on the machine makes the tails.
        "engine.ghost_cost.standard_error": Figure(
            float(np.diff(np.percentile(ratios, (25, 75)))[0] / 1.349 * 1.2533 / np.sqrt(rounds)), "", "lower"
        ),
    }


def _cache(pages: int, policy: str, ghost: bool = False) -> tuple[HbmPool, EmbeddingCache]:
    return make_cache(pages * ROWS_PER_PAGE, policy=policy, pages=pages, pool_pages=2 * PAGES, ghost=ghost)


def _true_gains(warm: Keys, counted: Keys, policy: str) -> dict[int, float]:
    hits = {}
    for pages in (0, *STEPS):
        pool, emb = _cache(PAGES + pages, policy)
        compiled = Compiled(pool, emb, BATCH)
        compiled.look_up(warm)
        emb.stats()
        compiled.look_up(counted)
        stats = emb.stats()
        hits[pages] = stats.hits / stats.requested
    return {pages: hits[pages] - hits[0] for pages in STEPS}


def _ghost(warm: Keys, counted: Keys, salt: int) -> Ghost:
    """Return a ghost that was fed the keys, xor a salt so that others of them are sampled."""
    ghost = _cache(PAGES, LRU, ghost=True)[1].ghost
    assert ghost is not None
    for part in (warm, counted):
        ghost.reset()
        ghost.feed_rows(np.zeros(part.size, np.int16), part ^ (salt << 40))
    return ghost
