"""The plots of the report, as self-contained SVG: drawn once for a wide page and once for a phone.

Colours are Okabe and Ito's, and every line also has a dash pattern of its own, so nothing rests on colour alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    MultipleLocator,
    NullFormatter,
    NullLocator,
)

from eval.comparison import DEPLOYABLE, HALF, HINDSIGHT, OPTIMUM, POLICY, Comparison, Row
from eval.segments import Run
from eval.sweep import Curve, Sweep
from helm_rl.files import atomic_file
from helm_rl.plot_style import page_style

if TYPE_CHECKING:
    from helm_rl.scenario import Scenario

WIDE_IN = 8.0
NARROW_IN = 3.7
"""Widths in inches at 96 CSS pixels: a page's column, and a phone less its margins."""

MOST_PANELS = 11
"""Segments whose curves are drawn; of more, as many are picked evenly."""

INK = "#222222"
SOFT = "#6b6b6b"
GRID = "#e4e4e4"
BURST = "#f3e3c3"
FLAT = "#cfe8dd"


@dataclass(frozen=True)
class Look:
    """How one controller is drawn everywhere."""

    colour: str
    dashes: Any
    width: float


LOOKS = {
    POLICY: Look("#d55e00", "solid", 2.0),
    DEPLOYABLE: Look("#0072b2", (0, (6, 2)), 1.5),
    HINDSIGHT: Look("#009e73", (0, (4, 1.5, 1, 1.5)), 1.5),
    HALF: Look("#7a7a7a", (0, (1.2, 1.6)), 1.5),
    OPTIMUM: Look("#111111", (0, (2.5, 1.5)), 1.2),
}
OTHERS = (
    Look("#cc79a7", "solid", 1.5),
    Look("#56b4e9", (0, (5, 1)), 1.3),
    Look("#a65628", (0, (3, 1, 1, 1, 1, 1)), 1.3),
    Look("#e69f00", (0, (1, 1)), 1.6),
    Look("#6a3d9a", (0, (7, 1.5, 1.5, 1.5)), 1.3),
    Look("#66a61e", (0, (2, 1)), 1.3),
)
"""Of controllers that have no look of their own, in the order of the table; beyond these they come again."""


def look_of(row: Row, comparison: Comparison) -> Look:
    """Return how a row of a comparison is drawn."""
    if row.key in LOOKS:
        return LOOKS[row.key]
    others = [other.key for other in comparison.rows if other.key not in LOOKS]
    return OTHERS[others.index(row.key) % len(OTHERS)]


_STYLE = page_style(INK, SOFT, GRID)

_Subject = TypeVar("_Subject")
Draw = Callable[[_Subject, bool], Figure]
"""Draws something, for a wide page or a narrow one."""


def svg(draw: Draw[_Subject], subject: _Subject, narrow: bool) -> bytes:
    """Draw one plot and return it as SVG: the same subject gives the same bytes."""
    size = 8.0 if narrow else 9.0
    style = dict(_STYLE)
    style |= dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize", "legend.fontsize"), size)
    style |= dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), size - 0.5)
    with mpl.rc_context(style):  # type: ignore[arg-type]
        figure = draw(subject, narrow)
        FigureCanvasSVG(figure)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": "helm-rl"})
    return file.getvalue()


