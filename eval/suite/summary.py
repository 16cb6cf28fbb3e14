"""What a suite says of each cell: a `Comparison` of all its controllers, capacities, bursts; and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from eval.comparison import (
    DEPLOYABLE,
    HALF,
    HINDSIGHT,
    OPTIMUM,
    POLICY,
    REFERENCE,
    SEEDS_FROM,
    Comparison,
    Estimate,
    Row,
    SeedResult,
    estimate,
    figure_word,
    fixed_rows,
)
from eval.results import RESULTS
from eval.routing import ROUTERS
from eval.segments import Run
from eval.statistics import improvement, improvement_interval, interquartile_mean, stratified_interval
from eval.suite.cells import RECORDED, Cell
from eval.suite.cluster import ROUTED, Cluster
from eval.suite.entries import SINGLE
from eval.suite.records import ServedRecord
from eval.suite.suite import Suite
from eval.sweep import half_of
from helm_rl.errors import UserError
from helm_rl.figures import Figure
from helm_rl.workloads.trace import BASE


@dataclass(frozen=True)
class CellSummary:
    """One cell over its draws.

    comparison: all its controllers; capacities: key -> a multiple of the load for each draw that it was sought on.
    """

    cell: Cell
    comparison: Comparison
    capacities: dict[str, tuple[float, ...]]

    @property
    def name(self) -> str:
        """What its figures are called."""
        return self.cell.name

    def p99(self, key: str) -> list[float]:
        """P99 of a controller on each draw."""
        return [result.runs[key].p99_ms for result in self.comparison.results]

    def capacity_ratio(self, to: str) -> Estimate | None:
        """Capacity of the policy over a static's, draw by draw; None without both, or where one bears no load."""
        ours, theirs = self.capacities.get(POLICY, ()), self.capacities.get(to, ())
        if not ours or not theirs or min(theirs) == 0:
            return None
        return estimate([one / other for one, other in zip(ours, theirs, strict=True)])

    @property
    def captured(self) -> float:
        """Share of the headroom that the policy has: its own mean gain on the hindsight static over the reference's."""
        room, _ = self.comparison.headroom()
        gain = np.mean([1.0 - one / other for one, other in zip(self.p99(POLICY), self.p99(HINDSIGHT), strict=True)])
        return float(gain / room) if room > 0 else float("nan")

    def violations(self, key: str) -> tuple[int, int]:
        """Bursts whose P99 breaks the SLO under a controller, and bursts."""
        tails = [
            result.runs[key].segment_p99_ms[index]
            for result in self.comparison.results
            for index, span in enumerate(result.sweep.part.spans)
            if span.label != BASE
        ]
        return sum(tail > self.cell.scenario.slo_ms for tail in tails), len(tails)

    @property
    def shift(self) -> float:
        """Largest less smallest alpha* of a segment, in the mean over the draws."""
        stars = self.comparison.best_alphas()
        return float(np.mean(stars.max(axis=1) - stars.min(axis=1)))


@dataclass(frozen=True)
class Summary:
    """A whole suite.

    cells: in the plan's order; served: (router, controller) -> what each draw of the cluster came to; nodes: of the
    cluster; rows: all controllers, the moving ones first.
    """

    cells: tuple[CellSummary, ...]
    served: dict[tuple[str, str], tuple[ServedRecord, ...]]
    nodes: int
    clustered: Cell | None
    rows: tuple[Row, ...]

    @property
    def has_policy(self) -> bool:
        """Whether a policy was evaluated."""
        return any(row.key == POLICY for row in self.rows)

    @cached_property
    def rules(self) -> list[Row]:
        """The rules that divide memory today, and controllers of somebody's own."""
        return [row for row in self.rows if getattr(row, "kind", "") in ("rule", "own")]

    def row(self, key: str) -> Row:
        """Return the row of a controller."""
        return next(row for row in self.rows if row.key == key)

    def over_hindsight(self, key: str) -> Estimate:
        """P99 to that of the hindsight static: interquartile mean over all cells and draws, each cell resampled."""
        strata = [
            [one / other for one, other in zip(cell.p99(key), cell.p99(HINDSIGHT), strict=True)] for cell in self.cells
        ]
        values = [ratio for ratios in strata for ratio in ratios]
        return Estimate(interquartile_mean(values), stratified_interval(strata), tuple(values))

    def improvement(self, key: str) -> Estimate:
        """Probability that P99 of a draw is lower under the policy than under another, the mean over all cells."""
        ours, theirs = [cell.p99(POLICY) for cell in self.cells], [cell.p99(key) for cell in self.cells]
        return Estimate(improvement(ours, theirs), improvement_interval(ours, theirs), ())

    def violations(self, key: str) -> float:
        """Share of the bursts, of all families' Burst, whose P99 breaks the SLO; NaN without any."""
        found = [cell.violations(key) for cell in self.cells if cell.cell.pattern == "burst"]
        bursts = sum(each for _, each in found)
        return sum(broken for broken, _ in found) / bursts if bursts else float("nan")

    def figures(self) -> dict[str, Figure]:
        """Return every figure, by name."""
        found: dict[str, Figure] = {}
        for cell in self.cells:
            found |= cell.comparison.figures()
            found[f"{cell.name}.shift"] = Figure(cell.shift, "alpha", "higher")
            if self.has_policy:
                ratio = cell.comparison.ratio(POLICY, SINGLE).value if cell.cell.family != RECORDED else float("nan")
                found[f"{cell.name}.p99_vs_single_static"] = Figure(ratio, "ratio", "lower")
                found[f"{cell.name}.captured"] = Figure(cell.captured, "share", "higher")
                for static in (DEPLOYABLE, HINDSIGHT):
                    gain = cell.capacity_ratio(static)
                    name = f"{cell.name}.capacity_vs_{static}"
                    found[name] = Figure(float("nan") if gain is None else gain.value, "ratio", "higher")
            for key, multiples in cell.capacities.items():
                found[f"{cell.name}.capacity.{key}"] = Figure(interquartile_mean(multiples), "x load", "higher")
        for row in self.rows:
            if row.key not in (SINGLE, HINDSIGHT):
                value = self.over_hindsight(row.key).value
                found[f"all.{row.key}.p99_vs_hindsight_static"] = Figure(value, "ratio", "lower")
        if self.has_policy:
            for row in self.rules:
                value = self.improvement(row.key).value
                found[f"all.improvement_over.{row.key}"] = Figure(value, "probability", "higher")
            found["burst.violations.helm"] = Figure(self.violations(POLICY), "share", "lower")
        found["burst.violations.naive"] = Figure(self.violations("naive"), "share", "lower")
        for (router, key), records in self.served.items():
            assert self.clustered is not None
            name = f"{self.clustered.name}.{figure_word(router)}.{key}"
            for field, unit, better in (
                ("p99_ms", "ms", "lower"),
                ("slo", "share", "higher"),
                ("throughput_per_s", "requests/s", "higher"),
            ):
                value_of = interquartile_mean([getattr(record, field) for record in records])
                found[f"{name}.{field.removesuffix('_per_s')}"] = Figure(value_of, unit, better)  # type: ignore[arg-type]
        return found


