"""`helm-rl eval reward`: how good a teacher each candidate for the reward is, by its bias and its noise.

A reward teaches P99 if what it calls best is what P99 calls best (bias), and if a few intervals are enough to tell a
good alpha from one beside it (noise). Both are measured on statics: no policy takes part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import tyro
from rich.table import Table

from eval.command import console
from eval.comparison import figure_word
from eval.segments import measured_part, reduce_replay
from eval.statistics import Floats
from eval.sweep import Work, alpha_grid, curve, working
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.metrics import WindowStats, p99_ms
from helm_rl.scenario import Scenario, load_scenario

APART = 0.08
"""Distance of the two alphas that a reward is asked to tell apart."""
SIGMAS = 1.96

Latencies = npt.NDArray[np.float32]
Teach = Callable[[WindowStats, Latencies, float], float]
"""From a window, the latencies of what arrived in it (ms, at least one) and the SLO (ms) to a reward."""


def _per_request(window: WindowStats, total: float) -> float:
    return total / max(window.completed, 1)


def _log(window: WindowStats, latency_ms: Latencies, slo_ms: float) -> float:
    return -_per_request(window, window.log_latency_sum)


def _excess(window: WindowStats, latency_ms: Latencies, slo_ms: float) -> float:
    return -float(np.clip(latency_ms / slo_ms - 1.0, 0.0, 10.0).mean())


def _demand(window: WindowStats, latency_ms: Latencies, slo_ms: float) -> float:
    return -(window.link_busy_ns + window.compute_busy_ns) * 1e-6 / max(window.arrivals, 1) / slo_ms


def _within(window: WindowStats, latency_ms: Latencies, slo_ms: float) -> float:
    return 1.0 - _per_request(window, window.slow)


def _tail(window: WindowStats, latency_ms: Latencies, slo_ms: float) -> float:
    return -p99_ms(latency_ms) / slo_ms


def _ours(window: WindowStats, latency_ms: Latencies, slo_ms: float) -> float:
    from envs.training_traces import tail_loss  # the simulator compiles kernels

    return -tail_loss(window)


def _power(exponent: float) -> Teach:
    def teach(window: WindowStats, latency_ms: Latencies, slo_ms: float) -> float:
        return -float(np.mean(np.minimum(latency_ms / slo_ms, 2.0) ** exponent))

    return teach


def _log_power(window: WindowStats, latency_ms: Latencies, slo_ms: float) -> float:
    return math.log(-_power(4.0)(window, latency_ms, slo_ms) + 1e-12) / -4.0


CANDIDATES: dict[str, tuple[str, Teach]] = {
    "p99": ("P99 of the interval", _tail),
    "log": ("mean log latency", _log),
    "log_tail": ("mean log latency + 4 x mean excess", lambda *a: _log(*a) + 4.0 * _excess(*a)),
    "excess": ("mean excess", _excess),
    "within_slo": ("share within the SLO", _within),
    "paper": ("share within the SLO, less P99's excess", lambda *a: _within(*a) + min(_tail(*a) + 1.0, 0.0)),
    "power_1": ("mean latency", _power(1.0)),
    "power_2": ("mean squared latency", _power(2.0)),
    "power_3": ("mean cubed latency", _power(3.0)),
    "power_4": ("mean latency to the 4th", _power(4.0)),
    "power_5": ("mean latency to the 5th", _power(5.0)),
    "power_8": ("mean latency to the 8th", _power(8.0)),
    "log_power": ("log of mean latency to the 4th", _log_power),
    "demand": ("link and accelerator time per request", _demand),
    "ours": ("ln(1 + mean latency to the 4th / .25)", _ours),
}
"""What could be rewarded: its title, and how it is computed.

