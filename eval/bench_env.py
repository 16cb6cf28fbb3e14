"""`helm-rl bench env`: how many requests a second the simulator serves on one core, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eval.command import console, figure_table
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import refuse_existing

GOAL_REQUESTS_PER_S = 30_000.0
MOST_SECONDS = 86_400.0


@dataclass
class Args:
    """Time the simulator in CPU time of one thread: requests/s of a scenario, of its base load and of its phases alone.

    Figures written by --json: env.requests_per_s (the scenario), env.requests_per_s.cold (its base load alone),
    env.requests_per_s.hot (its phases alone), env.row_lookups_per_s (simulated row lookups inside the loop),
    env.rows_per_s (rows they stand for), env.interval_us (Python around the compiled loop, per decision interval),
    env.share.{rows,lookups,kv,rest} (shares of the loop's time).
    """

    scenario: str = "burst"
    """Shipped scenario (burst, conversation, laptop, steady, trend) or TOML file."""
    seconds: float = 240.0
    """Length of the load that is served, warm-up included."""
    repeats: int = 3
    """Times each load is served; the fastest counts, for what else runs on the machine only slows it down."""
    json: Path | None = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace the JSON file if it exists."""


def main(args: Args) -> None:
    """Print the table and write the figures."""
    if args.json is not None:
        refuse_existing(args.json, args.overwrite)
        if args.json.is_dir():
            raise UserError(f"{args.json} is a folder; name a file")
    if not 1 <= args.seconds <= MOST_SECONDS:  # NaN is not
        raise UserError(f"--seconds must lie in 1 to {MOST_SECONDS:,.0f}, got {args.seconds}")
    if args.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {args.repeats}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        figures, notes = measure(args, progress)
    out = console()
    out.print(figure_table(f"Simulator on one core, scenario {args.scenario}", figures))
    for note in notes:
        out.print(note)
    if args.json is not None:
        write_figures(args.json, figures)


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
    figures["env.row_lookups_per_s"] = Figure(served.lookups / stages["lookups"], "1/s", "higher")
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
