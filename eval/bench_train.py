"""`helm-rl bench train`: what a training loop takes beside the simulator, ours and those of two others."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eval.command import console, figure_table
from eval.learning import GOAL, curve_of
from eval.statistics import Floats, bootstrap_interval, interquartile_mean
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs

if TYPE_CHECKING:
    from eval.training_loops import Loop, Trained
    from helm_rl.scenario import Scenario

HELM, EXAMPLE, SB3 = "helm", "cleanrl_loop", "sb3"
ABOUT = {
    HELM: "train base",
    EXAMPLE: "examples/cleanrl_ppo.py",
    SB3: "Stable-Baselines3 PPO",
}
GOALS = {EXAMPLE: 1 / 3, SB3: 1 / 2}
"""Our overhead over theirs, at most."""
ITERATION = 1024
"""Steps of an iteration, over all environments; of a warm-up, too."""
TRACES = 8
"""Draws of arrivals that are trained on, and held out."""
HELD_SEED = 1
"""Of the arrivals that policies are judged on; those of training have the seed 0."""
DISCOUNT_S = 60.0
REGRET_SCENARIO = "trend"


@dataclass
class Args:
    """Time three PPO loops on one scenario in one process, in turns, and hold the returns of their policies together.

    The loops: train base (as always, checkpoints and TensorBoard's log included, without held-out arrivals);
    examples/cleanrl_ppo.py, a plain loop in CleanRL's manner (SyncVectorEnv, eager torch), left out where the package
    is installed without the repository; Stable-Baselines3's PPO (DummyVecEnv, Monitor; extra bench). All have train
    base's defaults: 8 environments, 128 steps, 4 minibatches, 8 epochs, two tanh networks of 64 and 64, Adam at a
    constant 1e-3, the same discount, the same arrivals. Neither peer normalises observations or returns, as train base
    does.

    Times are CPU times of the process, all threads together, with torch on one thread and environments on one: what
    else the machine does hardly shows in them. The simulator is what reset and step of the environment itself
    (HelmNodeEnv) take, each call timed on its thread, in all three alike: the serving model, its reward and the
    observation. Overhead is the rest of the training, over its steps: vector environment and wrappers, actions,
    storage, advantages, updates, logs. A short training of each comes first and does not count.

    Returns are those of the policy without noise on arrivals that none was trained on, each episode from the same
    start for all, less what a static split of .5 earned: interquartile means over the trainings, with 95 % bootstrap
    intervals. Two loops count as equal where the interval of the difference, training by training, holds 0.

    Figures written by --json: train.steps_per_s (environment steps of train base per second of CPU, simulator
    included), train.overhead_us_per_step, train.overhead_ratio_vs_{cleanrl_loop,sb3} (medians over the trainings),
    train.simulator_us_per_step, train.return, train.return_difference.{cleanrl_loop,sb3} (ours less theirs),
    train.{overhead_us_per_step,simulator_us_per_step,return}.{cleanrl_loop,sb3}, train.return.still (alpha left where
    it starts); with --regret train.seconds_to_regret_05 (null where 5 % was not reached).
    """

    scenario: str = "laptop"
    """A shipped scenario (the README lists them) or a TOML file."""
    timesteps: int = 20_480
    """Environment steps of each training, in whole iterations of 1,024."""
    repeats: int = 5
    """Trainings of each loop, each with another seed."""
    episodes: int = 16
    """Held-out episodes in which each policy is judged."""
    regret: bool = False
    """Also train on Trend with train base's defaults, until regret on held-out arrivals is at most 5 %, on all cores;
    about 5 minutes."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --json if it exists."""


@dataclass(frozen=True)
class Measured:
    """Trainings of each loop, in the order of their seeds; returns of their policies, [repeats, episodes]; returns
    of a policy that leaves alpha where it is, [episodes]."""

    trained: dict[str, list[Trained]]
    returns: dict[str, Floats]
    still: Floats


def main(args: Args) -> None:
    """Print the tables and write the figures."""
    from helm_rl.scenario import load_scenario

    check_outputs(args.overwrite, (args.scenario,), json=args.json)
    for name, least in {"timesteps": ITERATION, "repeats": 1, "episodes": 1}.items():
        if getattr(args, name) < least:
            raise UserError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if args.timesteps % ITERATION:
        raise UserError(f"--timesteps must be whole iterations of {ITERATION:,}, got {args.timesteps}")
    scenario = load_scenario(args.scenario)
    if scenario.hardware.nodes != 1 or scenario.event:
        raise UserError(f"scenario {scenario.name} is a cluster's; one node's is needed, without [[event]] tables")
    loops, left_out = available_loops()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("parts"))
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, auto_refresh=False)
    with bar as progress:  # drawn between the trainings: their time is the process's, over all threads
        task = progress.add_task("arrivals", total=1 + (args.repeats + 1) * len(loops))
        progress.refresh()
        measured = measure(
            args, scenario, loops, lambda text: progress.update(task, description=text, advance=1, refresh=True)
        )
    figures = figures_of(measured)
    out = console()
    out.print(loops_table(measured))
    out.print(figure_table(f"Training on {scenario.name}, CPU time, torch on one thread", figures))
    for sentence in [*return_sentences(measured), *left_out]:
        out.print(f"{sentence}.")
    if args.regret:
        seconds = seconds_to_regret()
        figures["train.seconds_to_regret_05"] = Figure(seconds, "s", "lower")
        out.print(
            f"From scratch to a regret of {100 * GOAL:g} % on held-out arrivals of {REGRET_SCENARIO}: {seconds:.0f} s."
            if math.isfinite(seconds)
            else f"A training on {REGRET_SCENARIO} with the defaults did not come to a regret of {100 * GOAL:g} %."
        )
    if args.json is not None:
        write_figures(args.json, figures)


