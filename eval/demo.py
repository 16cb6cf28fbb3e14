"""`helm-rl demo`: the whole way in one go, from a generated trace to a report about a trained policy."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from eval.command import console, policy_contestant
from eval.comparison import SEEDS_FROM, Comparison, check_draws, compare
from eval.p99_latency import latency_table
from eval.ratio_gap import gap_table
from eval.summary import footnotes, headline
from eval.sweep import working
from helm_rl.errors import UserError
from helm_rl.figures import write_figures
from helm_rl.files import atomic_folder, refuse_existing
from helm_rl.scenario import load_scenario

REPORT, FIGURES, BUNDLE, TRACE, RUNS = "report.html", "figures.json", "bundle", "trace.parquet", "runs"
OUTPUTS = {REPORT, FIGURES, BUNDLE, TRACE, RUNS}


@dataclass
class Args:
    """Generate a bursty trace, train a base policy, export it, evaluate it beside static splits, write a report.

    Makes the folder OUTPUT with report.html, figures.json, bundle/, trace.parquet and runs/ (the training's log for
    TensorBoard, and its checkpoint), whole or not at all. The same seed gives the same figures. Takes a few minutes on
    two cores.
    """

    output: Path = Path("demo-output")
    """Folder to make."""
    seed: int = 1
    """Seed of the training, and number of the first draw of arrivals that are evaluated."""
    overwrite: bool = False
    """Replace the folder if it holds an earlier demo."""


@dataclass(frozen=True)
class Size:
    """How much the demo does: scenario, training steps, draws of arrivals, spacing of alpha, replays at a time."""

    scenario: str = "burst"
    timesteps: int = 61_440
    num_envs: int = 8
    num_steps: int = 128
    validate_every: int = 10
    draws: int = 3
    step: float = 0.05
    jobs: int = 2


def main(args: Args) -> None:
    """Run the demo and say last where the report is."""
    try:
        comparison = run(args, Size())
    except KeyboardInterrupt:
        # Training has named a run to go on with; but it lay in the folder that an unfinished demo takes away.
        print(
            f"the demo was stopped: nothing of it is kept, no run either; {args.output} is as it was", file=sys.stderr
        )
        raise
    out = console()
    out.print(headline(comparison))
    out.print(latency_table(comparison))
    out.print(gap_table(comparison))
    for line in footnotes(comparison):
        out.print(line, style="dim")
    out.print(f"Figures: {args.output / FIGURES}; policy: {args.output / BUNDLE}; trace: {args.output / TRACE}")
    print(f"Report: {args.output / REPORT}")


def run(args: Args, size: Size) -> Comparison:
    """Do all of it and put the results in `args.output`.

    Raises:
        UserError: The output exists (and is no earlier demo that --overwrite may replace), or the seed is out of range.
        KeyboardInterrupt: Nothing is left behind then.
    """
    check_draws(args.seed, size.draws)
    refuse_output(args.output, args.overwrite)

    # Here, so that `helm-rl demo --help` and a refused output do not wait for torch and the simulator.
    from eval.report import write_report
    from helm_rl.export import export
    from helm_rl.workloads.generate import generate
    from train import ppo_base

    scenario = load_scenario(size.scenario)
    spent: dict[str, float] = {}
    with atomic_folder(args.output) as folder:
        begun = _stage(1, f"generating the trace of scenario {scenario.name}")
        # The first draw that is evaluated: `helm-rl eval p99 --trace` can look at it again.
        trace = generate(scenario, seed=SEEDS_FROM + args.seed)
        trace.save(folder / TRACE)
        spent["trace"] = time.perf_counter() - begun

        begun = _stage(2, f"training the base policy for {size.timesteps:,} steps, on other arrivals")
        trained = ppo_base.train(
            ppo_base.Args(
                scenario=(size.scenario,),
                seed=args.seed,
                runs=folder / RUNS,
                total_timesteps=size.timesteps,
                num_envs=size.num_envs,
                num_steps=size.num_steps,
                validate_every=size.validate_every,
            )
        )
        spent["training"] = time.perf_counter() - begun

        begun = _stage(3, "exporting it as a bundle")
        export(trained, folder / BUNDLE)
        spent["export"] = time.perf_counter() - begun

        begun = _stage(4, f"evaluating it on arrivals that it never saw, {size.draws} times")
        policy = policy_contestant(folder / BUNDLE, scenario)
        with working(size.jobs) as work:
            comparison = compare(
                scenario, work, seeds=size.draws, first_seed=args.seed, policies=[policy], step=size.step
            )
        if comparison.results[0].trace_hash != trace.hash():
            raise RuntimeError("the same scenario and seed gave two different traces")
        spent["evaluation"] = time.perf_counter() - begun

        _stage(5, "writing the report")
        write_figures(folder / FIGURES, comparison.figures(), bundles=comparison.bundles())
        times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent.items())
        write_report(folder / REPORT, comparison, {"time taken": times})
    return comparison


def refuse_output(output: Path, overwrite: bool) -> None:
    """Raise UserError unless `output` is free, or holds nothing but an earlier demo and may be replaced."""
    with contextlib.suppress(FileExistsError, NotADirectoryError):  # said better below
        output.parent.mkdir(parents=True, exist_ok=True)
    refuse_existing(output, overwrite)
    if not output.exists():
        return
    others = sorted(path.name for path in output.iterdir() if path.name not in OUTPUTS) if output.is_dir() else [""]
    if others:
        what = f"holds {others[0]}, which no demo made" if output.is_dir() else "is not a folder"
        raise UserError(f"{output} {what}; --overwrite replaces only an earlier demo: name another output")


def _stage(number: int, text: str) -> float:
    Console(stderr=True, highlight=False).print(f"{number} of 5: {text}", style="bold")
    return time.perf_counter()
