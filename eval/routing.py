"""`helm-rl eval routing`: routers held against each other on a cluster, and what sudden reallocation does to bursts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tyro
from rich.table import Table

from eval.command import console
from eval.comparison import SEEDS_FROM, STEADY_SEEDS_FROM, check_draws, steady_optimum
from eval.segments import WINDOW_S
from eval.statistics import interquartile_mean, standard_error
from eval.sweep import STEP, Work, sweep_adaptively, working
from eval.wording import alpha as alpha_text
from eval.wording import milliseconds, percent
from helm_rl.control.protocol import Controller
from helm_rl.control.rules import RegimeRule
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import atomic_file, check_outputs
from helm_rl.metrics import SHED_FACTOR, p99_ms, quantile_ms, shed_ms
from helm_rl.scenario import Scenario, for_nodes, load_scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import BASE, Trace

if TYPE_CHECKING:
    from envs.serving.replay import ClusterReplay

Router = Literal["helm", "kv-aware", "least-loaded", "two-choices", "user-hash", "round-robin", "random"]
ROUTERS: tuple[Router, ...] = (
    "helm",
    "kv-aware",
    "least-loaded",
    "two-choices",
    "user-hash",
    "round-robin",
    "random",
)
NAIVE_ROUTER: Router = "least-loaded"
AFTER_S = 60.0
"""Served beyond the last burst."""
AT_ONCE_PAGES_PER_S = 1e9
MOST_NODES = 512
MOST_BURSTS = 100

NAIVE, NAIVE_HELM, HELM, HELM_PAGES = "naive", "naive_with_helms_router", "helm", "helm_without_rate"
"""Ways to reallocate."""
WAYS = {
    NAIVE: f"at once, {NAIVE_ROUTER} router",
    NAIVE_HELM: "at once, HELM's router",
    HELM: "budgeted, HELM's router",
    HELM_PAGES: "the same, target at once",
}


@dataclass
class Args:
    """Hold routers against each other on a cluster with one alpha, and sudden against budgeted reallocation.

    The scenario is scaled to --nodes: rates and users times the nodes. All routers serve the same arrivals, up to a
    minute after the first burst, at the same alpha: the best static of one node on arrivals that are not evaluated.
    Then a rule moves alpha between the best statics of the base load alone and of the burst, found on such arrivals
    too, when the hot-user ratio passes the middle between the two regimes': naive, at once, all pages at once, what is
    gained filled by what misses, and a router that looks at the load alone; or budgeted, at control.rate_per_s and
    control.migrate_pages_per_s, refilled in the background, with HELM's router. Beside them: naive with HELM's router,
    and budgeted with a target that jumps, so that control.migrate_pages_per_s alone holds pages back. A burst is
    violated where the P99 of the requests that arrive in it exceeds the SLO.

    Figures written by --json: routing.<router>.{p99_ms, p50_ms, slo, kv_hit, emb_hit, imbalance, critical_gb,
    refilled_gb, shed}: slo the share within the SLO; imbalance the time that link and accelerator of the busiest node
    are in use over the mean of all nodes, mean over 10 s windows; critical_gb what was fetched while requests waited
    for it; refilled_gb what came in the background; shed the share refused. burst.violations.{naive, helm,
    naive_with_helms_router, helm_without_rate} (shares of bursts), burst.p99_ms.<the same> (mean over bursts),
    burst.critical_gb.<the same>, routing.alpha, burst.alpha.{cold, hot}.
    """

    scenario: str = "burst"
    """What serves under which load, of one node: a shipped scenario (the README lists them) or a TOML file."""
    nodes: int = 32
    """Nodes of the cluster."""
    seeds: int = 3
    """Draws of arrivals."""
    seed: int = 1
    """Number of the first draw."""
    routers: tuple[Router, ...] = ROUTERS
    """Routers to compare."""
    alpha: float | None = None
    """The embedding cache's share for all routers (default: found as said above)."""
    bursts: int = 2
    """Bursts of each draw under reallocation; 0 leaves this part out."""
    jobs: int = 2
    """Replays at a time; one core each."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png|svg")] = None
    """Draw P99 and alpha over time of the first draw's reallocations here."""
    overwrite: bool = False
    """Replace --json and --plot files that exist."""


def main(args: Args) -> None:
    """Print the tables and write the files."""
    scenario = load_scenario(args.scenario)
    _check(args, scenario)
    with working(args.jobs) as work:
        result = measure(args, scenario, work)
    out = console()
    for table in result.tables():
        out.print(table)
    for note in result.notes:
        out.print(note, style="dim")
    if args.plot is not None:
        plot_bursts(result, args.plot)
    if args.json is not None:
        write_figures(args.json, result.figures())