Excess: latency / SLO - 1, from 0 to 10. Powers are of latency / SLO, which counts as 2 at the most, but for ours, the
reward of our environments, in which it grows on beyond, by its log.
"""


@dataclass
class Args:
    """Measure how biased and how noisy each candidate for the training's reward is against P99.

    Statics are replayed on arrivals of the training's kind. In the settled half of each segment a candidate has a best
    alpha; its bias is the distance to alpha*, where P99 is least, and p99_given_up what P99 is above its least there.
    intervals: how many, of the scenario's, are needed to tell alpha* from an alpha .08 beside it at 1.96 standard
    errors; paired: on the same arrivals. Medians over the segments, of which some never tell them apart (infinite).

    Figures written by --json: reward.<scenario>.<candidate>.{bias, p99_given_up, intervals, intervals_paired};
    candidates: p99, log, log_tail, excess, within_slo, paper, power_1, power_2, power_3, power_4, power_5, power_8,
    log_power, demand, ours.
    """

    scenario: tuple[str, ...] = ("burst", "trend", "steady")
    """Scenarios: shipped ones (the README lists them) or TOML files."""
    draws: int = 1
    """Draws of arrivals of each."""
    step: float = 0.04
    """Spacing of the statics; it must divide .08."""
    jobs: int = 2
    """Replays at a time; one core each."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --json if it exists."""


@dataclass(frozen=True)
class Lesson:
    """What one candidate says in one segment.

    bias: its best alpha less alpha*; given_up: P99 at its best alpha over the least, less 1; intervals, paired: to tell
    alpha* from the alpha beside it, infinite where it prefers that one.
    """

    bias: float
    given_up: float
    intervals: float
    paired: float


Lessons = dict[str, list[Lesson]]
"""By candidate, what it says in each segment."""


def main(args: Args) -> None:
    """Print the table and write the figures."""
    scenarios = _check(args)
    lessons: dict[str, Lessons] = {scenario.name: {name: [] for name in CANDIDATES} for scenario in scenarios}
    with working(args.jobs) as work:
        for scenario in scenarios:
            for draw in range(args.draws):
                work.describe(f"{scenario.name}, draw {draw + 1}: statics")
                for name, found in learn_from(scenario, draw, args.step, work).items():
                    lessons[scenario.name][name] += found
    out = console()
    for title, of_scenario in lessons.items():
        out.print(table(title, of_scenario))
    if args.json is not None:
        write_figures(args.json, figures(lessons))


def _check(args: Args) -> list[Scenario]:
    """Return the scenarios; UserError for any argument that does not fit, before the first replay."""
    scenarios = [load_scenario(name) for name in args.scenario]
    check_outputs(args.overwrite, args.scenario, json=args.json)
    if not scenarios:
        raise UserError("--scenario needs at least one scenario")
    names = [figure_word(scenario.name) for scenario in scenarios]
    if len(set(names)) < len(names):
        raise UserError(f"--scenario: two of them have one name in the figures: {', '.join(names)}")
    if args.draws < 1:
        raise UserError(f"--draws must be at least 1, got {args.draws}")
    for scenario in scenarios:
        low, high = scenario.control.alpha_min, scenario.control.alpha_max
        alpha_grid(low, high, args.step)
        if high - low < APART:
            raise UserError(
                f"scenario {scenario.name}: control.alpha_min = {low:g} and alpha_max = {high:g} lie less than "
                f"{APART:g} apart, the distance of the two alphas that are told apart"
            )
    if abs(APART / args.step - round(APART / args.step)) > 1e-9:
        raise UserError(f"--step must divide {APART:g}, got {args.step}")
    return scenarios


def learn_from(scenario: Scenario, draw: int, step: float, work: Work) -> Lessons:
    """Return what each candidate says in each segment of one draw of arrivals, which no evaluation has."""
    from envs.serving.replay import Replay, replay
    from envs.training_traces import SEEDS_FROM
    from helm_rl.workloads.generate import generate

    trace = generate(scenario, seed=SEEDS_FROM + draw)
    part = measured_part(trace)
    for span in part.spans:
        if span.end_ns - span.middle_ns < 2e9 * scenario.control.interval_s:
            raise UserError(
                f"scenario {scenario.name}: the second half of segment {span.label}, from {span.middle_ns / 1e9:g} to "
                f"{span.end_ns / 1e9:g} s, is shorter than 2 intervals of {scenario.control.interval_s:g} s, so their "
                "scatter is unknown; lower control.interval_s"
            )
    alphas = alpha_grid(scenario.control.alpha_min, scenario.control.alpha_max, step)
    work.plan(len(alphas))

    def one(alpha: float) -> Replay:
        found = replay(scenario, trace, StaticAlpha(alpha), alpha0=alpha)
        work.advance()
        return found

    replays = work.map(one, alphas)
    settled_ms = np.array([reduce_replay(each, trace, part, scenario.slo_ms).settled_p99_ms for each in replays])
    ends_ns = np.array([window.end_ns for window in replays[0].windows])
    cuts = np.searchsorted(trace.arrival_ns, [replays[0].windows[0].start_ns, *ends_ns])
    rewards = {name: np.empty((len(alphas), ends_ns.size)) for name in CANDIDATES}
    for row, each in enumerate(replays):
        latencies = [each.latency_ms[a:b] if b > a else np.zeros(1, np.float32) for a, b in itertools.pairwise(cuts)]
        for name, (_, teach) in CANDIDATES.items():
            rewards[name][row] = [
                teach(window, own, scenario.slo_ms) for window, own in zip(each.windows, latencies, strict=True)
            ]
    found: Lessons = {name: [] for name in CANDIDATES}
    for index, span in enumerate(part.spans):
        tail = curve(alphas, settled_ms[:, index], step)
        inside = (ends_ns > span.middle_ns) & (ends_ns <= span.end_ns)
        for name, all_rewards in rewards.items():
            found[name].append(lesson(np.array(alphas), all_rewards[:, inside], tail.best, tail.smooth_ms, step))
    return found


