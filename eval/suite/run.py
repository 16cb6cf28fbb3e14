"""Measuring what a suite lacks, many results at a time, with the time that is left."""

from __future__ import annotations

from eval.executor import Executor, working
from eval.processes import Task
from eval.suite.plan import OVERHEAD_S
from eval.suite.suite import Suite
from eval.suite.tasks import perform


def run(suite: Suite, executor: Executor) -> None:
    """Measure every result that is not there yet; each is stored as it comes, and an interrupt loses those at work."""
    total = sum(suite.plan.stage_cpu_s().values()) + executor.jobs * OVERHEAD_S
    with working(executor, kept=suite.store.folder) as workers:
        bar = workers.progress.add_task("", total=total)
        for stage in suite.stages():
            missing = [result for result in stage.results if suite.get(result) is None]
            workers.progress.update(bar, description=f"{stage.title}, {len(missing)} results")
            workers.progress.advance(bar, sum(result.cpu_s for result in stage.results if suite.get(result)))
            workers.run([Task(perform, (result,), result.cpu_s) for result in missing], suite.store.add, bar)
