"""`helm-rl bench telemetry`: what the telemetry of many nodes costs through racks and by samples, and what it loses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from envs.serving.cluster import ClusterSim
from eval.cluster_telemetry import InFull, Interval, Nodes, Seen, Summarised
from eval.command import console, policy_contestant
from helm_rl import racks
from helm_rl.control.protocol import Controller, FloatArray, Resuming
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.latency import SKETCH_BINS, SKETCH_WIDTH, sketches_p99_ms
from helm_rl.metrics import WindowStats, p99_ms
from helm_rl.observation import OBSERVATION_NAMES
from helm_rl.scenario import Scenario, for_nodes, load_scenario
from helm_rl.workloads.generate import generate

SCENARIO = "burst"
WARM_S = 5.0
RAMP_S = 4.0
BASE_SHARE = 0.4
"""Of the time, which the base load has for itself before the burst."""
MOST_NODES = 4096
PAGE_KIB, SAMPLED_SLOTS = 8192, 1 << 14
"""Larger pages and fewer sampled rows than `eval routing` has: a node's state takes 4 MiB then."""
COLD, HOT = 0.6, 0.3
FULL = "full"
WAYS = {
    FULL: "each latency",
    "flat": "summaries",
    "racks": "through racks",
    "half": "1/2 of nodes",
    "quarter": "1/4 of nodes",
    "eighth": "1/8 of nodes",
}
SHARES = {"half": 1 / 2, "quarter": 1 / 4, "eighth": 1 / 8}
_HOT_USERS, _P99 = (OBSERVATION_NAMES.index(name) for name in ("hot_user_ratio", "p99_over_slo"))


@dataclass
class Args:
    """Serve Burst on many nodes, and bring their telemetry to one place in several ways at once, each interval.

    In full, every node sends its counters and each request's latency. Else it sends counters and a histogram: to the
    centre, or to its rack, which adds up what comes and sends one message on; all nodes, or some of each rack, drawn
    anew each interval. Messages are made, read and added up for real, one after another in this process. The base load
    is served alone for two fifths of the time, then comes the burst. All nodes follow the decision upon the full
    telemetry; what would be decided upon the others is compared with it. The controller is a bundle, or without
    --policy a rule: alpha falls from .6 to .3 as the share of hot users rises from 0 to 1.

    Figures written by --json: telemetry.<nodes>.<way>.<figure>; ways: full, flat, racks, half, quarter, eighth. Of an
    interval in the median: centre_bytes, rack_bytes (that come in at the centre, and at all racks together), node_us,
    rack_us, centre_us (a core's time for one node, for one rack, for the centre with its observation). In the mean:
    signal_error (of the signal that is most off; signals lie within 0 and 1, one within -1 and 1), p99_error (as a
    share of the P99 that is observed, up to four times the SLO), alpha_error (of one decision, from the alpha that is
    applied); bound_held (share of signals that are off by no more than the bound of 95 % that comes with a sample).
    telemetry.<nodes>.sketch_error: by how much an interval's P99 from the histograms is off at most, as a share.
    """

    nodes: tuple[int, ...] = (32, 128, 512, 1024)
    """Sizes of the cluster; of 1,024 nodes the state takes 4 GiB."""
    rack_nodes: int = 8
    """Nodes of a rack."""
    seconds: float = 20.0
    """Seconds that are served and measured, after 5 to warm up."""
    policy: Path | None = None
    """Bundle folder of the controller, as `helm-rl export` writes it."""
    seed: int = 1
    """Of the arrivals, and of which nodes report."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --json if it exists."""


class ByHotUsers:
    """Alpha by the share of hot users alone, at once: an error in the one is an error in the other."""

    def reset(self, seed: int) -> None:
        """There is nothing to forget."""

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the rule's target."""
        return COLD + (HOT - COLD) * float(observation[_HOT_USERS])

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """What was measured changes nothing but the observation."""


@dataclass
class Track:
    """What came of each interval in one way: what was seen, and the target, decided upon from the applied alpha."""

    seen: list[Seen] = field(default_factory=list)
    target: list[float] = field(default_factory=list)

    def observations(self) -> npt.NDArray[np.float64]:
        """Return all observations, [k, 17]."""
        return np.array([one.observation for one in self.seen], np.float64)

    def median(self, name: str) -> float:
        """Return the median of a field of `Seen`."""
        return float(np.median([getattr(one, name) for one in self.seen]))


