"""Controllers side by side on the same arrivals: statics, the per-segment optimum, a policy; and the figures
that follow.

Per seed: the arrivals are drawn once, every static is replayed on them, then the optimum of each segment as a
schedule, the reference is sought if asked for, then come the policies. What is quoted over seeds is the interquartile
mean with a bootstrap interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from eval.reference import SEGMENTS, Effort, Reference, best_known, reference, segment_optimum
from eval.segments import LEAST_SEGMENT_REQUESTS, Gap, Run, gap
from eval.statistics import Floats, bootstrap_interval, interquartile_mean, standard_error
from eval.sweep import STEP, Curve, Sweep, Work, half_of, pooled_curve, sweep_adaptively
from helm_rl.control.protocol import Controller
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.figures import Figure
from helm_rl.metrics import shed_ms
from helm_rl.scenario import scenario_hash

if TYPE_CHECKING:
    from helm_rl.scenario import Scenario
    from helm_rl.workloads.trace import Trace

FAMILY = "default"
ROUTER = "single"
"""One node, so nothing is routed."""

SEEDS_FROM = 1_000_000
STEADY_SEEDS_FROM = 2_000_000
MOST_DRAWS = 1_000_000
"""Arrivals are drawn from these seeds up: the evaluated ones, and the Steady ones on which the deployable static is
chosen. Training draws from 2**32 up (envs/training_traces.py), so nothing is judged on arrivals it was fitted to."""

ALIKE = 1.005
"""P99s up to this multiple of the least one are alike: a table's digits hardly tell them apart."""
HALF_BUSY = 0.5
"""A node whose link and accelerator are busy for less of the time is far from its limit."""

POLICY = "policy"
HALF = "half_static"
DEPLOYABLE = "deployable_static"
HINDSIGHT = "hindsight_static"
OPTIMUM = SEGMENTS
REFERENCE = "reference"


@dataclass(frozen=True)
class Row:
    """One row of the table: key names it in the figures, title heads it, meaning says in a line what it is."""

    key: str
    title: str
    meaning: str


@dataclass(frozen=True)
class Contestant(Row):
    """A controller to evaluate, started at the deployable static's alpha.

    make returns a new one for each replay; origin says where it comes from; trained_on are the hashes of the recorded
    traces that it was trained on, if any; own: somebody else wrote it; files: of a bundle, the sha256 of each file that
    it is made of.
    """

    make: Callable[[], Controller]
    origin: str = ""
    trained_on: tuple[str, ...] = ()
    own: bool = False
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """One quoted number: how it is called in the figures, its unit, which way is good."""

    key: str
    unit: str
    better: Literal["lower", "higher"]


METRICS = (
    Metric("p99_ms", "ms", "lower"),
    Metric("p50_ms", "ms", "lower"),
    Metric("windowed_p99_ms", "ms", "lower"),
    Metric("onset_p99_ms", "ms", "lower"),
    Metric("slo", "share", "higher"),
    Metric("throughput", "requests/s", "higher"),
    Metric("ratio_gap", "alpha", "lower"),
    Metric("ratio_gap_transition", "alpha", "lower"),
    Metric("flat_gap", "alpha", "lower"),
    Metric("flat_gap_transition", "alpha", "lower"),
    Metric("regret", "ratio", "lower"),
)


@dataclass(frozen=True)
class Estimate:
    """A number over seeds: interquartile mean, its 95 % bootstrap interval (None with one seed), the values per
    seed.
    """

    value: float
    interval: tuple[float, float] | None
    per_seed: tuple[float, ...]


