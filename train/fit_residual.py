"""The residual adapter at work: it learns online, on a service that the base policy was not trained for.

    helm-rl train residual --policy bundle --scenario shifted.toml

The service is simulated, and what the adapter is told is what a service would tell it. Draws of arrivals follow each
other while it learns; then the base alone and the base with the adapter, which goes on learning, serve arrivals that
neither has seen.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import tyro
from rich.table import Table

from envs.training_traces import is_cluster
from eval.command import console, fitting_bundle
from eval.comparison import MOST_DRAWS, SEEDS_FROM
from eval.segments import gap
from eval.statistics import Floats, standard_error
from eval.sweep import Sweep, Work, half_of, sweep_adaptively, working
from helm_rl.checkpoint import POLICY_FILE, Bundle
from helm_rl.control.base import BasePolicy
from helm_rl.control.guard import Guard, Judge
from helm_rl.control.protocol import Controller, FloatArray
from helm_rl.control.residual import Learnt, Residual, ResidualSettings, on_cluster
from helm_rl.control.residual_file import ResidualOrigin, SavedResidual, save_residual
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.metrics import WindowStats, p99_ms
from helm_rl.profiles.hardware import HARDWARE
from helm_rl.scenario import Load, Scenario, for_nodes, load_scenario, scenario_hash
from train.variations import as_hard

if TYPE_CHECKING:
    from envs.serving.replay import ClusterReplay, Replay
    from helm_rl.workloads.trace import Trace

FALSIFIED = ("p99_ms", "link_busy_ns", "compute_busy_ns", "emb_margin_ms", "kv_margin_ms", "kv_margin_link_ms")
"""What false feedback is false in."""
STEP = 0.04
"""Spacing of the statics behind alpha*."""
MOST_NODES = 1024

STUDENT_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""One-sided 95 % points of Student's t for 1, 2, ... degrees of freedom; the last serves for more."""

Feedback = Literal["true", "constant", "random", "inverted", "swapped"]


@dataclass
class Args:
    """Let the residual adapter learn on a service, and hold the base policy with it against the base policy alone.

    On one node blocks of trying, of acting and of neither follow each other; with --nodes, each node has its own role
    in each block, those of neither being the control, and all nodes learn one network. The gap is the mean distance of
    alpha to the best one of each segment, settled; both serve the same arrivals. For a cluster the best ones are those
    of one node under its share of the load.

    Figures written by --json: residual.gap.{base, adapted}, residual.gap_ratio (adapted over base),
    residual.p99_ms.{base, adapted}, residual.p99_ratio, residual.p99_ratio_upper (one-sided 95 % over the draws),
    residual.learning_p99_ratio (while it learns), residual.tripped (times that the guard made it rest).
    """

    policy: Path
    """Bundle folder of the base policy."""
    scenario: str = "trend"
    """What serves under which load: a shipped scenario (the README lists them) or a TOML file."""
    load: Load = "limit"
    """The scenario's rates as they stand (near what a node bears), or moderate: 70 % of each."""
    hardware: str | None = None
    """Another hardware profile than the scenario's; with this and the next two the rates change with what a request
    takes, so that the load is about as hard."""
    link_gb_s: float | None = None
    """Another speed of the link to the embedding tables, in GB/s."""
    zipf_items: float | None = None
    """Another exponent of the items' popularity."""
    nodes: int = 1
    """Nodes behind the scenario's router, each with the scenario's load."""
    intervals: int = 3_000
    """Intervals of learning, at least, in whole draws of arrivals."""
    draws: int = 5
    """Draws of arrivals after that, on which both are measured."""
    seed: int = 1
    """Number of the first draw, and seed of what the adapter draws."""
    bound: float = ResidualSettings.bound
    """Most that the adapter moves the target, in alpha."""
    learning_rate: float = ResidualSettings.learning_rate
    """Step of the adapter's gradient ascent."""
    feedback: Feedback = "true"
    """What the adapter is told: what was measured, always the same, dice, or the contrary; swapped: true latencies, but
    the contrary of what pages are worth. The observation is true."""
    jobs: int = 2
    """Replays at a time; one core each."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Write what the adapter has then learnt here; `helm-rl export` puts it into a bundle."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --output and --json files that exist."""


