"""`helm-rl eval live`: the model clock, controllers, the engine's overhead and KV reuse, measured on the live node."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from eval.command import console, figure_table, fitting_bundle
from eval.comparison import check_draws, draw_arrivals, steady_optimum
from eval.sweep import COARSE_STEP, sweep_adaptively, working
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.metrics import quantile_ms
from helm_rl.profiles.hardware import link_gb_s
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import Scenario, load_scenario

if TYPE_CHECKING:
    from eval.live.contest import Entrant, Result
    from eval.live.errors import Measured
    from eval.live.reuse import Savings
    from eval.sweep import Sweep

Part = Literal["model", "contest", "overhead", "reuse"]
PARTS: tuple[Part, ...] = ("model", "contest", "overhead", "reuse")
LOADS = (0.3, 0.6, 0.8)
GOAL_LOADS = (0.3, 0.6)
"""At which the model clock as it is has goals; at the others it has one with the measured service times replayed."""
POLICY, DEPLOYABLE = "policy", "deployable_static"
OVERHEAD_ROUNDS = 30
OVERHEAD_TABLE_ROWS = 1 << 14
REUSE_ROUNDS = 7
_ALPHA = 0.5


@dataclass
class Args:
    """Measure on the live node, whose network, caches and copies are real, and hold the model clock against it.

    model: the scenario's base load, scaled so that the busier of link and accelerator is busy for 30, 60 and 80 % of
    the time, live and on the model clock on the same arrivals; calibrate this machine first (`helm-rl calibrate
    hardware`). contest: static splits and the policy on the scenario's load, in turns, block by block. overhead: what
    the engine adds to a request over the same network on plain tensors, all hits. reuse: what a cached prefix saves.

    On a CPU the network has one thread, and the link is paced to the scenario's bandwidth.

    Figures written by --json: live.model_p50_error.<load> and live.model_p99_error.<load> (|modelled / measured - 1|,
    load in per cent), live.replayed_p99_error.<load> (the model's queues with the measured service times),
    live.{p50_ms,p99_ms,model_p50_ms,model_p99_ms,rate}.<load>;
    live.contest.<entrant>.{p50_ms,p99_ms,slo,shed,ratio_gap} (deployable_static, static_<alpha in per cent>, policy;
    the gap is to the best alpha that the model clock finds for each segment), live.p99_vs_deployable_static,
    live.p99_vs_best_static; live.overhead (median over pairs), live.overhead_cpu (in time of the processor);
    live.reuse.<tokens>.<cached share in per cent>, live.reuse_error.<card> (mean distance to the published savings at
    the same lengths and shares); live.others_share (of the processors' time, what other processes took).
    """

    scenario: str = "laptop"
    """Network, pool, link and load: a shipped scenario with an hstu that fits this machine (laptop), or a TOML file."""
    hardware: Annotated[Path | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Profile for the model clock, from `helm-rl calibrate hardware`; without it the scenario's."""
    parts: tuple[Part, ...] = PARTS
    """What to measure."""
    policy: Path | None = None
    """Bundle folder that takes part in the contest, as `helm-rl export` writes it; it is not trained here."""
    statics: tuple[float, ...] = (0.3, 0.6)
    """Static splits that take part beside the deployable one, which is the model clock's best on the base load."""
    seconds: float = 60.0
    """Length of the load for each entrant of the contest, and for each load of the model's; with all parts and a policy
    that is seven times as long in all, and what it takes to warm the caches each time."""
    warm_s: float = 20.0
    """Length of the load before that; served as fast as can be, to warm the caches."""
    block_s: float = 5.0
    """Length of a block of the contest."""
    loads: tuple[float, ...] = LOADS
    """Busy shares at which the model clock is tried."""
    seed: int = 1
    """Number of the draw of arrivals."""
    backend: Literal["cpu", "cuda"] = "cpu"
    """Where pool and network are."""
    table_rows: int = 1 << 21
    """Rows of each of the four host tables."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Draw modelled on measured latency, quantile by quantile, a line for each load."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace files that exist."""


@dataclass
class Report:
    """What was measured: figures, and the tables that explain them."""

    figures: dict[str, Figure] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Measured] = field(default_factory=dict)  # by load, for the plot


Advance = Callable[[str, float], None]


def main(args: Args) -> None:
    """Measure, print the tables, write the files asked for."""
    scenario = _check(args)
    report = Report()
    try:
        with _progress(_seconds(args)) as advance:
            measure(args, scenario, advance, report)
    finally:  # what was measured before a part that failed, or before somebody lost patience, has taken its time, too
        _show(args, scenario, report)
    if args.json is not None:
        write_figures(args.json, report.figures)
    if args.plot is not None:
        from eval.live.plot import draw_quantiles

        draw_quantiles(args.plot, report.measured)


def _show(args: Args, scenario: Scenario, report: Report) -> None:
    out = console()
    for table in report.tables:
        out.print(table)
    goals = {name: figure for name, figure in report.figures.items() if figure.goal is not None}
    if goals:
        out.print(figure_table(f"Live, scenario {scenario.name}, backend {args.backend}", goals))
    for note in report.notes:
        out.print(note)


def measure(args: Args, scenario: Scenario, advance: Advance, report: Report) -> None:
    """Measure the parts asked for; each adds to the report."""
    from eval.live.machine import Others

    others = Others()
    parts: dict[Part, Callable[[Args, Scenario, Report, Advance], None]] = {
        "model": _model,
        "contest": _contest,
        "overhead": _overhead,
        "reuse": _reuse,
    }
    for part in args.parts:
        parts[part](args, scenario, report, advance)
    share = others.share()
    report.figures["live.others_share"] = Figure(share, "", "lower")
    if args.backend == "cpu":
        report.notes.append(
            f"On the CPU the network has one thread, and the link is paced to {link_gb_s(scenario.hardware):g} GB/s."
        )
    report.notes.append(f"Other processes took {share:.0%} of the processors' time meanwhile.")


def _model(args: Args, scenario: Scenario, report: Report, advance: Advance) -> None:
    from envs.serving.live import LiveNode
    from eval.live import errors
    from helm_rl.workloads.generate import generate

    table = Table(title="The model clock beside the live node: ms, hits, busy shares (model / live)")
    table.title_justify = "left"
    for heading in ("load", "req/s", "P50", "P99", "P99 replayed", "KV hits", "EMB hits", "link", "compute"):
        table.add_column(heading, justify="right")
    tables = None
    for share in args.loads:
        title = f"{share:.0%} load"
        advance(title, 0.0)
        base = errors.base_load(scenario, args.seconds, args.warm_s)
        load = errors.at_busy(base, share, _ALPHA)
        node = LiveNode(
            load, generate(load, seed=args.seed), backend=args.backend, table_rows=args.table_rows, tables=tables
        )
        tables = node.tables
        with contextlib.closing(node):
            found = errors.measure(
                node, _ALPHA, args.warm_s, round(args.seconds * 1e9), functools.partial(advance, title)
            )
        report.measured[title] = found
        report.figures |= _model_figures(f"{100 * share:g}", found, share in GOAL_LOADS)
        live, model = found.live, found.model
        pairs = [
            (live.kv_hits, model.kv_hits), (live.emb_hits, model.emb_hits), (live.link, model.link),
            (live.compute, model.compute),
        ]  # fmt: skip
        table.add_row(
            f"{share:.0%}",
            f"{found.rate:.1f}",
            *(f"{quantile_ms(found.model_ms, q):.1f} / {quantile_ms(found.live_ms, q):.1f}" for q in (0.5, 0.99)),
            f"{quantile_ms(found.replayed_ms, 0.99):.1f}",
            *(f"{modelled:.2f} / {measured:.2f}" for measured, modelled in pairs),
        )
    report.tables.append(table)


def _model_figures(load: str, found: Measured, has_goals: bool) -> dict[str, Figure]:
    from eval.live.errors import P50_GOAL, P99_GOAL

    def goal(value: float) -> float | None:
        return value if has_goals else None

    figures = {
        f"live.model_p50_error.{load}": Figure(found.error(0.5), "", "lower", goal(P50_GOAL)),
        f"live.model_p99_error.{load}": Figure(found.error(0.99), "", "lower", goal(P99_GOAL)),
        f"live.replayed_p99_error.{load}": Figure(
            found.error(0.99, replayed=True), "", "lower", None if has_goals else P99_GOAL
        ),
        f"live.rate.{load}": Figure(found.rate, "requests/s", "higher"),
    }
    for q, name in ((0.5, "p50_ms"), (0.99, "p99_ms")):
        figures[f"live.{name}.{load}"] = Figure(quantile_ms(found.live_ms, q), "ms", "lower")
        figures[f"live.model_{name}.{load}"] = Figure(quantile_ms(found.model_ms, q), "ms", "lower")
    return figures


def _contest(args: Args, scenario: Scenario, report: Report, advance: Advance) -> None:
    from eval.live.contest import Entrant, contest
    from helm_rl.runtime.steering import steering_of

    length = {"seconds": args.seconds, "warm_s": args.warm_s}
    phases = tuple(phase for phase in scenario.load.phase if phase.start_s + phase.seconds <= args.seconds)
    load = scenario.load.model_copy(update={"phase": phases})
    shown = scenario.model_copy(update={**length, "load": load})
    advance("the model clock's statics", 0.0)
    with working(1) as work:
        _, deployable = steady_optimum(scenario, work, 1, args.seed, COARSE_STEP)
        trace = draw_arrivals(shown, args.seed)
        swept = sweep_adaptively(shown, trace, work, COARSE_STEP)
    entrants = [Entrant(DEPLOYABLE, f"deployable static, alpha {deployable:.2f}", deployable)]
    entrants += [
        Entrant(f"static_{round(100 * alpha)}", f"static {alpha:g}", alpha)
        for alpha in args.statics
        if abs(alpha - deployable) > 1e-9
    ]
    if args.policy is not None:
        bundle = fitting_bundle(args.policy, scenario)
        steering = steering_of(bundle, scenario.control.interval_s)
        entrants.append(Entrant(POLICY, "policy", deployable, steering))
    found = contest(
        shown,
        trace,
        entrants,
        block_s=args.block_s,
        warm_s=args.warm_s,
        table_rows=args.table_rows,
        backend=args.backend,
        advance=advance,
    )
    report.tables.append(_contest_table(shown, entrants, found, swept))
    for key, result in found.items():
        name = f"live.contest.{key}"
        report.figures |= {
            f"{name}.p50_ms": Figure(result.p50_ms, "ms", "lower"),
            f"{name}.p99_ms": Figure(result.p99_ms, "ms", "lower"),
            f"{name}.slo": Figure(result.within(scenario.slo_ms), "", "higher"),
            f"{name}.shed": Figure(result.shed(scenario.slo_ms), "", "lower"),
            f"{name}.ratio_gap": Figure(result.ratio_gap(swept), "", "lower"),
        }
    if args.policy is not None:
        p99 = found[POLICY].p99_ms
        best = min(result.p99_ms for key, result in found.items() if key != POLICY)
        report.figures["live.p99_vs_deployable_static"] = Figure(p99 / found[DEPLOYABLE].p99_ms, "", "lower")
        report.figures["live.p99_vs_best_static"] = Figure(p99 / best, "", "lower")


def _contest_table(scenario: Scenario, entrants: list[Entrant], found: dict[str, Result], swept: Sweep) -> Table:
    first = next(iter(found.values()))
    title = f"Live in turns on the same schedule: {first.latency_ms.size} requests each, SLO {scenario.slo_ms:g} ms"
    table = Table(title=title, title_justify="left")
    table.add_column("entrant")
    headings = (
        "P50 ms",
        "P99 ms",
        "P99 by the model",
        "within SLO",
        "shed",
        "alpha",
        "distance to the best",
        "pages moved",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for one in entrants:
        result = found[one.key]
        run = swept.runs.get(round(one.alpha, 6)) if one.steering is None else None
        table.add_row(
            one.title,
            f"{result.p50_ms:.1f}",
            f"{result.p99_ms:.1f}",
            "" if run is None else f"{run.p99_ms:.1f}",
            f"{result.within(scenario.slo_ms):.2%}",
            str(result.shed(scenario.slo_ms)),
            f"{result.alpha.min():.2f} to {result.alpha.max():.2f}",
            f"{result.ratio_gap(swept):.3f}",
            f"{result.pages_moved:,}",
        )
    return table


def _overhead(args: Args, scenario: Scenario, report: Report, advance: Advance) -> None:
    from envs.serving.live import LiveNode
    from eval.live import overhead

    advance("overhead", 0.0)
    tokens = round(scenario.load.history_mean)
    trace = overhead.overhead_trace(scenario, tokens, OVERHEAD_ROUNDS)
    with contextlib.closing(LiveNode(scenario, trace, backend=args.backend, table_rows=OVERHEAD_TABLE_ROWS)) as node:
        found = overhead.measure(node)
    if found.misses:
        raise UserError(
            f"scenario {scenario.name}: {found.misses} rows or tokens were missed where all should hit; its pool is "
            f"too small for {overhead.USERS} histories of {tokens} tokens"
        )
    report.figures["live.overhead"] = Figure(found.wall, "", "lower", overhead.GOAL)
    report.figures["live.overhead_cpu"] = Figure(found.cpu, "", "lower")
    table = Table(title=f"A request of {tokens} tokens on, all hits: medians of {found.engine_s.size}, ms")
    table.title_justify = "left"
    for heading in ("", "wall", "processor"):
        table.add_column(heading, justify="right")
    rows = (
        ("from the engine", found.engine_s, found.engine_cpu_s),
        ("plain tensors", found.plain_s, found.plain_cpu_s),
    )
    for title, wall, cpu in rows:
        table.add_row(title, f"{1e3 * np.median(wall):.3f}", f"{1e3 * np.median(cpu):.3f}")
    table.add_row("added", f"{found.wall:+.2%}", f"{found.cpu:+.2%}")
    report.tables.append(table)
    report.notes.append(f"Scores from the engine and from plain tensors differ by {found.off:.1e} at most.")


def _reuse(args: Args, scenario: Scenario, report: Report, advance: Advance) -> None:
    from envs.serving.live import LiveNode
    from eval.live import reuse

    advance("reuse", 0.0)
    trace = reuse.reuse_trace(scenario, REUSE_ROUNDS)
    with contextlib.closing(LiveNode(scenario, trace, backend=args.backend, table_rows=OVERHEAD_TABLE_ROWS)) as node:
        found = reuse.measure(node)
    for tokens, savings in found.items():
        for share, saved in savings.items():
            report.figures[f"live.reuse.{tokens}.{100 * share:g}"] = Figure(saved, "", "higher")
    cards = {card: reuse.published(card) for card in ("l20",)}
    for card, told in cards.items():
        apart = [
            abs(found[tokens][share] - saved)
            for tokens, savings in told.items()
            for share, saved in savings.items()
            if share in found.get(tokens, {})
        ]
        report.figures[f"live.reuse_error.{card}"] = Figure(float(np.mean(apart)), "", "lower")
    report.tables.append(_reuse_table(found, cards))


def _reuse_table(found: Savings, cards: dict[str, Savings]) -> Table:
    from eval.live.reuse import SHARES

    table = Table(title="Share of a prefill's time that cached tokens save", title_justify="left")
    for heading in ("tokens", "where", *(f"{share:.2%} cached" for share in SHARES[1:])):
        table.add_column(heading, justify="right")
    sources = {"here": found, **{f"{card.upper()}, published": told for card, told in cards.items()}}
    for tokens in found:
        for where, savings in sources.items():
            if tokens in savings:
                cells = (savings[tokens].get(share, math.nan) for share in SHARES[1:])
                table.add_row(str(tokens), where, *("" if math.isnan(cell) else f"{cell:.0%}" for cell in cells))
    return table


def _seconds(args: Args) -> float:
    """Return for how long loads are served on the wall clock."""
    entrants = len(args.statics) + 1 + (args.policy is not None)
    return args.seconds * (len(args.loads) * ("model" in args.parts) + entrants * ("contest" in args.parts))


@contextlib.contextmanager
def _progress(seconds: float) -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} s"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task("", total=seconds)

        def advance(text: str, seconds: float) -> None:
            progress.update(task, description=text, advance=seconds)

        yield advance


def _check(args: Args) -> Scenario:
    """Return the scenario with its profile; UserError for what does not fit, before anything is measured."""
    inputs = (args.scenario, args.hardware, args.policy)
    check_outputs(args.overwrite, inputs, plot=args.plot, json=args.json)
    if not args.parts or len(set(args.parts)) < len(args.parts):
        raise UserError(f"--parts must name at least one of {', '.join(PARTS)}, and none twice")
    check_draws(args.seed, 1)
    for name, value, least in (("--seconds", args.seconds, 5.0), ("--block-s", args.block_s, 0.5)):
        if not least <= value <= 86_400:
            raise UserError(f"{name} must be {least:g} to 86,400, got {value}")
    if not 1 <= args.warm_s <= 86_400:
        raise UserError(f"--warm-s must be 1 to 86,400, got {args.warm_s}")
    if "model" in args.parts:
        given = " ".join(f"{load:g}" for load in args.loads)
        if not args.loads or not all(0.01 <= load <= 0.95 for load in args.loads):
            raise UserError(f"--loads must lie in .01 to .95, got {given or 'none'}")
        if len({f"{load:.0%}" for load in args.loads}) < len(args.loads):
            raise UserError(f"--loads must be a hundredth apart, got {given}")
    if not 1 <= args.table_rows < 2**31:
        raise UserError(f"--table-rows must lie in 1 to {2**31 - 1}, got {args.table_rows}")
    if args.plot is not None and "model" not in args.parts:
        raise UserError("--plot draws what part model measures; leave it in --parts")
    scenario = load_scenario(args.scenario)
    if args.hardware is not None:
        from helm_rl.profiles.hardware_file import load_hardware

        load_hardware(args.hardware)
        hardware = scenario.hardware.model_copy(update={"profile": str(args.hardware)})
        scenario = scenario.model_copy(update={"hardware": hardware})
    if resolve_model(scenario.model).architecture != "hstu":
        raise UserError(
            f"scenario {scenario.name}: model.architecture must be hstu, which is what a live node computes; for "
            "others a stand-in takes the time that the profile says"
        )
    control = scenario.control
    if len({round(100 * alpha) for alpha in args.statics}) < len(args.statics):
        raise UserError(f"--statics must be a hundredth apart, got {' '.join(f'{alpha:g}' for alpha in args.statics)}")
    for alpha in args.statics:
        if not control.alpha_min <= alpha <= control.alpha_max:
            raise UserError(f"--statics must lie in {control.alpha_min:g} to {control.alpha_max:g}, got {alpha:g}")
    if args.policy is not None:
        fitting_bundle(args.policy, scenario)
    if "overhead" in args.parts:
        _check_overhead(scenario)
    return scenario


def _check_overhead(scenario: Scenario) -> None:
    """Raise UserError where the pool cannot hold the histories of part overhead, which has them all hit."""
    from envs.serving.node import page_layout
    from eval.live.overhead import NEW, USERS

    pages, page_tokens, _ = page_layout(scenario.hardware, resolve_model(scenario.model))
    tokens = round(scenario.load.history_mean) + NEW * OVERHEAD_ROUNDS
    need, room = USERS * math.ceil(tokens / page_tokens), round((1.0 - scenario.control.alpha_min) * pages)
    if need > room:
        raise UserError(
            f"scenario {scenario.name}: part overhead keeps {USERS} histories of {tokens} tokens, which take {need} "
            f"pages, and the KV cache has {room} at most; leave it out of --parts, or raise hardware.pool_gib"
        )