@dataclass(frozen=True)
class SeedResult:
    """Everything replayed on one draw of arrivals.

    runs: by controller key; alphas: the fixed alpha of those that have one; reference: the best schedule known, found
    by a search or the best of every static and the per-segment optimum; rechecked: keys of controllers that beat the
    reference and gave the same P99 when replayed again.
    """

    seed: int | None
    trace_hash: str
    requests: int
    sweep: Sweep
    runs: dict[str, Run]
    alphas: dict[str, float]
    reference: Reference
    rechecked: tuple[str, ...]

    def gaps(self, key: str, half: Literal["transition", "settled"], span: int | None = None) -> Gap:
        """Distance of a controller's alpha to the best one over one half of a span, or of all spans (None)."""
        chosen = range(len(self.sweep.part.spans)) if span is None else [span]
        windows = []
        for index in chosen:
            where = self.sweep.part.spans[index]
            bounds = (where.start_ns, where.middle_ns, where.end_ns)
            windows.append(bounds[:2] if half == "transition" else bounds[1:])
        best = [self.sweep.settled[index].best for index in chosen]
        flat = [self.sweep.settled[index].flat for index in chosen]
        return gap(self.runs[key], windows, best, flat)

    def metric(self, key: str, metric: str) -> float:
        """One metric (METRICS) of one controller on these arrivals."""
        run = self.runs[key]
        match metric:
            case "p99_ms" | "p50_ms" | "windowed_p99_ms" | "onset_p99_ms" | "slo":
                return float(getattr(run, metric))
            case "throughput":
                return run.throughput_per_s
            case "ratio_gap":
                return self.gaps(key, "settled").ratio
            case "ratio_gap_transition":
                return self.gaps(key, "transition").ratio
            case "flat_gap":
                return self.gaps(key, "settled").flat
            case "flat_gap_transition":
                return self.gaps(key, "transition").flat
            case "regret":
                return run.p99_ms / self.reference.p99_ms - 1.0
            case _:
                raise KeyError(metric)


@dataclass(frozen=True)
class Comparison:
    """The whole evaluation.

    rows: those of the table, in order; deployable_basis: how that static's alpha was chosen; effort: of the search for
    the reference, None where it is the best of every static and the per-segment optimum; family: what its figures'
    names begin with.
    """

    scenario: Scenario
    pattern: str
    rows: tuple[Row, ...]
    results: tuple[SeedResult, ...]
    deployable: float
    deployable_basis: str
    steady: Curve | None
    step: float
    effort: Effort | None = None
    notes: tuple[str, ...] = field(default=())
    family: str = FAMILY

    def estimate(self, key: str, metric: str) -> Estimate:
        """One metric of one controller over the seeds."""
        return estimate([result.metric(key, metric) for result in self.results])

    def ratio(self, key: str, to: str) -> Estimate:
        """P99 of one controller divided by that of another on the same arrivals, over the seeds."""
        return estimate([result.runs[key].p99_ms / result.runs[to].p99_ms for result in self.results])

    def headroom(self) -> tuple[float, float]:
        """Mean of 1 - P99(reference) / P99(hindsight static), and its standard error (NaN with one seed)."""
        rooms = [1.0 - result.reference.p99_ms / result.runs[HINDSIGHT].p99_ms for result in self.results]
        return float(np.mean(rooms)), standard_error(rooms)

    def best_alphas(self) -> Floats:
        """alpha* of each span by seed, float64[seeds, spans]; recorded arrivals are one seed."""
        return np.array([[curve.best for curve in result.sweep.settled] for result in self.results])

    def noise_floor(self) -> Floats:
        """Standard deviation of alpha* over the seeds, float64[spans]; NaN with one seed."""
        stars = self.best_alphas()
        if len(stars) < 2:
            return np.full(stars.shape[1], np.nan)
        return stars.std(axis=0, ddof=1)

    def bundles(self) -> dict[str, Mapping[str, str]]:
        """Return the files (name: sha256) of each row that is a bundle, by its key."""
        return {row.key: row.files for row in self.rows if isinstance(row, Contestant) and row.files}

    def figures(self) -> dict[str, Figure]:
        """Every figure of this evaluation, by name. No timing is among them: the same seed gives the same figures."""
        pattern = f"{self.family}.{figure_word(self.pattern)}"
        found: dict[str, Figure] = {}
        for row in self.rows:
            for metric in METRICS:
                value = self.estimate(row.key, metric.key).value
                name = f"{pattern}.{ROUTER}.{row.key}.{metric.key}"
                found[name] = Figure(value, metric.unit, metric.better)
        headroom, error = self.headroom()
        found[f"{pattern}.headroom"] = Figure(headroom, "ratio", "higher")
        found[f"{pattern}.headroom_error"] = Figure(error, "ratio", "lower")
        found[f"{pattern}.noise_floor"] = Figure(float(np.mean(self.noise_floor())), "alpha", "lower")
        if any(row.key == POLICY for row in self.rows):
            for static in (DEPLOYABLE, HINDSIGHT):
                value = self.ratio(POLICY, static).value
                found[f"{pattern}.p99_vs_{static}"] = Figure(value, "ratio", "lower")
        return found