class Kept:
    """A controller whose reset, at the start of each replay, keeps what it has learnt; its feedback may be false."""

    def __init__(self, adapter: Residual, feedback: Feedback, seed: int) -> None:
        self.adapter = adapter
        self._feedback = feedback
        self._rng = np.random.default_rng([seed, 0xFEED])
        self._usual: WindowStats | None = None  # the first with a P99

    def reset(self, seed: int) -> None:
        """Begin another replay."""
        self.adapter.restart(seed)

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the adapter's target."""
        return self.adapter.decide(observation, applied_alpha, now_ns)

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """Pass on what was measured, or what takes its place."""
        if math.isfinite(window.p99_ms):
            if self._usual is None:
                self._usual = window
            told = self._told(window, self._usual)
        else:
            told = {}
        self.adapter.feedback(dataclasses.replace(window, **told))

    def _told(self, window: WindowStats, usual: WindowStats) -> dict[str, Any]:
        """Return what is falsified, by the fields of a window: P99, busy times, and what pages are worth."""
        match self._feedback:
            case "true":
                return {}
            case "constant":
                return {name: getattr(usual, name) for name in FALSIFIED}
            case "random":
                return {
                    name: type(getattr(usual, name))(getattr(usual, name) * self._rng.lognormal()) for name in FALSIFIED
                }
            case "inverted":
                return {"p99_ms": usual.p99_ms**2 / window.p99_ms, **_swapped(window)}
            case "swapped":
                return _swapped(window)


def _swapped(window: WindowStats) -> dict[str, Any]:
    """Return the window with the parts of rows and of keys and values, and of link and accelerator, exchanged."""
    return {
        "link_busy_ns": window.compute_busy_ns,
        "compute_busy_ns": window.link_busy_ns,
        "emb_margin_ms": window.kv_margin_ms,
        "kv_margin_ms": window.emb_margin_ms,
        "kv_margin_link_ms": 0.0,
    }


@dataclass(frozen=True)
class Served:
    """One replay: P99, and alpha at the end of each of k intervals, of one node [k] or of N [k, N]."""

    p99_ms: float
    time_s: Floats
    alpha: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Draw:
    """One set of arrivals, served by the base alone and with the adapter; swept: for the best alpha of each segment."""

    swept: Sweep
    base: Served
    adapted: Served

    def gap(self, run: Served) -> float:
        """Return the mean |alpha - alpha*| over the settled halves of all segments."""
        settled = [(span.middle_ns, span.end_ns) for span in self.swept.part.spans]
        curves = self.swept.settled
        return gap(run, settled, [curve.best for curve in curves], [curve.flat for curve in curves]).ratio


@dataclass(frozen=True)
class Result:
    """What was measured; learning: P99 with the adapter over that of the base alone, for each draw it learnt on."""

    scenario: Scenario
    learning: list[float]
    draws: list[Draw]
    tripped: int
    may_act: bool
    learnt: Learnt | None
    seconds: float

    @property
    def p99_ratios(self) -> Floats:
        """P99 with the adapter over that of the base alone, of each draw."""
        return np.array([draw.adapted.p99_ms / draw.base.p99_ms for draw in self.draws])

    def figures(self) -> dict[str, Figure]:
        """Return the figures that `Args` lists."""
        base = float(np.mean([draw.gap(draw.base) for draw in self.draws]))
        adapted = float(np.mean([draw.gap(draw.adapted) for draw in self.draws]))
        ratios = np.log(self.p99_ratios)
        student = STUDENT_95[min(len(ratios) - 1, len(STUDENT_95)) - 1] if len(ratios) > 1 else float("nan")
        upper = float(np.exp(ratios.mean() + student * standard_error(ratios)))
        return {
            "residual.gap.base": Figure(base, "alpha", "lower"),
            "residual.gap.adapted": Figure(adapted, "alpha", "lower"),
            "residual.gap_ratio": Figure(adapted / base if base else float("nan"), "ratio", "lower", 0.75),
            "residual.p99_ms.base": Figure(float(np.mean([draw.base.p99_ms for draw in self.draws])), "ms", "lower"),
            "residual.p99_ms.adapted": Figure(float(np.mean([d.adapted.p99_ms for d in self.draws])), "ms", "lower"),
            "residual.p99_ratio": Figure(float(np.exp(ratios.mean())), "ratio", "lower"),
            "residual.p99_ratio_upper": Figure(upper, "ratio", "lower", 1.03),
            "residual.learning_p99_ratio": Figure(float(np.exp(np.mean(np.log(self.learning)))), "ratio", "lower"),
            "residual.tripped": Figure(float(self.tripped), "times", "lower"),
        }


