"""Where long measurements run: in processes of this machine, or on the nodes of a Ray cluster."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eval.processes import Workers, working_processes
from eval.sweep import check_jobs
from helm_rl.errors import UserError

ExecutorName = Literal["local", "ray"]


@dataclass(frozen=True)
class Executor:
    """What runs tasks.

    name: local, processes of this machine, or ray; jobs: tasks at a time, of a cluster as many as it has cores;
    address: HOST:PORT of a Ray cluster that this machine is a node of, or "auto"; None: a Ray of this machine's own.
    """

    name: ExecutorName = "local"
    jobs: int = 2
    address: str | None = None

    def check(self) -> None:
        """Raise UserError, or ModuleNotFoundError without Ray, for what cannot be, now and not after a preparation."""
        check_jobs(self.jobs)
        if self.name == "local":
            if self.address is not None:
                raise UserError("--address is that of a Ray cluster, and goes with --executor ray")
            return
        if importlib.util.find_spec("ray") is None:
            raise ModuleNotFoundError("there is no Ray", name="ray")
        if self.address is not None:
            from eval.ray_workers import check_address

            check_address(self.address)


@contextmanager
def working(executor: Executor, kept: Path | None = None) -> Iterator[Workers]:
    """Yield what runs tasks, with progress on stderr; whatever ends the block early ends the tasks, too.

    kept: the folder of results that the user is told of who stops it, or whose disk is full.
    """
    try:
        if executor.name == "local":
            with working_processes(executor.jobs) as workers:
                yield workers
        else:
            from eval.ray_workers import ray_workers

            with ray_workers(executor.jobs, executor.address) as found:
                yield found
    except (KeyboardInterrupt, OSError):
        if kept is not None:
            print(f"stopped: what was measured is kept in {kept}; the same command goes on", file=sys.stderr)
        raise
