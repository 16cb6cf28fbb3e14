"""Miss ratios: batch LRU against exact LRU, and the engine's policies against libCacheSim's on many streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from eval.engine import peers
from eval.engine.caches import LRU, POLICIES, SIEVE, Compiled, Ratios, make_cache, ratios
from eval.engine.loads import Keys, Load, zipf
from helm_rl.figures import Figure

Advance = Callable[[str], None]

EXACT_GOAL = 0.002
SIEVE_GOAL = 0.005
LARGEST_SHARE = 32  # the goal holds for batches of at most this fraction of the slots
PAGES = 64
SHARES = (256, 128, 64, 32, 16, 8, 4, 2)


def own_ratios(keys: Keys, slots: int, pages: int, policy: str, batch: int) -> Ratios:
    """Return the ratios of the engine's cache, from empty."""
    pool, emb = make_cache(slots, policy=policy, pages=pages)
    Compiled(pool, emb, batch).look_up(keys)
    return ratios(emb)


def measure_batches(slots: int, requests: int, advance: Advance) -> dict[str, Figure]:
    """Compare batch LRU with libCacheSim's LRU, Zipf 1.0 over 1M keys from an empty cache, batches of all SHARES."""
    keys = zipf(np.random.default_rng(4), requests, 1_000_000, 1.0)
    with peers.LibCacheSimTrace(keys) as trace:
        exact = peers.libcachesim_miss_ratio("LRU", slots, trace)
    figures = {f"engine.miss_ratio.{slots}.libcachesim_lru": Figure(exact, "", "lower")}
    worst = 0.0
    for share in SHARES:
        advance(f"batches of 1/{share} of {slots:,} slots")
        error = own_ratios(keys, slots, PAGES, LRU, slots // share).misses - exact
        figures[f"engine.miss_ratio_error.{slots}.batch_1_{share}"] = Figure(error, "", "lower")
        if share >= LARGEST_SHARE:
            worst = max(worst, abs(error))
    figures[f"engine.miss_ratio_error.{slots}"] = Figure(worst, "", "lower", EXACT_GOAL)
    return figures


def measure_policies(loads: Sequence[Load], sizes: Sequence[int], requests: int, advance: Advance) -> dict[str, Figure]:
    """Compare policies on streams by fetches per request, from empty, batches of at most 1k and 1/32 of the slots.

    libCacheSim serves one request at a time, so there every miss is a fetch; in a batch, later copies of a missed key
    are misses too, but come with the same row.

    Args:
        loads: streams.
        sizes: slots; a stream of fewer than twice as many keys is served at a tenth of its keys instead.
        requests: length of generated streams.
        advance: called with what is done next, once a stream.
    """
    figures: dict[str, Figure] = {}
    ratios: dict[str, list[float]] = {}
    worst: dict[str, float] = {}
    for load in loads:
        advance(f"policies on {load.name}")
        keys = load.make(requests)
        unique = np.unique(keys).size
        fitting = [slots for slots in sizes if 2 * slots <= unique] or [max(PAGES, unique // 10 // PAGES * PAGES)]
        with contextlib.ExitStack() as stack:
            trace = stack.enter_context(peers.LibCacheSimTrace(keys)) if peers.installed(peers.LIBCACHESIM) else None
            for slots in fitting:
                batch = max(1, min(1_000, slots // LARGEST_SHARE))
                found = {p: own_ratios(keys, slots, PAGES, p, batch).fetches for p in POLICIES}
                if trace is not None:
                    for policy in peers.LIBCACHESIM_POLICIES:
                        found[_peer(policy)] = peers.libcachesim_miss_ratio(policy, slots, trace)
                for name, value in found.items():
                    figures[f"engine.policy.{load.name}.{slots}.{name}"] = Figure(value, "", "lower")
                    ratios.setdefault(name, []).append(value)
                if trace is not None:
                    # One by one, the policy alone differs; in batches, a missed key also brings its later copies along.
                    for name, n in (("engine.sieve_error", batch), ("engine.sieve_error.one_by_one", 1)):
                        fetches = found[SIEVE] if n == batch else own_ratios(keys, slots, PAGES, SIEVE, n).fetches
                        worst[name] = max(worst.get(name, 0.0), abs(fetches - found[_peer("Sieve")]))
    for name, values in ratios.items():
        figures[f"engine.policy.mean.{name}"] = Figure(float(np.mean(values)), "", "lower")
    for name, error in worst.items():
        figures[name] = Figure(error, "", "lower", SIEVE_GOAL)
    return figures


def _peer(policy: str) -> str:
    return f"{peers.LIBCACHESIM}_{policy.lower()}"
