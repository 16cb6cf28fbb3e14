"""Measuring all cells, many at a time: what is missing of a map, with progress, safe to interrupt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eval.executor import Executor, working
from eval.map.grid import LOADS, Cell, Grid, pace, requests
from eval.map.measure import measure, prepare
from eval.map.store import Store
from eval.processes import Task, Workers
from eval.results import Row


def run(grid: Grid, seeds: int, executor: Executor, store: Store) -> None:
    """Measure what `store` lacks: every setting's load first, then every cell on seed 1, then on the other seeds.

    Each result is stored as it comes; an interrupt loses those that are being measured.
    """
    if _complete(grid, seeds, store):
        return
    with working(executor, kept=store.folder) as workers:
        settings = grid.settings()
        preparations = [Task(prepare, (grid, setting), 1.0) for setting in settings if store.get(setting.key) is None]
        _work(workers, store, f"loads of {len(settings)} settings", preparations, len(settings))
        cells = _in_reach(grid, store)
        total = sum(expected_requests(store, cell) for cell in cells)
        _work(workers, store, f"{len(cells)} cells, seed 1", _measurements(grid, cells, [1], store), total)
        others = range(2, seeds + 1)
        if others:
            tasks = _measurements(grid, cells, others, store)
            _work(workers, store, f"{len(cells)} cells, seeds 2 to {seeds}", tasks, total * len(others))


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


def _measurements(grid: Grid, cells: Sequence[Cell], seeds: Iterable[int], store: Store) -> list[Task]:
    return [
        Task(
            measure,
            (grid, cell, seed, prepared(store, cell), store.get(cell.key, 1) if seed > 1 else None),
            expected_requests(store, cell),
        )
        for seed in seeds
        for cell in cells
        if store.get(cell.key, seed) is None
    ]


def _work(workers: Workers, store: Store, title: str, tasks: list[Task], total: float) -> None:
    """Run the tasks in their order and store what they return; `total` is their work and that already done."""
    bar = workers.progress.add_task(title, total=total)
    workers.progress.advance(bar, total - sum(task.share for task in tasks))
    workers.run(tasks, store.add, bar)
    workers.progress.remove_task(bar)