@dataclass(frozen=True)
class Served:
    """What one replay on a cluster measured, over requests and windows from the start of measurement on."""

    p99_ms: float
    p50_ms: float
    slo: float
    kv_hit: float
    emb_hit: float
    imbalance: float
    critical_gb: float
    refilled_gb: float
    shed: float
    burst_p99_ms: tuple[float, ...]
    """Of the requests that arrive in each burst."""
    window_s: npt.NDArray[np.float64]
    """Middles of the 10 s windows."""
    window_p99_ms: npt.NDArray[np.float64]
    """Of the requests that arrive in each."""
    window_alpha: npt.NDArray[np.float64]
    """Mean over the nodes at the end of each."""


FIELDS: dict[str, tuple[str, Literal["lower", "higher"]]] = {
    "p99_ms": ("ms", "lower"),
    "p50_ms": ("ms", "lower"),
    "slo": ("", "higher"),
    "kv_hit": ("", "higher"),
    "emb_hit": ("", "higher"),
    "imbalance": ("", "lower"),
    "critical_gb": ("GB", "lower"),
    "refilled_gb": ("GB", "lower"),
    "shed": ("", "lower"),
}
"""Of `Served`: unit, and which way is good."""


@dataclass(frozen=True)
class Alphas:
    """whole: the best static of a burst and what is around it; cold, hot: of the base load alone, of the burst's
    settled half; threshold: hot-user ratio between them. NaN: not needed.
    """

    whole: float
    cold: float
    hot: float
    threshold: float


@dataclass(frozen=True)
class Result:
    """routers and ways: what each measured, a value per draw; alphas: see there."""

    scenario: Scenario
    routers: dict[str, list[Served]]
    ways: dict[str, list[Served]]
    alphas: Alphas
    bursts: tuple[tuple[float, float], ...]
    """(start, end) in s of those that are reallocated for."""

    def violations(self, way: str) -> float:
        """Return the share of bursts with a P99 above the SLO."""
        tails = [tail for served in self.ways[way] for tail in served.burst_p99_ms]
        return float(np.mean([tail > self.scenario.slo_ms for tail in tails]))

    def figures(self) -> dict[str, Figure]:
        """Return the figures that `Args` lists: interquartile means over the draws."""
        figures: dict[str, Figure] = {}
        for router, runs in self.routers.items():
            for name, (unit, better) in FIELDS.items():
                values = [getattr(served, name) for served in runs]
                figures[f"routing.{router}.{name}"] = Figure(interquartile_mean(values), unit, better)
        if self.routers:
            figures["routing.alpha"] = Figure(self.alphas.whole, "", "lower")
        for way, runs in self.ways.items():
            figures[f"burst.violations.{way}"] = Figure(self.violations(way), "", "lower")
            tails = [tail for served in runs for tail in served.burst_p99_ms]
            figures[f"burst.p99_ms.{way}"] = Figure(float(np.mean(tails)), "ms", "lower")
            critical = interquartile_mean([served.critical_gb for served in runs])
            figures[f"burst.critical_gb.{way}"] = Figure(critical, "GB", "lower")
        if self.ways:
            figures["burst.alpha.cold"] = Figure(self.alphas.cold, "", "lower")
            figures["burst.alpha.hot"] = Figure(self.alphas.hot, "", "lower")
        return figures

    def tables(self) -> list[Table]:
        """Return a table of the routers and one of the reallocations, as far as they were measured."""
        tables = []
        nodes = self.scenario.hardware.nodes
        if self.routers:
            alpha = alpha_text(self.alphas.whole)
            title = f"{nodes} nodes, {self.scenario.name}, SLO {self.scenario.slo_ms:g} ms, alpha {alpha}"
            table = Table(title=title, title_justify="left")
            table.add_column("router")
            headings = (
                "P99 ms",
                "P50 ms",
                "within SLO",
                "KV hits",
                "EMB hits",
                "imbalance",
                "critical GB",
                "refill GB",
            )
            for heading in (*headings, "shed"):
                table.add_column(heading, justify="right")
            for router, runs in self.routers.items():
                values = {name: [getattr(served, name) for served in runs] for name in FIELDS}
                mean = {name: interquartile_mean(each) for name, each in values.items()}
                error_ms = standard_error(values["p99_ms"])
                spread = "" if np.isnan(error_ms) else f" ± {milliseconds(error_ms)}"
                table.add_row(
                    router,
                    milliseconds(mean["p99_ms"]) + spread,
                    milliseconds(mean["p50_ms"]),
                    f"{100 * mean['slo']:.2f} %",
                    f"{mean['kv_hit']:.3f}",
                    f"{mean['emb_hit']:.3f}",
                    f"{mean['imbalance']:.2f}",
                    f"{mean['critical_gb']:,.0f}",
                    f"{mean['refilled_gb']:,.0f}",
                    percent(mean["shed"]),
                )
            tables.append(table)
        if self.ways:
            count = sum(len(served.burst_p99_ms) for served in next(iter(self.ways.values())))
            cold, hot = alpha_text(self.alphas.cold), alpha_text(self.alphas.hot)
            above = f"above a hot-user ratio of {self.alphas.threshold:.2f}"
            title = f"{count} bursts, alpha {cold} for the base load, {hot} {above}"
            table = Table(title=title, title_justify="left")
            table.add_column("reallocation")
            for heading in ("bursts above the SLO", "their P99 ms, mean", "worst", "P99 ms of all", "critical GB"):
                table.add_column(heading, justify="right")
            for way, runs in self.ways.items():
                tails = [tail for served in runs for tail in served.burst_p99_ms]
                table.add_row(
                    WAYS[way],
                    f"{100 * self.violations(way):.0f} %",
                    milliseconds(float(np.mean(tails))),
                    milliseconds(max(tails)),
                    milliseconds(interquartile_mean([served.p99_ms for served in runs])),
                    f"{interquartile_mean([served.critical_gb for served in runs]):,.0f}",
                )
            tables.append(table)
        return tables

    @property
    def notes(self) -> list[str]:
        """Sentences to print below the tables."""
        return [
            "Interquartile means over the draws, P99 with its standard error; requests that were shed count "
            f"{SHED_FACTOR:.0f} times the SLO. Imbalance: busy time of the busiest node over the mean, in 10 s windows."
        ]


