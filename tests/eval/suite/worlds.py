"""A suite of small loads on a serving model whose right answers are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import envs.serving.replay
from eval.results import Results, Row
from eval.suite.cells import Cell
from eval.suite.command import SUITE
from eval.suite.entries import entries
from eval.suite.plan import Plan, Size
from eval.suite.suite import Suite
from eval.suite.tasks import Result, perform
from helm_rl.scenario import Scenario
from tests.eval.fakes import FakeServing

SMALL = Size(
    seeds=2, step=0.1, coarse_step=0.2, effort=None, deployable_draws=1, capacity_draws=1, tolerance=0.2, nodes=0
)  # fmt: skip
BEST = {"base": 0.6, "hot": 0.4, "burst": 0.2}
"""Of FakeServing, by the label of a segment."""


def serving() -> FakeServing:
    return FakeServing(BEST)


def small_scenario(pattern: str) -> Scenario:
    """120 s at 60 requests/s; users who return throughout, or from 40 to 80 s."""
    returning = {"rate": 30, "requests_per_visit": 2.0}
    phases: dict[str, list[dict[str, Any]]] = {
        "steady": [],
        "trend": [{"label": "hot", "start_s": 0, "seconds": 120, **returning}],
        "burst": [{"label": "burst", "start_s": 40, "seconds": 40, **returning}],
    }
    return Scenario.model_validate(
        {
            "name": pattern,
            "slo_ms": 100,
            "seconds": 120,
            "warm_s": 10,
            "load": {"rate": 60, "users": 1000, "phase": phases[pattern]},
        }
    )


def small_plan(policy: Path | None = None, size: Size = SMALL, families: tuple[str, ...] = ("decoder",)) -> Plan:
    cells = tuple(
        Cell(family, pattern, small_scenario(pattern))
        for family in families
        for pattern in ("steady", "trend", "burst")
    )
    return Plan(cells, tuple(entries(policy, (), [cell.scenario for cell in cells])), size)


def measured(plan: Plan, folder: Path) -> Suite:
    """Measure a plan, here and not in processes."""
    store = Results(folder, SUITE, {"helm_rl": "test"})
    suite = Suite(plan, store)
    for stage in suite.stages():
        for result in stage.results:
            if suite.get(result) is None:
                store.add(perform(result))
    store.close()
    return suite


@contextmanager
def faked() -> Iterator[None]:
    """Serve by `serving`, and no longer than this lasts: other tests serve in earnest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envs.serving.replay, "replay", serving())
        yield


def perform_faked(result: Result[Any]) -> Row:
    """Measure a result so, in whatever process."""
    with faked():
        return perform(result)
