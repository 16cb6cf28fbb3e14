"""`helm-rl bench control`: the control process over HTTP beside a live engine, under every fault, and killed."""

from __future__ import annotations

import math
import queue
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from eval.command import console, figure_table, fitting_bundle
from eval.control.faults import BAD_BUNDLE, END, FAULTS, GOOD_BUNDLE, KILL, beats
from eval.control.process import ControlProcess
from eval.control.proxy import FaultProxy
from eval.growth import GROWTH_LIMIT_MIB, held_mib, memory_growth
from helm_rl.checkpoint import POLICY_FILE, BoundsSection
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.metrics import shed_ms
from helm_rl.runtime.counters import Cause
from helm_rl.runtime.server import HookServer
from helm_rl.scenario import Scenario, load_scenario
from helm_rl.shipped import bundle_path

if TYPE_CHECKING:
    from envs.serving.live import LiveNode

GAP_LIMIT_S = 2.0
"""Serving has stopped where nothing completes for longer; at the scenario's rate the longest pause is a tenth of it."""
_GAP = 2  # sound answers between faults
_LATE = 1.7  # intervals that a late answer takes
_SLACK_S = 240.0  # of load beyond --seconds: cycles are not cut short, and a process takes time to start
_SILENCE_S = 60.0  # without an answer asked for, something is wrong


@dataclass
class Args:
    """Serve a load on the live engine while `helm-rl control` drives its alpha over HTTP through a proxy of faults.

    Every embedding row served is compared with its table, and every score of an hstu with that of the whole request
    computed again from the tables without any cache; of a decoder, for which a matrix product stands in, KV pages are.
    Cycle after cycle the proxy injects every kind of fault (eval/control/faults.py), the bundle is replaced by a bad
    one and by a good one, and the process is killed and started again. Exits with status 1 if alpha left its bounds,
    serving stopped, a fault was not counted by its cause, an interval was missed, a bad bundle was not refused, a good
    one not taken, the process did not end with status 0 when it was asked to, a request was lost, what was served was
    wrong, no page changed owner, or memory was not flat.

    Figures written by --json: control.seconds, control.cycles, control.requests (served), control.shed, control.lost
    (arrived, and two minutes after the end neither served nor shed), control.rows_verified, control.pages_verified,
    control.wrong_bytes, control.scores_verified, control.wrong_scores, control.pages_moved, control.rss_growth_mib (of
    this process, from its second cycle on: least of the last third of the samples less that of the first),
    control.longest_gap_s (between completions), control.alpha_asked_min, control.alpha_asked_max,
    control.alpha_applied_min, control.alpha_applied_max, control.intervals, control.decisions,
    control.intervals_missed, control.decision_mean_us (observation included), control.injected.<fault>,
    control.refused.<cause> (readings), control.fallbacks.<cause> (intervals), control.uncounted (faults that were not
    counted as they should), control.targets_unapplied, control.kills, control.reloads_ok, control.reloads_bad,
    control.log_lines, control.log_lines_wrong, control.exit_status.
    """

    bundle: tyro.conf.Positional[Path]
    """The bundle folder that drives alpha; it is copied, and the copy is what gets spoilt."""
    scenario: str = "laptop"
    """Model, pool, control and load: a shipped scenario of a pool that fits this machine (laptop), or a TOML file."""
    seconds: float = 600.0
    """Least length of the run, in real time; the cycle of faults that is under way is finished."""
    interval_s: float = 0.5
    """Seconds between decisions, one that the policy was trained for."""
    compute_scale: float = 0.25
    """Times the compute time of the scenario's profile that the stand-in for the model takes."""
    speed: float = 1.0
    """Requests arrive this many times faster than the scenario says. What is served is computed twice, once to be
    checked: where that is more than this machine can do, requests queue, and hold memory while they do."""
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
    args = replace(args, bundle=bundle_path(args.bundle))
    check_outputs(args.overwrite, (args.scenario, args.bundle), json=args.json)
    if not 0 < args.seconds <= 86_400:  # NaN is not
        raise UserError(f"--seconds must be above 0 and at most 86,400, got {args.seconds}")
    if not 0.01 <= args.speed <= 100:
        raise UserError(f"--speed must be .01 to 100, got {args.speed}")
    if not 0.005 <= args.interval_s <= 10:  # as in a scenario
        raise UserError(f"--interval-s must be .005 to 10, got {args.interval_s}")
    given = load_scenario(args.scenario)
    control = given.control.model_copy(update={"interval_s": args.interval_s})
    needed = given.warm_s + args.speed * (args.seconds + _SLACK_S)
    longer = {"seconds": max(given.seconds, needed), "control": control}
    scenario = Scenario.model_validate(given.model_copy(update=longer).model_dump())
    bounds = fitting_bundle(args.bundle, scenario).config.bounds
    with Progress(
        *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} s")),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        figures = measure(args, scenario, bounds, progress)
    console().print(figure_table(f"Control beside a live engine, scenario {args.scenario}", figures))
    if args.json is not None:
        write_figures(args.json, figures)
    if complaint := verdict(figures, bounds):
        raise SystemExit(f"error: {complaint}")


