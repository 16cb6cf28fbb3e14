"""`helm-rl calibrate hardware`: what this machine takes for a live node's work, as a profile for the model clock."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from eval.command import console, figure_table
from helm_rl.errors import UserError
from helm_rl.figures import Figure, command, machine, write_figures
from helm_rl.files import check_outputs
from helm_rl.memory import total_bytes
from helm_rl.profiles.fit import fit_batches
from helm_rl.profiles.hardware import HardwareProfile, link_gb_s
from helm_rl.profiles.hardware_file import save_hardware
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import Scenario, load_scenario

if TYPE_CHECKING:
    from envs.serving.live import LiveNode
    from eval.live.errors import Measured
    from eval.live.ladder import Batch

IDLE_BUSY = 0.05
"""Share of the time for which the node is busy while requests come one at a time."""
IDLE_S = 20.0
WARM_S = 20.0
_ALPHA = 0.5
_TRIAL_SEED = 1

Advance = Callable[[str], None]


@dataclass
class Args:
    """Measure what a live node's work takes here, fit a hardware profile to it, and hold the model clock against it.

    Prefills of histories of six lengths, their first half, then the second on the cached first, then a sixteenth on the
    rest, alone and four at a time, give FLOP/s and the fixed cost of a batch. Requests that come one at a time give how
    much longer the same work takes in service, by which both are scaled, and the fixed cost of a request. All medians.
    Last, the profile is tried: the scenario's base load on other arrivals, live and on the model clock. A scenario
    takes the profile by hardware.profile = "FILE.toml".

    On a CPU the network has one thread and computes in float32 (model.value_bytes = 4), and the link is paced to the
    scenario's link_gb_s, so what rows are gathered at shows only where that is faster.

    Figures written by --json: calibrate.peak_gflop_s, calibrate.linear_efficiency, calibrate.pair_efficiency,
    calibrate.in_service (how many times longer), calibrate.batch_ms, calibrate.request_ms, calibrate.gather_gb_s,
    calibrate.copy_gb_s, calibrate.onboard_ms,
    calibrate.prefill_error.median and .max (of the fit, over the prefills), calibrate.p50_error and
    calibrate.p99_error (of the trial), calibrate.others_share (of the processors' time, what other processes took:
    what a wall clock shows beside them is theirs, too).
    """

    output: Annotated[Path, tyro.conf.arg(metavar="FILE.toml")]
    """The profile to write."""
    scenario: str = "laptop"
    """Network, pool, link and load: a shipped scenario with an hstu that fits this machine (laptop), or a TOML file."""
    backend: Literal["cpu", "cuda"] = "cpu"
    """Where pool and network are."""
    rounds: int = 12
    """Times that each prefill is measured, at least 2."""
    seconds: float = 30.0
    """Length of the trial; 0: none."""
    load: float = 0.3
    """Share of the time for which the busier of link and accelerator is busy in the trial, by the model clock."""
    table_rows: int = 1 << 21
    """Rows of each of the four host tables."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Draw modelled on measured latency of the trial, quantile by quantile."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace files that exist."""


@dataclass(frozen=True)
class Calibration:
    """The prefills, the profile that was fitted, and how the model clock did with it; None where it was not tried."""

    batches: list[Batch]
    profile: HardwareProfile
    in_service: float  # times longer that the same work takes in service than prefills one after the other do
    trial: Measured | None
    others_share: float

    def predicted_ms(self, batch: Batch) -> float:
        """Return what the fit says of a prefill: the profile's time, but for what service adds."""
        in_service = self.profile.batch_ms + self.profile.prefill_ns(batch.linear_flop, batch.pair_flop) * 1e-6
        return in_service / self.in_service

    def figures(self) -> dict[str, Figure]:
        """Return the figures that `Args` lists."""
        from eval.live.errors import P50_GOAL, P99_GOAL

        profile = self.profile
        off = [abs(self.predicted_ms(batch) / batch.ms - 1.0) for batch in self.batches]
        found = {
            "peak_gflop_s": Figure(profile.peak_tflop_s * 1e3, "GFLOP/s", "higher"),
            "linear_efficiency": Figure(profile.linear_efficiency, "", "higher"),
            "pair_efficiency": Figure(profile.pair_efficiency, "", "higher"),
            "in_service": Figure(self.in_service, "", "lower"),
            "batch_ms": Figure(profile.batch_ms, "ms", "lower"),
            "request_ms": Figure(profile.request_ms, "ms", "lower"),
            "gather_gb_s": Figure(profile.local_gb_s, "GB/s", "higher"),
            "copy_gb_s": Figure(profile.pcie_gb_s, "GB/s", "higher"),
            "onboard_ms": Figure(profile.onboard_ms, "ms", "lower"),
            "prefill_error.median": Figure(float(np.median(off)), "", "lower"),
            "prefill_error.max": Figure(max(off), "", "lower"),
        }
        if self.trial is not None:
            found["p50_error"] = Figure(self.trial.error(0.5), "", "lower", P50_GOAL)
            found["p99_error"] = Figure(self.trial.error(0.99), "", "lower", P99_GOAL)
        found["others_share"] = Figure(self.others_share, "", "lower")
        return {f"calibrate.{name}": figure for name, figure in found.items()}

    def table(self) -> Table:
        """Return a line for each prefill: measured, and by the profile."""
        table = Table(title="Prefills, ms in the median", title_justify="left")
        for heading in ("at once", "tokens", "cached", "measured", "by the fit", "off"):
            table.add_column(heading, justify="right")
        for one in self.batches:
            predicted = self.predicted_ms(one)
            cells = (f"{one.ms:.2f}", f"{predicted:.2f}", f"{predicted / one.ms - 1.0:+.1%}")
            table.add_row(str(one.users), str(one.tokens), str(one.cached), *cells)
        return table


