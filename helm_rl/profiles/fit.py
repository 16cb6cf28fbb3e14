"""`helm-rl bench profiles`: fits the hardware profiles to published measurements, and can measure this processor."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.profiles.hardware import HARDWARE, HardwareProfile
from helm_rl.profiles.model import MODELS
from helm_rl.profiles.published import POINTS, Point, Quantity

DIGITS = {
    "linear_efficiency": 3,
    "pair_efficiency": 3,
    "batch_ms": 2,
    "local_gb_s": 1,
    "pcie_gb_s": 1,
    "onboard_ms": 1,
}
"""Digits behind the point to which a profile keeps what the fit gives."""

GOAL_MEDIAN = 0.10
GOAL_MAX = 0.25

FloatArray = npt.NDArray[np.float64]


@dataclass
class Args:
    """Fit the hardware profiles to published measurements, and show how far off each point is.

    Figures written by --json: profiles.points (points held against their profile), profiles.point_error.median and
    profiles.point_error.max (|model / published - 1| over them). A point that determines a number of its profile alone
    has no error to tell and is not among them; profiles.points.exact counts those. With --measure-cpu also
    cpu.peak_gflop_s, cpu.linear_gflop_s, cpu.pair_gflop_s, cpu.gather_gb_s, cpu.copy_gb_s.
    """

    measure_cpu: bool = False
    """Also measure this machine's processor, as the profile `cpu` was (half a minute, 2 GiB)."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace the JSON file if it exists."""


@dataclass(frozen=True)
class Prediction:
    """A published point beside what its profile says."""

    point: Point
    ms: float
    error: float  # ms / published - 1
    exact: bool  # its profile has as many numbers fitted to points of this kind as there are points


def main(args: Args) -> None:
    """Print the points and the profiles, and write the figures."""
    check_outputs(args.overwrite, json=args.json)
    figures = point_figures(predictions())
    if args.measure_cpu:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            figures |= measure_cpu(progress)
    out = Console(width=None if sys.stdout.isatty() else 118, highlight=False, markup=False, emoji=False)
    out.print(_point_table())
    out.print(_profile_table())
    for name, profile in HARDWARE.items():
        out.print(f"{name}: {profile.source}")
    for name, figure in figures.items():
        goal = "" if figure.goal is None else f" (goal: at most {figure.goal:g})"
        out.print(f"{name} = {figure.value:.4g} {figure.unit}".rstrip() + goal)
    if args.json is not None:
        write_figures(args.json, figures)


def predict(point: Point, hardware: HardwareProfile) -> float:
    """Return the ms that the profile gives for a published point.

    Raises ValueError for a point that does not say what was moved.
    """
    if point.moved_bytes is None:
        raise ValueError(f"{point.source}: {point.note}")
    if point.fits == "gather":
        return point.resident_ms + point.moved_bytes / hardware.local_gb_s * 1e-6
    if point.fits == "onboard":
        return hardware.onboard_ms + point.moved_bytes / hardware.pcie_gb_s * 1e-6
    if point.fits == "attention":
        return hardware.prefill_ns(0.0, point.pair_flop) * 1e-6
    return hardware.batch_ms + hardware.prefill_ns(point.linear_flop, point.pair_flop) * 1e-6


def predictions() -> list[Prediction]:
    """Return every published point that can be predicted, beside what its profile as it is stored says."""
    rows = []
    for point in POINTS:
        if point.moved_bytes is not None:
            ms = predict(point, HARDWARE[point.hardware])
            rows.append(Prediction(point, ms, ms / point.ms - 1.0, _exact(point)))
    return rows


def fit(name: str) -> dict[str, float]:
    """Fit the fields of the profile `name` that have published points; return them, not rounded.

    Each quantity by least squares on the relative errors, in closed form: the times are linear in the reciprocals of
    the speeds. What is held fixed: the peak, and the H100's batch_ms, which its one batch cannot tell.
    """
    fitted: dict[str, float] = {}
    compute, attention = _of(name, "compute"), _of(name, "attention")
    if attention:
        fitted |= _fit_kernels(compute, attention, HARDWARE[name])
    elif compute:
        fitted |= _fit_compute(compute, HARDWARE[name].peak_tflop_s)
    onboard = _of(name, "onboard")
    if onboard:
        columns = [np.ones(len(onboard)), np.array([point.moved_bytes for point in onboard])]
        fixed, ms_per_byte = _least_squares(columns, onboard)
        fitted |= {"onboard_ms": fixed, "pcie_gb_s": 1e-6 / ms_per_byte}
    gather = _of(name, "gather")
    if gather:
        (ms_per_byte,) = _least_squares([np.array([point.moved_bytes for point in gather])], gather)
        fitted["local_gb_s"] = 1e-6 / ms_per_byte
    return fitted