def available_loops() -> tuple[dict[str, Loop], list[str]]:
    """Return the loops that can run here, and a sentence for each other."""
    from eval import training_loops

    loops: dict[str, Loop] = {HELM: training_loops.helm_loop}
    left_out = []
    if training_loops.EXAMPLE.exists():
        loops[EXAMPLE] = training_loops.example_loop
    else:
        left_out.append(f"{ABOUT[EXAMPLE]} is left out: it comes with the repository alone")
    if importlib.util.find_spec("stable_baselines3") is not None:
        loops[SB3] = training_loops.sb3_loop
    else:
        left_out.append(f"{ABOUT[SB3]} is left out: it is not installed (pip install 'helm-rl[bench]')")
    return loops, left_out


def measure(args: Args, scenario: Scenario, loops: dict[str, Loop], advance: Callable[[str], None]) -> Measured:
    """Train with every loop, round by round, each round beginning with another; judge every policy.

    `advance` is called with what comes next.
    """
    from envs.node_env import HelmNodeEnv
    from envs.training_traces import TrainingTraces
    from eval.training_loops import Settings, episode_returns, timed

    traces = TrainingTraces(scenario, count=TRACES)
    for i in range(TRACES):
        traces.reference(i)
    held = HelmNodeEnv(traces=TrainingTraces(scenario, count=TRACES, seed=HELD_SEED))
    starts = range(args.episodes)
    still = episode_returns(lambda _: np.zeros(1, np.float32), held, starts)
    gamma = math.exp(-scenario.control.interval_s / DISCOUNT_S)

    def train(name: str, steps: int, seed: int) -> Trained:
        settings = Settings(steps, gamma)
        envs = [HelmNodeEnv(traces=traces) for _ in range(settings.num_envs)]
        return timed(loops[name], envs, settings, seed)

    names = list(loops)
    for name in names:
        advance(f"warming up: {ABOUT[name]}")
        train(name, ITERATION, 0)
    trained: dict[str, list[Trained]] = {name: [] for name in names}
    returns: dict[str, list[Floats]] = {name: [] for name in names}
    for k in range(args.repeats):
        for i in range(len(names)):
            name = names[(k + i) % len(names)]
            advance(f"training: {ABOUT[name]}")
            trained[name].append(train(name, args.timesteps, k + 1))
            returns[name].append(episode_returns(trained[name][-1].policy, held, starts))
    advance("done")
    return Measured(trained, {name: np.array(rows) for name, rows in returns.items()}, still)


