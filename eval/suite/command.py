"""`helm-rl eval suite`: a policy beside statics, rules and the reference, over families, loads and draws."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from eval.command import console
from eval.comparison import HINDSIGHT, check_draws
from eval.executor import Executor, ExecutorName
from eval.results import OPTIONS, RESULTS, Kind, Results
from eval.routing import MOST_NODES
from eval.suite.cells import NODE, cells, recorded_cells
from eval.suite.entries import entries
from eval.suite.families import FAMILIES
from eval.suite.given import read_decision, read_map
from eval.suite.goals import fell_short, goals
from eval.suite.plan import FULL, QUICK, US_PER_REQUEST, Plan, minutes
from eval.suite.records import check_row
from eval.suite.report import headline, write_report
from eval.suite.run import run
from eval.suite.runs import RUNS, write_runs
from eval.suite.suite import Suite
from eval.suite.summary import CellSummary, summarise
from eval.wording import counted, interval_ms, milliseconds
from helm_rl import __version__
from helm_rl.errors import UserError
from helm_rl.figures import write_figures
from helm_rl.files import check_outputs, refuse_existing
from helm_rl.shipped import newest_base

REPORT, FIGURES = "report.html", "figures.json"
FILES = (OPTIONS, RESULTS, REPORT, FIGURES, RUNS)
SUITE = Kind("suite", FILES, check_row)
QUICK_FAMILIES = ("decoder",)


@dataclass
class Args:
    """Measure a policy beside all statics, rules, host tiers and the reference, and write a page about it.

    Each family (a model on a device behind a link) serves Steady, Trend and Burst near what the best static bears, each
    over several draws of arrivals that nothing was trained or chosen on; one family's Burst is served by 32 nodes, too.
    Every result is kept as it comes, with its settings and their hash: after an interrupt the same command goes on, and
    another policy or more draws measure what is new. The default takes under three hours on 2 cores, --quick (one
    family, two draws, coarser) some five minutes. --output gets report.html, figures.json and runs.json.

    Figures (figures.json, and --json), interquartile means over the draws:
    <family>.<pattern>.<router>.<controller>.{p99_ms, p50_ms, windowed_p99_ms, onset_p99_ms, slo, throughput, ratio_gap,
    ratio_gap_transition, flat_gap, flat_gap_transition, regret}, of which a cluster's, behind its router, has p99_ms,
    slo and throughput, and one node's router is single; <family>.<pattern>.{headroom, headroom_error, noise_floor,
    shift, captured, p99_vs_single_static, p99_vs_deployable_static, p99_vs_hindsight_static,
    capacity_vs_deployable_static, capacity_vs_hindsight_static}; <family>.<pattern>.capacity.<controller>;
    burst.violations.{naive, helm}; all.<controller>.p99_vs_hindsight_static and all.improvement_over.<controller>, over
    all families and patterns.
    Controllers: policy, policy_base and other ablations, marginal_hits, cliffhanger, miss_ratio_curves, kv_first,
    emb_first, hill_climbing, weighted_margins, naive, host_tier_96, host_tier_960, half_static, deployable_static,
    single_static, hindsight_static, segment_optimum, reference.
    """

    output: Path
    """Folder of the results; one that holds a part of this suite is completed."""
    policy: Path | None = None
    """Bundle of the policy: a folder, as `helm-rl export` writes it, or the name of a shipped one (default: the newest
    shipped base policy, helm-base-v1 as yet)."""
    beside: tuple[Path, ...] = ()
    """Bundles to measure beside it, with their ablations, each a row under its folder's name: the same policy below
    other layers, say. What a bundle has in common with the policy is measured once."""
    controller: tuple[str, ...] = ()
    """Also measure controllers of your own, each MODULE:CLASS, such as my_rules:HotUsers: a class in this folder, or
    installed, with the methods of helm_rl.control.protocol.Controller (examples/own_controller.py is one)."""
    families: tuple[str, ...] = ()
    """Families to measure: decoder, hstu, large (default: all, and decoder with --quick)."""
    traces: Path | None = None
    """Folder with logs of Azure, Mooncake, RAGPulse or Twitter, whose arrivals make a family of their own, recorded."""
    seeds: int | None = None
    """Draws of arrivals, at least 1 (default: 5, and 2 with --quick)."""
    seed: int = 1
    """Number of the first draw."""
    nodes: int | None = None
    """Nodes of the cluster; 0 leaves it out (default: 32, and 4 with --quick)."""
    quick: bool = False
    """One family, two draws, coarser statics, no search for the reference, a small cluster."""
    jobs: int = 2
    """Results measured at a time, one core each; with --address as many as the cluster has cores."""
    executor: ExecutorName = "local"
    """Where results are measured: local, in processes of this machine, or ray, on the nodes of a Ray cluster (needs
    the extra 'ray'); the figures are the same."""
    address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """With --executor ray: the cluster, of which this machine must be a node, or auto; without it Ray starts on this
    machine alone, for as long as the command takes."""
    map: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of `helm-rl eval map`, to be shown in the report."""
    decision: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Figures of `helm-rl bench decision` (its --json), to be shown in the report."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures here, too."""
    overwrite: bool = False
    """Replace a --json file that exists."""


