"""A suite as a list of results: what each is called, what it depends on, in which order they can be measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from pydantic import BaseModel

from eval.comparison import DEPLOYABLE, HINDSIGHT
from eval.results import Results
from eval.suite import tasks
from eval.suite.cells import NODE, RECORDED, Cell
from eval.suite.cluster import Cluster
from eval.suite.entries import HOST_GIB, Entry, Prepared, with_host_tier
from eval.suite.plan import (
    CAPACITY_REPLAYS,
    REGIMES_REPLAYS,
    SEARCH,
    STEADY_REPLAYS,
    Plan,
    cell_cpu_s,
)
from eval.suite.records import (
    AlphaRecord,
    CapacityRecord,
    PaceRecord,
    ReferenceRecord,
    RegimesRecord,
    RunRecord,
    StaticsRecord,
    record_of,
)
from eval.suite.tasks import Result, Source, Stage
from eval.sweep import Sweep, alpha_grid
from helm_rl.scenario import Scenario, at_load, scenario_hash

_Record = TypeVar("_Record", bound=BaseModel)


class Suite:
    """The results of a plan, in a store."""

    def __init__(self, plan: Plan, store: Results) -> None:
        self.plan = plan
        self.store = store
        self._decoded: dict[tuple[str, int], tuple[str, BaseModel]] = {}
        self._sweeps: dict[tuple[str, int], Sweep] = {}

    def get(self, result: Result[_Record]) -> _Record | None:
        """Return what was measured, None where it was not yet, or under other settings."""
        row = self.store.get(result.key, result.seed)
        if row is None or row["hash"] != result.hash or row["kind"] != result.kind:
            return None
        at = result.key, result.seed
        if at not in self._decoded or self._decoded[at][0] != row["hash"]:
            self._decoded[at] = row["hash"], record_of(row)
        return cast("_Record", self._decoded[at][1])

    def stages(self) -> Iterator[Stage]:
        """Yield the stages; those before must have been measured when the next is asked for."""
        plan, numbers = self.plan, self.plan.size.numbers
        yield Stage("statics that can be deployed", self._preparations())
        if plan.of(RECORDED):
            yield Stage("loads of recorded arrivals", [self.pace_of(cell) for cell in plan.of(RECORDED)])
        cells = self.cells
        yield Stage("statics", [self.statics_of(cell, number) for cell in cells for number in numbers])
        for family in plan.families:
            while missing := self._missing_singles(family):
                yield Stage(f"best single static of {family}", missing)
        if plan.size.effort is not None:
            yield Stage("reference schedules", [self.schedule_of(cell, number) for cell in cells for number in numbers])
        runs = [self.run_of(cell, number, entry) for cell in cells for number in numbers for entry in plan.entries]
        yield Stage("controllers", runs)
        capacities = [
            self.capacity_of(cell, number, name)
            for cell in cells
            for number in plan.size.capacity_numbers
            for name in self.capacity_names
        ]
        yield Stage("capacities", capacities)
        if plan.clustered is not None:
            yield from Cluster(self).stages()

    @property
    def cells(self) -> list[Cell]:
        """The cells, those of recorded arrivals at the load that was found for them."""
        found = []
        for cell in self.plan.cells:
            if cell.family == RECORDED:
                multiple = self.needed(self.pace_of(cell)).multiple
                cell = replace(cell, scenario=at_load(cell.scenario, multiple))
            found.append(cell)
        return found

    # What is chosen on arrivals that are not evaluated

    def deployable_of(self, family: str, gib: float = 0.0) -> Result[AlphaRecord]:
        """The best static of a family's Steady load, with a host tier or without."""
        steady = self.plan.cell(family, "steady")
        scenario = with_host_tier(steady.scenario, gib) if gib else steady.scenario
        size = self.plan.size
        draws = size.deployable_draws
        return Result(
            f"{family}.deployable" + (f".host_{gib:g}" if gib else ""),
            0,
            "alpha",
            {"scenario": scenario_hash(scenario), "first": size.first, "draws": draws, "step": size.step},
            partial(tasks.deployable_static, scenario, size.first, draws, size.step),
            STEADY_REPLAYS * draws * cell_cpu_s(steady),
        )

    def regimes_of(self, family: str) -> Result[RegimesRecord]:
        """The best statics of a family's Burst and of its base load."""
        burst, first = self.plan.cell(family, "burst"), self.plan.size.first
        settings = {"scenario": scenario_hash(burst.scenario), "first": first}
        work = partial(tasks.regimes, burst.scenario, first)
        return Result(f"{family}.regimes", 0, "regimes", settings, work, REGIMES_REPLAYS * cell_cpu_s(burst))

    def pace_of(self, cell: Cell) -> Result[PaceRecord]:
        """The load of recorded arrivals, as the plan has it, over the one that they are evaluated at."""
        first = self.plan.size.first
        work = partial(tasks.pace, cell, first)
        settings = {"cell": cell.identity, "first": first}
        return Result(f"{cell.name}.pace", 0, "pace", settings, work, 5 * CAPACITY_REPLAYS * cell_cpu_s(cell))

    def _preparations(self) -> list[Result[Any]]:
        found: list[Result[Any]] = []
        for family in self.plan.families:
            found += [self.deployable_of(family), *(self.deployable_of(family, gib) for gib in HOST_GIB)]
            found.append(self.regimes_of(family))
        return found

    def prepared(self, family: str) -> Prepared:
        """Return what was chosen for a family; recorded arrivals are served by NODE's."""
        node = NODE if family == RECORDED else family
        rule = self.needed(self.regimes_of(node))
        return Prepared(
            self.needed(self.deployable_of(node)).alpha,
            {gib: self.needed(self.deployable_of(node, gib)).alpha for gib in HOST_GIB},
            rule.cold,
            rule.hot,
            rule.threshold,
            rule.whole,
        )

    # What is measured on one node

    def statics_of(self, cell: Cell, number: int) -> Result[StaticsRecord]:
        """The statics of a draw."""
        deployable, size = self.prepared(cell.family).deployable, self.plan.size
        settings = {
            "cell": cell.identity,
            "draw": number,
            "deployable": deployable,
            "step": size.step,
            "coarse_step": size.coarse_step,
        }
        work = partial(tasks.statics, cell, number, deployable, size.step, size.coarse_step)
        return Result(f"{cell.name}.statics", number, "statics", settings, work, size.static_replays * cell_cpu_s(cell))

    def sweep(self, cell: Cell, number: int) -> Sweep:
        """Return the statics of a draw, with those that were replayed for the best single one."""
        result = self.statics_of(cell, number)
        if (result.key, number) not in self._sweeps:
            self._sweeps[result.key, number] = self.needed(result).sweep()
        return self._sweeps[result.key, number]

    def static_of(self, cell: Cell, number: int, alpha: float) -> Result[RunRecord]:
        """One more static."""
        settings = {"cell": cell.identity, "draw": number, "alpha": alpha}
        work = partial(tasks.static, cell, number, alpha)
        return Result(f"{cell.name}.static_{alpha:g}", number, "run", settings, work, cell_cpu_s(cell))

    def _p99s(self, cell: Cell, number: int) -> dict[float, float]:
        """P99 of every static of a draw that has been replayed."""
        found = {alpha: run.p99_ms for alpha, run in self.sweep(cell, number).runs.items()}
        for alpha in self.grid(cell.scenario):
            record = self.get(self.static_of(cell, number, alpha))
            if record is not None:
                found.setdefault(alpha, record.p99_ms)
        return found

    def single(self, family: str) -> float:
        """Return the alpha of the least mean ln P99 over all draws of a family's loads: the best single static."""
        found = [self._p99s(cell, number) for cell in self.plan.of(family) for number in self.plan.size.numbers]
        shared = sorted(set.intersection(*(set(one) for one in found)))
        mean = [float(np.mean([np.log(one[alpha]) for one in found])) for alpha in shared]
        return shared[int(np.argmin(mean))]

    def _missing_singles(self, family: str) -> list[Result[RunRecord]]:
        """Statics that enclose the best single one and were not replayed on every draw yet."""
        best = self.single(family)
        missing = []
        for cell in self.plan.of(family):
            near = [alpha for alpha in self.grid(cell.scenario) if abs(alpha - best) < self.plan.size.coarse_step]
            for number in self.plan.size.numbers:
                known = self._p99s(cell, number)
                missing += [self.static_of(cell, number, alpha) for alpha in near if alpha not in known]
        return missing

    def grid(self, scenario: Scenario) -> list[float]:
        """Return the alphas that statics may have."""
        return alpha_grid(scenario.control.alpha_min, scenario.control.alpha_max, self.plan.size.step)

    def schedule_of(self, cell: Cell, number: int) -> Result[ReferenceRecord]:
        """The best schedule of a draw."""
        effort = self.plan.size.effort
        assert effort is not None
        statics = self.statics_of(cell, number)
        settings = {"statics": statics.hash, "effort": asdict(effort)}
        work = partial(tasks.best_schedule, cell, number, self.needed(statics), effort)
        return Result(
            f"{cell.name}.reference", number, "reference", settings, work, SEARCH * effort.replays * cell_cpu_s(cell)
        )

    def reference(self, cell: Cell, number: int) -> ReferenceRecord:
        """Return the best schedule known of a draw."""
        if self.plan.size.effort is None:
            return self.needed(self.statics_of(cell, number)).known
        return self.needed(self.schedule_of(cell, number))

    def run_of(self, cell: Cell, number: int, entry: Entry) -> Result[RunRecord]:
        """A draw under a controller."""
        prepared = self.prepared(cell.family)
        settings = {
            "cell": cell.identity,
            "draw": number,
            "controller": entry.key,
            "identity": entry.identity,
            "prepared": prepared.plain(),
        }
        work = partial(tasks.controlled, cell, number, entry, prepared, self.reference(cell, number).run.p99_ms)
        return Result(f"{cell.name}.{entry.key}", number, "run", settings, work, cell_cpu_s(cell))

    @property
    def capacity_names(self) -> list[str]:
        """Keys of the controllers whose capacity is sought."""
        policies = [entry.key for entry in self.plan.entries if entry.kind == "policy"]
        return [*policies[:1], DEPLOYABLE, HINDSIGHT]

    def capacity_of(self, cell: Cell, number: int, name: str) -> Result[CapacityRecord]:
        """The capacity of a controller on a draw."""
        prepared, tolerance = self.prepared(cell.family), self.plan.size.tolerance
        source = self._source(cell, number, name)
        settings = {
            "cell": cell.identity,
            "draw": number,
            "controller": source.identity if isinstance(source, Entry) else source,
            "prepared": prepared.plain(),
            "tolerance": tolerance,
        }
        work = partial(tasks.capacity_of, cell, number, source, prepared, tolerance)
        cpu_s = CAPACITY_REPLAYS * cell_cpu_s(cell)
        return Result(f"{cell.name}.{name}.capacity", number, "capacity", settings, work, cpu_s)

    def _source(self, cell: Cell, number: int, name: str) -> Source:
        """The entry of that key, or the alpha of one of the statics."""
        if name == DEPLOYABLE:
            return self.prepared(cell.family).deployable
        if name == HINDSIGHT:
            return self.sweep(cell, number).hindsight
        return next(entry for entry in self.plan.entries if entry.key == name)

    def needed(self, result: Result[_Record]) -> _Record:
        """Return what was measured; KeyError where it was not."""
        record = self.get(result)
        if record is None:
            raise KeyError(f"{result.key}, draw {result.seed}, has not been measured")
        return record
