"""`helm-rl eval learning`: learning curves of training runs, P99 regret on held-out arrivals over environment steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro
from rich.table import Table

from eval.command import console
from eval.comparison import figure_word
from eval.statistics import Floats, interquartile_mean
from eval.wording import counted
from helm_rl.checkpoint import TrainingSection, load_training_state
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.metrics import mean_regret

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOAL = 0.05
"""Mean P99 regret from which a policy counts as trained."""


@dataclass
class Args:
    """Lay training runs side by side: how soon, and how far, P99 regret on held-out arrivals fell.

    Runs of one --exp-name are one group, of as many seeds. What was looked at while it trained chose the policy that is
    kept, so the least regret here flatters it; `helm-rl eval p99` has arrivals that chose nothing.

    Figures written by --json, interquartile means over the seeds of a group: learning.<group>.regret (least mean regret
    of a run), learning.<group>.steps_to_goal and learning.<group>.seconds_to_goal (to the first look at which it was at
    most 5 %; of the training, without set-up and without the search for what regret is held against),
    learning.<group>.reached (share of runs that came to that), learning.<group>.seconds (of the whole training).

    Example: helm-rl eval learning runs/* --plot learning.png
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders of `helm-rl train base`."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png|svg")] = None
    """Draw the curves here."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --plot and --json files that exist."""


@dataclass(frozen=True)
class Curve:
    """One run: mean P99 regret on held-out arrivals after so many steps, both [looks], steps ascending."""

    seed: int
    steps: Floats
    regret: Floats
    seconds: float
    total_steps: int

    @property
    def steps_to_goal(self) -> float:
        """Steps to the first look with a regret of at most GOAL; infinite without any."""
        reached = np.flatnonzero(self.regret <= GOAL)
        return float(self.steps[reached[0]]) if reached.size else math.inf

    @property
    def seconds_to_goal(self) -> float:
        """Seconds of training to that look, if steps took equally long."""
        return self.seconds * self.steps_to_goal / self.total_steps


def curve_of(training: TrainingSection) -> Curve:
    """Return the curve of a run that looked at held-out arrivals."""
    looks = sorted(training.validation.regrets.items())
    per_iteration = training.steps / training.iterations
    return Curve(
        training.seed,
        np.array([iterations * per_iteration for iterations, _ in looks]),
        np.array([mean_regret(regrets.values()) for _, regrets in looks]),
        training.seconds,
        training.steps,
    )


def load_groups(paths: tuple[Path, ...]) -> dict[str, list[Curve]]:
    """Read runs and return their curves by --exp-name; UserError for a run that cannot be laid beside the others."""
    if not paths:
        raise UserError("no run was given; name run folders of 'helm-rl train base'")
    groups: dict[str, list[Curve]] = {}
    first: tuple[Path, dict[str, float]] | None = None
    for path in paths:
        training = load_training_state(path)[0].training
        if not training.validation.regrets:
            raise UserError(f"{path}: this run has not looked at held-out arrivals yet (--validate-every)")
        held = training.validation.reference_ms
        first = first or (path, held)
        if held != first[1]:
            raise UserError(
                f"{path}: was held against other arrivals than {first[0]}, so that their regrets cannot be compared"
            )
        group = groups.setdefault(str(training.arguments.get("exp_name", "")), [])
        curve = curve_of(training)
        if curve.seed in [each.seed for each in group]:
            raise UserError(f"{path}: two runs of one --exp-name have the seed {curve.seed}; give one of them")
        group.append(curve)
    words = [figure_word(name) for name in groups]
    if len(set(words)) < len(words):
        raise UserError(f"two of the --exp-name differ in punctuation alone: {', '.join(groups)}")
    return groups


def figures_of(groups: dict[str, list[Curve]]) -> dict[str, Figure]:
    """Return the figures that `Args` lists; steps and seconds are missing where a run did not come to the goal."""
    found = {}
    for name, curves in groups.items():
        key = f"learning.{figure_word(name)}"
        least = interquartile_mean([curve.regret.min() for curve in curves])
        reached = float(np.mean([math.isfinite(curve.steps_to_goal) for curve in curves]))
        found[f"{key}.regret"] = Figure(least, "ratio", "lower", GOAL)
        found[f"{key}.reached"] = Figure(reached, "share", "higher")
        found[f"{key}.seconds"] = Figure(interquartile_mean([curve.seconds for curve in curves]), "s", "lower")
        if reached == 1.0:
            steps = interquartile_mean([curve.steps_to_goal for curve in curves])
            seconds = interquartile_mean([curve.seconds_to_goal for curve in curves])
            found[f"{key}.steps_to_goal"] = Figure(steps, "steps", "lower")
            found[f"{key}.seconds_to_goal"] = Figure(seconds, "s", "lower")
    return found


def table(groups: dict[str, list[Curve]]) -> Table:
    """Return a line for each group."""
    found = Table(title="mean P99 regret on held-out arrivals, while training", title_justify="left")
    found.add_column("runs")
    for heading in ("seeds", "least regret (worst seed)", "at the last look", "steps to 5 %", "s to 5 %", "s in all"):
        found.add_column(heading, justify="right")
    figures = {name: figure.value for name, figure in figures_of(groups).items()}
    for name, curves in groups.items():
        key = f"learning.{figure_word(name)}"
        worst = max(curve.regret.min() for curve in curves)
        last = interquartile_mean([curve.regret[-1] for curve in curves])
        reached = [curve for curve in curves if math.isfinite(curve.steps_to_goal)]
        partly = f"{len(reached)} of {len(curves)} runs"
        found.add_row(
            name,
            str(len(curves)),
            f"{100 * figures[f'{key}.regret']:.1f} % ({100 * worst:.1f} %)",
            f"{100 * last:.1f} %",
            f"{figures[f'{key}.steps_to_goal']:,.0f}" if len(reached) == len(curves) else partly,
            f"{figures[f'{key}.seconds_to_goal']:,.0f}" if len(reached) == len(curves) else partly,
            f"{figures[f'{key}.seconds']:,.0f}",
        )
    return found


def draw(axes: Axes, groups: dict[str, list[Curve]]) -> None:
    """Draw each group's median over its seeds, and the band between its least and its greatest."""
    from eval.plots import INK, OTHERS

    for index, (name, curves) in enumerate(groups.items()):
        colour = OTHERS[index % len(OTHERS)].colour
        looked = sorted(set.intersection(*(set(curve.steps.tolist()) for curve in curves)))
        at = np.array([curve.regret[np.isin(curve.steps, looked)] for curve in curves]) * 100
        label = f"{name} ({counted(len(curves), 'seed')})"
        axes.plot(looked, np.median(at, axis=0), color=colour, marker="o", markersize=3, label=label)
        axes.fill_between(looked, at.min(axis=0), at.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    axes.axhline(100 * GOAL, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
    axes.set_xlabel("environment steps")
    axes.set_ylabel("mean P99 regret on held-out arrivals (%)")
    axes.set_xlim(left=0)


def main(args: Args) -> None:
    """Print the table, draw, write the figures."""
    check_outputs(args.overwrite, args.runs, plot=args.plot, json=args.json)
    groups = load_groups(args.runs)
    console().print(table(groups))
    if args.plot is not None:
        from eval.plots import page

        with page(args.plot, height_in=3.6) as figure:
            axes = figure.subplots()
            draw(axes, groups)
            axes.set_title("learning: the policy without noise, on arrivals it is not trained on", loc="left")
            axes.legend()
    if args.json is not None:
        write_figures(args.json, figures_of(groups))
