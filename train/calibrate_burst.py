"""`helm-rl train burst`: thresholds of the burst detectors for a mean time between false alarms, and the recovery rule.

    helm-rl train burst --scenario burst --output detector.json --plots plots

1. The scenario's load is drawn without its bursts and served; the thresholds of both detectors are those at which
   false alarms are rare enough, surely so. Other draws then show how rare they are.
2. Bursts of many sizes on arrivals of many rates and dispersions: how fast they are found, beside the limit.
3. When the detector fires on recorded arrivals.
4. The recovery rule: the alphas to go to in a burst, by replays of the scenario with its bursts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from envs.training_traces import SEEDS_FROM, is_cluster
from eval.command import fitting_bundle
from eval.sweep import Work
from helm_rl.control.base import BasePolicy
from helm_rl.control.burst import BurstSettings, look_at_all, new_burst_state
from helm_rl.control.detector_file import Detector, Origin, save_detector
from helm_rl.control.protocol import Controller
from helm_rl.control.recovery import RecoveryRule
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs, refuse_existing
from helm_rl.scenario import Load, Scenario, load_scenario, scenario_hash
from helm_rl.workloads.trace import Trace
from train.calibration import (
    CONFIDENCE,
    MARGIN,
    Advance,
    Alarms,
    Recording,
    by_detector,
    calibrate,
    false_alarms,
    record,
)
from train.detection import Cell
from train.detection import Load as Arrivals
from train.firings import Firings, firings
from train.recovery_fit import WORSE, Bursts, Fit, Outcome, Reached, fit_rule, recovering, steady_alpha

RATES = (20.0, 67.0, 140.0, 420.0, 1500.0)
DISPERSIONS = (1.0, 2.0, 4.0)
FACTORS = (1.2, 1.5, 2.0, 3.0, 4.0)
ROC = ((67.0, 1.5), (67.0, 2.0), (140.0, 1.5), (20.0, 3.0))
ROC_DISPERSIONS = (1.0, 2.0)
ROC_S = (60.0, 200.0, 600.0, 2000.0)
FOUND = 0.95
"""Share of bursts that is to be found within a second, where the limit finds as many."""
LEAST_FACTOR = 1.5
"""From which bursts are to be found."""
PROMPT = 1.5
"""Times what detection and the budget of migration need, in which the target should be applied."""
FASTER = 0.8
"""Times the P99 of a burst's first seconds without recovery, that it should be with it."""
LEAST_S, MOST_S = 1.0, 100_000.0
"""Between which a mean time between false alarms can be asked for."""

_DRAW_S = 2_500.0  # of a draw that thresholds are set on
_CALIBRATION, _HELD_OUT, _STEADY, _FIT, _FIT_HELD_OUT = (SEEDS_FROM + (k << 24) for k in range(1, 6))
"""First seeds of five sets of draws, all training's: evaluations draw from smaller ones."""

Part = Literal["curves", "recovery"]


@dataclass
class Args:
    """Calibrate the burst detectors to a scenario's load, measure them, fit the recovery rule, and write all as a file.

    For a recorded load, write a scenario with `helm-rl trace fit` first. Draws are of training's seeds.

    Figures written by --json:
    burst.false_alarm_s (measured mean time between false alarms, on draws that were not used for the thresholds),
    burst.false_alarm_s.{least,arrivals,p99,calibration,calibration_least} (its lower 95 % bound; of each detector
    alone; on the draws for the thresholds), burst.threshold_nats, burst.p99_sigmas, burst.look_ns;
    curves, at the false alarms that were asked for, the detector set for each load:
    burst.found_within_1s.<rate>.<factor>, burst.limit_within_1s.<rate>.<factor>, burst.delay_p50_s.<rate>.<factor>,
    burst.delay_p95_s.<rate>.<factor>, with .dispersion_<d> at the end where arrivals are not Poisson, factors as 1_5
    for 1.5; burst.cells_at_limit (share of loads and factors from 1.5 on, of which the limit finds 95 % within 1 s,
    where the detector does);
    burst.firings_per_hour.<file name of a log>;
    recovery.{alpha_cold,alpha_hot}, recovery.found_after_s (seconds from the start of a burst of the scenario, median),
    recovery.target_ratio (time to the rule's target over what detection and the budget of migration need, median),
    recovery.first_10s_p99_ms[.without], recovery.first_10s_ratio, recovery.p99_ms
    [.without], recovery.p99_ratio (with recovery over without, on draws that were not used for the fit).
    """

    output: Annotated[Path, tyro.conf.arg(metavar="FILE.json")]
    """Where the detector's file goes."""
    scenario: str = "burst"
    """What serves under which load, on one node: a shipped scenario (the README lists them) or a TOML file."""
    load: Load = "limit"
    """The scenario's rates as they stand (near what a node bears), or moderate: 70 % of each."""
    false_alarm_s: float = 1000.0
    """Seconds between false alarms, in the mean, at the least; more find bursts later."""
    policy: Path | None = None
    """Bundle of the controller below recovery; without it, the static that is best on the load without bursts."""
    logs: tuple[Path, ...] = ()
    """Traces (.parquet, from `helm-rl trace convert`) whose arrivals are looked at: firings an hour."""
    skip: tuple[Part, ...] = ()
    """Parts to leave out."""
    draws: int = 3
    """Draws of the scenario with its bursts for the recovery rule, and as many to try it on."""
    quick: bool = False
    """Less of everything, in a minute or two: that it works, not how well, so no figure has a goal."""
    jobs: int = 2
    """Replays at a time; one core each."""
    plots: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Write the plots here: found.svg, roc.svg, firings-<log>.svg, recovery.svg."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace outputs that exist."""


