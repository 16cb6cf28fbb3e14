"""What `helm-rl eval p99` and `helm-rl eval ratio-gap` share: arguments, checks, outputs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console

from eval.comparison import (
    DEPLOYABLE,
    HINDSIGHT,
    OPTIMUM,
    POLICY,
    REFERENCE,
    Comparison,
    Contestant,
    check_draws,
    compare,
)
from eval.sweep import STEP, ReplayFunction, alpha_grid, working
from eval.wording import milliseconds, percent
from helm_rl.checkpoint import POLICY_FILE
from helm_rl.control.base import BasePolicy
from helm_rl.errors import UserError
from helm_rl.figures import write_figures
from helm_rl.files import refuse_existing
from helm_rl.metrics import SHED_FACTOR
from helm_rl.scenario import Scenario, load_scenario
from helm_rl.workloads.trace import Trace

WIDTH = 118
"""Columns of the tables where stdout is no terminal and has no width of its own."""


@dataclass
class EvalArgs:
    """Arguments of every evaluation."""

    scenario: str = "burst"
    """What serves and under which load: a shipped scenario (burst, steady, trend, conversation), or a TOML file."""
    policy: Path | None = None
    """Bundle folder to evaluate, as `helm-rl export` writes it; without it, only the statics and the optimum."""
    trace: Path | None = None
    """Recorded arrivals (Parquet, from `helm-rl trace generate` or `convert`) in place of the scenario's load.
    """
    seeds: int | None = None
    """Draws of arrivals, at least 1; more narrow the intervals (default: 3, and 1 with --trace)."""
    seed: int = 1
    """Number of the first draw; none of them is ever trained on."""
    step: float = STEP
    """Spacing of the alphas replayed around each minimum; larger is faster and coarser."""
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
    scenario = load_scenario(args.scenario)
    seeds = args.seeds if args.seeds is not None else (3 if args.trace is None else 1)
    check_draws(args.seed, seeds)
    if args.trace is not None and seeds != 1:
        raise UserError(f"--seeds {seeds}: a recorded trace is one set of arrivals; leave --seeds out with --trace")
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {args.jobs}")
    alpha_grid(scenario.control.alpha_min, scenario.control.alpha_max, args.step)
    outputs = [path for path in (args.json, args.report) if path is not None]
    for path in outputs:
        refuse_existing(path, args.overwrite)
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file")
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise UserError(f"--json and --report name the same file, {args.json}")
    policies = [policy_contestant(args.policy, scenario)] if args.policy is not None else []
    trace = Trace.load(args.trace) if args.trace is not None else None

    with working(args.jobs, replay) as work:
        comparison = compare(
            scenario, work, seeds=seeds, first_seed=args.seed, trace=trace, policies=policies, step=args.step
        )
    if args.report is not None:
        from eval.report import write_report

        write_report(args.report, comparison)
    if args.json is not None:
        write_figures(args.json, comparison.figures())
    return comparison


def policy_contestant(path: Path, scenario: Scenario) -> Contestant:
    """Load a bundle and check that it can control this scenario; UserError says why not."""
    policy = BasePolicy.load(path)
    bounds, control = policy.config.bounds, scenario.control
    for name in ("interval_s", "alpha_min", "alpha_max"):
        trained, asked = getattr(bounds, name), getattr(control, name)
        if abs(trained - asked) > 1e-9:
            raise UserError(
                f"{path}/config.json: bounds.{name} is {trained:g}, and scenario {scenario.name} has "
                f"control.{name} = {asked:g}; a policy controls what it was trained for"
            )
    training, environment = policy.config.training, policy.config.environment
    where = environment.scenario or environment.env_id
    return Contestant(
        POLICY,
        "policy",
        f"the bundle, frozen; it starts at the deployable static's alpha, {control.interval_s:g} s between decisions",
        lambda: BasePolicy.load(path),
        origin=f"trained on {where} for {training.steps:,} steps, seed {training.seed}; weights sha256 "
        f"{policy.config.files[POLICY_FILE]}",
        trained_on=environment.trace_hash,
    )


def console() -> Console:
    """Where tables go: stdout, at a fixed width where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def headline(comparison: Comparison) -> str:
    """The result in a sentence or two, with the measured numbers and nothing else."""

    def p99(key: str) -> str:
        value = comparison.estimate(key, "p99_ms").value
        shed = value == np.float32(SHED_FACTOR * comparison.scenario.slo_ms)
        return f"{milliseconds(value)} ms" + (" (more than 1 % were shed)" if shed else "")

    draws = len(comparison.results)
    where = "on the recorded arrivals" if comparison.results[0].seed is None else f"over {draws} draws of arrivals"
    if draws == 1 and comparison.results[0].seed is not None:
        where = "on one draw of arrivals"
    statics = (
        f"The static that could have been deployed (alpha {comparison.deployable:.2f}) took {p99(DEPLOYABLE)}, the "
        f"best static in hindsight {p99(HINDSIGHT)}, the per-segment optimum {p99(OPTIMUM)}"
    )
    if not any(row.key == POLICY for row in comparison.rows):
        room, _ = comparison.headroom()
        return (
            f"Scenario {comparison.pattern}, {where}: how long 99 % of requests took at most. {statics}. What the "
            f"reference gains on the best static in hindsight is {percent(room)}."
        )
    regret = comparison.estimate(POLICY, "regret").value
    return (
        f"In scenario {comparison.pattern}, {where}, the policy answered 99 % of requests within {p99(POLICY)}. "
        f"{statics}; the policy is {percent(abs(regret))} {'above' if regret >= 0 else 'below'} the best of these."
    )


def footnotes(comparison: Comparison) -> list[str]:
    """What a reader must know to read the numbers rightly."""
    lines = [
        f"Reference = {REFERENCE}; the full reference schedule (by dynamic programming) is not built yet.",
        "Latency runs from the scheduled arrival; a shed request counts as 100 x the SLO and as a violation.",
    ]
    if len(comparison.results) > 1:
        lines.append(
            f"Values are interquartile means over {len(comparison.results)} draws, with 95 % bootstrap "
            "intervals, which are too narrow where draws are few."
        )
    else:
        lines.append("One set of arrivals: nothing is known about the spread.")
    return [*lines, *(note[0].upper() + note[1:] + "." for note in comparison.notes)]
