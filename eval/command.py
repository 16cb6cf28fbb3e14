"""What `helm-rl eval p99` and `helm-rl eval ratio-gap` share: arguments, checks, outputs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from eval.comparison import (
    DEPLOYABLE,
    HALF,
    HINDSIGHT,
    OPTIMUM,
    POLICY,
    REFERENCE,
    Comparison,
    Contestant,
    check_draws,
    compare,
    figure_word,
)
from eval.own_controller import own_contestants
from eval.peers import PEERS, peer_contestants
from eval.reference import EFFORT
from eval.sweep import STEP, ReplayFunction, alpha_grid, check_jobs, working
from helm_rl.checkpoint import POLICY_FILE, Bundle, load_bundle
from helm_rl.control.base import BasePolicy
from helm_rl.control.layers import LAYERS, Layer, controller, layers_of
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.scenario import Load, Scenario, load_scenario
from helm_rl.shipped import bundle_path
from helm_rl.workloads.trace import Trace

RESERVED = {POLICY, HALF, DEPLOYABLE, HINDSIGHT, OPTIMUM, REFERENCE} | PEERS
"""Names in the figures that no bundle's folder may take."""
WIDTH = 118
"""Columns of the tables where stdout is no terminal and has no width of its own."""


@dataclass
class EvalArgs:
    """Arguments of `helm-rl eval p99` and `helm-rl eval ratio-gap`."""

    scenario: str = "burst"
    """What serves under which load: a shipped scenario (the README lists them) or a TOML file."""
    load: Load = "limit"
    """The scenario's rates as they stand (near what a node bears), or moderate: 70 % of each."""
    policy: tuple[Path, ...] = ()
    """Bundles to evaluate: folders, as `helm-rl export` writes them, or names of shipped ones; the first is the policy
    that the headline and the plots are about. Without any, only the statics and the optimum."""
    ablate: bool = False
    """Also evaluate each bundle that has layers above its base policy without them, and with each of several alone."""
    controller: tuple[str, ...] = ()
    """Also evaluate controllers of your own, each MODULE:CLASS, such as my_rules:HotUsers: a class in this folder, or
    installed, with the methods of helm_rl.control.protocol.Controller (examples/own_controller.py is one)."""
    peers: bool = False
    """Also evaluate the rules that divide memory today: marginal hits, Cliffhanger, miss-ratio curves, KV first, EMB
    first, hill climbing, and ours, weighted margins."""
    trace: Path | None = None
    """Recorded arrivals (Parquet, from `helm-rl trace generate` or `convert`) in place of the scenario's load.
    """
    seeds: int | None = None
    """Draws of arrivals, at least 1; more narrow the intervals (default: 3, and 1 with --trace)."""
    seed: int = 1
    """Number of the first draw; none of them is ever trained on."""
    step: float = STEP
    """Spacing of the alphas replayed around each minimum; larger is faster and coarser."""
    reference: Literal["quick", "full"] = "quick"
    """What regret and headroom are held against: the best of the statics and the per-segment optimum, or (full) of
    these and a schedule found offline, which takes about three times as long in all."""
    jobs: int = 2
    """Replays at a time; one core each."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures here, for machines."""
    report: Annotated[Path | None, tyro.conf.arg(metavar="FILE.html")] = None
    """Write a self-contained page with the plots here."""
    overwrite: bool = False
    """Replace --json and --report files that exist."""


def evaluate(args: EvalArgs, replay: ReplayFunction | None = None) -> Comparison:
    """Check the arguments, run the evaluation and write the files asked for; the caller prints its table.

    Raises UserError for any argument that does not fit, before the first replay.
    """
    scenario = load_scenario(args.scenario, args.load)
    seeds = args.seeds if args.seeds is not None else (3 if args.trace is None else 1)
    check_draws(args.seed, seeds)
    if args.trace is not None and seeds != 1:
        raise UserError(f"--seeds {seeds}: a recorded trace is one set of arrivals; leave --seeds out with --trace")
    check_jobs(args.jobs)
    alpha_grid(scenario.control.alpha_min, scenario.control.alpha_max, args.step)
    inputs = (args.scenario, args.trace, *args.policy)
    check_outputs(args.overwrite, inputs, json=args.json, report=args.report)
    policies = policy_contestants(args.policy, scenario, args.ablate)
    policies += own_contestants(args.controller, scenario, RESERVED | {one.key for one in policies})
    if args.peers:
        policies += peer_contestants(scenario)
    trace = Trace.load(args.trace) if args.trace is not None else None

    with working(args.jobs, replay) as work:
        comparison = compare(
            scenario,
            work,
            seeds=seeds,
            first_seed=args.seed,
            trace=trace,
            policies=policies,
            step=args.step,
            effort=EFFORT if args.reference == "full" else None,
        )
    if args.report is not None:
        from eval.report import write_report

        write_report(args.report, comparison)
    if args.json is not None:
        write_figures(args.json, comparison.figures(), bundles=comparison.bundles())
    return comparison


