"""`helm-rl eval headroom`: what adapting alpha could gain on a trace of one's own, or on a scenario's load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import tyro
from rich.table import Table

from eval.capacity import MOST, Capacity, capacity, compressed_trace, scaled_load
from eval.command import console
from eval.comparison import SEEDS_FROM, check_draws, draw_arrivals, steady_optimum
from eval.reference import EFFORT, PROGRAMMED, SEGMENTS, Effort, Reference, reference, segment_optimum
from eval.segments import LEAST_SEGMENT_REQUESTS, FlatSet, Run
from eval.statistics import standard_error
from eval.sweep import STEP, Sweep, Work, alpha_grid, sweep_adaptively, working
from eval.wording import alpha as alpha_text
from eval.wording import flat_set, milliseconds, percent
from helm_rl.control.protocol import Controller
from helm_rl.control.schedule import ScheduledAlpha
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.metrics import shed_ms
from helm_rl.scenario import Load, load_scenario

if TYPE_CHECKING:
    from helm_rl.scenario import Scenario
    from helm_rl.workloads.trace import Trace

LONG_REQUESTS = 300_000
"""Requests from which a trace is a long one: its statics are twice as far apart."""
CPU_SECONDS_PER_MILLION = 1_500.0
"""15 minutes on two cores, for a million requests, of which the search keeps both busy for five sixths. CPU time: what
else runs on the machine changes no result."""
LAST_PASS = 1.7
"""What a search costs at most over its budget, for a pass that has begun is finished."""
CAPACITY_REPLAYS = 20
"""What the capacities cost at most, in replays."""
LEAST_REQUESTS_TIMED = 100_000
"""A trace is given the time of this many requests at the least."""
WORTH = 0.05
"""Headroom from which adapting is called worth it."""
DEPLOYABLE_WORTH = 0.1
"""What it must gain on the deployable static to be worth it where the load is not known beforehand."""
BLOCK_S = 10.0
MOST_BLOCKS = 1_000
RESAMPLES = 1_000
BIN = 0.0025
"""Width of a bin of the bootstrap's histograms, in ln latency."""
MOST_ROWS = 24
"""Segments in the table; of more, as many are picked evenly."""


@dataclass
class Args:
    """Say what adapting alpha could gain on one's own traffic: against the best static, and against a deployable one.

    On a recorded trace, or without one on the scenario's own load over several draws. Replays the statics, searches
    offline for the best schedule of alpha over time, with all arrivals known and transitions included, and bisects for
    the load that each can bear. Takes below 15 minutes per million requests on two cores.

    Figures written by --json: headroom.value (1 - P99 of the reference schedule / P99 of the best static in hindsight),
    headroom.error (one standard error), headroom.shift (largest alpha* of a segment less the smallest),
    headroom.flat_shift (the same from flat set to flat set), headroom.p99_vs_deployable (P99 of the reference over that
    of the deployable static), headroom.p99_ms.{reference, hindsight_static, deployable_static, segment_optimum},
    headroom.alpha.{hindsight_static, deployable_static}, headroom.capacity.{reference, hindsight_static,
    deployable_static} (multiples of the load), headroom.replays (of the first draw's sweep and search).

    Example: helm-rl eval headroom mytrace.parquet --scenario burst --plot headroom.png
    """

    trace: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TRACE.parquet]")] = None
    """Recorded arrivals, from `helm-rl trace convert` or `generate` (default: the scenario's own load)."""
    scenario: str = "burst"
    """What serves under which SLO: a shipped scenario (the README lists them) or a TOML file."""
    load: Load = "limit"
    """The scenario's rates as they stand (near what a node bears), or moderate: 70 % of each."""
    seeds: int | None = None
    """Draws of the scenario's load, at least 1; more narrow the error (default: 3)."""
    seed: int = 1
    """Number of the first draw."""
    step: float | None = None
    """Spacing of the statics around each minimum (default: 0.02, and 0.04 from 300,000 requests on)."""
    replays: int | None = None
    """Replays' worth of requests after which the search begins no further pass (default: 50, fewer on a slow machine).
    """
    jobs: int = 2
    """Replays at a time; one core each."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png|svg")] = None
    """Draw the best alpha of each segment, the reference and the P99s over time here (the first draw)."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures here, for machines."""
    overwrite: bool = False
    """Replace --plot and --json files that exist."""


