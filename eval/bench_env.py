"""`helm-rl bench env`: how many requests a second the simulator serves on one core, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eval.command import console, figure_table
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs

GOAL_REQUESTS_PER_S = 30_000.0
GOAL_LOOKUPS_PER_S = 8e6
MOST_SECONDS = 86_400.0


@dataclass
class Args:
    """Time the simulator in CPU time of one thread: requests/s of a scenario, of its base load and of its phases alone.

    Figures written by --json: env.requests_per_s (the scenario), env.requests_per_s.cold (its base load alone),
    env.requests_per_s.hot (its phases alone), env.row_lookups_per_s (simulated row lookups inside the loop),
    env.rows_per_s (rows they stand for), env.interval_us (Python around the compiled loop, per decision interval),
    env.share.{rows,lookups,kv,rest} (shares of the loop's time).
    With --cluster, Steady at 100 requests/s a node with 5 requests a visit: env.requests_per_s.cluster32 (32 nodes, one
    core), env.cost_us.<nodes>_nodes (of a request, 1 to 128 nodes), env.cost_growth_1_to_128 (128 nodes against one),
    env.two_cores (what two clusters on two threads serve in a second over what one does on one; wall time),
    env.two_cores.arithmetic (the same of plain arithmetic: what the machine lets two threads do).
    With --hour, an hour of 32 nodes in a process of its own: env.hour_s (generating it included),
    env.hour_generate_s, env.hour_gb (peak memory), env.hour_requests.
    """

    scenario: str = "burst"
    """A shipped scenario (the README lists them) or a TOML file."""
    seconds: float = 240.0
    """Length of the load that is served, warm-up included."""
    repeats: int = 3
    """Times each load is served; the fastest counts, for what else runs on the machine only slows it down."""
    cluster: bool = False
    """Also measure clusters of 1 to 128 nodes; about 2 minutes."""
    hour: bool = False
    """Also simulate an hour of 32 nodes at 100 requests/s each; about 3 minutes."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png|svg")] = None
    """Draw the cost of a request over the number of nodes here; needs --cluster."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --json and --plot files that exist."""


def main(args: Args) -> None:
    """Print the table and write the figures."""
    check_outputs(args.overwrite, (args.scenario,), json=args.json, plot=args.plot)
    if args.plot is not None and not args.cluster:
        raise UserError("--plot draws what --cluster measures; add --cluster")
    if not 1 <= args.seconds <= MOST_SECONDS:  # NaN is not
        raise UserError(f"--seconds must lie in 1 to {MOST_SECONDS:,.0f}, got {args.seconds}")
    if args.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {args.repeats}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        figures, notes = measure(args, progress)
        clusters = _measure_clusters(args, progress)
    out = console()
    out.print(figure_table(f"Simulator on one core, scenario {args.scenario}", figures))
    for note in notes:
        out.print(note)
    if clusters:
        out.print(figure_table("Clusters, Steady at 100 requests/s a node", clusters))
        figures |= clusters
    if args.json is not None:
        write_figures(args.json, figures)


def _measure_clusters(args: Args, progress: Progress) -> dict[str, Figure]:
    """Measure what --cluster and --hour ask for."""
    from eval import cluster_speed

    figures: dict[str, Figure] = {}
    if args.cluster:
        nodes = cluster_speed.NODES
        task = progress.add_task("clusters", total=len(nodes) + args.repeats)

        def advance() -> None:
            progress.advance(task)

        costs_us = cluster_speed.measure_growth(nodes, args.repeats, advance)
        figures |= cluster_speed.growth_figures(nodes, costs_us)
        figures |= cluster_speed.two_cores_figures(*cluster_speed.measure_two_cores(args.repeats, advance))
        if args.plot is not None:
            cluster_speed.plot_growth(nodes, costs_us, args.plot)
    if args.hour:
        task = progress.add_task("an hour of 32 nodes", total=1)
        figures |= cluster_speed.measure_hour()
        progress.advance(task)
    return figures


