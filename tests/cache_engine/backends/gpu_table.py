"""Speed of the CUDA backend on the GPU at hand: lookups, and rows gathered beside a pinned copy.

`python -m tests.cache_engine.backends.gpu_table` prints the table; `--device` only names the GPU. Status 1 and one
sentence where there is none. Figures are wall-clock time, launches from Python included.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding as cpu
from cache_engine.backends.cpu import pool as pools
from cache_engine.backends.cuda import CudaEmbedding
from cache_engine.backends.device import CudaUnavailableError, CupyDevice, Device

ROWS_PER_PAGE = 4096
ROW_BYTES = 512


def skewed_ids(rng: np.random.Generator, ids: int, n: int) -> npt.NDArray[np.int64]:
    """Ids 1..`ids` whose logarithm is uniform: Zipf's law of exponent 1, but for the first few."""
    return ((ids + 1.0) ** rng.random(n)).astype(np.int64)


def lookups_per_s(device: Device, slots: int, batch: int, seconds: float = 1.0) -> tuple[float, float]:
    """Return keys per second and the hit ratio, full cache, ids 8 times as many as slots; misses are admitted."""
    rng = np.random.default_rng(0)
    pages = -(-slots // ROWS_PER_PAGE)
    pool = pools.new_pool_state(pages, 1)
    pool.goal[0] = pages
    emb = CudaEmbedding(pool, ROWS_PER_PAGE, pages, 0, device)
    assert emb.accept(pages) == pages

    def look_up(ids: npt.NDArray[np.int64] | Any, tables: Any) -> None:
        emb.lookup(tables, ids)
        emb.publish()

    fill = max(batch, min(65_536, slots))
    tables = device.array(np.zeros(fill, np.int16))
    while device.read(emb.state.scalars)[cpu.N_FRESH]:
        look_up(device.array(rng.integers(0, 2**62, fill)), tables)
    tables = device.array(np.zeros(batch, np.int16))
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


def gather_bytes_per_s(device: Device, rows: Any, storage: bool, repeats: int = 20) -> float:
    """Bytes per second of gathering rows, uint8 [m, row_bytes], in random order.

    Args:
        device: where the kernel runs.
        rows: in the device's memory, or pinned memory that it reads.
        storage: read them as slots of the storage; otherwise as staged misses.
        repeats: launches.
    """
    m, row_bytes = rows.shape
    order = np.random.default_rng(0).permutation(m).astype(np.int32)
    slots = device.array(order if storage else np.full(m, -1, np.int32))
    miss = device.array(order)
    out = device.empty((m, row_bytes), np.uint8)
    units = row_bytes // 16

    def gather() -> None:
        device.launch("gather_rows_16", m * units, rows, rows, slots, miss, out, m * row_bytes, m, units, m)

    return m * row_bytes / seconds_each(gather, lambda: device.read(out, 1), repeats)


def seconds_each(work: Callable[[], None], wait: Callable[[], Any], repeats: int) -> float:
    """Seconds of one call of `work`, `wait` at the end, after one call in advance."""
    work()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - start) / repeats


def print_table(device: CupyDevice) -> None:
    """Measure on a real GPU, and print."""
    import cupy

    print("lookups with admission, ids log-uniform over 8 x slots")
    print(f"{'slots':>10} {'batch':>8} {'M keys/s':>10} {'hit ratio':>10}")
    for slots in (131_072, 2**22):
        for batch in (1024, 16_384, 65_536):
            speed, hits = lookups_per_s(device, slots, batch)
            print(f"{slots:>10} {batch:>8} {speed / 1e6:>10.1f} {hits:>10.3f}", flush=True)

    m = 2**18
    here = device.array(np.zeros((m, ROW_BYTES), np.uint8))
    there = device.empty((m, ROW_BYTES), np.uint8)
    memory = cupy.cuda.alloc_pinned_memory(m * ROW_BYTES)
    owner = cupy.cuda.UnownedMemory(memory.ptr, m * ROW_BYTES, memory, cupy.cuda.Device().id)
    pinned = cupy.ndarray((m, ROW_BYTES), np.uint8, cupy.cuda.MemoryPointer(owner, 0))
    host = np.frombuffer(memory, np.uint8, m * ROW_BYTES).reshape(m, ROW_BYTES)
    host[:] = 1

    def device_copy() -> None:
        there.data.copy_from_device_async(here.data, m * ROW_BYTES, device.stream)

    def pinned_copy() -> None:
        there.set(host, stream=device.stream)

    wait = device.stream.synchronize
    figures = {
        "copy within the device": m * ROW_BYTES / seconds_each(device_copy, wait, 20),
        "gather from slots": gather_bytes_per_s(device, here, True),
        "copy from pinned memory": m * ROW_BYTES / seconds_each(pinned_copy, wait, 20),
        "gather from pinned memory": gather_bytes_per_s(device, pinned, False),
    }
    print(f"rows of {ROW_BYTES} bytes, {m * ROW_BYTES >> 20} MiB, each byte counted once")
    for name, speed in figures.items():
        print(f"{name:>28} {speed / 1e9:>10.1f} GB/s")


def main(arguments: list[str]) -> int:
    """Name the GPU; measure unless told `--device`."""
    try:
        device = CupyDevice()
    except CudaUnavailableError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    print(f"{properties['name'].decode()}, CUDA driver {cupy.cuda.runtime.driverGetVersion()}, CuPy {cupy.__version__}")
    if arguments != ["--device"]:
        print_table(device)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