@dataclass(frozen=True)
class Room:
    """What one set of arrivals leaves to be won.

    deployable: alpha of the static that could have been set beforehand; effort: of the search for the reference;
    replays: what all this cost, in whole replays.
    """

    swept: Sweep
    optimum: Run
    reference: Reference
    deployable: float
    effort: Effort
    replays: float

    @property
    def static(self) -> Run:
        """The best static in hindsight."""
        return self.swept.runs[self.swept.hindsight]

    @property
    def value(self) -> float:
        """Headroom: 1 - P99 of the reference / P99 of the best static in hindsight."""
        return 1.0 - self.reference.p99_ms / self.static.p99_ms

    @property
    def shift(self) -> float:
        """How far alpha* moves between the segments."""
        stars = [curve.best for curve in self.swept.settled]
        return max(stars) - min(stars)

    @property
    def flat_shift(self) -> float:
        """How far apart the flat sets of two segments lie at most; 0 where any two of them meet."""
        flats = [curve.flat for curve in self.swept.settled]
        return max(_distance(one, other) for one in flats for other in flats)

    @property
    def p99_vs_deployable(self) -> float:
        """P99 of the reference over that of the deployable static."""
        return self.reference.p99_ms / self.swept.runs[self.deployable].p99_ms


@dataclass(frozen=True)
class Headroom:
    """The whole answer. error: one standard error of the headroom; capacities: by controller, on the first draw."""

    scenario: Scenario
    name: str
    recorded: bool
    rooms: tuple[Room, ...]
    error: float
    capacities: dict[str, Capacity]
    step: float

    @property
    def value(self) -> float:
        """Mean headroom over the draws."""
        return float(np.mean([room.value for room in self.rooms]))

    @property
    def p99_vs_deployable(self) -> float:
        """Mean ratio over the draws."""
        return float(np.mean([room.p99_vs_deployable for room in self.rooms]))

    def figures(self) -> dict[str, Figure]:
        """Every figure by name; P99s, alphas and shifts are means over the draws."""

        def mean(values: Sequence[float]) -> float:
            return float(np.mean(values))

        rooms = self.rooms
        found = {
            "headroom.value": Figure(self.value, "ratio", "higher"),
            "headroom.error": Figure(self.error, "ratio", "lower"),
            "headroom.shift": Figure(mean([room.shift for room in rooms]), "alpha", "lower"),
            "headroom.flat_shift": Figure(mean([room.flat_shift for room in rooms]), "alpha", "lower"),
            "headroom.p99_vs_deployable": Figure(self.p99_vs_deployable, "ratio", "lower"),
            "headroom.replays": Figure(rooms[0].replays, "replays", "lower"),
        }
        for name in CONTROLLERS:
            value = mean([_run(room, name).p99_ms for room in rooms])
            found[f"headroom.p99_ms.{name}"] = Figure(value, "ms", "lower")
        alphas = {
            "hindsight_static": [room.swept.hindsight for room in rooms],
            "deployable_static": [room.deployable for room in rooms],
        }
        for name, values in alphas.items():
            found[f"headroom.alpha.{name}"] = Figure(mean(values), "alpha", "lower")
        for name, each in self.capacities.items():
            found[f"headroom.capacity.{name}"] = Figure(each.multiple, "x load", "higher")
        return found


CONTROLLERS = {
    "reference": "reference schedule",
    "hindsight_static": "best static, in hindsight",
    "deployable_static": "deployable static",
    "segment_optimum": "per-segment optimum",
}


