"""`helm-rl eval telemetry`: what it costs a controller in P99 that what it sees is sampled, late or lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from eval.command import console, policy_contestant
from eval.comparison import SEEDS_FROM, check_draws, steady_optimum
from eval.routing import check_bursts, find_alphas
from eval.statistics import bootstrap_interval, interquartile_mean
from eval.sweep import STEP, Work, working
from eval.wording import alpha, milliseconds
from helm_rl.control.protocol import Controller
from helm_rl.control.rules import RegimeRule
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.metrics import p99_ms
from helm_rl.scenario import Scenario, TelemetrySection, load_scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace

AS_IT_IS = "as_it_is"
OPTIONS = {
    AS_IT_IS: ("as it is", TelemetrySection()),
    "sampled_tenth": ("of a tenth of the requests", TelemetrySection(sample=0.1)),
    "sampled_hundredth": ("of a hundredth of the requests", TelemetrySection(sample=0.01)),
    "late_1s": ("1 s late", TelemetrySection(delay_s=1.0)),
    "late_5s": ("5 s late", TelemetrySection(delay_s=5.0)),
    "late_30s": ("30 s late", TelemetrySection(delay_s=30.0)),
    "lost_tenth": ("a tenth lost", TelemetrySection(loss=0.1)),
    "lost_half": ("half lost", TelemetrySection(loss=0.5)),
    "all": ("the worst of each at once", TelemetrySection(sample=0.01, delay_s=30.0, loss=0.5)),
}
"""What a controller sees: its title in the table, and the scenario's [telemetry]."""


@dataclass
class Args:
    """Serve the same arrivals under one controller that sees everything, a sample, late or lost windows.

    The controller is a bundle, or without --policy a rule: it moves alpha, at most control.rate_per_s, between the best
    statics of the base load and of the burst, found on arrivals that are not evaluated, when the hot-user ratio passes
    the middle between both regimes'.

    Figures written by --json: telemetry.<option>.p99_ms and telemetry.<option>.ratio (of it to that of as_it_is on the
    same arrivals); options: as_it_is, sampled_tenth, sampled_hundredth, late_1s, late_5s, late_30s, lost_tenth,
    lost_half, all (a hundredth, 30 s late, half lost).
    """

    scenario: str = "burst"
    """What serves under which load, on one node: a shipped scenario (the README lists them) or a TOML file."""
    policy: Path | None = None
    """Bundle folder of the controller, as `helm-rl export` writes it."""
    seeds: int = 3
    """Draws of arrivals."""
    seed: int = 1
    """Number of the first draw."""
    jobs: int = 2
    """Replays at a time; one core each."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --json if it exists."""


@dataclass(frozen=True)
class Result:
    """p99_ms: option -> P99 of each draw; controller: what decided, in a few words."""

    scenario: Scenario
    p99_ms: dict[str, list[float]]
    controller: str

    def ratios(self, option: str) -> list[float]:
        """Return the P99 of each draw over that of the same draw under full telemetry."""
        return [one / whole for one, whole in zip(self.p99_ms[option], self.p99_ms[AS_IT_IS], strict=True)]

    def figures(self) -> dict[str, Figure]:
        """Return the figures that `Args` lists: interquartile means over the draws."""
        figures = {}
        for option, tails in self.p99_ms.items():
            figures[f"telemetry.{option}.p99_ms"] = Figure(interquartile_mean(tails), "ms", "lower")
            figures[f"telemetry.{option}.ratio"] = Figure(interquartile_mean(self.ratios(option)), "", "lower")
        return figures

    def table(self) -> Table:
        """Return a line for each option."""
        table = Table(title=f"{self.scenario.name}, SLO {self.scenario.slo_ms:g} ms, {self.controller}")
        table.title_justify = "left"
        table.add_column("telemetry")
        for heading in ("P99 ms", "times that as it is", "95 % interval"):
            table.add_column(heading, justify="right")
        for option, tails in self.p99_ms.items():
            ratios = self.ratios(option)
            interval = bootstrap_interval(ratios)
            table.add_row(
                OPTIONS[option][0],
                milliseconds(interquartile_mean(tails)),
                f"{interquartile_mean(ratios):.3f}",
                "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
            )
        return table


def main(args: Args) -> None:
    """Print the table and write the figures."""
    scenario = load_scenario(args.scenario)
    check_outputs(args.overwrite, (args.scenario, args.policy), json=args.json)
    check_draws(args.seed, args.seeds)
    if args.policy is None:
        check_bursts(scenario)
    elif scenario.hardware.nodes != 1 or scenario.event:
        raise UserError(f"scenario {scenario.name} must be of one node, hardware.nodes = 1, without [[event]] tables")
    contestant = None if args.policy is None else policy_contestant(args.policy, scenario)
    with working(args.jobs) as work:
        if contestant is not None:
            start = steady_optimum(scenario, work, 1, args.seed, STEP)[1]
            result = measure(scenario, work, contestant.make, start, args.seeds, args.seed, f"policy {args.policy}")
        else:
            found = find_alphas(scenario, work, args.seed)
            rate = scenario.control.rate_per_s
            make = functools.partial(RegimeRule, found.cold, found.hot, found.threshold, rate)
            title = (
                f"a rule: alpha {alpha(found.cold)}, above a hot-user ratio of {found.threshold:.2f} {alpha(found.hot)}"
            )
            result = measure(scenario, work, make, found.cold, args.seeds, args.seed, title)
    console().print(result.table())
    if args.json is not None:
        write_figures(args.json, result.figures())


def measure(
    scenario: Scenario,
    work: Work,
    make: Callable[[], Controller],
    alpha0: float,
    seeds: int,
    first_seed: int,
    controller: str,
) -> Result:
    """Serve every draw under every option, with a controller made anew for each, from `alpha0`."""
    tails: dict[str, list[float]] = {option: [] for option in OPTIONS}
    for seed in range(first_seed, first_seed + seeds):
        work.describe(f"draw {seed}")
        trace = generate(scenario, SEEDS_FROM + seed)

        def one(option: str, trace: Trace = trace, seed: int = seed) -> float:
            seen = scenario.model_copy(update={"telemetry": OPTIONS[option][1]})
            return p99_ms(work.measured_ms(seen, trace, make(), alpha0, seed))

        for option, tail in zip(OPTIONS, work.map(one, OPTIONS), strict=True):
            tails[option].append(tail)
    return Result(scenario, tails, controller)
