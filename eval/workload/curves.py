"""Miss-ratio curves from a sample, beside libCacheSim's LRU replayed at each size in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from eval.engine import peers
from eval.engine.loads import zipf
from helm_rl.figures import Figure
from helm_rl.workloads.curves import miss_ratio_curve

ACCESSES = 10_000_000
KEYS = 1_000_000
RATE = 0.01
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Sizes, of the keys."""
SAMPLES = 5
GOAL_ERROR = 0.01
GOAL_SPEEDUP = 20.0


def measure(accesses: int = ACCESSES, advance: Callable[[str], None] = lambda _: None) -> dict[str, Figure]:
    """Compare curves of a stream of Zipf 1.0 over a tenth as many keys; `advance` is told what comes next.

    The error is the mean over the sizes, as in SHARDS' own evaluation, and over samples of other keys. The speed-up is
    that of the whole curve against one replay at one size, in CPU seconds, reading libCacheSim's file included.

    Raises ModuleNotFoundError if libCacheSim is not installed.
    """
    import libcachesim  # noqa: F401 (told before the stream is drawn)

    count = accesses // (ACCESSES // KEYS)
    keys = zipf(np.random.default_rng(4), accesses, count, 1.0)
    sizes = np.array([max(1, round(share * count)) for share in SHARES], dtype=np.float64)
    exact, replay_s = [], []
    with peers.LibCacheSimTrace(keys) as trace:
        for size in sizes.astype(int).tolist():
            advance(f"libCacheSim at {size:,} slots")
            begun = time.process_time()
            exact.append(peers.libcachesim_miss_ratio("LRU", size, trace))
            replay_s.append(time.process_time() - begun)
    advance("curves of samples")
    miss_ratio_curve(keys[:1000], rate=1, sizes=sizes)  # compiles
    errors, within, took_s = [], [], []
    for sample in range(SAMPLES):
        other = keys ^ (sample << 40)  # the same stream, of which other keys are followed
        begun = time.process_time()
        curve = miss_ratio_curve(other, rate=RATE, sizes=sizes)
        took_s.append(time.process_time() - begun)
        errors.append(np.abs(curve.miss_ratio - exact))
        within.append(np.abs(curve.miss_ratio - exact) <= 2 * curve.standard_error)
    found = np.array(errors)
    figures = {
        "trace.mrc_error": Figure(float(found.mean()), "", "lower", GOAL_ERROR),
        "trace.mrc_error.worst": Figure(float(found.max()), "", "lower"),
        "trace.mrc_within_two_errors": Figure(float(np.mean(within)), "", "higher"),
        "trace.mrc_speedup": Figure(min(replay_s) / float(np.median(took_s)), "", "higher", GOAL_SPEEDUP),
        "trace.mrc_s": Figure(float(np.median(took_s)), "s", "lower"),
        "trace.mrc_s.libcachesim_replay": Figure(min(replay_s), "s", "lower"),
    }
    for share, error in zip(SHARES, found.mean(axis=0), strict=True):
        figures[f"trace.mrc_error.{share:g}"] = Figure(float(error), "", "lower")
    return figures