def verdict(figures: dict[str, Figure], bounds: BoundsSection) -> str | None:
    """Return what a run must not have shown, None if it is sound."""
    value = {name.removeprefix("control."): figure.value for name, figure in figures.items()}
    if not bounds.alpha_min <= value["alpha_asked_min"] <= value["alpha_asked_max"] <= bounds.alpha_max:
        return (
            f"alpha from {value['alpha_asked_min']:g} to {value['alpha_asked_max']:g} was asked for, and the bounds "
            f"are {bounds.alpha_min:g} and {bounds.alpha_max:g}"
        )
    if value["longest_gap_s"] > GAP_LIMIT_S:
        return f"serving stopped for {value['longest_gap_s']:.2f} s"
    never = [fault.name for fault in FAULTS if not value[f"injected.{fault.name}"]]
    if never:
        return f"{', '.join(never)} never happened, so nothing was checked"
    if value["uncounted"]:
        return f"{value['uncounted']:,.0f} faults were not counted by their causes"
    if value["intervals_missed"]:
        return f"{value['intervals_missed']:,.0f} intervals were missed"
    if not value["kills"] == value["reloads_ok"] == value["reloads_bad"] == value["cycles"]:
        return "in each cycle a bad bundle must be refused and a good one taken, and in one they were not"
    if value["decisions"] < value["intervals"] / 3:
        return "fewer than a third of the intervals had a decision, though most answers were sound"
    if value["log_lines_wrong"] or value["exit_status"]:
        return (
            f"{value['log_lines_wrong']:,.0f} lines of its log were no JSON, and it ended with status "
            f"{value['exit_status']:,.0f}"
        )
    if value["lost"]:
        return f"{value['lost']:,.0f} requests were neither served nor shed"
    if value["wrong_bytes"] or value["wrong_scores"]:
        return f"{value['wrong_bytes']:,.0f} bytes and {value['wrong_scores']:,.0f} scores served were wrong"
    if not (value["rows_verified"] and value["pages_verified"] + value["scores_verified"] and value["pages_moved"]):
        return "no row, no page or score was served, or no page changed owner, so nothing was checked"
    if not value["rss_growth_mib"] <= GROWTH_LIMIT_MIB:  # NaN is not
        return f"memory is not flat: it grew by {value['rss_growth_mib']:,.1f} MiB, {GROWTH_LIMIT_MIB:g} are allowed"
    return None


def measure(args: Args, scenario: Scenario, bounds: BoundsSection, progress: Progress) -> dict[str, Figure]:
    """Run and return the figures; `progress` gets a task that counts seconds."""
    from envs.serving.live import LiveNode
    from envs.serving.live_adapter import LiveAdapter
    from helm_rl.workloads.generate import generate

    task = progress.add_task("preparing", total=args.seconds)
    node = LiveNode(
        scenario,
        generate(scenario, seed=scenario.seed),
        speed=args.speed,
        compute_scale=args.compute_scale,
        table_rows=args.table_rows,
        verify=True,
    )
    try:
        begin_ns = node.trace.meta.measure_from_ns
        node.reset(0.5 * (bounds.alpha_min + bounds.alpha_max), begin_ns, round(scenario.warm_s * 1e9))
        adapter = LiveAdapter(node)
        hooks = HookServer(adapter)
        proxy = FaultProxy(hooks.url, beats(_GAP), _LATE * args.interval_s)
        try:
            run = _Run(args, scenario, proxy)
            run.go(progress, task)
            served = _served(node, begin_ns)
        finally:
            proxy.close()
            hooks.close()
        return run.figures() | served | _alphas(adapter.asked, adapter.applied, bounds)
    finally:
        node.close()