@dataclass(frozen=True)
class Thresholds:
    """Calibrated settings, and the false alarms that they give: on their own draws, on others, of each detector."""

    settings: BurstSettings
    alpha: float
    own: Alarms
    held_out: Alarms
    arrivals: Alarms
    p99: Alarms
    look_ns: float


@dataclass(frozen=True)
class Recovered:
    """The fitted rule; P99 with and without it on other draws, and when bursts are found there, in the median."""

    fit: Fit
    with_rule: Outcome
    without: Outcome
    found_after_s: float

    @property
    def reached(self) -> tuple[Reached, ...]:
        """How soon the rule's target was applied on those draws."""
        return self.with_rule.reached

    @property
    def reached_ratio(self) -> float:
        """Time to the target over what detection and budget need, the median over bursts; NaN where none was set."""
        return float(np.median([one.ratio for one in self.reached])) if self.reached else math.nan


def main(args: Args) -> None:
    """Print what was found and write the files."""
    scenario, logs = check(args)
    with progress_bar() as bar, closing(Work(args.jobs)) as work:
        thresholds = find_thresholds(args, scenario, work, bar("false alarms"))
        settings = thresholds.settings
        cells, roc = ([], []) if "curves" in args.skip else curves(args, settings, work, bar("bursts"))
        fired = [firings(trace, name, settings) for name, trace in logs]
        recovered = None
        if "recovery" not in args.skip:
            recovered = fit_recovery(args, scenario, thresholds, work, bar("replays"))
    figures = figures_of(args, thresholds, cells, fired, recovered)
    rule = None if recovered is None else recovered.fit.rule
    save(args, scenario, settings, rule, figures)
    if args.plots is not None:
        plot(args.plots, cells, roc, fired, recovered)
    if args.json is not None:
        write_figures(args.json, figures)
    show(args, thresholds, cells, fired, recovered)


def check(args: Args) -> tuple[Scenario, list[tuple[str, Trace]]]:
    """Return the scenario and the logs; raise UserError for the first argument that does not fit."""
    scenario = load_scenario(args.scenario, args.load)
    if is_cluster(scenario):
        raise UserError(f"scenario {scenario.name} needs a cluster; burst detectors look at one node's arrivals")
    if not LEAST_S <= args.false_alarm_s <= MOST_S:
        raise UserError(f"--false-alarm-s must be from {LEAST_S:g} to {MOST_S:g}, not {args.false_alarm_s}")
    for name, value, most in (("--draws", args.draws, 1000), ("--jobs", args.jobs, 1024)):
        if not 1 <= value <= most:
            raise UserError(f"{name} must be from 1 to {most}, not {value}")
    names = [log_name(path) for path in args.logs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two of --logs are called {name}, and so would be their figures; rename one")
    plots: dict[str, Path] = {}
    if args.plots is not None and args.plots.is_dir():
        plots = {f"plots {file}": args.plots / file for file in plot_files(args)}
    elif args.plots is not None:
        refuse_existing(args.plots)  # what stands there is no folder, or it is made when there is something to write
    inputs = (args.scenario, args.policy, *args.logs)
    check_outputs(args.overwrite, inputs, output=args.output, json=args.json, **plots)
    if args.policy is not None:
        fitting_bundle(args.policy, scenario)
    return scenario, [(name, Trace.load(path)) for name, path in zip(names, args.logs, strict=True)]


def log_name(path: Path) -> str:
    """Return what a log is called in the figures."""
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in path.stem.lower())