def main(args: Args) -> None:
    """Print the answer, then the tables; write the files asked for."""
    found = evaluate(args)
    out = console()
    out.print(answer(found))
    out.print(controller_table(found))
    out.print(segment_table(found))
    for line in footnotes(found):
        out.print(line, style="dim")


def evaluate(args: Args) -> Headroom:
    """Check the arguments, measure, write the files asked for; UserError for what does not fit, before any replay."""
    scenario = load_scenario(args.scenario, args.load)
    if args.trace is not None and args.seeds not in (None, 1):
        raise UserError(
            f"--seeds {args.seeds}: a recorded trace is one set of arrivals; leave --seeds out with a trace"
        )
    seeds = 1 if args.trace is not None else args.seeds if args.seeds is not None else 3
    check_draws(args.seed, seeds)
    if args.replays is not None and args.replays < 0:
        raise UserError(f"--replays must be at least 0, got {args.replays}")
    alpha_grid(scenario.control.alpha_min, scenario.control.alpha_max, args.step or STEP)
    check_outputs(args.overwrite, (args.scenario, args.trace), json=args.json, plot=args.plot)
    recorded = None
    if args.trace is not None:
        from helm_rl.workloads.trace import Trace

        recorded = Trace.load(args.trace)
    with working(args.jobs) as work:
        found = headroom(scenario, work, recorded, seeds, args.seed, args.step, args.replays)
    if args.plot is not None:
        from eval.plots import draw_headroom

        first = found.rooms[0]
        runs = {title: _run(first, name) for name, title in CONTROLLERS.items() if name != SEGMENTS}
        draw_headroom(args.plot, scenario, found.name, first.swept, first.reference.run, runs)
    if args.json is not None:
        write_figures(args.json, found.figures())
    return found


def headroom(
    scenario: Scenario,
    work: Work,
    recorded: Trace | None = None,
    seeds: int = 3,
    first_seed: int = 1,
    step: float | None = None,
    replays: float | None = None,
) -> Headroom:
    """Measure the headroom on a recorded trace, or on several draws of the scenario's load, and the capacities.

    step: spacing of the statics, None: by the length of the trace; replays: budget of each search, None: by the time.
    """
    seed = SEEDS_FROM + first_seed
    first = recorded if recorded is not None else draw_arrivals(scenario, seed)
    step = step if step is not None else STEP if len(first) < LONG_REQUESTS else 2 * STEP
    deployable = None
    if recorded is None:
        _, deployable = steady_optimum(scenario, work, min(seeds, 2), first_seed, step)
    rooms: list[Room] = []
    effort = EFFORT if replays is None else Effort(replays=float(replays))
    for index in range(seeds):
        work.describe(f"arrivals {index + 1} of {seeds}")
        trace = first if index == 0 else draw_arrivals(scenario, seed + index)
        rooms.append(measure(scenario, trace, work, step, effort, deployable, timed=replays is None))
    work.describe("error")
    error = standard_error([room.value for room in rooms])
    if seeds == 1:
        error = _bootstrap_error(scenario, first, work, rooms[0])
    work.describe("capacity")
    capacities = _capacities(scenario, first, work, rooms[0], None if recorded is not None else seed)
    name = scenario.name if recorded is None else recorded.meta.name
    return Headroom(scenario, name, recorded is not None, tuple(rooms), error, capacities, step)