def measure(args: Args, scenario: Scenario, work: Work) -> Result:
    """Find the alphas on one node, then serve every draw by every router and in every way."""
    found = Alphas(*[float("nan")] * 4)
    if args.bursts or args.alpha is None:
        found = find_alphas(scenario, work, args.seed)
    if args.alpha is not None:
        found = replace(found, whole=args.alpha)
    one, several = (stretch(scenario, bursts, args.nodes) for bursts in (1, args.bursts))
    routers: dict[str, list[Served]] = {router: [] for router in args.routers}
    ways: dict[str, list[Served]] = {way: [] for way in WAYS if args.bursts}
    work.plan((len(routers) + len(ways)) * args.seeds)
    for seed in range(args.seed, args.seed + args.seeds):
        work.describe(f"draw {seed}")
        jobs: list[Job] = []
        if ways:
            trace = generate(several, SEEDS_FROM + seed)
            for way in ways:
                rate = several.control.rate_per_s if way == HELM else None
                make = functools.partial(RegimeRule, found.cold, found.hot, found.threshold, rate)
                jobs.append(Job(reallocating(several, way), trace, make, found.cold))
        if routers:
            trace = generate(one, SEEDS_FROM + seed)
            make_static = functools.partial(StaticAlpha, found.whole)
            jobs += [Job(with_router(one, router), trace, make_static, found.whole) for router in routers]
        served = work.map(lambda job: serve(job, work.advance), jobs)
        for runs, each in zip([*ways.values(), *routers.values()], served, strict=True):
            runs.append(each)
    return Result(several if ways else one, routers, ways, found, _bursts(several) if ways else ())


class Job(NamedTuple):
    """What serves which arrivals, under controllers of which kind, from which alpha on."""

    scenario: Scenario
    trace: Trace
    make: Callable[[], Controller]
    alpha: float


def stretch(scenario: Scenario, bursts: int, nodes: int) -> Scenario:
    """Return the scenario for `nodes` nodes with its phases `bursts` times (at least once), and a minute after them.

    The base load before the scenario's first phase comes before every burst.
    """
    period_s = max(phase.start_s + phase.seconds for phase in scenario.load.phase)
    fields = for_nodes(scenario, nodes).model_dump()
    load = fields["load"]
    load["phase"] = [
        phase | {"start_s": phase["start_s"] + k * period_s} for k in range(max(1, bursts)) for phase in load["phase"]
    ]
    return Scenario.model_validate(fields | {"seconds": period_s * max(1, bursts) + AFTER_S})