def plot_files(args: Args) -> list[str]:
    """Return the names of the plots that these arguments make."""
    files = [] if "curves" in args.skip else ["found.svg", "roc.svg"]
    files += [f"firings-{log_name(path)}.svg" for path in args.logs]
    return files if "recovery" in args.skip else [*files, "recovery.svg"]


@contextmanager
def progress_bar() -> Iterator[Callable[[str], Callable[[int], Advance]]]:
    """Yield bar(title)(steps), which returns what to call after each of so many more steps."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def bar(title: str) -> Callable[[int], Advance]:
            task = progress.add_task(title, total=0.0)

            def plan(steps: int) -> Advance:
                total = progress.tasks[progress.task_ids.index(task)].total or 0.0
                progress.update(task, total=total + steps)
                return lambda: progress.advance(task)

            return plan

        yield bar


def find_thresholds(args: Args, scenario: Scenario, work: Work, plan: Callable[[int], Advance]) -> Thresholds:
    """Set both thresholds on draws of the load without bursts, and count false alarms on others."""
    seconds = (5.0 if args.quick else 40.0) * args.false_alarm_s
    draws = math.ceil(seconds / _DRAW_S)
    steady = range(_STEADY, _STEADY + (1 if args.quick else 2))
    alpha = steady_alpha(scenario, steady, work, plan(9))
    settings = BurstSettings()

    def recorded(first: int) -> list[Recording]:
        seeds = range(first, first + draws)
        return record(scenario, alpha, seeds, seconds / draws, settings.tick_s, work, plan(draws))

    own = recorded(_CALIBRATION)
    settings = calibrate(settings, own, args.false_alarm_s)
    found_on_own = false_alarms(settings, own)
    del own
    others = recorded(_HELD_OUT)
    arrivals, p99 = by_detector(settings, others)
    one = others[0]
    marks = np.zeros(one.arrivals.size, np.bool_)
    took = []
    for _ in range(5):
        begun = time.perf_counter()
        look_at_all(new_burst_state(settings), one.arrivals, one.p99_ms, marks)
        took.append(time.perf_counter() - begun)
    look_ns = min(took) / one.arrivals.size * 1e9
    return Thresholds(settings, alpha, found_on_own, false_alarms(settings, others), arrivals, p99, look_ns)


def curves(
    args: Args, settings: BurstSettings, work: Work, plan: Callable[[int], Advance]
) -> tuple[list[Cell], list[Cell]]:
    """Measure bursts of all sizes on all loads, the detector set for each; and some at other rates of false alarms."""
    rates = RATES[1:3] if args.quick else RATES
    dispersions = DISPERSIONS[:2] if args.quick else DISPERSIONS
    factors = FACTORS[1:3] if args.quick else FACTORS
    seconds, bursts = (2.0, 60) if args.quick else (20.0, 400)
    loads = [(rate, dispersion) for rate in rates for dispersion in dispersions]
    advance = plan(len(loads) * len(factors))

    def measure(load: tuple[float, float]) -> tuple[list[Cell], list[Cell]]:
        rate, dispersion = load
        arrivals = Arrivals(1, rate, dispersion, seconds * args.false_alarm_s, bursts, settings.tick_s)
        nats = arrivals.threshold(settings, args.false_alarm_s)
        cells = []
        for factor in factors:
            cells.append(arrivals.cell(settings, factor, args.false_alarm_s, nats))
            advance()
        roc = []
        chosen = [factor for of, factor in ROC if of == rate and factor in factors and dispersion in ROC_DISPERSIONS]
        for mean_s in ROC_S if chosen else ():
            nats = arrivals.threshold(settings, mean_s)
            roc += [arrivals.cell(settings, factor, mean_s, nats) for factor in chosen]
        return cells, roc

    measured = work.map(measure, loads)
    return [cell for cells, _ in measured for cell in cells], [cell for _, roc in measured for cell in roc]


def fit_recovery(
    args: Args, scenario: Scenario, thresholds: Thresholds, work: Work, plan: Callable[[int], Advance]
) -> Recovered:
    """Fit the rule above the policy, or the static, and replay it on draws of its own."""
    draws = 1 if args.quick else args.draws
    base = base_maker(args.policy, scenario, thresholds.alpha)
    settings = thresholds.settings

    def bursts(first: int) -> Bursts:
        return Bursts(scenario, range(first, first + draws), thresholds.alpha, work)

    def advance() -> None:
        plan(1)()  # how many replays there will be nobody knows beforehand

    fit = fit_rule(bursts(_FIT), base, settings, advance)
    makers = [recovering(base, fit.rule, settings, scenario.control.rate_per_s), base]
    others = bursts(_FIT_HELD_OUT)
    with_rule, without = others.outcomes(makers, advance)
    return Recovered(fit, with_rule, without, float(np.median(others.found_after_s(settings))))


def base_maker(policy: Path | None, scenario: Scenario, alpha: float) -> Callable[[], Controller]:
    """Return a maker of the controller below recovery."""
    if policy is None:
        return lambda: StaticAlpha(alpha)
    bundle = fitting_bundle(policy, scenario)
    return lambda: BasePolicy.of(bundle, scenario.control.interval_s)


def figures_of(
    args: Args, thresholds: Thresholds, cells: list[Cell], fired: list[Firings], recovered: Recovered | None
) -> dict[str, Figure]:
    """Return all figures by name."""
    goal = None if args.quick else args.false_alarm_s
    held_out, own = thresholds.held_out, thresholds.own
    figures = {
        "burst.false_alarm_s": Figure(held_out.mean_s, "s", "higher", goal),
        "burst.false_alarm_s.least": Figure(held_out.least_s, "s", "higher", goal),
        "burst.false_alarm_s.arrivals": Figure(thresholds.arrivals.mean_s, "s", "higher"),
        "burst.false_alarm_s.p99": Figure(thresholds.p99.mean_s, "s", "higher"),
        "burst.false_alarm_s.calibration": Figure(own.mean_s, "s", "higher"),
        "burst.false_alarm_s.calibration_least": Figure(own.least_s, "s", "higher", goal),
        "burst.threshold_nats": Figure(thresholds.settings.threshold, "nats", "lower"),
        "burst.p99_sigmas": Figure(thresholds.settings.p99_sigmas, "standard deviations", "lower"),
        "burst.look_ns": Figure(thresholds.look_ns, "ns", "lower", None if args.quick else 100.0),
    }
    for cell in cells:
        name = cell_name(cell)
        hard = cell.factor < LEAST_FACTOR or cell.limit.within < FOUND or args.quick
        figures[f"burst.found_within_1s.{name}"] = Figure(cell.ours.within, "share", "higher", None if hard else FOUND)
        figures[f"burst.limit_within_1s.{name}"] = Figure(cell.limit.within, "share", "higher")
        for q in (50, 95):
            figures[f"burst.delay_p{q}_s.{name}"] = Figure(cell.ours.quantile_s(q / 100), "s", "lower")
    possible = [cell for cell in cells if cell.factor >= LEAST_FACTOR and cell.limit.within >= FOUND]
    if possible:
        share = float(np.mean([cell.ours.within >= FOUND for cell in possible]))
        figures["burst.cells_at_limit"] = Figure(share, "share", "higher", None if args.quick else 1.0)
    for one in fired:
        figures[f"burst.firings_per_hour.{one.name}"] = Figure(one.per_hour, "1/hour", "lower")
    if recovered is not None:
        rule, with_rule, without = recovered.fit.rule, recovered.with_rule, recovered.without
        first, whole = with_rule.first_ms / without.first_ms, with_rule.whole_ms / without.whole_ms
        if recovered.reached:
            goal = None if args.quick else PROMPT
            figures["recovery.target_ratio"] = Figure(recovered.reached_ratio, "ratio", "lower", goal)
        figures |= {
            "recovery.alpha_cold": Figure(rule.alpha_cold, "alpha", "higher"),
            "recovery.alpha_hot": Figure(rule.alpha_hot, "alpha", "lower"),
            "recovery.found_after_s": Figure(recovered.found_after_s, "s", "lower"),
            "recovery.first_10s_p99_ms": Figure(with_rule.first_ms, "ms", "lower"),
            "recovery.first_10s_p99_ms.without": Figure(without.first_ms, "ms", "lower"),
            "recovery.first_10s_ratio": Figure(first, "ratio", "lower", None if args.quick else FASTER),
            "recovery.p99_ms": Figure(with_rule.whole_ms, "ms", "lower"),
            "recovery.p99_ms.without": Figure(without.whole_ms, "ms", "lower"),
            "recovery.p99_ratio": Figure(whole, "ratio", "lower", None if args.quick else WORSE),
        }
    return figures


def cell_name(cell: Cell) -> str:
    """Return how a load and a factor are called in the figures."""
    name = ".".join(f"{value:g}".replace(".", "_") for value in (cell.rate, cell.factor))
    return name if cell.dispersion <= 1.0 else f"{name}.dispersion_{cell.dispersion:g}"


def save(
    args: Args, scenario: Scenario, settings: BurstSettings, rule: RecoveryRule | None, figures: dict[str, Figure]
) -> None:
    """Write the detector's file."""
    names = ("burst.false_alarm_s", "burst.false_alarm_s.least", "recovery.first_10s_ratio", "recovery.p99_ratio")
    measured = {name: figures[name].value for name in names if name in figures}
    origin = Origin(
        scenario=scenario.name,
        scenario_hash=scenario_hash(scenario),
        false_alarm_s=args.false_alarm_s,
        measured={name: value for name, value in measured.items() if math.isfinite(value)},
    )
    save_detector(args.output, Detector(settings, rule, origin))