def measure(
    scenario: Scenario,
    trace: Trace,
    work: Work,
    step: float = STEP,
    effort: Effort = EFFORT,
    deployable: float | None = None,
    timed: bool = False,
) -> Room:
    """Measure one set of arrivals: statics .1 apart, then `step` around the minima, then the search.

    Arguments:
        deployable: alpha of the deployable static; None: the best one on the first quarter of the arrivals.
        timed: make the search smaller where the machine, by the time that the statics took, is too slow for it.
    """
    begun_s = time.process_time()
    also = [] if deployable is None else [deployable]
    swept = sweep_adaptively(scenario, trace, work, step, also, opening=deployable is None)
    schedule = segment_optimum(trace, swept)
    (optimum,) = work.run(scenario, trace, swept.part, [(schedule, float(schedule.alphas[0]), 0)])
    if timed:
        spent_s = time.process_time() - begun_s
        left_s = CPU_SECONDS_PER_MILLION * max(len(trace), LEAST_REQUESTS_TIMED) * 1e-6 - spent_s
        possible = (left_s / (spent_s / (len(swept.runs) + 1)) - CAPACITY_REPLAYS) / LAST_PASS
        if possible < effort.replays:
            effort = replace(effort, replays=float(max(0, int(possible))))
    best = reference(scenario, trace, swept, optimum, work, effort)
    cost = len(swept.runs) + 1 + best.replays + (best.programmed is not None)
    return Room(swept, optimum, best, swept.opening.best if deployable is None else deployable, effort, cost)


def _run(room: Room, name: str) -> Run:
    """The replay of one of CONTROLLERS."""
    match name:
        case "reference":
            return room.reference.run
        case "hindsight_static":
            return room.static
        case "deployable_static":
            return room.swept.runs[room.deployable]
        case _:
            return room.optimum


def _distance(one: FlatSet, other: FlatSet) -> float:
    """Distance between two flat sets, 0 where they meet."""
    return min(max(low - top, bottom - high, 0.0) for low, high in one for bottom, top in other)


def _bootstrap_error(scenario: Scenario, trace: Trace, work: Work, room: Room) -> float:
    """Standard error of the headroom over resampled blocks of time; static and reference stay what they are."""
    alpha = room.swept.hindsight
    schedule, alpha0 = room.reference.schedule, room.reference.alpha0
    starts: list[tuple[Controller, float]] = [(StaticAlpha(alpha), alpha), (schedule, alpha0)]
    static_ms, reference_ms = work.map(lambda start: work.measured_ms(scenario, trace, *start), starts)
    arrival_ns = trace.arrival_ns[room.swept.part.first :]
    block = (arrival_ns - arrival_ns[0]) // round(_block_s(room) * 1e9)
    return bootstrap_error(static_ms, reference_ms, block)


def _block_s(room: Room) -> float:
    return max(BLOCK_S, room.swept.part.seconds / MOST_BLOCKS)


def bootstrap_error(
    static_ms: npt.NDArray[np.floating], reference_ms: npt.NDArray[np.floating], block: npt.NDArray[np.int64]
) -> float:
    """Standard deviation of 1 - P99(reference) / P99(static) over resamples of the blocks, drawn with replacement.

    All [n], of the same requests; block counts from 0. P99s are read from histograms whose bins are BIN wide.
    """
    blocks = int(block.max()) + 1
    low = float(np.log(min(static_ms.min(), reference_ms.min())))
    rng = np.random.default_rng(0)
    weights = rng.multinomial(blocks, np.full(blocks, 1.0 / blocks), size=RESAMPLES).astype(np.float32)
    p99 = []
    for latency_ms in (static_ms, reference_ms):
        place = ((np.log(latency_ms) - low) / BIN).astype(np.int64)
        used, place = np.unique(place, return_inverse=True)
        counts = np.zeros((blocks, used.size), np.float32)
        np.add.at(counts, (block, place), 1.0)
        total = np.cumsum((weights @ counts).astype(np.float64), axis=1)
        p99.append(low + BIN * used[(total < 0.99 * total[:, -1:]).sum(axis=1)])
    return float(np.std(1.0 - np.exp(p99[1] - p99[0])))


