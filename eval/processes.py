"""Long measurements in processes: tasks whose results are stored as they come, with progress, safe to interrupt."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
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


class Task(NamedTuple):
    """What to call in a process, with what, and its share of the work."""

    function: Callable[..., Row]
    arguments: tuple[Any, ...]
    share: float


class Workers:
    """Processes at work, and the progress that is shown of it."""

    def __init__(self, pool: ProcessPoolExecutor, progress: Progress) -> None:
        self._pool = pool
        self.progress = progress

    def run(self, tasks: Sequence[Task], add: Callable[[Row], None], bar: TaskID) -> None:
        """Run the tasks in their order; each result goes to `add` as it comes, its share to the bar."""
        futures = {self._pool.submit(task.function, *task.arguments): task.share for task in tasks}
        for future in as_completed(futures):
            add(future.result())
            self.progress.advance(bar, futures[future])


@contextmanager
def working_processes(jobs: int) -> Iterator[Workers]:
    """Yield so many processes with progress on stderr; whatever ends the block early ends them, too."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    with (
        Progress(*columns, *left, console=Console(stderr=True), transient=True, speed_estimate_period=600) as progress,
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _follow_the_parent) as pool,
    ):
        try:
            yield Workers(pool, progress)
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
