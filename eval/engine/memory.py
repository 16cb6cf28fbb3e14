"""Nanoseconds per lookup from small caches to large ones, beside what the machine's memory allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cache_engine.jit import kernel
from eval.engine.caches import Compiled, make_cache
from eval.engine.loads import scatter, zipf
from eval.timed_kernels import chase
from helm_rl.figures import Figure
from helm_rl.files import atomic_file
from helm_rl.memory import free_bytes

Advance = Callable[[str], None]

BATCH = 1_000
KEYS_PER_SLOT = 16
_LINE = 8  # int64 in a cache line
_PAGES = 64
# Of a cache's metadata: what filling it and the arrays that measure memory take as well, one after the other.
_ROOM = 2.0
_BYTES_PER_SLOT = 64


@dataclass(frozen=True)
class MemoryPoint:
    """One size of cache, ns each."""

    slots: int
    metadata_bytes: int
    lookup: float  # Zipf 1.0 over KEYS_PER_SLOT keys a slot, misses admitted, compiled loop
    chase: float  # one load whose address comes from the load before it, from as many bytes
    gather: float  # one load of many that are under way at a time


def fitting_slots(exponents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the sizes 2**exponent whose metadata and copies fit half of the free memory, and those that do not."""
    free = free_bytes() / 2
    fit = [1 << e for e in exponents if (1 << e) * _BYTES_PER_SLOT * _ROOM <= free]
    return fit, [1 << e for e in exponents if 1 << e not in fit]


def measure_memory(slots: int, policy: str, repeats: int, advance: Advance) -> MemoryPoint:
    """Measure one size, a power of two of at least 1,024 slots; the fastest of `repeats` turns of each counts."""
    advance(f"{slots:,} slots")
    rng = np.random.default_rng(9)
    keys = KEYS_PER_SLOT * slots
    pool, emb = make_cache(slots, policy=policy, pages=_PAGES)
    compiled = Compiled(pool, emb, BATCH)
    # Any keys fill it; the most popular ones make its hit rate settle sooner.
    _fill(compiled, slots, keys)
    compiled.look_up(zipf(rng, min(2 * slots, 2_000_000), keys, 1.0))
    metadata_bytes = emb.metadata_bytes()
    lines = metadata_bytes // 64
    n = 500_000
    order = rng.permutation(lines).astype(np.int64)
    memory = np.zeros(lines * _LINE, np.int64)
    memory[order * _LINE] = np.roll(order, -1) * _LINE
    del order
    best = [np.inf, np.inf, np.inf]
    at = chase(memory, 0, 1) + 0 * _gather(memory, lines, np.uint64(0), 1)  # compiled before it is timed
    for _ in range(repeats):
        part = zipf(rng, n, keys, 1.0)
        best[0] = min(best[0], compiled.look_up(part) / n)
        begun = time.perf_counter()
        at = chase(memory, at, n // 5)
        best[1] = min(best[1], (time.perf_counter() - begun) / (n // 5))
        begun = time.perf_counter()
        at = (at + _gather(memory, lines, np.uint64(rng.integers(2**62)), n)) % lines * _LINE
        best[2] = min(best[2], (time.perf_counter() - begun) / n)
    lookup_ns, chase_ns, gather_ns = (1e9 * seconds for seconds in best)
    return MemoryPoint(slots, metadata_bytes, lookup_ns, chase_ns, gather_ns)


def memory_figures(points: Sequence[MemoryPoint]) -> dict[str, Figure]:
    """Return the figures of the points: ns, and the share of each limit that is reached."""
    figures = {}
    for point in points:
        name = f"engine.ns_per_lookup.{point.slots}"
        figures[name] = Figure(point.lookup, "ns", "lower")
        figures[f"{name}.pointer_chase"] = Figure(point.chase, "ns", "lower")
        figures[f"{name}.gather"] = Figure(point.gather, "ns", "lower")
        figures[f"engine.share_of_latency_limit.{point.slots}"] = Figure(point.chase / point.lookup, "", "higher")
        figures[f"engine.share_of_gather_limit.{point.slots}"] = Figure(point.gather / point.lookup, "", "higher")
    return figures


def plot_memory(points: Sequence[MemoryPoint], path: Path) -> None:
    """Draw the points to a PNG or SVG file."""
    from matplotlib.figure import Figure as Plot
    from matplotlib.ticker import FuncFormatter

    plot = Plot(figsize=(7, 4.2), layout="constrained")
    axes = plot.subplots()
    slots = [point.slots for point in points]
    for label, values, style in (
        ("lookup, misses admitted", [p.lookup for p in points], "o-"),
        ("one dependent load (pointer chase)", [p.chase for p in points], "s--"),
        ("one load of many under way (gather)", [p.gather for p in points], "^:"),
    ):
        axes.plot(slots, values, style, label=label, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("slots")
    axes.set_ylabel("ns, one thread")
    axes.set_title(f"Zipf 1.0 over {KEYS_PER_SLOT} keys a slot, batches of {BATCH:,}")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_file(path) as temporary:
        plot.savefig(temporary, format=path.suffix.lstrip(".").lower(), dpi=150)


def _fill(compiled: Compiled, slots: int, keys: int) -> None:
    for start in range(0, slots, 1 << 20):
        ranks = np.arange(start, min(start + (1 << 20), slots), dtype=np.int64)
        compiled.look_up(scatter(slots - 1 - ranks, keys))


@kernel
def _gather(memory: npt.NDArray[np.int64], lines: int, seed: np.uint64, n: int) -> int:
    total = 0
    x = seed
    for _ in range(n):
        # A linear congruential sequence: an address that no load is waited for, and no prefetcher foresees.
        x = x * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        line = np.int64(((x >> np.uint64(32)) * np.uint64(lines)) >> np.uint64(32))
        total += memory[line * 8]
    return total
