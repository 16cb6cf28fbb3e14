"""Measuring all cells, in processes: what is missing of a map, with progress, safe to interrupt."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eval.map.grid import LOADS, Cell, Grid, pace, requests
from eval.map.measure import measure, prepare
from eval.map.rows import Row
from eval.map.store import Store

_Task = tuple[Callable[..., Row], tuple[Any, ...], float]
"""What to call in a process, with what, and its share of the work."""


def run(grid: Grid, seeds: int, jobs: int, store: Store) -> None:
    """Measure what `store` lacks: every setting's load first, then every cell on seed 1, then on the other seeds.

    Each result is stored as it comes; an interrupt loses those that are being measured.
    """
    if _complete(grid, seeds, store):
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    with (
        Progress(*columns, *left, console=Console(stderr=True), transient=True, speed_estimate_period=600) as progress,
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _follow_the_parent) as pool,
    ):
        try:
            settings = grid.settings()
            preparations: list[_Task] = [
                (prepare, (grid, setting), 1.0) for setting in settings if store.get(setting.key) is None
            ]
            _work(pool, progress, store, f"loads of {len(settings)} settings", preparations, len(settings))
            cells = _in_reach(grid, store)
            total = sum(expected_requests(store, cell) for cell in cells)
            _work(pool, progress, store, f"{len(cells)} cells, seed 1", _measurements(grid, cells, [1], store), total)
            others = range(2, seeds + 1)
            if others:
                tasks = _measurements(grid, cells, others, store)
                _work(pool, progress, store, f"{len(cells)} cells, seeds 2 to {seeds}", tasks, total * len(others))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
                process.join()
            raise


def _complete(grid: Grid, seeds: int, store: Store) -> bool:
    if any(store.get(setting.key) is None for setting in grid.settings()):
        return False
    return not _measurements(grid, _in_reach(grid, store), range(1, seeds + 1), store)


def _in_reach(grid: Grid, store: Store) -> list[Cell]:
    return [cell for cell in grid.cells() if prepared(store, cell)["rate"] is not None]


def prepared(store: Store, cell: Cell) -> Row:
    """Return what is stored of a cell's setting."""
    row = store.get(cell.setting.key)
    assert row is not None
    return row


def expected_requests(store: Store, cell: Cell) -> float:
    """Requests of a cell's trace, in the mean."""
    rate = float(prepared(store, cell)["rate"]) * LOADS[cell.load]
    return requests(cell.setting, rate, pace(cell.setting, rate))


def _measurements(grid: Grid, cells: Sequence[Cell], seeds: Iterable[int], store: Store) -> list[_Task]:
    return [
        (
            measure,
            (grid, cell, seed, prepared(store, cell), store.get(cell.key, 1) if seed > 1 else None),
            expected_requests(store, cell),
        )
        for seed in seeds
        for cell in cells
        if store.get(cell.key, seed) is None
    ]


def _work(
    pool: ProcessPoolExecutor, progress: Progress, store: Store, title: str, tasks: list[_Task], total: float
) -> None:
    """Run the tasks in their order and store what they return; `total` is their work and that already done."""
    task = progress.add_task(title, total=total)
    progress.advance(task, total - sum(share for _, _, share in tasks))
    futures = {pool.submit(function, *arguments): share for function, arguments, share in tasks}
    for future in as_completed(futures):
        store.add(future.result())
        progress.advance(task, futures[future])
    progress.remove_task(task)


def _follow_the_parent() -> None:
    """Leave interrupts to the first process, and end when it has gone, however it went.

    Ctrl-C reaches every process of a terminal; the first one alone decides what follows. If it is killed it cannot end
    the others, and each would wait for work for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])  # a pipe that the system closes with the parent, even before this thread began
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