class _Run:
    """The process through its lives, and what it has counted in all of them."""

    def __init__(self, args: Args, scenario: Scenario, proxy: FaultProxy) -> None:
        self._args, self._slo_ms, self._proxy = args, scenario.slo_ms, proxy
        self._counted: Counter[str] = Counter()
        self._reloads: Counter[str] = Counter()
        self._cycles = self._kills = self._lines = self._wrong_lines = 0
        self._exit_status = math.nan
        self._seconds = 0.0
        self._event = ""  # the last
        self._memory: list[tuple[float, float]] = []  # when, and MiB, from the second cycle on

    def go(self, progress: Progress, task: TaskID) -> None:
        """Let cycles of faults pass until the time is over."""
        begun_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="helm-rl-") as folder:
            self._bundle = Path(folder) / "bundle"
            shutil.copytree(self._args.bundle, self._bundle)
            process = self._start()
            progress.update(task, description="faults")
            try:
                while self._seconds < self._args.seconds or self._event != END:
                    process = self._heed(self._next_event(process), process)
                    self._seconds = time.monotonic() - begun_s
                    if self._cycles:
                        self._memory.append((self._seconds, held_mib()))
                    progress.update(task, completed=min(self._seconds, self._args.seconds))
                self._count(process)
                self._exit_status = process.end()
            finally:
                process.kill()
                self._lines += process.lines
                self._wrong_lines += process.wrong_lines

    def _next_event(self, process: ControlProcess) -> str:
        end_s = time.monotonic() + _SILENCE_S + 200 * self._args.interval_s
        while time.monotonic() < end_s:
            try:
                return self._proxy.events.get(timeout=1.0)
            except queue.Empty:
                if process.status is not None:
                    break
        raise RuntimeError(f"the control process asks for nothing any more (exit status {process.status})")

    def _heed(self, event: str, process: ControlProcess) -> ControlProcess:
        """Do to the process what its turn has come for; return the one that lives on."""
        self._event = event
        policy = self._bundle / POLICY_FILE
        if event == BAD_BUNDLE:
            policy.write_bytes(b"no policy")
            self._reloads[process.reload()] += 1
        elif event == GOOD_BUNDLE:
            shutil.copyfile(self._args.bundle / POLICY_FILE, policy)
            self._reloads[process.reload()] += 1
        elif event == KILL:
            self._count(process)
            process.kill()
            self._lines += process.lines
            self._wrong_lines += process.wrong_lines
            self._kills += 1
            process = self._start()
        else:
            self._cycles += 1
        return process

    def _start(self) -> ControlProcess:
        return ControlProcess(self._bundle, self._proxy.url, self._slo_ms, self._args.interval_s)

    def _count(self, process: ControlProcess) -> None:
        """Add what a process has counted before it ends: its counters end with it."""
        time.sleep(0.5 * self._args.interval_s)  # the target of the last answer has been answered, too
        self._counted.update(process.metrics())

    def figures(self) -> dict[str, Figure]:
        """Return what was injected and what was counted."""
        counted, injected = self._counted, self._proxy.injected
        due: Counter[Cause] = Counter()
        targets = 0
        for fault in FAULTS:
            if fault.cause is None:
                targets += injected[fault.name]
            else:
                due[fault.cause] += injected[fault.name]
        refused = {cause: counted[f"helm_rl_readings_refused_total,{cause}"] for cause in Cause}
        unapplied = counted["helm_rl_targets_unapplied_total"]
        intervals = counted["helm_rl_intervals_total"]
        mean_s = counted["helm_rl_decision_seconds_sum"] / max(intervals, 1)
        figures = {
            "seconds": Figure(self._seconds, "s", "higher", self._args.seconds),
            "cycles": Figure(self._cycles, "", "higher", 1),
            "intervals": Figure(intervals, "", "higher"),
            "decisions": Figure(counted["helm_rl_decisions_total"], "", "higher"),
            "intervals_missed": Figure(counted["helm_rl_intervals_missed_total"], "", "lower", 0),
            "decision_mean_us": Figure(1e6 * mean_s, "us", "lower"),
            **{f"injected.{fault.name}": Figure(injected[fault.name], "", "higher") for fault in FAULTS},
            **{f"refused.{cause}": Figure(refused[cause], "", "lower") for cause in Cause if refused[cause]},
            **{
                f"fallbacks.{cause}": Figure(number, "", "lower")
                for cause in Cause
                if (number := counted[f"helm_rl_fallbacks_total,{cause}"])
            },
            "uncounted": Figure(uncounted(due, refused) + max(0, targets - unapplied), "", "lower", 0),
            "targets_unapplied": Figure(unapplied, "", "lower"),
            "kills": Figure(self._kills, "", "higher"),
            "reloads_ok": Figure(self._reloads["ok"], "", "higher", self._cycles),
            "reloads_bad": Figure(self._reloads["bad"], "", "higher", self._cycles),
            "log_lines": Figure(self._lines, "", "lower"),
            "log_lines_wrong": Figure(self._wrong_lines, "", "lower", 0),
            "exit_status": Figure(self._exit_status, "", "lower", 0),
            "rss_growth_mib": Figure(memory_growth(*np.array(self._memory).T)[0], "MiB", "lower", GROWTH_LIMIT_MIB),
        }
        return {f"control.{name}": figure for name, figure in figures.items()}