def _capacities(scenario: Scenario, trace: Trace, work: Work, room: Room, seed: int | None) -> dict[str, Capacity]:
    """Capacity of the statics and of the reference's schedule, on one draw's seed or on the recorded trace itself.

    The schedule stays as it was found: with a compressed trace it is compressed, too.
    """
    load = partial(scaled_load, scenario, seed) if seed is not None else partial(compressed_trace, scenario, trace)
    schedule = room.reference.schedule

    def follow(multiple: float) -> Controller:
        divisor = 1.0 if seed is not None else multiple
        return ScheduledAlpha(np.floor(schedule.times_ns / divisor).astype(np.int64), schedule.alphas)

    def hold(alpha: float, multiple: float) -> Controller:
        return StaticAlpha(alpha)

    asked: dict[str, tuple[Callable[[float], Controller], float]] = {
        "reference": (follow, room.reference.alpha0),
        "hindsight_static": (partial(hold, room.swept.hindsight), room.swept.hindsight),
        "deployable_static": (partial(hold, room.deployable), room.deployable),
    }
    found = work.map(lambda each: capacity(load, each[0], each[1], work), asked.values())
    return dict(zip(asked, found, strict=True))


def answer(found: Headroom) -> str:
    """The result in a sentence, and whether adapting is worth it."""
    rooms = found.rooms
    where = f"On this trace ({found.name})" if found.recorded else f"On the load of scenario {found.name}"
    hindsight = ", ".join(dict.fromkeys(alpha_text(room.swept.hindsight) for room in rooms))
    deployable = alpha_text(rooms[0].deployable)
    price_ms = float(shed_ms(found.scenario.slo_ms))

    def draws(shed: int) -> str:
        return "" if shed == len(rooms) else f" in {shed} of {len(rooms)} draws"

    if lost := sum(room.reference.p99_ms == price_ms for room in rooms):
        return (
            f"{where} every static sheds more than 1 % of the requests{draws(lost)}, and so does the best schedule "
            "found: P99 is the price of shedding, whatever alpha does. Give the node less load, or more hardware, and "
            "ask again."
        )
    against = 1.0 - found.p99_vs_deployable
    error = f" (± {percent(found.error)})" if np.isfinite(found.error) else ""
    text = (
        f"{where} adapting alpha would lower P99 by {percent(found.value)}{error} at most, as far as an offline search "
        f"finds, against the best static in hindsight, {hindsight}; against {deployable}, the static that could have "
        f"been deployed without knowing the load, by {percent(against)}. "
    )
    if rescued := sum(room.static.p99_ms == price_ms for room in rooms):
        text += (
            f"Every static sheds more than 1 % of the requests{draws(rescued)}, which counts as a P99 of "
            f"{price_ms:,.0f} ms; the schedule does not. "
        )
    spread = 2.0 * found.error if np.isfinite(found.error) else 0.0
    if found.value - spread >= WORTH:
        return text + "Worth it."
    if found.value + spread >= WORTH:
        return text + "It may be worth it: the error leaves that open; more draws or a longer trace would tell."
    if against >= DEPLOYABLE_WORTH:
        return text + f"Worth it only as long as nobody can tell the load beforehand; else set alpha to {hindsight}."
    return text + f"Not worth it: set alpha to {hindsight}."


def controller_table(found: Headroom) -> Table:
    """One line per controller: alpha, P99, what it is to the best static, SLO, the load it can bear."""
    table = Table(title=f"{found.name}: what each could do, SLO {found.scenario.slo_ms:g} ms", title_justify="left")
    table.add_column("controller")
    for heading in ("alpha", "P99 ms", "to the best static", "within SLO", "bears, x this load"):
        table.add_column(heading, justify="right")
    figures = found.figures()
    best = figures["headroom.p99_ms.hindsight_static"].value
    for name, title in CONTROLLERS.items():
        alphas = figures.get(f"headroom.alpha.{name}")
        p99 = figures[f"headroom.p99_ms.{name}"].value
        slo = float(np.mean([_run(room, name).slo for room in found.rooms]))
        bears = "-"
        if name in found.capacities:
            each = found.capacities[name]
            bears = f"{each.multiple:.2f}" if each.multiple < MOST else f"{MOST:g} or more"
        table.add_row(
            title,
            alpha_text(alphas.value) if alphas is not None else "moves",
            milliseconds(p99),
            f"{100 * (p99 / best - 1):+.1f} %",
            f"{100 * slo:.2f} %",
            bears,
        )
    return table