@dataclass(frozen=True)
class Result:
    """Of one size of cluster. tracks: by way, of the intervals after the warm-up."""

    nodes: int
    tracks: dict[str, Track]
    sketch_error: float

    def signal_errors(self, way: str) -> npt.NDArray[np.float64]:
        """Return by how much each signal is off in the mean, [17]."""
        off = np.abs(self.tracks[way].observations() - self.tracks[FULL].observations())
        mean: npt.NDArray[np.float64] = off.mean(0)
        return mean

    def p99_error(self, way: str) -> float:
        """Return by how much the observed P99 is off in the mean, as a share of it."""
        ours, full = (self.tracks[one].observations()[:, _P99] for one in (way, FULL))
        return float(np.abs(ours / full - 1.0).mean())

    def alpha_error(self, way: str) -> float:
        """Return by how much the target is off in the mean."""
        return float(np.abs(np.subtract(self.tracks[way].target, self.tracks[FULL].target)).mean())

    def bound_held(self, way: str) -> float:
        """Return how many signals are off by no more than their bound, of those that are off or could be."""
        track = self.tracks[way]
        off = np.abs(track.observations() - self.tracks[FULL].observations())
        bound = np.array([one.bound for one in track.seen])
        open_ = (off > 0.0) | (bound > 0.0)
        return float((off <= bound)[open_].mean())

    def figures(self) -> dict[str, Figure]:
        """Return the figures that `Args` lists."""
        figures = {
            f"telemetry.{self.nodes}.sketch_error": Figure(self.sketch_error, "", "lower", math.expm1(SKETCH_WIDTH))
        }
        for way, track in self.tracks.items():
            prefix = f"telemetry.{self.nodes}.{way}"
            for name in ("centre_bytes", "rack_bytes"):
                figures[f"{prefix}.{name}"] = Figure(track.median(name), "B", "lower")
            for name in ("node_us", "rack_us", "centre_us"):
                figures[f"{prefix}.{name}"] = Figure(track.median(name), "us", "lower")
            if way != FULL:
                figures[f"{prefix}.signal_error"] = Figure(float(self.signal_errors(way).max()), "", "lower")
                figures[f"{prefix}.p99_error"] = Figure(self.p99_error(way), "", "lower")
                figures[f"{prefix}.alpha_error"] = Figure(self.alpha_error(way), "", "lower")
            if way in SHARES:
                figures[f"{prefix}.bound_held"] = Figure(self.bound_held(way), "", "higher", 0.95)
        return figures

    def table(self, controller: str) -> Table:
        """Return a line for each way."""
        table = Table(title=f"{self.nodes} nodes, {controller}; an interval of a second", title_justify="left")
        table.add_column("telemetry")
        headings = (
            "KB: centre",
            "racks",
            "us: node",
            "rack",
            "centre",
            "signal most off",
            "P99 off",
            "alpha off",
            "bounded",
        )
        for heading in headings:
            table.add_column(heading, justify="right")
        for way, track in self.tracks.items():
            row = [WAYS[way]]
            row += [f"{track.median(name) / 1e3:,.1f}" for name in ("centre_bytes", "rack_bytes")]
            row += [f"{track.median(name):,.0f}" for name in ("node_us", "rack_us", "centre_us")]
            if way != FULL:
                errors = self.signal_errors(way)
                worst = int(errors.argmax())
                row.append(f"{OBSERVATION_NAMES[worst]} {errors[worst]:.4f}" if errors[worst] > 0 else "none")
                row += [f"{100 * self.p99_error(way):.2f} %", f"{self.alpha_error(way):.4f}"]
            if way in SHARES:
                row.append(f"{100 * self.bound_held(way):.0f} %")
            table.add_row(*row)
        return table


def main(args: Args) -> None:
    """Print a table for each size and write the figures."""
    check_outputs(args.overwrite, (args.policy,), json=args.json)
    if not args.nodes or not all(2 <= nodes <= MOST_NODES for nodes in args.nodes):
        raise UserError(f"--nodes {' '.join(map(str, args.nodes))}: expected sizes of 2 to {MOST_NODES} nodes")
    if not 1 <= args.rack_nodes <= MOST_NODES:
        raise UserError(f"--rack-nodes {args.rack_nodes}: expected 1 to {MOST_NODES}")
    if not 5.0 <= args.seconds <= 3600.0:
        raise UserError(f"--seconds {args.seconds:g}: expected 5 to 3,600")
    make: Callable[[], Controller] = ByHotUsers
    title = f"alpha {COLD:g} to {HOT:g} by the share of hot users"
    if args.policy is not None:
        make, title = policy_contestant(args.policy, load_scenario(SCENARIO)).make, f"policy {args.policy}"
    figures: dict[str, Figure] = {}
    for nodes in args.nodes:
        result = _measured(args, nodes, make)
        console().print(result.table(title))
        figures |= result.figures()
    if args.json is not None:
        write_figures(args.json, figures)