def estimate(values: Sequence[float]) -> Estimate:
    """Summarise one value per seed."""
    return Estimate(interquartile_mean(values), bootstrap_interval(values), tuple(values))


def figure_word(name: str) -> str:
    """Turn any name into one part of a figure's name: lower case, letters, digits and underscores."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "unnamed"


def steady_scenario(scenario: Scenario) -> Scenario:
    """The family's Steady load: the same scenario at its first base rate, without drift and phases."""
    load = scenario.load.model_copy(update={"phase": (), "rate_end": None})
    return scenario.model_copy(update={"name": "steady", "load": load})


def compare(
    scenario: Scenario,
    work: Work,
    *,
    seeds: int = 3,
    first_seed: int = 1,
    trace: Trace | None = None,
    policies: Sequence[Contestant] = (),
    step: float = STEP,
    effort: Effort | None = None,
) -> Comparison:
    """Evaluate `policies` beside the statics and the per-segment optimum.

    Arguments:
        scenario: what serves, under which SLO and control limits; also the load, unless `trace` is given.
        work: where the replays run.
        seeds, first_seed: draws of arrivals, and the number of the first; a recorded trace is one draw.
        trace: recorded arrivals in place of generated ones.
        step: spacing of alpha around a minimum.
        effort: how finely the reference is sought; None: it is the best of every static and the per-segment optimum.

    Raises:
        UserError: No seed, a trace or a segment with too few requests, a step out of range; a controller of somebody's
            own that beat the reference did not come to the same in a second replay.
        RuntimeError: One of ours did not, or the reference did not do in a replay what it did in the search.
    """
    check_draws(first_seed, seeds)
    if trace is not None and seeds != 1:
        raise UserError(f"a recorded trace is one set of arrivals: --seeds must be 1 with --trace, got {seeds}")

    draws: list[tuple[int | None, Trace | None]]
    steady: Curve | None = None
    if trace is None:
        draws = [(SEEDS_FROM + first_seed + index, None) for index in range(seeds)]
        steady, deployable = steady_optimum(scenario, work, min(seeds, 2), first_seed, step)
        basis = f"least P99 on the Steady load ({scenario.load.rate:g} requests/s, no phases), other arrivals"
        pattern = scenario.name
    else:
        draws = [(None, trace)]
        deployable, basis = float("nan"), "least P99 on the first quarter of the recorded arrivals"
        pattern = trace.meta.name

    half = half_of(scenario)
    results = []
    rows: tuple[Row, ...] = ()
    notes: list[str] = []
    for index, (seed, recorded) in enumerate(draws):
        work.describe(f"arrivals {index + 1} of {len(draws)}: statics")
        arrivals = recorded if recorded is not None else draw_arrivals(scenario, seed)
        also = [half] if trace is not None else [half, deployable]
        swept = sweep_adaptively(scenario, arrivals, work, step, also, opening=trace is not None)
        if trace is not None:
            deployable = swept.opening.best
        work.describe(f"arrivals {index + 1} of {len(draws)}: controllers")
        rows = (*policies, *fixed_rows(half, deployable, effort))
        results.append(_controllers(scenario, arrivals, work, seed, swept, half, deployable, policies, effort))
        if swept.part.sparse and trace is None:
            raise UserError(
                f"scenario {scenario.name}: {swept.part.sparse} of its segments hold too few requests for a "
                f"P99 (at least {LEAST_SEGMENT_REQUESTS} in each half); raise load.rate or lengthen the phases"
            )
        if swept.part.sparse:
            notes.append(f"{swept.part.sparse} segments hold too few requests for a P99 and were left out")
    notes += _overloaded(scenario, results)
    if all(_alike(result, scenario.slo_ms) for result in results):
        arrivals = trace if trace is not None else draw_arrivals(scenario, results[0].seed or 0)
        served = work.replay(scenario, arrivals, StaticAlpha(half), half)
        notes.append(_why_alike(scenario, results, served.link_busy, served.compute_busy))
    hashes = {result.trace_hash for result in results}
    notes += [
        f"the {policy.title} was trained on these very arrivals, so its figures flatter it"
        for policy in policies
        if hashes.intersection(policy.trained_on)
    ]
    beaten = sorted({key for result in results for key in result.rechecked})
    if beaten:
        titles = " and ".join(row.title for row in rows if row.key in beaten)
        notes.append(f"the reference was beaten on some arrivals by {titles}; a second replay gave the same P99")
    return Comparison(scenario, pattern, rows, tuple(results), deployable, basis, steady, step, effort, tuple(notes))