def segment_table(found: Headroom) -> Table:
    """One line per segment of the first draw: alpha*, its spread over the draws, flat set, the reference's alpha."""
    from eval.plots import spread

    first = found.rooms[0]
    table = Table(title="the best alpha of each segment", title_justify="left")
    table.add_column("segment")
    for heading in ("from s", "to s", "alpha*", "noise floor", "flat set", "P99 at alpha*, ms", "reference, mean"):
        table.add_column(heading, justify="right")
    spans = first.swept.part.spans
    stars = np.array([[curve.best for curve in room.swept.settled] for room in found.rooms])
    time_s, applied = first.reference.run.time_s, first.reference.run.alpha
    for index in spread(len(spans), MOST_ROWS):
        span, curve = spans[index], first.swept.settled[index]
        inside = (time_s > span.start_ns / 1e9) & (time_s <= span.end_ns / 1e9)
        table.add_row(
            span.label,
            f"{span.start_ns / 1e9:.0f}",
            f"{span.end_ns / 1e9:.0f}",
            alpha_text(float(stars[:, index].mean())),
            f"{stars[:, index].std(ddof=1):.3f}" if len(stars) > 1 else "-",
            flat_set(curve.flat),
            milliseconds(float(curve.smooth_ms.min())),
            f"{applied[inside].mean():.2f}" if inside.any() else "-",
        )
    return table


def footnotes(found: Headroom) -> list[str]:
    """How it was found, and what a reader must know to read it rightly."""
    rooms = found.rooms
    shift, flat = (float(np.mean([getattr(room, name) for room in rooms])) for name in ("shift", "flat_shift"))
    room = rooms[0]
    effort = room.effort
    won = sum(each.reference.winner == PROGRAMMED for each in rooms)
    best = room.reference
    finer = " and ".join(f"{step:g}" for step in effort.finer)
    lines = [
        f"Alpha* shifts by {shift:.2f} between segments; from flat set to flat set (within 2 % of the least P99) by "
        f"{flat:.2f}.",
        f"Reference: the best of {len(room.swept.runs)} statics ({found.step:g} apart around the minima), the "
        "per-segment optimum and a schedule sought by dynamic programming, the last being the best on "
        f"{won} of {len(rooms)}: pieces of {best.piece_s:.0f} s, alphas {finer} apart around the best known and "
        f"{effort.step:g} apart everywhere, {best.replays:.0f} replays' worth (--replays {effort.replays:.0f}). It is "
        "no bound.",
    ]
    if len(rooms) > 1:
        lines.append(f"The error is the standard error over {len(rooms)} draws of arrivals.")
    else:
        lines.append(
            f"The error comes from resampling blocks of {_block_s(room):.0f} s of the trace, with static and reference "
            "as they are: it knows nothing of what another day would bring."
        )
    if found.recorded:
        lines.append(
            "The deployable static is the best one on the first quarter of these arrivals. A multiple of the load is "
            "the trace with all times divided, pauses of users included."
        )
    else:
        lines.append(
            f"The deployable static is the best one on the base load alone ({found.scenario.load.rate:g} requests/s), "
            "other arrivals. A multiple of the load has all its rates multiplied."
        )
    lines.append(
        "Capacity (what each bears): the largest load at which P99 stays within the SLO, to 2 %; the reference's "
        "schedule stays as it was found at this load." + ("" if len(rooms) == 1 else " On the first draw.")
    )
    if room.swept.part.sparse:
        lines.append(
            f"{room.swept.part.sparse} segments with fewer than {LEAST_SEGMENT_REQUESTS} requests in a half have no "
            "alpha*; their requests count."
        )
    return lines
