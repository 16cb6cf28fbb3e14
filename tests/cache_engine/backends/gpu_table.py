"""Speed of backend "cuda" on the GPU at hand, beside the goals: lookups, gathers, refills, steps of a resize.

`python -m tests.cache_engine.backends.gpu_table [--json FILE]` prints the table; `--device` only names the GPU. Where
there is none: status 1 and one sentence. Figures are wall-clock time, launches from Python included. Needs cupy, numpy
and numba alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine import EmbeddingCache, HbmPool
from cache_engine.backends.cpu import embedding as cpu
from cache_engine.backends.cpu import pool as pools
from cache_engine.backends.cuda import CudaEmbedding
from cache_engine.backends.device import CudaUnavailableError, CupyDevice, Device
from cache_engine.backends.transfer import RING, HostTables, Lane
from helm_rl.figures import Figure, write_figures

ROWS_PER_PAGE = 4096
ROW_BYTES = 512

# HierarchicalKV finds 2.0 to 2.5 G keys/s on an A100 of 2,039 GB/s (its README); a quarter of the middle is the goal.
_FIND_PER_BYTE = 2.25e9 / 4 / 2.039e12


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    slots: tuple[int, ...] = (131_072, 2**22)
    batches: tuple[int, ...] = (1024, 16_384, 65_536)
    find_batch: int = 2**20
    seconds: float = 1.0  # of each figure of lookups
    gather_rows: int = 2**18
    table_rows: int = 2**20  # of the host table
    rows_per_page: int = ROWS_PER_PAGE
    pages: int = 64
    foreground: int = 1024  # keys of a batch that waits for its rows
    foreground_batches: int = 400


def skewed_ids(rng: np.random.Generator, ids: int, n: int) -> npt.NDArray[np.int64]:
    """Ids 1..`ids` whose logarithm is uniform: Zipf's law of exponent 1, but for the first few."""
    return ((ids + 1.0) ** rng.random(n)).astype(np.int64)