def provenance(comparison: Comparison) -> dict[str, str]:
    """What was run, for a reader who wants to run it again: scenario and trace hashes, seeds, grid."""
    results = comparison.results
    drawn = ", ".join(str(result.seed) for result in results if result.seed is not None)
    return {
        "scenario": f"{comparison.scenario.name}, sha256 {scenario_hash(comparison.scenario)}",
        "arrivals": f"seeds {drawn}" if drawn else "recorded",
        "trace": ", ".join(f"sha256 {result.trace_hash}" for result in results),
        "requests measured": ", ".join(f"{result.requests:,}" for result in results),
        "statics replayed": ", ".join(str(len(result.sweep.runs)) for result in results),
        "step of alpha": f"{comparison.step:g}",
        "reference": ", ".join(result.reference.winner for result in results),
        **{row.title: row.origin for row in comparison.rows if isinstance(row, Contestant) and row.origin},
        "deployable static": f"alpha {comparison.deployable:.2f}: {comparison.deployable_basis}",
    }


def check_draws(first_seed: int, seeds: int) -> None:
    """Raise UserError unless at least one draw is asked for and all of them are among the held-out seeds."""
    if not 1 <= seeds <= MOST_DRAWS:
        raise UserError(f"--seeds must be at least 1{'' if seeds < 1 else f' and at most {MOST_DRAWS}'}, got {seeds}")
    if first_seed < 0 or first_seed + seeds > MOST_DRAWS:
        raise UserError(f"--seed must lie in 0 to {MOST_DRAWS - seeds}, got {first_seed}")


def draw_arrivals(scenario: Scenario, seed: int | None) -> Trace:
    """Draw the arrivals of one seed; those that are judged have seeds from SEEDS_FROM up."""
    from helm_rl.workloads.generate import generate

    return generate(scenario, seed=seed)


def steady_optimum(
    scenario: Scenario, work: Work, draws: int, first_seed: int, step: float, segments: bool = True
) -> tuple[Curve, float]:
    """Sweep the Steady load and return its curve, averaged over the draws, and the alpha at its minimum.

    segments: sweep around the minima of its minutes, too.

    Raises UserError where the scenario has no base load.
    """
    if scenario.load.rate == 0:
        raise UserError(
            f"scenario {scenario.name}: load.rate is 0, so there is no Steady load to choose the deployable static "
            "on; give load.rate some requests per second"
        )
    steady = steady_scenario(scenario)
    swept = []
    for index in range(draws):
        work.describe(f"Steady arrivals {index + 1} of {draws}: statics")
        arrivals = draw_arrivals(steady, STEADY_SEEDS_FROM + first_seed + index)
        swept.append(sweep_adaptively(steady, arrivals, work, step, segments=segments))
    pooled = pooled_curve(swept, step)
    return pooled, pooled.best


def _overloaded(scenario: Scenario, results: Sequence[SeedResult]) -> list[str]:
    """Name the segments in which every static sheds over 1 %: there P99 is the price of shedding alone."""
    shed = float(shed_ms(scenario.slo_ms))
    spans = results[0].sweep.part.spans
    found = [
        f"{span.label} from {span.start_ns / 1e9:.0f} s"
        for index, span in enumerate(spans)
        if any(result.sweep.settled[index].p99_ms.min() == shed for result in results)
    ]
    if not found:
        return []
    where = "in every segment" if len(found) == len(spans) > 1 else f"in {', '.join(found)}"
    return [f"{where} every static sheds more than 1 % of the requests: alpha* means nothing there"]


def _alike(result: SeedResult, slo_ms: float) -> bool:
    """Return whether no row and no static differs from another in P99, and none sheds that much."""
    p99_ms = [run.p99_ms for run in (*result.runs.values(), *result.sweep.runs.values())]
    return bool(max(p99_ms) <= ALIKE * min(p99_ms) and max(p99_ms) < shed_ms(slo_ms))