def _measured(args: Args, nodes: int, make: Callable[[], Controller]) -> Result:
    """Measure one size behind a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("intervals"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{nodes} nodes", total=None)

        def advance(done: int, of: int) -> None:
            progress.update(task, completed=done, total=of)

        return measure(scenario_of(nodes, args.seconds), args.rack_nodes, make, args.seed, advance)


def scenario_of(nodes: int, seconds: float) -> Scenario:
    """Return Burst on so many nodes, the base load alone first, and then the burst until the end."""
    scenario = load_scenario(SCENARIO)
    start_s = BASE_SHARE * seconds
    phase = scenario.load.phase[0].model_copy(
        update={"start_s": start_s, "ramp_s": min(RAMP_S, (seconds - start_s) / 2), "seconds": seconds - start_s}
    )
    update = {
        "seconds": seconds,
        "warm_s": WARM_S,
        "load": scenario.load.model_copy(update={"phase": (phase,)}),
        "hardware": scenario.hardware.model_copy(update={"page_kib": PAGE_KIB}),
    }
    return for_nodes(scenario.model_copy(update=update), nodes)


def measure(
    scenario: Scenario,
    rack_nodes: int,
    make: Callable[[], Controller],
    seed: int,
    advance: Callable[[int, int], None] = lambda done, of: None,
) -> Result:
    """Serve the scenario, and look at every interval in all ways; `advance` takes intervals done, and in all."""
    nodes = scenario.hardware.nodes
    served = Nodes(ClusterSim(scenario, generate(scenario, seed), COLD, max_sampled_slots=SAMPLED_SLOTS))
    cluster = served.cluster
    ways: dict[str, InFull | Summarised] = {
        FULL: InFull(scenario.slo_ms),
        "flat": Summarised(scenario.slo_ms, nodes, None),
        "racks": Summarised(scenario.slo_ms, nodes, rack_nodes),
    }
    ways |= {way: Summarised(scenario.slo_ms, nodes, rack_nodes, share, seed) for way, share in SHARES.items()}
    pilot, controllers = make(), {way: make() for way in ways}
    for controller in (pilot, *controllers.values()):
        controller.reset(seed)
    tracks = {way: Track() for way in ways}
    interval_ns = round(scenario.control.interval_s * 1e9)
    start_ns, from_ns = cluster.now_ns, cluster.trace.meta.measure_from_ns
    intervals = (cluster.end_ns - start_ns) // interval_ns
    sketch_error = 0.0
    for k in range(intervals):
        interval = served.run(start_ns + (k + 1) * interval_ns)
        alpha = float(cluster.alpha.mean())
        for way, look in ways.items():
            seen, controller = look.see(interval), controllers[way]
            if way == FULL:
                cluster.set_targets([pilot.decide(seen.observation, alpha, cluster.now_ns)] * nodes)
            if cluster.now_ns > from_ns:
                # A policy adds to its own target: without a common start, errors would pile up that serving corrects.
                if isinstance(controller, Resuming):
                    controller.resume(alpha)
                tracks[way].seen.append(seen)
                tracks[way].target.append(controller.decide(seen.observation, alpha, cluster.now_ns))
        sketch_error = max(sketch_error, _sketch_error(interval))
        advance(k + 1, intervals)
    return Result(nodes, tracks, sketch_error)


def _sketch_error(interval: Interval) -> float:
    """Return by how much the P99 of all that completed is off by the histogram's bins, as a share of it."""
    latency_ms = np.concatenate(interval.latency_ms)
    if latency_ms.size == 0:
        return 0.0
    counts = np.zeros((1, SKETCH_BINS))
    racks.count_latencies(counts, np.zeros(latency_ms.size, np.int64), latency_ms)
    return abs(float(sketches_p99_ms(counts)[0]) / p99_ms(latency_ms) - 1.0)