def _bursts(scenario: Scenario) -> tuple[tuple[float, float], ...]:
    return tuple((phase.start_s, phase.start_s + phase.seconds) for phase in scenario.load.phase)


def with_router(scenario: Scenario, router: str) -> Scenario:
    """Return the scenario behind another router."""
    return scenario.model_copy(update={"router": scenario.router.model_copy(update={"policy": router})})


def reallocating(scenario: Scenario, way: str) -> Scenario:
    """Return the scenario as this way of reallocating has it: router, migration and refill."""
    if way in (HELM, HELM_PAGES):
        return with_router(scenario, "helm")
    hardware = scenario.hardware.model_copy(update={"refill_share": 0.0})
    control = scenario.control.model_copy(update={"migrate_pages_per_s": AT_ONCE_PAGES_PER_S})
    sudden = scenario.model_copy(update={"hardware": hardware, "control": control})
    return with_router(sudden, NAIVE_ROUTER if way == NAIVE else "helm")


def find_alphas(scenario: Scenario, work: Work, seed: int) -> Alphas:
    """Find the statics and the threshold on one node and on arrivals that are not evaluated."""
    one = stretch(scenario, 1, 1)
    trace = generate(one, STEADY_SEEDS_FROM + seed)
    work.describe("one node's statics")
    found = sweep_adaptively(one, trace, work)
    spans = zip(found.part.spans, found.settled, strict=True)
    hot = float(np.mean([each.best for span, each in spans if span.label != BASE]))
    cold = steady_optimum(one, work, 1, seed, STEP)[1]
    return Alphas(found.whole.best, cold, hot, _middle(one, trace))


def _middle(scenario: Scenario, trace: Trace) -> float:
    """Return the middle between the hot-user ratios of the phases' plateaus and of the time before them."""
    from helm_rl.workloads.inspect import returning

    arrival_s, returns = trace.arrival_ns * 1e-9, returning(trace)
    inside = np.zeros(len(trace), np.bool_)
    for phase in scenario.load.phase:
        end_s = phase.start_s + phase.seconds - phase.ramp_s
        inside |= (arrival_s >= phase.start_s + phase.ramp_s) & (arrival_s < end_s)
    before = (arrival_s >= 0) & (arrival_s < min(phase.start_s for phase in scenario.load.phase))
    ratios = [float(returns[part].mean()) for part in (inside, before) if part.any()]
    return float(np.mean(ratios))


def serve(job: Job, advance: Callable[[float], None] | None = None) -> Served:
    """Replay on a cluster and reduce it; `advance` is told the parts of it that are done."""
    from envs.serving.replay import replay_cluster

    scenario = job.scenario
    seconds = scenario.seconds + scenario.warm_s
    done = 0.0

    def told(_: int) -> None:
        nonlocal done
        step = min(scenario.control.interval_s / seconds, 1.0 - done)
        done += step
        if advance is not None:
            advance(step)

    result = replay_cluster(scenario, job.trace, job.make, alpha0=job.alpha, advance=told)
    if advance is not None:
        advance(1.0 - done)
    return reduce(result, job.trace, scenario)


def reduce(result: ClusterReplay, trace: Trace, scenario: Scenario) -> Served:
    """Reduce a replay to what is compared."""
    latency_ms = result.latency_ms[result.measured]
    arrival_s = trace.arrival_ns[result.measured] * 1e-9
    start_s = trace.meta.measure_from_ns * 1e-9
    measured = [window for window, end_s in zip(result.windows, result.time_s, strict=True) if end_s > start_s]
    nodes = [node for window in measured for node in window.nodes if node is not None]
    tokens = sum(node.history_tokens for node in nodes)
    rows = sum(node.rows for node in nodes)
    bursts = [latency_ms[(arrival_s >= start) & (arrival_s <= end)] for start, end in _bursts(scenario)]
    window = np.floor((arrival_s - start_s) / WINDOW_S).astype(np.int64)
    cuts = np.flatnonzero(np.diff(window)) + 1
    middles = start_s + (window[np.concatenate([[0], cuts])] + 0.5) * WINDOW_S
    ends = np.searchsorted(result.time_s, middles + WINDOW_S / 2, side="right") - 1
    return Served(
        p99_ms=p99_ms(latency_ms),
        p50_ms=quantile_ms(latency_ms, 0.5),
        slo=float((latency_ms <= scenario.slo_ms).mean()),
        kv_hit=sum(node.history_tokens_hit for node in nodes) / max(tokens, 1),
        emb_hit=sum(node.rows_hit for node in nodes) / max(rows, 1.0),
        imbalance=imbalance(result, start_s),
        critical_gb=sum(node.fetched_bytes for node in nodes) * 1e-9,
        refilled_gb=sum(node.refilled_bytes for node in nodes) * 1e-9,
        shed=float((latency_ms == shed_ms(scenario.slo_ms)).mean()),
        burst_p99_ms=tuple(p99_ms(part) for part in bursts),
        window_s=middles,
        window_p99_ms=np.array([p99_ms(part) for part in np.split(latency_ms, cuts)]),
        window_alpha=result.alpha.mean(axis=1)[ends].astype(np.float64),
    )