def _why_alike(scenario: Scenario, results: Sequence[SeedResult], link_busy: float, compute_busy: float) -> str:
    """Say that the split is of no consequence, and how much there was to do; that it is little, only where it is."""
    alphas = results[0].sweep.runs
    found = (
        f"the split does not matter to these arrivals: every row's P99, and that of each of {len(alphas)} statics from "
        f"{min(alphas):g} to {max(alphas):g}, lies within {100 * (ALIKE - 1):.1f} % of the others; at "
        f"{half_of(scenario):.2g} the link is busy {100 * link_busy:.1f} % of the time and the accelerator "
        f"{100 * compute_busy:.1f} %"
    )
    if max(link_busy, compute_busy) >= HALF_BUSY:
        return found
    return (
        f"{found}, far less than they could be: only a higher load, by load.rate or by --speed-up of trace convert, "
        "can tell splits apart"
    )


def check_again(title: str, first_ms: float, second_ms: float, own: bool) -> None:
    """Raise unless a second replay gave the same P99: a UserError of a controller of somebody's own."""
    if second_ms == first_ms:
        return
    found = f"{title}: the same arrivals gave a P99 of {first_ms} ms, then {second_ms} ms"
    if own:
        raise UserError(f"controller {found}; whatever it draws at random must come from the seed that reset is given")
    raise RuntimeError(found)


def fixed_rows(half: float, deployable: float, effort: Effort | None) -> tuple[Row, ...]:
    """The rows that stand beside every policy, in the order of the table."""
    searched = Row(REFERENCE, "reference", "the best schedule found offline, transitions included, all arrivals known")
    return (
        Row(HALF, f"static {half:.2g}", "half of the pool to each cache, or as near to it as the bounds allow"),
        Row(
            DEPLOYABLE,
            "deployable static",
            f"alpha {deployable:.2f}: the best that an operator can set without knowing the load to come",
        ),
        Row(
            HINDSIGHT,
            "hindsight static",
            "the best static on these very arrivals, which nobody knows beforehand",
        ),
        Row(
            OPTIMUM,
            "per-segment optimum",
            "goes to each segment's best alpha the moment it begins; replayed, its transitions included",
        ),
        *([searched] if effort is not None else []),
    )


def _controllers(
    scenario: Scenario,
    trace: Trace,
    work: Work,
    seed: int | None,
    swept: Sweep,
    half: float,
    deployable: float,
    policies: Sequence[Contestant],
    effort: Effort | None,
) -> SeedResult:
    """Replay the schedule of segment optima and the policies, find the reference, and put all beside the statics."""
    part = swept.part
    schedule = segment_optimum(trace, swept)
    replay_seed = seed or 0
    starts: list[tuple[Controller, float, int]] = [(schedule, float(schedule.alphas[0]), replay_seed)]
    starts += [(policy.make(), deployable, replay_seed) for policy in policies]
    optimum, *found = work.run(scenario, trace, part, starts)
    best = best_known(trace, swept, optimum)
    if effort is not None:
        best = reference(scenario, trace, swept, optimum, work, effort)

    hindsight = swept.hindsight
    runs = {policy.key: run for policy, run in zip(policies, found, strict=True)}
    runs |= {
        HALF: swept.runs[half],
        DEPLOYABLE: swept.runs[deployable],
        HINDSIGHT: swept.runs[hindsight],
        OPTIMUM: optimum,
    }
    if effort is not None:
        runs[REFERENCE] = best.run

    # A policy that beats what was found offline may be a mistake in either: it is replayed again, and reported.
    better = [policy for policy in policies if runs[policy.key].p99_ms < best.p99_ms]
    again = work.run(scenario, trace, part, [(policy.make(), deployable, replay_seed) for policy in better])
    for policy, run in zip(better, again, strict=True):
        check_again(policy.title, runs[policy.key].p99_ms, run.p99_ms, policy.own)
    return SeedResult(
        seed=seed,
        trace_hash=trace.hash(),
        requests=part.requests,
        sweep=swept,
        runs=runs,
        alphas={HALF: half, DEPLOYABLE: deployable, HINDSIGHT: hindsight},
        reference=best,
        rechecked=tuple(policy.key for policy in better),
    )