def tail_by_controller(comparison: Comparison, narrow: bool) -> Figure:
    """P99 of every controller, a point per draw and the interquartile mean, beside the SLO."""
    rows = comparison.rows
    figure = Figure(figsize=(_width(narrow), 0.5 + 0.36 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        look = look_of(row, comparison)
        found = comparison.estimate(row.key, "p99_ms")
        if found.interval is not None:
            axes.plot(found.interval, [place, place], color=look.colour, linewidth=5, alpha=0.25, solid_capstyle="butt")
        axes.plot(found.per_seed, [place] * len(found.per_seed), "o", color=look.colour, markersize=3.5, alpha=0.55)
        axes.plot(found.value, place, "|", color=look.colour, markersize=15, markeredgewidth=2.4)
        axes.annotate(
            f"{found.value:,.0f}",
            (found.value, place),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color=look.colour,
            fontweight="bold",
        )
    axes.set_yticks(range(len(rows)), [row.title for row in reversed(rows)])
    axes.set_ylim(-0.5, len(rows) - 0.35)
    log_ms(axes.xaxis, axes.set_xscale)
    shown = [value for row in rows for value in comparison.estimate(row.key, "p99_ms").per_seed]
    axes.set_xlim(*_range([*shown, comparison.scenario.slo_ms]))
    _mark_slo(axes, comparison.scenario.slo_ms)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("P99 latency of the whole run (ms, log scale)")
    return figure


def alpha_over_time(comparison: Comparison, narrow: bool) -> Figure:
    """Alpha and target of the policy beside alpha*, and below it the P99 of 10 s windows; the first draw in full."""
    first = comparison.results[0]
    figure = Figure(figsize=(_width(narrow), 5.0 if narrow else 4.7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, 1.0])
    spans = first.sweep.part.spans
    for axes in (above, below):
        _shade_phases(axes, comparison, named=axes is above)
        axes.set_xlim(first.sweep.part.start_ns / 1e9, first.sweep.part.end_ns / 1e9)
    for index, (span, curve) in enumerate(zip(spans, first.sweep.settled, strict=True)):
        at = [span.start_ns / 1e9, span.end_ns / 1e9]
        for low, high in curve.flat:
            label = "flat set of α*" if index == 0 and low == curve.flat[0][0] else None
            above.fill_between(at, low, high, color=FLAT, linewidth=0, label=label)
    look = LOOKS[OPTIMUM]
    edges = np.array([[span.start_ns / 1e9, span.end_ns / 1e9] for span in spans]).ravel()
    stars = np.repeat([curve.best for curve in first.sweep.settled], 2)
    above.plot(
        edges, stars, color=look.colour, linestyle=look.dashes, linewidth=look.width, label="α*, best per segment"
    )
    above.axhline(
        comparison.deployable,
        color=LOOKS[DEPLOYABLE].colour,
        linestyle=LOOKS[DEPLOYABLE].dashes,
        linewidth=1.2,
        label="deployable static",
    )
    for row in comparison.rows:
        if row.key in first.alphas or row.key == OPTIMUM:
            continue
        look = look_of(row, comparison)
        for result in comparison.results[1:]:
            run = result.runs[row.key]
            above.plot(run.time_s, run.alpha, color=look.colour, linewidth=0.6, alpha=0.35)
        run = first.runs[row.key]
        above.plot(
            run.time_s,
            run.target,
            color=look.colour,
            linewidth=0.9,
            linestyle=(0, (1, 1)),
            label=f"{row.title}: target",
        )
        above.plot(run.time_s, run.alpha, color=look.colour, linewidth=look.width, label=f"{row.title}: α applied")
    above.set_ylabel("α, EMB's share of the pool")
    above.set_ylim(max(0.0, comparison.scenario.control.alpha_min - 0.05), comparison.scenario.control.alpha_max + 0.05)
    above.yaxis.set_major_locator(MultipleLocator(0.2))
    for row in comparison.rows:
        run, look = first.runs[row.key], look_of(row, comparison)
        below.plot(
            run.window_s,
            run.window_p99_ms,
            color=look.colour,
            linestyle=look.dashes,
            linewidth=look.width,
            label=row.title,
        )
    log_ms(below.yaxis, below.set_yscale)
    below.axhline(comparison.scenario.slo_ms, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
    below.set_ylabel("P99 per 10 s (ms, log)")
    below.set_xlabel("time (s)")
    for axes in (above, below):
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=2 if narrow else 3, borderaxespad=0.2, handlelength=2.2,
            columnspacing=1.2,
        )  # fmt: skip
    return figure


def curves_by_regime(comparison: Comparison, narrow: bool) -> Figure:
    """P99 against alpha, a panel per segment and one for the whole run; minimum and flat set marked."""
    first = comparison.results[0]
    spans = first.sweep.part.spans
    shown = spread(len(spans), MOST_PANELS)
    panels: list[tuple[str, Curve, list[Curve]]] = [
        ("whole run", first.sweep.whole, [result.sweep.whole for result in comparison.results[1:]])
    ]
    for index in shown:
        span = spans[index]
        title = f"{span.label}, {span.start_ns / 1e9:.0f} to {span.end_ns / 1e9:.0f} s"
        panels.append(
            (title, first.sweep.settled[index], [result.sweep.settled[index] for result in comparison.results[1:]])
        )
    columns = min(len(panels), 1 if narrow and len(panels) <= 4 else 2 if narrow or len(panels) <= 4 else 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(_width(narrow), (2.1 if columns == 1 else 2.0) * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
    cells = grid.ravel()
    for axes in cells[len(panels) :]:
        axes.set_visible(False)
    for place, (axes, (title, curve, others)) in enumerate(zip(cells, panels, strict=False)):
        for low, high in curve.flat:
            axes.axvspan(low, high, color=FLAT, linewidth=0)
        for other in others:
            axes.plot(other.alphas, other.smooth_ms, color=SOFT, linewidth=0.7, alpha=0.6)
        axes.plot(curve.alphas, curve.p99_ms, "o", color=INK, markersize=2.2, alpha=0.55)
        axes.plot(curve.alphas, curve.smooth_ms, color=INK, linewidth=1.4)
        least = float(curve.smooth_ms.min())
        axes.plot(curve.best, least, "v", color=LOOKS[POLICY].colour, markersize=7, zorder=5)
        log_ms(axes.yaxis, axes.set_yscale)
        _headroom(axes, curve)
        axes.annotate(
            f"{'best' if place == 0 else 'α*'} {curve.best:.2f}, {least:,.0f} ms",
            (curve.best, least),
            xytext=(0, -6),
            textcoords="offset points",
            ha="left" if curve.best < 0.35 else "right" if curve.best > 0.65 else "center",
            va="top",
            color=LOOKS[POLICY].colour,
            fontweight="bold",
        )
        axes.set_title(title, loc="left", color=INK, fontweight="bold")
        axes.set_xlim(comparison.scenario.control.alpha_min - 0.02, comparison.scenario.control.alpha_max + 0.02)
        axes.xaxis.set_major_locator(MultipleLocator(0.2))
        if place % columns == 0:
            axes.set_ylabel("P99 (ms, log)")
        if place + columns >= len(panels):
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("α, EMB's share")
    return figure


def latency_distribution(comparison: Comparison, narrow: bool) -> Figure:
    """Share of requests slower than a latency, both axes in log; the first draw."""
    first = comparison.results[0]
    figure = Figure(figsize=(_width(narrow), 3.7 if narrow else 3.6), layout="constrained")
    axes = figure.subplots()
    for row in comparison.rows:
        run, look = first.runs[row.key], look_of(row, comparison)
        axes.plot(
            run.tail_ms, run.tail_share, color=look.colour, linestyle=look.dashes, linewidth=look.width, label=row.title
        )
    log_ms(axes.xaxis, axes.set_xscale)
    ends = [float(run.tail_ms[place]) for run in (first.runs[row.key] for row in comparison.rows) for place in (0, -1)]
    axes.set_xlim(*_range([*ends, comparison.scenario.slo_ms]))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    least = min(run.tail_share.min() for run in (first.runs[row.key] for row in comparison.rows))
    axes.set_ylim(max(1e-5, least), 1.3)
    axes.axhline(0.01, color=INK, linewidth=0.9)
    axes.annotate(
        "P99",
        (1.0, 0.01),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="right",
        color=INK,
        fontsize="small",
    )
    _mark_slo(axes, comparison.scenario.slo_ms)
    axes.set_xlabel("latency (ms, log scale)")
    axes.set_ylabel("slower requests (log)" if narrow else "share of requests slower than that (log scale)")
    figure.legend(loc="outside upper left", ncols=2 if narrow else 3, handlelength=2.2, columnspacing=1.2)
    return figure


def draw_headroom(
    path: Path, scenario: Scenario, name: str, swept: Sweep, reference: Run, runs: dict[str, Run]
) -> None:
    """Write a PNG: above, the flat set and best alpha of each segment and the reference's alpha; below, P99 per 10 s.

    runs: what the lower part shows, by title.
    """
    with page(path, height_in=5.0) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, 1.0])
        spans = swept.part.spans
        for index, (span, curve) in enumerate(zip(spans, swept.settled, strict=True)):
            at = [span.start_ns / 1e9, span.end_ns / 1e9]
            for low, high in curve.flat:
                label = "flat set" if index == 0 and low == curve.flat[0][0] else None
                above.fill_between(at, low, max(high, low + 0.004), color=FLAT, linewidth=0, label=label)
            label = "α*, best per segment" if index == 0 else None
            look = LOOKS[OPTIMUM]
            above.plot(at, [curve.best] * 2, color=look.colour, linestyle=look.dashes, linewidth=1.5, label=label)
        above.plot(reference.time_s, reference.alpha, color=LOOKS[POLICY].colour, linewidth=LOOKS[POLICY].width)
        look = LOOKS[HINDSIGHT]
        above.axhline(swept.hindsight, color=look.colour, linestyle=look.dashes, linewidth=look.width)
        above.set_ylabel("α, EMB's share of the pool")
        above.set_ylim(max(0.0, scenario.control.alpha_min - 0.05), scenario.control.alpha_max + 0.05)
        above.set_xlim(swept.part.start_ns / 1e9, swept.part.end_ns / 1e9)
        above.set_title(f"{name}: the best α of each segment, and what it is worth", loc="left")
        looks = (LOOKS[POLICY], LOOKS[HINDSIGHT], LOOKS[DEPLOYABLE])
        for (title, run), look in zip(runs.items(), looks, strict=True):
            below.plot(
                run.window_s,
                run.window_p99_ms,
                color=look.colour,
                linestyle=look.dashes,
                linewidth=look.width,
                label=f"{title}: P99 {run.p99_ms:,.0f} ms",
            )
        log_ms(below.yaxis, below.set_yscale)
        below.axhline(scenario.slo_ms, color=INK, linewidth=0.9, linestyle=(0, (1, 2)), label="SLO")
        below.set_ylabel("P99 per 10 s (ms, log)")
        below.set_xlabel("time (s)")
        figure.legend(loc="outside lower center", ncols=3, handlelength=2.2, columnspacing=1.2)


@contextmanager
def page(path: Path, height_in: float) -> Iterator[Figure]:
    """Yield a figure as wide as a page's column, in the style of all; then write it as PNG or SVG, as its name says."""
    with mpl.rc_context(_STYLE | {"font.size": 9.0}):  # type: ignore[arg-type]
        figure = Figure(figsize=(WIDE_IN, height_in), dpi=150, layout="constrained")
        yield figure
        FigureCanvasAgg(figure)
        with atomic_file(path) as aside:
            kind = path.suffix[1:].lower()
            made_by = {"Software": "helm-rl"} if kind == "png" else {"Date": None, "Creator": "helm-rl"}
            figure.savefig(aside, format=kind, metadata=made_by)


def _width(narrow: bool) -> float:
    return NARROW_IN if narrow else WIDE_IN


def _mark_slo(axes: Axes, slo_ms: float) -> None:
    """Draw the SLO as a dotted line across a latency axis."""
    axes.axvline(slo_ms, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
    axes.annotate(
        "SLO",
        (slo_ms, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(3, -1),
        textcoords="offset points",
        va="top",
        color=SOFT,
        fontsize="small",
    )


def _shade_phases(axes: Axes, comparison: Comparison, named: bool) -> None:
    """Shade where a phase adds load; a phase over the whole run is the load, and is not shaded."""
    part = comparison.results[0].sweep.part
    for span in part.spans:
        whole = len({each.label for each in part.spans}) == 1
        if span.label != "base" and not whole:
            axes.axvspan(span.start_ns / 1e9, span.end_ns / 1e9, color=BURST, linewidth=0)
        if span.label != "base" and not whole and named:
            axes.annotate(
                span.label,
                ((span.start_ns + span.end_ns) / 2e9, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, -2),
                textcoords="offset points",
                ha="center",
                va="top",
                color="#8a6a1f",
                fontsize="small",
            )


def log_ms(axis: Axis, set_scale: Callable[[str], None]) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks."""
    set_scale("log")
    axis.set_major_locator(_LogTicks())
    axis.set_major_formatter(FuncFormatter(_milliseconds))
    axis.set_minor_locator(NullLocator())


class _LogTicks(Locator):
    """1, 2 and 5 times the powers of ten where at least three of them are in view, else closer ones."""

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        low, high = sorted((vmin, vmax))
        decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
        for steps in ((1, 10), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            ticks = np.unique(np.outer(decades, steps))
            ticks = ticks[(ticks >= low) & (ticks <= high)]
            if len(ticks) >= (5 if steps == (1, 10) else 3):
                return ticks.tolist()
        return list(MaxNLocator(4).tick_values(low, high))


def _milliseconds(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-9 else f"{value:.5g}"


def _range(values: list[float]) -> tuple[float, float]:
    """Ends of a log axis with room for the labels beside its outermost points."""
    return min(values) / 1.35, max(values) * 1.35


def _headroom(axes: Axes, curve: Curve) -> None:
    """Leave room below the minimum for its label, and cap what an overloaded alpha does to the scale."""
    low = float(min(curve.smooth_ms.min(), curve.p99_ms.min()))
    high = float(max(curve.smooth_ms.max(), curve.p99_ms.max()))
    span = max(np.log(high / low), np.log(1.6))
    axes.set_ylim(low / np.exp(0.28 * span), low * np.exp(1.08 * span))


def spread(count: int, most: int) -> list[int]:
    """All indices up to `count`, or `most` of them evenly spread."""
    return list(range(count)) if count <= most else np.linspace(0, count - 1, most).round().astype(int).tolist()