def _fit_compute(points: Sequence[Point], peak_tflop_s: float) -> dict[str, float]:
    linear = np.array([point.linear_flop for point in points])
    pair = np.array([point.pair_flop for point in points])
    return fit_batches(linear, pair, np.array([point.ms for point in points]), peak_tflop_s)


def fit_batches(linear: FloatArray, pair: FloatArray, ms: FloatArray, peak_tflop_s: float) -> dict[str, float]:
    """Fit linear_efficiency, pair_efficiency and batch_ms to batches of so many FLOPs that took so long, each [n].

    One efficiency for both kinds of work where the times ask for an impossible pair of them; a batch costs at least
    nothing.
    """
    ones = np.ones(ms.size)
    peak_ms = 1e-9 / peak_tflop_s  # a FLOP at the peak
    linear_ms, pair_ms, batch_ms = least_squares([linear, pair, ones], ms)
    if batch_ms < 0:
        (linear_ms, pair_ms), batch_ms = least_squares([linear, pair], ms), 0.0
    if not (linear_ms >= peak_ms and pair_ms >= peak_ms):
        linear_ms, batch_ms = least_squares([linear + pair, ones], ms)
        if batch_ms < 0:
            (linear_ms,), batch_ms = least_squares([linear + pair], ms), 0.0
        pair_ms = linear_ms
    return {"linear_efficiency": peak_ms / linear_ms, "pair_efficiency": peak_ms / pair_ms, "batch_ms": batch_ms}


def _fit_kernels(compute: Sequence[Point], attention: Sequence[Point], hardware: HardwareProfile) -> dict[str, float]:
    """Fit the efficiencies where attention was timed by itself: the rest of the batch is the work per token."""
    peak_ms = 1e-9 / hardware.peak_tflop_s
    (pair_ms,) = _least_squares([np.array([point.pair_flop for point in attention])], attention)
    pair = np.array([point.pair_flop for point in compute])
    linear = np.array([point.linear_flop for point in compute])
    (linear_ms,) = _least_squares([linear], compute, hardware.batch_ms + pair * pair_ms)
    return {"linear_efficiency": peak_ms / linear_ms, "pair_efficiency": peak_ms / pair_ms}


def _least_squares(
    columns: list[FloatArray], points: Sequence[Point], known_ms: FloatArray | float = 0.0
) -> list[float]:
    measured = np.array([point.ms for point in points])
    return least_squares(columns, measured, np.array([point.resident_ms for point in points]) + known_ms)


def least_squares(columns: list[FloatArray], measured: FloatArray, known: FloatArray | float = 0.0) -> list[float]:
    """Return the weights [len(columns)] whose sum, with what is known, has the least squared relative errors."""
    design = np.stack(columns, axis=1) / measured[:, None]
    scale = np.abs(design).max(axis=0)  # FLOPs and ones differ by 12 orders of magnitude
    weights, *_ = np.linalg.lstsq(design / scale, (measured - known) / measured, rcond=None)
    return [float(weight) for weight in weights / scale]


def _of(name: str, quantity: Quantity) -> list[Point]:
    return [p for p in POINTS if p.hardware == name and p.fits == quantity and p.moved_bytes is not None]


def _exact(point: Point) -> bool:
    """Whether the profile has as many numbers fitted to the points of this kind as there are points."""
    kinds: tuple[Quantity, ...] = ("compute", "attention") if point.fits in ("compute", "attention") else (point.fits,)
    numbers = 1 if point.fits == "gather" else 2  # one speed; two speeds, or a speed and a fixed cost
    return sum(len(_of(point.hardware, kind)) for kind in kinds) <= numbers


def point_figures(rows: Sequence[Prediction]) -> dict[str, Figure]:
    """Return the figures over the points that do not determine a number of their profile alone."""
    errors = [abs(row.error) for row in rows if not row.exact]
    return {
        "profiles.points": Figure(len(errors), "", "higher"),
        "profiles.points.exact": Figure(len(rows) - len(errors), "", "lower"),
        "profiles.point_error.median": Figure(median(errors), "", "lower", GOAL_MEDIAN),
        "profiles.point_error.max": Figure(max(errors), "", "lower", GOAL_MAX),
    }