def policy_contestants(paths: Sequence[Path], scenario: Scenario, ablate: bool = False) -> list[Contestant]:
    """Load bundles; the first is the policy, others are named after their folders. UserError for a name taken twice.

    ablate: each is followed by itself without the layers above its base policy, and with each of several alone.
    """
    found: list[Contestant] = []
    for path in paths:
        bundle = fitting_bundle(path, scenario)
        name = path.resolve().name if found else POLICY
        stacks = ablations(bundle) if ablate else []
        for layers in (layers_of(bundle), *stacks):
            each = contestant(bundle, scenario, layers)
            suffix = "" if layers == layers_of(bundle) else f" ({' + '.join(('base', *layers))})"
            key = figure_word(name + suffix)
            if key in {one.key for one in found} | (RESERVED - {POLICY}):
                raise UserError(f"--policy {path}: {key} is the name of another controller here; rename the folder")
            found.append(replace(each, key=key, title=name + suffix))
    return found


def ablations(bundle: Bundle) -> list[tuple[Layer, ...]]:
    """Return the smaller stacks of a bundle's layers: none, and each alone where there are several."""
    layers = layers_of(bundle)
    alone: list[tuple[Layer, ...]] = [(layer,) for layer in layers] if len(layers) > 1 else []
    return [(), *alone] if layers else []


def policy_contestant(path: Path, scenario: Scenario) -> Contestant:
    """Load a bundle with all its layers and check that it can control this scenario; UserError says why not."""
    bundle = fitting_bundle(path, scenario)
    return contestant(bundle, scenario, layers_of(bundle))


def contestant(bundle: Bundle, scenario: Scenario, layers: tuple[Layer, ...]) -> Contestant:
    """Return a bundle's policy with some of its layers as a contestant on a scenario that it fits."""
    interval_s = scenario.control.interval_s
    controller(bundle, interval_s, layers)  # a layer's file that is wrong shows before any replay
    training, environment = bundle.config.training, bundle.config.environment
    where = ", ".join(source.name for source in environment.scenarios) or environment.env_id
    return Contestant(
        POLICY,
        "policy",
        f"the bundle's {' + '.join(('base', *layers))}; it starts at the deployable static's alpha, {interval_s:g} s "
        "between decisions",
        lambda: controller(bundle, interval_s, layers),
        origin=f"trained on {where} for {training.steps:,} steps, seed {training.seed}; weights sha256 "
        f"{bundle.config.files[POLICY_FILE]}",
        trained_on=tuple(source.sha256 for source in environment.traces),
        files={name: bundle.config.files[name] for name in (POLICY_FILE, *(LAYERS[layer] for layer in layers))},
    )


def fitting_bundle(path: Path, scenario: Scenario) -> Bundle:
    """Load a bundle; UserError unless its policy was trained for the scenario's interval and bounds of alpha."""
    bundle = load_bundle(bundle_path(path))
    BasePolicy.of(bundle, scenario.control.interval_s)
    for name in ("alpha_min", "alpha_max"):
        trained, asked = getattr(bundle.config.bounds, name), getattr(scenario.control, name)
        if abs(trained - asked) > 1e-9:
            raise UserError(
                f"{path}/config.json: bounds.{name} is {trained:g}, and scenario {scenario.name} has "
                f"control.{name} = {asked:g}; a policy controls what it was trained for"
            )
    return bundle


def console() -> Console:
    """Where tables go: stdout, at a fixed width where it is no terminal. A name with [brackets] in it is no markup."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False, emoji=False)


def figure_table(title: str, figures: dict[str, Figure]) -> Table:
    """Return a table of names and values; where a figure has a goal, of the goals and whether they are reached."""
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    if any(figure.goal is not None for figure in figures.values()):
        table.add_column("goal", justify="right")
        table.add_column("reached")
    for name, figure in figures.items():
        row = [name, f"{number(figure.value)} {figure.unit}".rstrip()]
        if figure.goal is not None:
            sign = "at least" if figure.better == "higher" else "at most"
            reached = figure.value >= figure.goal if figure.better == "higher" else figure.value <= figure.goal
            row += [f"{sign} {number(figure.goal)}", "yes" if reached else "NO"]
        table.add_row(*row)
    return table


def number(value: float) -> str:
    """Return a figure's value in four digits, or whole from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