def main(args: Args) -> None:
    """Measure, write profile, plot and figures, print the tables."""
    scenario = _check(args)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        with tempfile.TemporaryDirectory(prefix="helm-rl-") as folder:
            found = _Calibrating(
                args, scenario, Path(folder), lambda text: progress.update(task, description=text)
            ).run()
    figures = found.figures()
    out = console()
    out.print(found.table())
    out.print(figure_table(f"This machine, scenario {args.scenario}, backend {args.backend}", figures))
    if args.backend == "cpu":
        out.print(
            f"On the CPU the link is paced, to {link_gb_s(scenario.hardware):g} GB/s; the network has one thread."
        )
    save_hardware(args.output, found.profile)  # after the tables: they tell it all should the disk be full
    out.print(f'A scenario takes the profile by hardware.profile = "{args.output}".')
    if args.json is not None:
        write_figures(args.json, figures)
    if args.plot is not None and found.trial is not None:
        from eval.live.plot import draw_quantiles

        draw_quantiles(args.plot, {f"{args.load:.0%} load": found.trial})


class _Calibrating:
    """One calibration; `advance` is told what is measured now. Unfinished profiles go to `folder`."""

    def __init__(self, args: Args, scenario: Scenario, folder: Path, advance: Advance) -> None:
        self._args, self._scenario, self._folder, self._advance = args, scenario, folder, advance

    def run(self) -> Calibration:
        """Measure everything."""
        from envs.serving.live import LiveNode
        from eval.live import errors, speeds
        from eval.live.ladder import climb, ladder
        from eval.live.machine import Others

        args, scenario, advance = self._args, self._scenario, self._advance
        model = resolve_model(scenario.model)
        others = Others()
        advance("host tables")
        node = LiveNode(
            scenario,
            ladder(scenario, scenario.load.history_max, args.rounds),
            backend=args.backend,
            table_rows=args.table_rows,
        )
        self._tables = node.tables
        with contextlib.closing(node):
            advance("products")
            peak = speeds.peak_gflop_s(args.backend, model.value_bytes)
            advance("prefills")
            batches = climb(node)
        advance("rows and pages")
        onboard_ms, copy_gb_s = speeds.onboarding(scenario.hardware.page_kib * 1024, args.backend)
        gather_gb_s = speeds.gather_gb_s(self._tables, args.backend)
        linear = np.array([batch.linear_flop for batch in batches])
        pair = np.array([batch.pair_flop for batch in batches])
        profile = HardwareProfile(
            peak_tflop_s=peak * 1e-3,
            **fit_batches(linear, pair, np.array([batch.ms for batch in batches]), peak * 1e-3),
            request_ms=0.0,
            local_gb_s=gather_gb_s,
            pcie_gb_s=copy_gb_s,
            onboard_ms=onboard_ms,
            hbm_gib=_memory_gib(args.backend),
            source=f"measured: {command()}, {machine()['processor']}",
            extrapolated=(),
        )
        profile = within_peak(profile)
        advance("requests one at a time")
        with contextlib.closing(self._node(profile, IDLE_S, IDLE_BUSY, errors.SEEDS_FROM + 1)) as node:
            errors.serve(node, _ALPHA, WARM_S, round(IDLE_S * 1e9))
            # Prefills one after the other tell how time grows with work; these, how fast the work is in service, where
            # link, clock and queue take the processor's caches in turn.
            in_service = errors.slowdown(node)
            profile = replace(
                profile,
                linear_efficiency=profile.linear_efficiency / in_service,
                pair_efficiency=profile.pair_efficiency / in_service,
                batch_ms=profile.batch_ms * in_service,
                request_ms=errors.fixed_ms(node),
            )
            profile = within_peak(profile)
        trial = None
        if args.seconds:
            advance(f"the model clock's trial, {args.seconds:g} s")
            with contextlib.closing(self._node(profile, args.seconds, args.load, _TRIAL_SEED)) as node:
                trial = errors.measure(node, _ALPHA, WARM_S, round(args.seconds * 1e9))
        return Calibration(batches, profile, in_service, trial, others.share())

    def _node(self, profile: HardwareProfile, seconds: float, busy: float, seed: int) -> LiveNode:
        """Return a node under the base load, so that by this profile it is busy for that share of the time."""
        from envs.serving.live import LiveNode
        from eval.live import errors
        from helm_rl.workloads.generate import generate

        file = self._folder / f"{seed}.toml"
        save_hardware(file, profile)
        base = errors.base_load(self._scenario, seconds, WARM_S)
        hardware = base.hardware.model_copy(update={"profile": str(file)})
        load = errors.at_busy(base.model_copy(update={"hardware": hardware}), busy, _ALPHA)
        return LiveNode(load, generate(load, seed=seed), backend=self._args.backend, tables=self._tables)