def measure_cpu(progress: Progress, repeats: int = 20, table_bytes: int = 1 << 30) -> dict[str, Figure]:
    """Measure this processor on all cores that NumPy takes, in float32; the fastest of `repeats` runs counts.

    Peak: a product of 2048 x 2048 x 2048. Linear: the weights of a layer of decoder-0.2b on 512 tokens. Pair: its 16
    heads, 512 queries on 2,048 keys, scores and values, without the softmax. Gather: 65,536 rows of 512 B at random
    from a table of `table_bytes`. Copy: that table.
    """
    model, tokens, keys = MODELS["decoder-0.2b"], 512, 2048
    random = np.random.default_rng(0)

    def values(*shape: int) -> npt.NDArray[np.float32]:
        return random.standard_normal(shape, dtype=np.float32)

    kv_width = model.kv_heads * model.head_dim
    wide = model.heads * model.head_dim
    rows, hidden = values(tokens, model.d_model), values(tokens, model.ffn)
    into = [values(model.d_model, width) for width in (wide, kv_width, kv_width, wide, model.ffn, model.ffn)]
    back = values(model.ffn, model.d_model)
    square = values(2048, 2048)
    query, key, value = (
        values(model.heads, tokens, model.head_dim),
        values(model.heads, model.head_dim, keys),
        values(model.heads, keys, model.head_dim),
    )
    table = np.ones((table_bytes // 512, 128), np.float32)
    twin = np.ones_like(table)  # written once: its pages exist
    ids = random.integers(0, len(table), 1 << 16)
    gathered = np.empty((len(ids), 128), np.float32)

    works: list[tuple[str, str, float, Callable[[], Any]]] = [
        ("cpu.peak_gflop_s", "GFLOP/s", 2.0 * 2048**3, lambda: square @ square),
        (
            "cpu.linear_gflop_s",
            "GFLOP/s",
            tokens * model.flops_per_token / model.layers,
            lambda: ([rows @ weights for weights in into], hidden @ back),
        ),
        (
            "cpu.pair_gflop_s",
            "GFLOP/s",
            tokens * keys * model.flops_per_pair / model.layers,
            lambda: (query @ key) @ value,
        ),
        ("cpu.gather_gb_s", "GB/s", gathered.nbytes, lambda: np.take(table, ids, axis=0, out=gathered, mode="clip")),
        ("cpu.copy_gb_s", "GB/s", table.nbytes, lambda: np.copyto(twin, table)),
    ]
    task = progress.add_task("measuring this processor", total=len(works) * (1 + repeats))
    fastest_s = [math.inf] * len(works)
    for run in range(1 + repeats):  # in turns, so that a neighbour on the machine slows no work in all of its runs
        for at, (_, _, _, work) in enumerate(works):
            start = time.perf_counter()
            work()
            if run > 0:  # the first warms
                fastest_s[at] = min(fastest_s[at], time.perf_counter() - start)
            progress.advance(task)
    return {
        name: Figure(amount / seconds * 1e-9, unit, "higher")
        for (name, unit, amount, _), seconds in zip(works, fastest_s, strict=True)
    }


def _point_table() -> Table:
    table = Table(title="Published points; (exact): determines a number of its profile alone", title_justify="left")
    for column in ("hardware", "quantity", "batch", "tokens", "cached"):
        table.add_column(column)
    for column in ("published ms", "model ms", "error"):
        table.add_column(column, justify="right")
    rows = {id(row.point): row for row in predictions()}
    for point in POINTS:
        shape = [str(point.batch), str(point.tokens), str(point.cached)] if point.model is not None else [""] * 3
        cells = [point.hardware, f"{point.fits} {point.note}".rstrip(), *shape, f"{point.ms:.4g}"]
        row = rows.get(id(point))
        if row is None:
            table.add_row(*cells, "", "")
        else:
            table.add_row(*cells, f"{row.ms:.4g}", "(exact)" if row.exact else f"{row.error:+.1%}")
    return table


def _profile_table() -> Table:
    table = Table(title="Profiles; *: extrapolated", title_justify="left")
    table.add_column("")
    for name in HARDWARE:
        table.add_column(name, justify="right")
    for field in ("peak_tflop_s", *DIGITS, "request_ms", "hbm_gib"):
        marks = ["*" if field in profile.extrapolated else "" for profile in HARDWARE.values()]
        values = [f"{getattr(profile, field):g}" for profile in HARDWARE.values()]
        table.add_row(field, *(value + mark for value, mark in zip(values, marks, strict=True)))
    return table


if __name__ == "__main__":
    from helm_rl import cli

    sys.exit(cli.main(["bench", "profiles", *sys.argv[1:]]))