def measure(args: Args, progress: Progress) -> tuple[dict[str, Figure], list[str]]:
    """Serve the loads; return the figures, and a sentence for each that was left out.

    `progress` gets a task that counts the runs.
    """
    from envs.serving.stages import stage_seconds
    from helm_rl.scenario import Scenario, load_scenario

    scenario = load_scenario(args.scenario)
    warm_s = min(scenario.warm_s, args.seconds / 4)
    fields = scenario.model_dump() | {"seconds": max(scenario.seconds, args.seconds), "warm_s": warm_s}
    whole = Scenario.model_validate(fields)
    load = whole.load.model_dump()
    parts: dict[str, Any] = {}
    if whole.load.rate > 0:
        parts["cold"] = load | {"phase": ()}
    if whole.load.phase:
        # The base load cannot be left out: it is the scenario's. A thousandth of it stays.
        parts["hot"] = load | {"rate": load["rate"] / 1000, "rate_end": None}
    task = progress.add_task("serving", total=(1 + len(parts)) * (args.repeats + 1) + 1)

    def advance() -> None:
        progress.advance(task)

    figures: dict[str, Figure] = {}
    notes: list[str] = []
    served = _serve(whole, args, advance)
    figures["env.requests_per_s"] = Figure(served.requests / served.seconds, "1/s", "higher", GOAL_REQUESTS_PER_S)
    for name, part in parts.items():
        alone = _serve(Scenario.model_validate(fields | {"load": part}), args, advance)
        if name == "hot" and not alone.phase_requests:
            notes.append(
                f"env.requests_per_s.hot is left out: the first {args.seconds:g} s have no request of a phase; raise "
                "--seconds."
            )
            continue
        figures[f"env.requests_per_s.{name}"] = Figure(alone.requests / alone.seconds, "1/s", "higher")
    progress.update(task, description="stages")
    stages = stage_seconds(served.node, served.requests, args.repeats)
    advance()
    figures["env.row_lookups_per_s"] = Figure(served.lookups / stages["lookups"], "1/s", "higher", GOAL_LOOKUPS_PER_S)
    figures["env.rows_per_s"] = Figure(served.rows / served.seconds, "1/s", "higher")
    figures["env.interval_us"] = Figure(served.interval_us, "us", "lower")
    rest = max(0.0, served.seconds - sum(stages.values()))
    for name, seconds in [*stages.items(), ("rest", rest)]:
        figures[f"env.share.{name}"] = Figure(seconds / served.seconds, "", "lower")
    return figures, notes


@dataclass
class _Served:
    node: Any
    requests: int
    phase_requests: int
    seconds: float  # inside the compiled loop
    lookups: int
    rows: float
    interval_us: float


def _serve(scenario: Any, args: Args, advance: Callable[[], None]) -> _Served:
    """Serve the first `args.seconds` of the scenario's load with alpha .5, some times; return the fastest.

    `advance` is called after each.
    """
    from envs.serving.node import NodeSim
    from helm_rl.observation import ObservationBuilder
    from helm_rl.workloads.generate import generate

    trace = generate(scenario, seed=scenario.seed)
    start = int(trace.arrival_ns[0])
    node = NodeSim(scenario, trace)
    builder = ObservationBuilder(scenario.slo_ms)
    served_phases = trace.phase[trace.arrival_ns < start + args.seconds * 1e9]
    phase_requests = int(np.count_nonzero(served_phases))  # 0 is the base load
    interval_ns = round(scenario.control.interval_s * 1e9)
    best: _Served | None = None
    for _ in range(args.repeats + 1):  # the first compiles and warms up
        node.reset(0.5)
        before = node.simulated_lookups
        rows = loop_s = 0.0
        requests = 0
        python_us = []
        while node.now_ns < start + args.seconds * 1e9:
            begun = time.thread_time()
            window = node.run(node.now_ns + interval_ns)
            ran = time.thread_time()
            builder.update(window)
            loop_s += ran - begun
            python_us.append((time.thread_time() - ran) * 1e6)
            requests += window.arrivals
            rows += window.rows
        lookups = node.simulated_lookups - before
        served = _Served(node, requests, phase_requests, loop_s, lookups, rows, float(np.median(python_us)))
        if best is None or served.seconds < best.seconds:
            best = served
        advance()
    assert best is not None
    return best
