"""`helm-rl bench live`: a trace replayed in real time on the live engine, resized meanwhile, all of it checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eval.command import console, figure_table
from eval.growth import GROWTH_LIMIT_MIB, held_mib, memory_growth
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.metrics import p99_ms
from helm_rl.scenario import load_scenario
from helm_rl.workloads.trace import Trace

if TYPE_CHECKING:
    from envs.live_env import HelmLiveEnv


@dataclass
class Args:
    """Replay a trace on the wall clock, move the split at every interval, and check all that is served.

    Every embedding row is compared with its table. Every score of an hstu is compared with that of the whole request
    computed again, from the tables and without any cache; a decoder, for which a matrix product stands in, has bytes in
    its KV pages that are compared. The target goes from alpha_min to alpha_max and back as fast as the scenario's
    rate_per_s allows, so pages change owner at every interval. Exits with status 1 if a request was lost, a byte or a
    score was wrong, memory was not flat, nothing was checked or nothing moved.

    Figures written by --json: live.seconds, live.requests, live.shed, live.lost (arrived, and two minutes after the end
    neither served nor shed), live.rows_verified, live.pages_verified, live.wrong_bytes, live.scores_verified,
    live.wrong_scores, live.resizes (intervals in which pages changed owner), live.pages_moved, live.rss_growth_mib
    (least resident memory in the last third of the run less that in the first, the warm-up left out),
    live.rss_slope_mib_per_min (least squares), live.p99_ms (from scheduled arrivals; the time that checking takes is in
    it), live.engine_share (of the time that link and accelerator are busy, the part inside the cache engine).
    """

    trace: Path | None = None
    """Arrivals (Parquet, from `helm-rl trace generate` or `convert`); without it the scenario's load is generated, as
    long as is needed."""
    scenario: str = "laptop"
    """Model, pool and control: a shipped scenario of a pool that fits this machine (laptop), or a TOML file."""
    seconds: float = 600.0
    """Length of the measured run, in real time."""
    warm_s: float = 30.0
    """Real time served before it, from which memory is measured; before that, as much is served without waiting."""
    speed: float = 1.0
    """Requests arrive this many times faster than the trace says. What is served is computed twice, once to be checked:
    where that is more than this machine can do, requests queue, and hold memory while they do."""
    backend: Literal["cpu", "cuda"] = "cpu"
    """Where the pool and the network are."""
    table_rows: int = 1 << 21
    """Rows of each of the four host tables."""
    json: Path | None = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace the JSON file if it exists."""


def main(args: Args) -> None:
    """Print the table and write the figures.

    Raises:
        SystemExit: with status 1 and a sentence on stderr, where `verdict` has a complaint.
    """
    check_outputs(args.overwrite, (args.scenario, args.trace), json=args.json)
    for name, value in (("--seconds", args.seconds), ("--warm-s", args.warm_s)):
        if not 0 < value <= 86_400:  # NaN is not
            raise UserError(f"{name} must be above 0 and at most 86,400, got {value}")
    if not 0.01 <= args.speed <= 100:
        raise UserError(f"--speed must be .01 to 100, got {args.speed}")
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} s"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        figures = measure(args, progress)
    console().print(figure_table(f"Live engine, scenario {args.scenario}, backend {args.backend}", figures))
    if args.json is not None:
        write_figures(args.json, figures)
    if complaint := verdict(figures):
        raise SystemExit(f"error: {complaint}")


def verdict(figures: dict[str, Figure]) -> str | None:
    """Return what a run must not have shown, None if it is sound."""
    wrong, scores = figures["live.wrong_bytes"].value, figures["live.wrong_scores"].value
    grown = figures["live.rss_growth_mib"].value
    if figures["live.lost"].value:
        return f"{figures['live.lost'].value:,.0f} requests were neither served nor shed"
    if wrong or scores:
        return f"{wrong:,.0f} bytes and {scores:,.0f} scores served were wrong"
    checked = figures["live.pages_verified"].value + figures["live.scores_verified"].value
    if not figures["live.rows_verified"].value or not checked:
        return "no row or no request was served, so nothing was checked"
    if not figures["live.resizes"].value:
        return "no page changed owner in any interval, so nothing was checked under a resize"
    if not grown <= GROWTH_LIMIT_MIB:  # NaN is not
        return f"memory is not flat: it grew by {grown:,.1f} MiB, and {GROWTH_LIMIT_MIB:g} are allowed"
    return None


