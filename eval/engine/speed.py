"""Lookups with insertion per second, beside libCacheSim's LRU and cachetools' on the same keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eval.engine import peers
from eval.engine.caches import Compiled, look_up, make_cache
from eval.engine.loads import scatter, zipf
from helm_rl.figures import Figure

BATCH = 1_000
_CACHETOOLS_SHARE = 10  # it serves a tenth of each round

Advance = Callable[[str], None]


@dataclass(frozen=True)
class SpeedCase:
    """One size of cache under Zipf 1.0."""

    slots: int
    keys: int
    libcachesim_goal: float
    cachetools_goal: float | None


CASES = (
    SpeedCase(8_192, 1_000_000, 1.2, None),
    SpeedCase(131_072, 1_000_000, 4.0, 20.0),
    SpeedCase(1 << 22, 1 << 26, 3.0, 20.0),
)
QUICK_CASES = CASES[:2]


def measure_speed(case: SpeedCase, policy: str, rounds: int, round_keys: int, advance: Advance) -> dict[str, Figure]:
    """Serve rounds of the same keys by turns from full caches; one thread.

    A ratio is the median over rounds of the peer's time over ours; a rate is that of a cache's fastest round.
    """
    slots = case.slots
    advance(f"keys for {slots:,} slots")
    rng = np.random.default_rng(3)
    # The most popular keys, the least popular of them first, then keys as they come: full, and in a steady state.
    fill = scatter(np.arange(slots, dtype=np.int64)[::-1], case.keys)
    warm = np.concatenate([fill, zipf(rng, min(2 * slots, 2_000_000) // BATCH * BATCH, case.keys, 1.0)])
    measured = zipf(rng, rounds * round_keys, case.keys, 1.0)

    advance(f"filling {slots:,} slots")
    pool, emb = make_cache(slots, policy=policy)
    compiled = Compiled(*make_cache(slots, policy=policy), BATCH)
    look_up(emb, warm, BATCH)
    compiled.look_up(warm)
    trace = peers.LibCacheSimTrace(np.concatenate([warm, measured])) if peers.installed(peers.LIBCACHESIM) else None
    python = peers.CacheTools(slots) if peers.installed(peers.CACHETOOLS) else None
    try:
        if trace is not None:
            advance(f"libCacheSim's best hashpower at {slots:,} slots")
            lru, hashpower = peers.fastest_libcachesim("LRU", slots, trace, warm.size)
        if python is not None:
            advance(f"filling cachetools with {slots:,} keys")
            python.look_up(warm.tolist())
        seconds: dict[str, list[float]] = {}
        for k in range(rounds):
            advance(f"round {k + 1} at {slots:,} slots")
            part = measured[k * round_keys : (k + 1) * round_keys]
            turn = {"public": lambda: look_up(emb, part, BATCH), "compiled": lambda: compiled.look_up(part)}  # noqa: B023
            if trace is not None:
                turn["libcachesim"] = lambda: trace.run(lru, warm.size + k * round_keys, round_keys)[0]  # noqa: B023
            if python is not None:
                few = part[: round_keys // _CACHETOOLS_SHARE].tolist()
                turn["cachetools"] = lambda: python.look_up(few) * _CACHETOOLS_SHARE  # noqa: B023
            names = list(turn)
            for name in names[k % len(names) :] + names[: k % len(names)]:
                seconds.setdefault(name, []).append(turn[name]())
    finally:
        if trace is not None:
            trace.__exit__(None, None, None)

    def rate(name: str) -> float:
        return round_keys / min(seconds[name])

    def ratio(peer: str, ours: str) -> float:
        return float(np.median(np.array(seconds[peer]) / np.array(seconds[ours])))

    figures = {
        f"engine.lookups_per_s.{slots}": Figure(rate("public"), "1/s", "higher"),
        f"engine.lookups_per_s.{slots}.compiled": Figure(rate("compiled"), "1/s", "higher"),
    }
    for peer, title, goal in (
        ("libcachesim", "libcachesim_lru", case.libcachesim_goal),
        ("cachetools", "cachetools", case.cachetools_goal),
    ):
        if peer in seconds:
            figures[f"engine.lookups_per_s.{slots}.{title}"] = Figure(rate(peer), "1/s", "higher")
            figures[f"engine.ratio_vs_{title}.{slots}"] = Figure(ratio(peer, "public"), "", "higher", goal)
            figures[f"engine.ratio_vs_{title}.{slots}.compiled"] = Figure(ratio(peer, "compiled"), "", "higher", goal)
    if trace is not None:
        figures[f"engine.libcachesim_hashpower.{slots}"] = Figure(hashpower, "", "lower")
    if slots >= 131_072:
        own = (emb.metadata_bytes() + pool.metadata_bytes()) / slots
        figures["engine.metadata_bytes_per_slot"] = Figure(own, "B", "lower", 40.0)
    return figures