def imbalance(result: ClusterReplay, start_s: float) -> float:
    """Return the busy time (link and accelerator) of the busiest node over the mean, mean over 10 s windows.

    A node counts as idle where it is down. Windows in which nothing was busy are left out.
    """
    busy: dict[int, npt.NDArray[np.float64]] = {}
    for window, end_s in zip(result.windows, result.time_s, strict=True):
        if end_s <= start_s:
            continue
        times = [0.0 if node is None else float(node.link_busy_ns + node.compute_busy_ns) for node in window.nodes]
        at = int(np.ceil((end_s - start_s) / WINDOW_S - 1e-9))
        busy[at] = busy.get(at, np.zeros(len(times))) + np.array(times)
    ratios = [float(times.max() / times.mean()) for times in busy.values() if times.any()]
    return float(np.mean(ratios)) if ratios else float("nan")


def plot_bursts(result: Result, path: Path) -> None:
    """Draw the P99 of every 10 s and the mean alpha over the first draw, a line for each way to reallocate."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Plot

    colours: Sequence[str] = ("#d55e00", "#e69f00", "#0072b2", "#009e73")
    with mpl.rc_context({"svg.hashsalt": "helm-rl"}):
        plot = Plot(figsize=(8, 4.6), layout="constrained")
        tail, share = plot.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for (way, runs), colour, style in zip(result.ways.items(), colours, ("-", "--", "-", "-."), strict=True):
            tail.plot(runs[0].window_s, runs[0].window_p99_ms, style, color=colour, label=WAYS[way])
            share.plot(runs[0].window_s, runs[0].window_alpha, style, color=colour)
        for axes in (tail, share):
            for start_s, end_s in result.bursts:
                axes.axvspan(start_s, end_s, color="#f3e3c3", zorder=0)
            axes.spines[["top", "right"]].set_visible(False)
        tail.axhline(result.scenario.slo_ms, color="#222222", linewidth=0.8)
        tail.set_yscale("log")
        tail.set_ylabel("P99 of 10 s, ms")
        tail.legend(frameon=False, fontsize="small")
        share.set_ylabel("alpha, mean of nodes")
        share.set_xlabel("s")
        with atomic_file(path) as aside:
            plot.savefig(aside, format=path.suffix[1:].lower(), dpi=150)


def _check(args: Args, scenario: Scenario) -> None:
    check_outputs(args.overwrite, (args.scenario,), json=args.json, plot=args.plot)
    for name, value, least, most in (
        ("--nodes", args.nodes, 1, MOST_NODES),
        ("--bursts", args.bursts, 0, MOST_BURSTS),
        ("--jobs", args.jobs, 1, 1024),
    ):
        if not least <= value <= most:
            raise UserError(f"{name} must lie in {least} to {most}, got {value}")
    check_draws(args.seed, args.seeds)
    if len(set(args.routers)) < len(args.routers):
        raise UserError(f"--routers names a router twice: {' '.join(args.routers)}")
    if not args.routers and not args.bursts:
        raise UserError("there is nothing to measure: name --routers, or --bursts above 0")
    if args.plot is not None and not args.bursts:
        raise UserError("--plot draws bursts, and --bursts 0 leaves them out")
    check_bursts(scenario)
    if args.alpha is not None and not scenario.control.alpha_min <= args.alpha <= scenario.control.alpha_max:
        raise UserError(
            f"--alpha must lie in the scenario's {scenario.control.alpha_min:g} to {scenario.control.alpha_max:g}, "
            f"got {args.alpha}"
        )


def check_bursts(scenario: Scenario) -> None:
    """Raise UserError unless the scenario is of one node, with bursts."""
    if not scenario.load.phase:
        raise UserError(
            f"scenario {scenario.name} has no [[load.phase]], so no bursts; name one that has, such as burst"
        )
    if scenario.hardware.nodes != 1 or scenario.event:
        raise UserError(f"scenario {scenario.name} must be of one node, hardware.nodes = 1, without [[event]] tables")