def within_peak(profile: HardwareProfile) -> HardwareProfile:
    """Return a profile of the same speeds whose shares of the peak are at most 1, as a file must have them.

    Work that was faster than the peak says that something disturbed the product by which the peak was measured.
    """
    above = max(1.0, profile.linear_efficiency, profile.pair_efficiency)
    return replace(
        profile,
        peak_tflop_s=profile.peak_tflop_s * above,
        linear_efficiency=profile.linear_efficiency / above,
        pair_efficiency=profile.pair_efficiency / above,
    )


def _memory_gib(backend: str) -> float:
    if backend == "cuda":
        import torch

        return float(torch.cuda.mem_get_info()[1] / 2**30)
    return total_bytes() / 2**30


def _check(args: Args) -> Scenario:
    """Return the scenario; UserError for what does not fit, before anything is measured."""
    check_outputs(args.overwrite, (args.scenario,), output=args.output, plot=args.plot, json=args.json)
    if args.output.suffix != ".toml":
        raise UserError(f"--output must end in .toml, got {args.output}: by that a scenario tells it from a name")
    scenario = load_scenario(args.scenario)
    if resolve_model(scenario.model).architecture != "hstu":
        raise UserError(
            f"scenario {scenario.name}: model.architecture must be hstu, which is what a live node computes; for "
            "others a stand-in takes the time that the profile says"
        )
    if not 2 <= args.rounds <= 10_000:
        raise UserError(f"--rounds must be 2 to 10,000, got {args.rounds}")
    if not (args.seconds == 0 or 1 <= args.seconds <= 86_400):
        raise UserError(f"--seconds must be 0, for no trial, or 1 to 86,400, got {args.seconds}")
    if not 0.01 <= args.load <= 0.95:
        raise UserError(f"--load must be .01 to .95, got {args.load}")
    if not 1 <= args.table_rows < 2**31:
        raise UserError(f"--table-rows must lie in 1 to {2**31 - 1}, got {args.table_rows}")
    if args.plot is not None and not args.seconds:
        raise UserError("--plot draws the trial, and --seconds 0 asks for none")
    return scenario