def figures_of(measured: Measured) -> dict[str, Figure]:
    """Return the figures that `Args` lists, but for the one of --regret."""
    ours = measured.trained[HELM]
    per_s = float(np.median([each.steps / each.cpu_s for each in ours]))
    figures = {"train.steps_per_s": Figure(per_s, "1/s", "higher")}
    for name, runs in measured.trained.items():
        ending = "" if name == HELM else f".{name}"
        overhead, simulator = overhead_us(runs), float(np.median([each.simulator_us for each in runs]))
        figures[f"train.overhead_us_per_step{ending}"] = Figure(overhead, "us", "lower")
        figures[f"train.simulator_us_per_step{ending}"] = Figure(simulator, "us", "lower")
        figures[f"train.return{ending}"] = Figure(interquartile_mean(per_training(measured, name)), "", "higher")
    figures["train.return.still"] = Figure(float(measured.still.mean()), "", "higher")
    for name, goal in GOALS.items():
        if name in measured.trained:
            pairs = zip(ours, measured.trained[name], strict=True)
            ratio = float(np.median([one.overhead_us / other.overhead_us for one, other in pairs]))
            figures[f"train.overhead_ratio_vs_{name}"] = Figure(ratio, "", "lower", goal)
            difference = interquartile_mean(per_training(measured, HELM) - per_training(measured, name))
            figures[f"train.return_difference.{name}"] = Figure(difference, "", "higher")
    return figures


def overhead_us(runs: list[Trained]) -> float:
    """Return the median overhead per step of some trainings."""
    return float(np.median([each.overhead_us for each in runs]))


def per_training(measured: Measured, name: str) -> Floats:
    """Return the mean return of each policy of a loop, [repeats]."""
    mean: Floats = measured.returns[name].mean(axis=1)
    return mean


def loops_table(measured: Measured) -> Table:
    """Return a line for each loop: what it took beside the simulator, from the least to the most, and its returns."""
    table = Table(title="Beside the simulator, per environment step", title_justify="left")
    table.add_column("loop")
    for heading in ("median us", "least", "most", "simulator us", "return (95 % interval)"):
        table.add_column(heading, justify="right")
    for name, runs in measured.trained.items():
        overheads = [each.overhead_us for each in runs]
        simulator = float(np.median([each.simulator_us for each in runs]))
        numbers = (overhead_us(runs), min(overheads), max(overheads), simulator)
        table.add_row(ABOUT[name], *(f"{value:.1f}" for value in numbers), with_interval(per_training(measured, name)))
    return table


def return_sentences(measured: Measured) -> list[str]:
    """Say of each peer whether its policies earn as much as ours."""
    sentences = [f"Alpha left where it starts returns {measured.still.mean():.3g}"]
    for name in measured.trained:
        if name == HELM:
            continue
        difference = per_training(measured, HELM) - per_training(measured, name)
        interval = bootstrap_interval(difference)
        if interval is None:
            verdict = "one training says nothing of how far they scatter"
        elif interval[0] <= 0.0 <= interval[1]:
            verdict = "equal within the interval"
        else:
            verdict = "NOT equal: " + ("ours return more" if interval[0] > 0.0 else "ours return less")
        sentences.append(f"Returns, ours less those of {ABOUT[name]}: {with_interval(difference)}: {verdict}")
    return sentences


def with_interval(values: Floats) -> str:
    """Return the interquartile mean of values with its interval, as text."""
    interval = bootstrap_interval(values)
    ends = "" if interval is None else f" ({interval[0]:.3g} to {interval[1]:.3g})"
    return f"{interquartile_mean(values):.3g}{ends}"


def seconds_to_regret() -> float:
    """Train on REGRET_SCENARIO with the defaults; return the seconds to the first look within GOAL, or infinity."""
    from helm_rl.checkpoint import load_training_state
    from train import ppo_base

    with tempfile.TemporaryDirectory(prefix="helm-rl-") as folder:
        run = ppo_base.train(ppo_base.Args(scenario=(REGRET_SCENARIO,), runs=Path(folder)))
        return curve_of(load_training_state(run)[0].training).seconds_to_goal