def measure(args: Args, progress: Progress) -> dict[str, Figure]:
    """Run and return the figures; `progress` gets a task that counts seconds."""
    from envs.live_env import HelmLiveEnv

    scenario = load_scenario(args.scenario)
    interval_s = scenario.control.interval_s
    warm, steps = (max(1, round(seconds / interval_s)) for seconds in (args.warm_s, args.seconds))
    if args.trace is None:  # as long as it takes, with what comes before the measured run
        needed = (2 * warm + steps + 2) * interval_s * args.speed
        scenario = scenario.model_copy(update={"seconds": max(scenario.seconds, needed)})
    env = HelmLiveEnv(
        scenario,
        None if args.trace is None else Trace.load(args.trace),
        (warm + steps) * interval_s,
        backend=args.backend,
        speed=args.speed,
        table_rows=args.table_rows,
        verify=True,
        warm_s=args.warm_s,
    )
    try:
        # What comes before the measured run: served without waiting, then in real time.
        ahead = min(warm, max(0, env.intervals - warm - steps))
        if env.intervals < ahead + warm + steps:
            raise UserError(
                f"{args.trace} lasts {env.intervals * interval_s:g} s at speed {args.speed:g}; --warm-s and --seconds "
                f"ask for {(warm + steps) * interval_s:g}"
            )
        return _replay(env, ahead, warm, steps, progress)
    finally:
        env.close()


def _replay(env: HelmLiveEnv, ahead: int, warm: int, steps: int, progress: Progress) -> dict[str, Figure]:
    from eval.live.lost import lost

    control = env.scenario.control
    target = 0.5 * (control.alpha_min + control.alpha_max)
    stride = control.rate_per_s * control.interval_s
    env.reset(seed=0, options={"start": ahead, "alpha": target})
    task = progress.add_task("warm-up", total=(warm + steps) * control.interval_s)
    action = 1.0
    resizes = moved = 0
    time_s, rss_mib = [], []
    for k in range(warm + steps):
        if k == warm:
            progress.update(task, description="measured")
            start = env.totals
            first_ns = env.node.now_ns
        target += action * stride
        if not control.alpha_min - 1e-9 <= target <= control.alpha_max + 1e-9:
            action, target = -action, target - 2 * action * stride
        _, _, _, over, info = env.step(np.array([action], np.float32))
        progress.advance(task, control.interval_s)
        if k >= warm:
            moved += info["window"].moved_pages
            resizes += info["window"].moved_pages > 0
            time_s.append((env.node.now_ns - first_ns) * 1e-9)
            rss_mib.append(held_mib())
        # A machine that is late takes several intervals in one step.
        if over:
            break
    if not time_s:
        raise UserError("the warm-up took all of the time: this machine is far too slow for the load; lower --speed")
    end = env.totals
    node = env.node
    last_ns = node.now_ns
    out = lost(node, first_ns, last_ns)
    served_ms = node.latency_ms[(node.trace.arrival_ns >= first_ns) & (node.trace.arrival_ns < last_ns)]
    served_ms[np.isnan(served_ms)] = np.inf
    growth, slope = memory_growth(np.array(time_s), np.array(rss_mib))
    busy_s = end.busy_s - start.busy_s
    return {
        "live.seconds": Figure(time_s[-1], "s", "higher"),
        "live.requests": Figure(end.requests - start.requests, "", "higher"),
        "live.shed": Figure(end.shed - start.shed, "", "lower"),
        "live.lost": Figure(out, "", "lower", 0.0),
        "live.rows_verified": Figure(end.rows_verified - start.rows_verified, "", "higher"),
        "live.pages_verified": Figure(end.pages_verified - start.pages_verified, "", "higher"),
        "live.wrong_bytes": Figure(end.wrong_bytes, "", "lower", 0.0),
        "live.scores_verified": Figure(end.scores_verified - start.scores_verified, "", "higher"),
        "live.wrong_scores": Figure(end.wrong_scores, "", "lower", 0.0),
        "live.resizes": Figure(resizes, "", "higher", float(len(time_s))),
        "live.pages_moved": Figure(moved, "", "higher"),
        "live.rss_growth_mib": Figure(growth, "MiB", "lower", GROWTH_LIMIT_MIB),
        "live.rss_slope_mib_per_min": Figure(60 * slope, "MiB/min", "lower"),
        "live.p99_ms": Figure(p99_ms(served_ms), "ms", "lower"),
        "live.engine_share": Figure((end.engine_s - start.engine_s) / busy_s if busy_s else math.nan, "", "lower"),
    }
