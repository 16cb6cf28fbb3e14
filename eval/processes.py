"""Long measurements in processes: tasks whose results are stored as they come, with progress, safe to interrupt."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from eval.results import Row
from helm_rl.errors import UserError


class Task(NamedTuple):
    """What to call in a process, with what, and its share of the work."""

    function: Callable[..., Row]
    arguments: tuple[Any, ...]
    share: float


class Workers(ABC):
    """Processes at work, here or elsewhere, and the progress that is shown of it."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def run(self, tasks: Sequence[Task], add: Callable[[Row], None], bar: TaskID) -> None:
        """Run the tasks in their order; each result goes to `add` as it comes, its share to the bar."""
        for task, row in self.results(tasks):
            add(row)
            self.progress.advance(bar, task.share)

    @abstractmethod
    def results(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Row]]:
        """Start the tasks in their order; yield each with its result as it comes."""


class Processes(Workers):
    """Processes of this machine."""

    def __init__(self, pool: ProcessPoolExecutor, progress: Progress) -> None:
        super().__init__(progress)
        self._pool = pool

    def results(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Row]]:
        """Start the tasks in their order; yield each with its result as it comes."""
        futures = {self._pool.submit(task.function, *task.arguments): task for task in tasks}
        for future in as_completed(futures):
            try:
                row = future.result()
            except BrokenProcessPool:
                raise UserError(
                    "a process that measured was ended by something else, by the system maybe, of too little memory; "
                    "what had been measured is kept, and the same command goes on (fewer --jobs take less memory)"
                ) from None
            yield futures[future], row


def progress_bars() -> Progress:
    """Return progress on stderr that goes with what it showed when it ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    return Progress(*columns, *left, console=Console(stderr=True), transient=True, speed_estimate_period=600)


@contextmanager
def working_processes(jobs: int, tasks_each: int | None = None) -> Iterator[Workers]:
    """Yield so many processes with progress on stderr; whatever ends the block early ends them, too.

    tasks_each: after so many tasks another process takes the place of one, None: never.
    """
    with (
        progress_bars() as progress,
        ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), _follow_the_parent, max_tasks_per_child=tasks_each
        ) as pool,
    ):
        try:
            yield Processes(pool, progress)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
                process.join()
            raise


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