def summarise(suite: Suite) -> Summary:
    """Read a suite that has been measured to its end."""
    plan = suite.plan
    singles = {family: suite.single(family) for family in plan.families}
    cells = tuple(_cell(suite, cell, singles.get(cell.family)) for cell in suite.cells)
    served: dict[tuple[str, str], tuple[ServedRecord, ...]] = {}
    if plan.clustered is not None:
        cluster, numbers = Cluster(suite), plan.size.cluster_numbers
        for key, (router, _) in cluster.controllers().items():
            served[router, key] = tuple(suite.needed(cluster.controlled(number, key)) for number in numbers)
        served["helm", HINDSIGHT] = tuple(cluster.hindsight(number)[1] for number in numbers)
        for router in ROUTERS:
            served[router, ROUTED] = tuple(suite.needed(cluster.routed(number, router)) for number in numbers)
    rows = next((cell.comparison.rows for cell in cells if cell.cell.family != RECORDED), ())
    return Summary(cells, served, plan.size.nodes, plan.clustered, rows)


def _cell(suite: Suite, cell: Cell, single: float | None) -> CellSummary:
    plan = suite.plan
    prepared = suite.prepared(cell.family)
    half = half_of(cell.scenario)
    fixed = fixed_rows(half, prepared.deployable, plan.size.effort)
    rows: list[Row] = [*plan.entries, *fixed]
    if single is not None:
        meaning = f"alpha {single:.2f}: the best one over all three loads and all draws, which nobody knows beforehand"
        rows.insert(len(plan.entries) + 2, Row(SINGLE, "best single static", meaning))
    results = tuple(_result(suite, cell, number, half, single) for number in plan.size.numbers)
    comparison = Comparison(
        cell.scenario,
        cell.pattern,
        tuple(rows),
        results,
        prepared.deployable,
        "least P99 on the family's Steady load, on other arrivals",
        None,
        plan.size.step,
        plan.size.effort,
        family=cell.family,
    )
    numbers = plan.size.capacity_numbers
    capacities = {
        name: tuple(suite.needed(suite.capacity_of(cell, number, name)).multiple for number in numbers)
        for name in suite.capacity_names
    }
    return CellSummary(cell, comparison, capacities)


def _result(suite: Suite, cell: Cell, number: int, half: float, single: float | None) -> SeedResult:
    swept, record = suite.sweep(cell, number), suite.needed(suite.statics_of(cell, number))
    optimum, deployable = record.optimum.run(), suite.prepared(cell.family).deployable
    alphas = {HALF: half, DEPLOYABLE: deployable, HINDSIGHT: swept.hindsight}
    if lacking := set(alphas.values()) - swept.runs.keys():
        raise _damaged(suite, f"{cell.name}.statics", number, f"lacks alpha {min(lacking):g}")
    runs: dict[str, Run] = {key: swept.runs[alpha] for key, alpha in alphas.items()}
    if single is not None:
        alphas[SINGLE] = single
        known = swept.runs.get(single)
        runs[SINGLE] = known if known is not None else suite.needed(suite.static_of(cell, number, single)).run()
    best = suite.reference(cell, number).reference()
    runs[OPTIMUM] = optimum
    if suite.plan.size.effort is not None:
        runs[REFERENCE] = best.run
    for entry in suite.plan.entries:
        runs[entry.key] = suite.needed(suite.run_of(cell, number, entry)).run()
    for key, run in runs.items():
        if run.segment_p99_ms.size != len(swept.part.spans):
            raise _damaged(suite, f"{cell.name}.{key}", number, "has not the segments of its arrivals")
    better = tuple(entry.key for entry in suite.plan.entries if runs[entry.key].p99_ms < best.p99_ms)
    return SeedResult(SEEDS_FROM + number, record.trace_hash, record.requests, swept, runs, alphas, best, better)


def _damaged(suite: Suite, key: str, number: int, what: str) -> UserError:
    path = suite.store.folder / RESULTS
    return UserError(f"{path}: the result {key}, draw {number}, {what}; delete its line, it will be measured again")
