"""Ghosts: their gains against caches that really had the pages, their error bars, and what they cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from cache_engine import EmbeddingCache, HbmPool
from cache_engine.ghost import EmbeddingGhost
from eval.engine import peers
from eval.engine.caches import LRU, POLICIES, Compiled, look_up, make_cache
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
    """Compare predicted gains of 16 and 64 pages, per policy, with caches that have them; LRU's with exact LRU as well.

    Args:
        loads: streams of keys.
        requests: those counted, after half as many that warm up.
        samples: further ghosts, each of another sample of the keys, that tell how often two standard errors hold.
        advance: called with what is done next.
    """
    figures: dict[str, Figure] = {}
    worst: dict[str, float] = {}
    within: dict[str, list[bool]] = {}
    for load in loads:
        keys = load.make(requests + requests // 2)
        warm, counted = np.split(keys, [keys.size // 3 // BATCH * BATCH])
        for policy in POLICIES:
            advance(f"{policy} caches of three sizes on {load.name}")
            truths = {policy: _true_gains(warm, counted, policy)}
            if policy == LRU and peers.installed(peers.LIBCACHESIM):
                advance(f"exact LRU on {load.name}")
                truths["exact_lru"] = _exact_gains(keys, warm.size)
            for k in range(1 + samples):
                advance(f"{policy} ghost {k + 1} of {1 + samples} on {load.name}")
                ghost = _ghost(warm, counted, policy, k)
                for pages in STEPS:
                    said = ghost.gain(pages)
                    for truth, gains in truths.items():
                        off = said.hits_per_request - gains[pages]
                        within.setdefault(truth, []).append(abs(off) <= 2 * said.standard_error)
                        if k == 0:
                            error = off / gains[pages] if gains[pages] else math.inf
                            worst[truth] = max(worst.get(truth, 0.0), abs(error))
                            name = f"engine.ghost_gain_error.{load.name}.{pages}.{truth}"
                            figures[name] = Figure(error, "", "lower")
                    if k == 0:
                        name = f"{load.name}.{pages}.{policy}"
                        figures[f"engine.ghost_gain.{name}"] = Figure(said.hits_per_request, "", "higher")
                        figures[f"engine.ghost_standard_error.{name}"] = Figure(said.standard_error, "", "lower")
    for truth in worst:
        figures[f"engine.ghost_gain_error.{truth}"] = Figure(worst[truth], "", "lower", ERROR_GOAL)
        figures[f"engine.ghost_within_two_errors.{truth}"] = Figure(
            float(np.mean(within[truth])), "", "higher", WITHIN_GOAL
        )
    figures["engine.ghost_gain_error"] = Figure(max(worst.values()), "", "lower", ERROR_GOAL)
    return figures


def measure_cost(keys: Keys, policy: str, rounds: int, advance: Advance) -> dict[str, Figure]:
    """Serve the same keys by turns with and without a ghost, through the public call, in short rounds of CPU time."""
    advance("cost of a ghost")
    plain, ghosted = (_cache(PAGES, policy, ghost=on)[1] for on in (False, True))
    for emb in (plain, ghosted):
        look_up(emb, keys, BATCH)
    ratios = []
    per_round = keys.size // rounds
    for k in range(rounds):
        part = keys[k * per_round : (k + 1) * per_round]
        seconds = {}
        for emb in (plain, ghosted) if k % 2 else (ghosted, plain):
            begun = time.thread_time()
            look_up(emb, part, BATCH)
            seconds[emb] = time.thread_time() - begun
        ratios.append(seconds[ghosted] / seconds[plain] - 1)
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


def _exact_gains(keys: Keys, warm: int) -> dict[int, float]:
    with peers.LibCacheSimTrace(keys) as trace:
        ratio = {
            pages: peers.libcachesim_miss_ratio("LRU", (PAGES + pages) * ROWS_PER_PAGE, trace, warm)
            for pages in (0, *STEPS)
        }
    return {pages: ratio[0] - ratio[pages] for pages in STEPS}


def _ghost(warm: Keys, counted: Keys, policy: str, salt: int) -> EmbeddingGhost:
    """Return a ghost that was fed the keys, xor a salt so that others of them are sampled."""
    ghost = _cache(PAGES, policy, ghost=True)[1].ghost
    assert ghost is not None
    tables = np.zeros(BATCH, np.int16)
    for part in (warm, counted):
        ghost.reset()
        salted = part ^ (salt << 40)
        for start in range(0, part.size, BATCH):
            batch = salted[start : start + BATCH]
            ghost.feed_keys(tables[: batch.size], batch)
    return ghost
