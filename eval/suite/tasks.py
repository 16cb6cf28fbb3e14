"""What a suite measures, one result at a time, each in whatever process runs it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from eval.capacity import capacity
from eval.comparison import SEEDS_FROM, STEADY_SEEDS_FROM, check_again, steady_optimum
from eval.map.measure import LIMIT_ALPHAS
from eval.reference import Effort, best_known, reference, segment_optimum
from eval.results import Row
from eval.routing import Job, find_alphas, serve, stretch, with_router
from eval.segments import Run, measured_part
from eval.suite.calibrate import SHARE
from eval.suite.cells import Cell
from eval.suite.entries import Entry, Prepared, serving
from eval.suite.records import (
    AlphaRecord,
    CapacityRecord,
    Kind,
    PaceRecord,
    ReferenceRecord,
    RegimesRecord,
    RunRecord,
    ServedRecord,
    StaticsRecord,
)
from eval.sweep import Work, half_of, sweep_adaptively
from helm_rl import __version__
from helm_rl.control.protocol import Controller
from helm_rl.control.static import StaticAlpha
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace

Source = Entry | float
"""A controller of the table, or a static's alpha."""


_Record = TypeVar("_Record", bound=BaseModel)


@dataclass(frozen=True)
class Result(Generic[_Record]):
    """One result to be measured.

    key, seed: what it is stored under, seed 0 where it has none; settings: all that it depends on; cpu_s: about what it
    takes.
    """

    key: str
    seed: int
    kind: Kind
    settings: dict[str, Any]
    measure: Callable[[], _Record]
    cpu_s: float

    @property
    def hash(self) -> str:
        """sha256 (hex) of the settings and of helm-rl's version."""
        document = json.dumps({"helm_rl": __version__, **self.settings}, sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()


@dataclass(frozen=True)
class Stage:
    """Results that can be measured at once; title: what is said meanwhile."""

    title: str
    results: Sequence[Result[Any]]


def perform(result: Result[Any]) -> Row:
    """Measure a result and return its row."""
    begun = time.process_time()
    record = result.measure()
    return {
        "key": result.key,
        "seed": result.seed,
        "kind": result.kind,
        "hash": result.hash,
        "settings": result.settings,
        "result": json.loads(record.model_dump_json()),
        "cpu_s": round(time.process_time() - begun, 3),
    }


def deployable_static(steady: Scenario, first: int, draws: int, step: float) -> AlphaRecord:
    """Choose the static of least P99 on a Steady load, on arrivals that are not evaluated."""
    with _work() as work:
        curve, best = steady_optimum(steady, work, draws, first, step, segments=False)
    return AlphaRecord(alpha=best, p99_ms=float(curve.p99_ms[list(curve.alphas).index(best)]))


def regimes(burst: Scenario, first: int) -> RegimesRecord:
    """Find what a rule for two regimes needs, on arrivals that are not evaluated."""
    with _work() as work:
        found = find_alphas(burst, work, first)
    return RegimesRecord(whole=found.whole, cold=found.cold, hot=found.hot, threshold=found.threshold)


def pace(cell: Cell, first: int) -> PaceRecord:
    """Find the multiple of a load that is as near the best static's limit as the families' loads are."""
    with _work() as work:
        load = partial(cell.load, STEADY_SEEDS_FROM + first)
        found = [capacity(load, partial(_static, alpha), alpha, work) for alpha in LIMIT_ALPHAS]
    return PaceRecord(multiple=SHARE * max(one.multiple for one in found))


def statics(cell: Cell, number: int, deployable: float, step: float, coarse_step: float) -> StaticsRecord:
    """Replay the statics of a draw, coarse and then fine around the minima, and the per-segment optimum."""
    trace, scenario = cell.draw(number), cell.scenario
    with _work() as work:
        also = [half_of(scenario), deployable]
        swept = sweep_adaptively(scenario, trace, work, step, also, coarse_step=coarse_step)
        schedule = segment_optimum(trace, swept)
        (optimum,) = work.run(scenario, trace, swept.part, [(schedule, float(schedule.alphas[0]), 0)])
    return StaticsRecord.of(trace.hash(), swept, optimum, best_known(trace, swept, optimum), step)


def static(cell: Cell, number: int, alpha: float) -> RunRecord:
    """Replay one more static."""
    return RunRecord.of(_replayed(cell.scenario, cell.draw(number), StaticAlpha(alpha), alpha, 0))


def best_schedule(cell: Cell, number: int, found: StaticsRecord, effort: Effort) -> ReferenceRecord:
    """Seek the best schedule of a draw."""
    with _work() as work:
        best = reference(cell.scenario, cell.draw(number), found.sweep(), found.optimum.run(), work, effort)
    return ReferenceRecord.of(best)


def controlled(cell: Cell, number: int, entry: Entry, prepared: Prepared, reference_ms: float) -> RunRecord:
    """Replay a draw under a controller; where it beats the reference, twice.

    Raises UserError where the second replay of a controller of somebody's own gives another P99, RuntimeError where one
    of ours does.
    """
    scenario, make, alpha0 = serving(entry, cell.scenario, prepared)
    trace, seed = cell.draw(number), SEEDS_FROM + number
    run = _replayed(scenario, trace, make(), alpha0, seed)
    if run.p99_ms < reference_ms:
        again = _replayed(scenario, trace, make(), alpha0, seed)
        check_again(entry.title, run.p99_ms, again.p99_ms, entry.kind == "own")
    return RunRecord.of(run)


def capacity_of(cell: Cell, number: int, source: Source, prepared: Prepared, tolerance: float) -> CapacityRecord:
    """Find the largest multiple of a draw's load at which P99 stays within the SLO under a controller."""
    if isinstance(source, Entry):
        _, make, alpha0 = serving(source, cell.scenario, prepared)
    else:
        make, alpha0 = partial(StaticAlpha, source), source
    seed = SEEDS_FROM + number
    with _work() as work:
        found = capacity(partial(cell.load, seed), lambda _: make(), alpha0, work, seed=seed, tolerance=tolerance)
    tried = tuple((multiple, ms if ms == ms else None) for multiple, ms in found.tried)  # NaN: without requests
    above = found.above if found.above < float("inf") else None
    return CapacityRecord(multiple=found.multiple, above=above, tried=tried)


def clustered(cell: Cell, number: int, nodes: int, router: str, source: Source, prepared: Prepared) -> ServedRecord:
    """Serve a burst on a cluster behind a router, with a controller on each node; naive has a router of its own."""
    scenario = with_router(stretch(cell.scenario, 1, nodes), router)
    trace = _cluster_trace(stretch(cell.scenario, 1, nodes), SEEDS_FROM + number)
    if isinstance(source, Entry):
        scenario, make, alpha0 = serving(source, scenario, prepared)
    else:
        make, alpha0 = partial(StaticAlpha, source), source
    served = serve(Job(scenario, trace, make, alpha0))
    measured = int((trace.arrival_ns >= trace.meta.measure_from_ns).sum())
    return ServedRecord(
        p99_ms=served.p99_ms,
        p50_ms=served.p50_ms,
        slo=served.slo,
        throughput_per_s=measured * (1.0 - served.shed) / scenario.seconds,
        shed=served.shed,
        imbalance=served.imbalance if served.imbalance == served.imbalance else None,
        burst_p99_ms=served.burst_p99_ms,
    )


@lru_cache(maxsize=1)
def _cluster_trace(scenario: Scenario, seed: int) -> Trace:
    """Draw a cluster's arrivals; the last are kept."""
    return generate(scenario, seed)


def _static(alpha: float, _: float) -> Controller:
    return StaticAlpha(alpha)


def _replayed(scenario: Scenario, trace: Trace, controller: Controller, alpha0: float, seed: int) -> Run:
    with _work() as work:
        (run,) = work.run(scenario, trace, measured_part(trace), [(controller, alpha0, seed)])
    return run


@contextmanager
def _work() -> Iterator[Work]:
    """One replay at a time, in this process."""
    work = Work(1)
    try:
        yield work
    finally:
        work.close()