def lookups_per_s(
    device: Device, slots: int, batch: int, seconds: float = 1.0, all_hit: bool = False
) -> tuple[float, float]:
    """Return keys per second and the hit ratio of a full cache; misses are admitted.

    Ids are 8 times as many as slots, skewed; or, with `all_hit`, random ones of those that the cache holds.
    """
    rng = np.random.default_rng(0)
    pages = -(-slots // ROWS_PER_PAGE)
    pool = pools.new_pool_state(pages, 1)
    pool.goal[0] = pages
    emb = CudaEmbedding(pool, ROWS_PER_PAGE, pages, 0, cpu.SIEVE, device)
    assert emb.accept(pages) == pages

    def look_up(ids: npt.NDArray[np.int64] | Any, tables: Any) -> None:
        emb.lookup(tables, ids)
        emb.publish()

    fill = max(1, min(65_536, slots))
    tables = device.array(np.zeros(fill, np.int16))
    if all_hit:
        for at in range(0, slots, fill):
            look_up(device.array(np.arange(at, at + fill)), tables)
    else:
        while device.read(emb.state.scalars)[cpu.N_FRESH]:
            look_up(device.array(rng.integers(0, 2**62, fill)), tables)
    tables = device.array(np.zeros(batch, np.int16))
    if all_hit:
        batches = [device.array(rng.integers(0, slots, batch)) for _ in range(8)]
    else:
        for _ in range(-(-4 * slots // batch)):
            look_up(device.array(skewed_ids(rng, 8 * slots, batch)), tables)
        batches = [device.array(skewed_ids(rng, 8 * slots, batch)) for _ in range(32)]
    device.write(emb.state.counters, np.zeros(cpu.N_COUNTERS, np.int64))
    done = 0
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        for ids in batches:
            look_up(ids, tables)
        done += len(batches) * batch
    counters = device.read(emb.state.counters)
    return done / spent, counters[cpu.HITS] / counters[cpu.REQUESTED]


def gather_bytes_per_s(device: Device, rows: Any, repeats: int = 20) -> float:
    """Bytes per second of gathering rows out of slots in random order; rows: uint8 [m, row_bytes] on the device."""
    m, row_bytes = rows.shape
    order = device.array(np.random.default_rng(0).permutation(m).astype(np.int32))
    out = device.empty((m, row_bytes), np.uint8)
    units = row_bytes // 16

    def gather() -> None:
        device.launch("gather_rows_16", m * units, rows, rows, order, order, out, m * row_bytes, m, units, m)

    return m * row_bytes / seconds_each(gather, lambda: device.read(out, 1), repeats)


def host_bytes_per_s(device: Device, table: npt.NDArray[np.uint8], m: int, gather: str, repeats: int = 10) -> float:
    """Bytes per second of fetching m random rows of a host table by one path."""
    tables = HostTables([table], table.shape[1], device, gather)
    lane = Lane(device, table.shape[1], RING)
    keys = device.array(np.random.default_rng(0).integers(0, table.shape[0], m))
    zeros = device.array(np.zeros(m, np.int16))
    first = device.array(np.arange(m, dtype=np.int32))
    to = device.empty((m, table.shape[1]), np.uint8)

    def fetch() -> None:
        tables.fetch(lane, zeros, keys, first, m, to)

    speed = m * table.shape[1] / seconds_each(fetch, lambda: device.record().wait(), repeats)
    tables.close()
    return speed


def pinned_bytes_per_s(device: Device, size: int, repeats: int = 20) -> float:
    """Bytes per second of plain copies out of page-locked memory."""
    host, there = device.pinned(size), device.empty(size, np.uint8)
    return size / seconds_each(lambda: device.send(there, host), lambda: device.record().wait(), repeats)


def foreground_ms(device: Device, table: npt.NDArray[np.uint8], sizes: Sizes, refill: bool) -> npt.NDArray[np.float64]:
    """Milliseconds of each of many lookups, its rows there, alone or while a refill goes on."""
    rng = np.random.default_rng(0)
    pool, emb = _cache(device, table, sizes)
    for _ in range(4 * sizes.pages * sizes.rows_per_page // sizes.foreground):
        emb.lookup(skewed_ids(rng, table.shape[0], sizes.foreground) - 1)
    times = []
    for _ in range(sizes.foreground_batches):
        keys = device.array(skewed_ids(rng, table.shape[0], sizes.foreground) - 1)
        if refill and emb._refill.waiting < table.shape[0] // 16:
            emb.refill(rng.integers(0, table.shape[0], table.shape[0] // 8))
        device.record().wait()
        start = time.perf_counter()
        emb.lookup(keys)
        device.record().wait()
        times.append((time.perf_counter() - start) * 1e3)
    if refill:
        assert emb.stats().refilled, "a refill was on its way"
    pool.close()
    return np.array(times)


def resize_ms(device: Device, table: npt.NDArray[np.uint8], sizes: Sizes) -> tuple[float, float]:
    """Return the median milliseconds of giving up, and of taking, one page of a full cache."""
    rng = np.random.default_rng(0)
    pool, emb = _cache(device, table, sizes)
    for _ in range(2 * sizes.pages * sizes.rows_per_page // sizes.foreground):
        emb.lookup(rng.integers(0, table.shape[0], sizes.foreground))
    steps = max(1, min(32, sizes.pages // 2))
    pages = sizes.pages
    medians = []
    for sign in (-1, 1):
        times = []
        for _ in range(steps):
            pages += sign
            pool.set_goals({"emb": pages}, len(medians) * steps + len(times) + 1)
            device.record().wait()
            start = time.perf_counter()
            done = pool.migrate(1)
            device.record().wait()
            times.append((time.perf_counter() - start) * 1e3)
            assert done.freed + done.granted == 1
        medians.append(float(np.median(times)))
    pool.close()
    return medians[0], medians[1]


def _cache(device: Device, table: npt.NDArray[np.uint8], sizes: Sizes) -> tuple[HbmPool, EmbeddingCache]:
    row_bytes = table.shape[1]
    pool = HbmPool(sizes.pages, sizes.rows_per_page * row_bytes, ("emb",), min_pages=0, backend="cuda", device=device)
    emb = EmbeddingCache(pool, row_bytes=row_bytes, tables=[table])
    pool.set_goals({"emb": sizes.pages}, 0)
    pool.migrate(sizes.pages)
    return pool, emb


def seconds_each(work: Callable[[], None], wait: Callable[[], Any], repeats: int) -> float:
    """Seconds of one call of `work`, `wait` at the end, after one call in advance."""
    work()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - start) / repeats


def measure(device: Device, bytes_per_s: float, sizes: Sizes) -> Iterator[tuple[str, Figure]]:
    """Yield each figure's name and value as it is measured.

    Args:
        device: the GPU.
        bytes_per_s: bandwidth of its memory, by its data sheet.
        sizes: how much is measured.
    """
    slots = sizes.slots[-1]
    speed, _ = lookups_per_s(device, slots, sizes.find_batch, sizes.seconds, all_hit=True)
    yield "gpu.finds_per_s", Figure(speed, "keys/s", "higher", _FIND_PER_BYTE * bytes_per_s)
    for slots in sizes.slots:
        for batch in sizes.batches:
            speed, hits = lookups_per_s(device, slots, batch, sizes.seconds)
            yield f"gpu.lookups_per_s.{slots}.{batch}", Figure(speed, "keys/s", "higher")
        yield f"gpu.lookup_hit_ratio.{slots}", Figure(hits, "", "higher")

    rows = device.array(np.zeros((sizes.gather_rows, ROW_BYTES), np.uint8))
    yield "gpu.gather_bytes_per_s.slots", Figure(gather_bytes_per_s(device, rows), "B/s", "higher")
    del rows
    table = np.ones((sizes.table_rows, ROW_BYTES), np.uint8)
    copy = pinned_bytes_per_s(device, sizes.gather_rows * ROW_BYTES)
    yield "gpu.pinned_copy_bytes_per_s", Figure(copy, "B/s", "higher")
    paths = {how: host_bytes_per_s(device, table, sizes.gather_rows // 4, how) for how in ("zero-copy", "staging")}
    for how, speed in paths.items():
        yield f"gpu.gather_bytes_per_s.{how.replace('-', '_')}", Figure(speed, "B/s", "higher")
    yield "gpu.gather_ratio_vs_pinned_copy", Figure(max(paths.values()) / copy, "", "higher", 0.8)

    alone, beside = (foreground_ms(device, table, sizes, refill) for refill in (False, True))
    for name, times in (("alone", alone), ("with_refill", beside)):
        yield f"gpu.foreground_ms.p50.{name}", Figure(float(np.median(times)), "ms", "lower")
        yield f"gpu.foreground_ms.p99.{name}", Figure(float(np.quantile(times, 0.99)), "ms", "lower")
    # One copy of at most a mebibyte, and what it costs to admit the one before.
    delay = float(np.median(beside) - np.median(alone))
    yield "gpu.foreground_delay_ms", Figure(delay, "ms", "lower")
    shrink, grow = resize_ms(device, table, sizes)
    yield "gpu.resize_step_ms.shrink", Figure(shrink, "ms", "lower")
    yield "gpu.resize_step_ms.grow", Figure(grow, "ms", "lower")


def line(name: str, figure: Figure) -> str:
    """One line of the table: value, unit, and the goal where there is one."""
    scale, prefix = (1e9, "G") if figure.unit == "B/s" else (1e6, "M") if figure.unit == "keys/s" else (1.0, "")
    goal = "" if figure.goal is None else f"   goal {figure.goal / scale:.3g}"
    return f"{name:<44} {figure.value / scale:>10.3f} {prefix}{figure.unit}{goal}"


def main(arguments: list[str]) -> int:
    """Name the GPU; measure unless told `--device`."""
    parser = argparse.ArgumentParser(prog="gpu_table", description="Speed of backend cuda on the GPU at hand.")
    parser.add_argument("--device", action="store_true", help="only name the GPU")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args(arguments)
    try:
        device = CupyDevice()
    except CudaUnavailableError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    import cupy

    here = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(here.id)["name"].decode()
    # Two transfers a cycle; kHz and bits.
    bytes_per_s = 2e3 * here.attributes["MemoryClockRate"] * here.attributes["GlobalMemoryBusWidth"] / 8
    print(f"{name}, {bytes_per_s / 1e9:.0f} GB/s, CUDA {cupy.cuda.runtime.driverGetVersion()}, CuPy {cupy.__version__}")
    if options.device:
        return 0
    figures: dict[str, Figure] = {"gpu.memory_bytes_per_s": Figure(bytes_per_s, "B/s", "higher")}
    for name_of_figure, figure in measure(device, bytes_per_s, Sizes()):
        figures[name_of_figure] = figure
        print(line(name_of_figure, figure), flush=True)
    if options.json is not None:
        write_figures(options.json, figures, accelerator=name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