def main(args: Args) -> None:
    """Let it learn, measure, print the table and write the figures."""
    check_args(args)
    check_outputs(args.overwrite, (args.policy, args.scenario), output=args.output, json=args.json)
    scenario = service(args)
    bundle = fitting_bundle(args.policy, scenario)
    with working(args.jobs) as work:
        result = measure(scenario, bundle, args, work)
    out = console()
    out.print(table(result, args))
    if args.output is not None:
        save(args.output, bundle, result, args)
    if args.json is not None:
        write_figures(args.json, result.figures())


def check_args(args: Args) -> None:
    """Raise UserError naming the first argument that is out of range."""
    for name, least in (("intervals", 1), ("draws", 1), ("seed", 0), ("nodes", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if args.seed + args.draws > MOST_DRAWS:  # beyond lie the arrivals of validation and of training
        raise UserError(f"--seed and --draws together must be at most {MOST_DRAWS}, got {args.seed} and {args.draws}")
    if args.hardware is not None and args.hardware not in HARDWARE:
        raise UserError(f"--hardware: {args.hardware!r} is unknown; known: {', '.join(sorted(HARDWARE))}")
    for name, most in (("link_gb_s", 10_000.0), ("zipf_items", 10.0)):
        value = getattr(args, name)
        if value is not None and not 0.0 < value <= most:
            raise UserError(f"--{name.replace('_', '-')} must be above 0 and at most {most:g}, got {value:g}")
    if args.nodes > MOST_NODES:
        raise UserError(f"--nodes must be at most {MOST_NODES}, got {args.nodes}")
    if args.nodes > 1 and args.output is not None:
        raise UserError("--output: what nodes learnt together is not kept in a file; leave --nodes out")
    settings(args)


def settings(args: Args) -> ResidualSettings:
    """Return the adapter's settings."""
    return ResidualSettings(bound=args.bound, learning_rate=args.learning_rate)


def service(args: Args) -> Scenario:
    """Return what serves: the scenario, shifted as the arguments say."""
    from helm_rl.profiles.hardware import check_fits, resolve_hardware
    from helm_rl.profiles.model import resolve_model

    scenario = load_scenario(args.scenario, args.load)
    if is_cluster(scenario):
        raise UserError(f"scenario {scenario.name} needs a cluster of its own; give one of a single node, and --nodes")
    hardware = {"profile": args.hardware, "link_gb_s": args.link_gb_s}
    load = {"zipf_items": args.zipf_items}
    shifted = scenario.model_copy(
        update={
            "hardware": scenario.hardware.model_copy(update={k: v for k, v in hardware.items() if v is not None}),
            "load": scenario.load.model_copy(update={k: v for k, v in load.items() if v is not None}),
        }
    )
    if shifted == scenario:
        return scenario
    check_fits(resolve_model(shifted.model), resolve_hardware(shifted.hardware), shifted.hardware)
    return as_hard(shifted, scenario)


def measure(scenario: Scenario, bundle: Bundle, args: Args, work: Work) -> Result:
    """Learn on draws that training has, then serve draws that evaluations have."""
    from envs.training_traces import SEEDS_FROM as TRAINING_SEEDS_FROM
    from helm_rl.workloads.generate import generate

    begun = time.perf_counter()
    serving = scenario if args.nodes == 1 else for_nodes(scenario, args.nodes)
    twins, bases = ([BasePolicy.of(bundle, scenario.control.interval_s) for _ in range(args.nodes)] for _ in range(2))
    adapters, judge = adapters_of(bases, args)
    kept = [Kept(adapter, args.feedback, args.seed + node) for node, adapter in enumerate(adapters)]
    both: list[list[Controller]] = [list(kept), list(twins)]

    def serve_both(seed: int) -> list[Served]:
        trace = generate(serving, seed=seed)
        work.plan(2)
        return work.map(lambda controllers: serve(serving, trace, controllers, work), both)

    learning, intervals, draw = [], 0, 0
    while intervals < args.intervals:
        work.describe(f"learning: {intervals:,} of {args.intervals:,} intervals")
        adapted, alone = serve_both(TRAINING_SEEDS_FROM + args.seed + draw)
        draw += 1
        learning.append(adapted.p99_ms / alone.p99_ms)
        intervals += len(alone.time_s)
    learnt = adapters[0].learnt() if args.nodes == 1 else None
    draws = []
    for index in range(args.draws):
        seed = SEEDS_FROM + args.seed + index
        work.describe(f"measuring: arrivals {index + 1} of {args.draws}")
        swept = sweep_adaptively(scenario, generate(scenario, seed=seed), work, STEP)
        adapted, alone = serve_both(seed)
        draws.append(Draw(swept, alone, adapted))
    return Result(serving, learning, draws, judge.tripped, judge.may_act, learnt, time.perf_counter() - begun)


def adapters_of(bases: Sequence[BasePolicy], args: Args) -> tuple[list[Residual], Judge]:
    """Return the adapter of each node, and their guard."""
    if len(bases) > 1:
        return on_cluster(bases, settings(args), seed=args.seed)
    adapter = Residual(bases[0], settings(args))
    adapter.reset(args.seed)
    assert isinstance(adapter.guard, Guard)
    return [adapter], adapter.guard


def serve(scenario: Scenario, trace: Trace, controllers: Sequence[Controller], work: Work) -> Served:
    """Replay the trace from an alpha of .5, with a controller for each node."""
    from envs.serving.replay import replay, replay_cluster

    half = half_of(scenario)
    found: Replay | ClusterReplay
    if len(controllers) == 1:
        found = replay(scenario, trace, controllers[0], alpha0=half, keep_windows=False)
    else:
        makers = iter(controllers)
        found = replay_cluster(scenario, trace, lambda: next(makers), alpha0=half)
    work.advance()
    return Served(p99_ms(found.latency_ms[found.measured]), found.time_s, found.alpha)


def save(path: Path, bundle: Bundle, result: Result, args: Args) -> None:
    """Write what was learnt, with what was measured."""
    measured = {name: figure.value for name, figure in result.figures().items() if math.isfinite(figure.value)}
    origin = ResidualOrigin(
        policy_sha256=bundle.config.files[POLICY_FILE],
        scenario=result.scenario.name,
        scenario_hash=scenario_hash(result.scenario),
        intervals=args.intervals,
        measured=measured,
    )
    assert result.learnt is not None
    save_residual(path, SavedResidual(result.learnt, origin))


def table(result: Result, args: Args) -> Table:
    """Return the base alone and with the adapter side by side."""
    figures = {name: figure.value for name, figure in result.figures().items()}
    state = "it acts" if result.may_act else "its guard keeps it still"
    state += f", after {result.tripped} rests" if result.tripped and result.may_act else ""
    nodes = f", {args.nodes} nodes" if args.nodes > 1 else ""
    title = (
        f"{result.scenario.name}{nodes}: base policy with a residual adapter that learnt for "
        f"{args.intervals:,} intervals from {args.feedback} feedback; {state}"
    )
    found = Table(title=title, title_justify="left")
    found.add_column("controller")
    for heading in ("distance of alpha to the best, settled", "P99 ms"):
        found.add_column(heading, justify="right")
    for name, key in (("base", "base"), ("base + residual", "adapted")):
        found.add_row(name, f"{figures[f'residual.gap.{key}']:.4f}", f"{figures[f'residual.p99_ms.{key}']:.1f}")
    upper = figures["residual.p99_ratio_upper"]
    bound = f" (at most {upper:.3f}, 95 % one-sided)" if math.isfinite(upper) else ""  # one draw has no spread
    gap = figures["residual.gap_ratio"]
    shown = f"{gap:.3f}" if math.isfinite(gap) else "-"  # no ratio to a base that never is off the best
    found.add_row("ratio", shown, f"{figures['residual.p99_ratio']:.3f}{bound}")
    found.add_row("while it learnt", "", f"{figures['residual.learning_p99_ratio']:.3f}")
    return found