def plot(folder: Path, cells: list[Cell], roc: list[Cell], fired: list[Firings], recovered: Recovered | None) -> None:
    """Write the plots."""
    from train import burst_plots

    if cells:
        burst_plots.save(burst_plots.found_plot(cells), folder / "found.svg")
        burst_plots.save(burst_plots.roc_plot(roc), folder / "roc.svg")
    for one in fired:
        burst_plots.save(burst_plots.firings_plot(one), folder / f"firings-{one.name}.svg")
    if recovered is not None:
        burst_plots.save(burst_plots.recovery_plot(recovered.fit), folder / "recovery.svg")


def show(
    args: Args, thresholds: Thresholds, cells: list[Cell], fired: list[Firings], recovered: Recovered | None
) -> None:
    """Print what was found."""
    out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    settings, held_out, own = thresholds.settings, thresholds.held_out, thresholds.own
    out.print(
        f"thresholds: arrivals {settings.threshold:.2f} nats, P99 {settings.p99_sigmas:.1f} standard deviations; "
        f"a look takes {thresholds.look_ns:.0f} ns"
    )
    for title, alarms in (("their own draws", own), ("other draws", held_out)):
        out.print(
            f"on {title}: {alarms.count} false alarms in {alarms.seconds:,.0f} s, so one in {alarms.mean_s:,.0f} s, "
            f"and with {CONFIDENCE:.0%} confidence at least {alarms.least_s:,.0f} s between them"
        )
    out.print(f"({args.false_alarm_s:,.0f} s were asked for, and thresholds are set for {MARGIN:g} times that)")
    out.print(
        f"of those on other draws, arrivals alone: {thresholds.arrivals.count}, P99 alone: {thresholds.p99.count} "
        f"(alpha {thresholds.alpha:g})"
    )
    if cells:
        out.print(cell_table(cells, args.false_alarm_s))
    for one in fired:
        out.print(f"{one.name}: {one.fired_s.size} firings in {one.seconds / 3600:.2f} h, {one.per_hour:.2f} an hour")
    if recovered is not None:
        rule, with_rule, without = recovered.fit.rule, recovered.with_rule, recovered.without
        out.print(
            f"recovery: alpha {rule.alpha_cold:g} where no user is hot to {rule.alpha_hot:g} where all are; on other "
            f"draws bursts are found after {recovered.found_after_s:.1f} s (median), the P99 of their first 10 s is "
            f"{with_rule.first_ms:,.1f} ms against {without.first_ms:,.1f} without, that of the whole run "
            f"{with_rule.whole_ms:,.1f} against {without.whole_ms:,.1f}"
        )
        if recovered.reached:
            seconds = np.median([one.reached_s for one in recovered.reached])
            out.print(
                f"its target is applied {seconds:.1f} s after a burst begins, {recovered.reached_ratio:.2f} times what "
                "detection and the budget of migration need (medians)"
            )
    out.print(f"wrote {args.output}")


def cell_table(cells: list[Cell], false_alarm_s: float) -> Table:
    """Return a table of the share found within a second and of the delay, a row for each load and factor."""
    title = f"share of bursts found within 1 s, and delays, at one false alarm in {false_alarm_s:g} s"
    table = Table(title=title, title_justify="left", caption="* below the limit's 95 %")
    for name in ("req/s", "dispersion", "factor", "in 1 s", "limit", "best test", "p50 s", "p95 s"):
        table.add_column(name, justify="left" if name == "best test" else "right", no_wrap=True)
    for cell in cells:
        short = cell.factor >= LEAST_FACTOR and cell.limit.within >= FOUND > cell.ours.within
        table.add_row(
            f"{cell.rate:g}",
            f"{cell.dispersion:g}",
            f"{cell.factor:g}",
            f"{cell.ours.within:.3f}{'*' if short else ''}",
            f"{cell.limit.within:.3f}",
            cell.limit.test,
            f"{cell.ours.quantile_s(0.5):.2f}",
            f"{cell.ours.quantile_s(0.95):.2f}",
        )
    return table