def main(args: Args) -> None:
    """Measure what is missing, print the tables, write page and figures."""
    plan = plan_of(args)
    _check_files(args)
    map_cells = () if args.map is None else read_map(args.map)
    decision = None if args.decision is None else read_decision(args.decision)
    with Results(args.output, SUITE, {"helm_rl": __version__}) as store:
        suite = Suite(plan, store)
        _announce(plan, args)
        run(suite, executor_of(args))
        summary = summarise(suite)
    out = console()
    for cell in summary.cells:
        out.print(cell_table(cell))
    found = goals(summary)
    out.print(headline(summary, found))
    for line in fell_short(found):
        out.print(f"Missed: {line}")
    figures = summary.figures()
    write_figures(args.output / FIGURES, figures)
    write_runs(args.output / RUNS, summary)
    write_report(args.output / REPORT, summary, map_cells, decision)
    out.print(f"Report: {args.output / REPORT}", style="dim")
    if args.json is not None:
        write_figures(args.json, figures)


def plan_of(args: Args) -> Plan:
    """Check the arguments and return what is to be measured; UserError for any that does not fit."""
    size = QUICK if args.quick else FULL
    seeds = size.seeds if args.seeds is None else args.seeds
    check_draws(args.seed, seeds)
    executor_of(args).check()
    nodes = size.nodes if args.nodes is None else args.nodes
    if not 0 <= nodes <= MOST_NODES:
        raise UserError(f"--nodes must lie in 0 to {MOST_NODES}, got {nodes}")
    size = replace(size, seeds=seeds, first=args.seed, nodes=nodes, cluster_seeds=min(size.cluster_seeds, seeds))
    found = cells(args.families or (QUICK_FAMILIES if args.quick else tuple(FAMILIES)))
    if args.traces is not None:
        if all(cell.family != NODE for cell in found):
            raise UserError(f"--traces: recorded arrivals are served by the node of {NODE}; add it to --families")
        found += recorded_cells(args.traces)
    policy = args.policy
    if policy is None and (newest := newest_base()) is not None:
        policy = Path(newest)
    chosen = entries(policy, args.controller, [cell.scenario for cell in found], args.beside)
    return Plan(tuple(found), tuple(chosen), size)


def executor_of(args: Args) -> Executor:
    """Return what measures."""
    return Executor(args.executor, args.jobs, args.address)


def _check_files(args: Args) -> None:
    """Raise UserError unless every file can be written, now and not after the work."""
    inputs = (args.policy, *args.beside, args.traces, args.map, args.decision)
    check_outputs(args.overwrite, inputs, json=args.json)
    if args.json is not None:
        figures, folder = Path(os.path.realpath(args.json)), Path(os.path.realpath(args.output))
        if figures in (folder, *folder.parents) or figures in [folder / name for name in FILES]:
            raise UserError(f"--json names the suite's own folder, one that it is in, or one of its files, {args.json}")
    if args.output.is_dir():
        for path in (args.output / name for name in FILES):
            refuse_existing(path, overwrite=True)
            if path.is_dir():
                raise UserError(f"{path} is a folder, and the suite's own file goes there; name another --output")


def _announce(plan: Plan, args: Args) -> None:
    """Say what is to be measured and about how long that takes."""
    took = minutes(list(plan.stage_cpu_s().values()), args.jobs)
    rates = ", ".join(f"{US_PER_REQUEST[family]:g} us ({family})" for family in plan.families)
    cluster = f", and {plan.size.nodes} nodes" if plan.clustered is not None else ""
    Console(stderr=True, highlight=False, markup=False, emoji=False).print(
        f"{len(plan.cells)} loads, {counted(plan.size.seeds, 'draw')} each, {len(plan.entries)} controllers beside the "
        f"statics{cluster}: about {counted(round(took), 'minute')} on {counted(args.jobs, 'core')}, at {rates} a "
        f"request; less what {args.output} has."
    )


def cell_table(cell: CellSummary) -> Table:
    """One line per controller of a cell."""
    comparison = cell.comparison
    room, error = comparison.headroom()
    table = Table(
        title=f"{cell.name}: SLO {cell.cell.scenario.slo_ms:g} ms, headroom {100 * room:.1f} % +- {100 * error:.1f}",
        title_justify="left",
    )
    table.add_column("controller")
    for heading in ("P99 ms", "to hindsight", "within SLO", "served/s", "|alpha - alpha*|", "bears, x this load"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        p99 = comparison.estimate(row.key, "p99_ms")
        interval = interval_ms(p99)
        bears = cell.capacities.get(row.key)
        table.add_row(
            row.title,
            milliseconds(p99.value) + (f" ({interval})" if interval else ""),
            f"{comparison.ratio(row.key, HINDSIGHT).value:.3f}",
            f"{100 * comparison.estimate(row.key, 'slo').value:.2f} %",
            f"{comparison.estimate(row.key, 'throughput').value:.1f}",
            f"{comparison.estimate(row.key, 'ratio_gap').value:.3f}",
            "" if bears is None else f"{sum(bears) / len(bears):.2f}",
        )
    return table