def uncounted(due: Mapping[Cause, float], refused: Mapping[Cause, float]) -> float:
    """Return how many faults were counted as something else, or not at all.

    due: answers with a fault, by what it is to be counted as; refused: what was counted. A machine that is slow adds to
    those that are late, and one that a fault was in is then counted as late alone.
    """
    others = [cause for cause in due if cause is not Cause.LATE]
    missing = sum(max(0, due[cause] - refused[cause]) for cause in others)
    too_many = sum(max(0, refused[cause] - due[cause]) for cause in others)
    spare = refused[Cause.LATE] - due.get(Cause.LATE, 0)
    return too_many + max(0, -spare) + max(0, missing - max(0, spare))


def _served(node: LiveNode, begin_ns: int) -> dict[str, Figure]:
    """Return how many requests were served since `begin_ns`, how well, and the longest time in which none was."""
    from eval.live.lost import lost

    end_ns = node.clock_ns()
    out = lost(node, begin_ns, end_ns)
    totals = node.totals
    arrival_ns, took_ms = node.trace.arrival_ns, node.latency_ms.astype(np.float64)
    done = (arrival_ns >= begin_ns) & ~np.isnan(took_ms)
    shed = done & (took_ms == shed_ms(node.scenario.slo_ms))
    done_ns = np.sort(arrival_ns[done & ~shed] + (took_ms[done & ~shed] * 1e6).astype(np.int64))
    gaps_ns = np.diff(done_ns, prepend=begin_ns, append=end_ns)
    return {
        "control.requests": Figure(done_ns.size, "", "higher"),
        "control.shed": Figure(int(shed.sum()), "", "lower"),
        "control.lost": Figure(out, "", "lower", 0),
        "control.rows_verified": Figure(totals.rows_verified, "", "higher"),
        "control.pages_verified": Figure(totals.pages_verified, "", "higher"),
        "control.wrong_bytes": Figure(totals.wrong_bytes, "", "lower", 0),
        "control.scores_verified": Figure(totals.scores_verified, "", "higher"),
        "control.wrong_scores": Figure(totals.wrong_scores, "", "lower", 0),
        "control.pages_moved": Figure(totals.pages_moved, "", "higher"),
        "control.longest_gap_s": Figure(float(gaps_ns.max()) * 1e-9, "s", "lower", GAP_LIMIT_S),
    }


def _alphas(asked: tuple[float, float], applied: tuple[float, float], bounds: BoundsSection) -> dict[str, Figure]:
    return {
        "control.alpha_asked_min": Figure(asked[0], "", "higher", bounds.alpha_min),
        "control.alpha_asked_max": Figure(asked[1], "", "lower", bounds.alpha_max),
        "control.alpha_applied_min": Figure(applied[0], "", "higher"),
        "control.alpha_applied_max": Figure(applied[1], "", "lower"),
    }