def lesson(alphas: Floats, rewards: Floats, best: float, tail_ms: Floats, step: float) -> Lesson:
    """Hold one candidate against P99 in one segment.

    Args:
        alphas: [k], ascending, `step` apart.
        rewards: [k, intervals], on the same arrivals.
        best: alpha*; tail_ms: [k], the smoothed P99 that is least there.
    """
    # Not smoothed: beside a cliff a smooth curve rises above all of its points.
    chosen = int(np.argmax(rewards.mean(axis=1)))
    at = int(np.argmin(np.abs(alphas - best)))
    far = round(APART / step)
    beside = at + far if at + far < alphas.size else at - far
    gain = rewards[at] - rewards[beside]
    spread = rewards[at].var(ddof=1) + rewards[beside].var(ddof=1)
    return Lesson(
        bias=float(alphas[chosen] - best),
        given_up=float(tail_ms[chosen] / tail_ms.min() - 1.0),
        intervals=needed(float(gain.mean()), float(spread)),
        paired=needed(float(gain.mean()), float(gain.var(ddof=1))),
    )


def needed(gain: float, variance: float) -> float:
    """Return how many intervals tell a mean gain from none; infinite where there is no gain."""
    return SIGMAS**2 * variance / gain**2 if gain > 0 else math.inf


def figures(lessons: dict[str, Lessons]) -> dict[str, Figure]:
    """Return the figures that `Args` lists: medians over the segments of each scenario."""
    found = {}
    for scenario, candidates in lessons.items():
        for name, each in candidates.items():
            values = {
                ("bias", "alpha"): [abs(one.bias) for one in each],
                ("p99_given_up", "ratio"): [one.given_up for one in each],
                ("intervals", "intervals"): [one.intervals for one in each],
                ("intervals_paired", "intervals"): [one.paired for one in each],
            }
            for (key, unit), measured in values.items():
                value = float(np.median(measured))
                found[f"reward.{figure_word(scenario)}.{name}.{key}"] = Figure(value, unit, "lower")
    return found


def table(scenario: str, lessons: Lessons) -> Table:
    """Return a line for each candidate."""
    segments = len(next(iter(lessons.values())))
    found = Table(title=f"{scenario}: what rewards teach in {segments} segments (medians)", title_justify="left")
    found.add_column("reward")
    for heading in ("|bias|, alpha", "mean bias", "P99 given up", "worst", "intervals", "paired"):
        found.add_column(heading, justify="right")
    for name, each in lessons.items():
        given_up = [one.given_up for one in each]
        found.add_row(
            CANDIDATES[name][0],
            f"{np.median([abs(one.bias) for one in each]):.3f}",
            f"{np.mean([one.bias for one in each]):+.3f}",
            f"{100 * np.median(given_up):.1f} %",
            f"{100 * max(given_up):.0f} %",
            _count(float(np.median([one.intervals for one in each]))),
            _count(float(np.median([one.paired for one in each]))),
        )
    return found


def _count(intervals: float) -> str:
    return "never" if math.isinf(intervals) else f"{math.ceil(intervals):,}"
