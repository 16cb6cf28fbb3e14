"""The plots of a trace's page, as SVG whose colours the page chooses, so that it can be light or dark.

Each is drawn twice, for a wide page and for a phone. Nothing rests on colour alone: panels are named, and of two
lines one is dashed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from helm_rl.plot_style import page_style
from helm_rl.workloads.inspect import Curve, OverTime, TraceSummary
from helm_rl.workloads.wording import things

WIDE_IN = 8.0
NARROW_IN = 3.7
"""Widths in inches at 96 CSS pixels: a page's column, and a phone less its margins."""

# Colours that stand for the page's: each is replaced by a variable of its style sheet.
INK, SOFT, GRID = "#010101", "#020202", "#030303"
FIRST, SECOND, SHADE = "#040404", "#050505", "#060606"
VARIABLES = {INK: "ink", SOFT: "soft", GRID: "grid", FIRST: "first", SECOND: "second", SHADE: "shade"}

_STYLE = page_style(INK, SOFT, GRID) | {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.titlecolor": INK,
}

Draw = Callable[[TraceSummary, bool], Figure]


def svg(draw: Draw, summary: TraceSummary, narrow: bool, name: str) -> str:
    """Draw one plot and return it as an <svg> element; its ids start with `name`, which must differ within a page."""
    size = 8.0 if narrow else 9.0
    style = dict(_STYLE)
    style |= dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize", "legend.fontsize"), size)
    style |= dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), size - 0.5)
    with mpl.rc_context(style):  # type: ignore[arg-type]
        figure = draw(summary, narrow)
        FigureCanvasSVG(figure)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue().decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)


def over_time(summary: TraceSummary, narrow: bool) -> Figure:
    """Requests per second, and the hot-user ratio, over time."""
    figure, (above, below) = _two(narrow, shared=True)
    over = summary.over_time
    _windows(above, over, over.rate_per_s, FIRST)
    above.set_ylabel("requests/s")
    _windows(below, over, 100 * _numbers(over.hot_user_ratio), FIRST)
    below.set_ylabel("hot users, %")
    _finish_times(summary, above, below)
    return figure


def working_sets(summary: TraceSummary, narrow: bool) -> Figure:
    """Distinct items, and tokens of the histories of distinct users, in each window."""
    figure, (above, below) = _two(narrow, shared=True)
    over = summary.over_time
    _windows(above, over, over.items, FIRST)
    above.set_ylabel(things(summary))
    _windows(below, over, over.history_tokens, SECOND)
    below.set_ylabel("tokens")
    _finish_times(summary, above, below)
    return figure


def miss_ratios(summary: TraceSummary, narrow: bool) -> Figure:
    """Miss ratio over size, with a band of two standard errors."""
    figure, (left, right) = _two(narrow, shared=False)
    for axes, curve, colour, label in (
        (left, summary.embedding_curve, FIRST, f"embedding cache ({things(summary)})"),
        (right, summary.kv_curve, SECOND, "KV cache (tokens of history)"),
    ):
        _miss_ratio(axes, curve, colour)
        axes.set_xlabel(label)
        axes.set_ylabel("miss ratio")
    return figure


def popularity(summary: TraceSummary, narrow: bool) -> Figure:
    """How often the item of each rank was named, beside the law that was fitted."""
    figure = Figure(figsize=(NARROW_IN if narrow else WIDE_IN, 3.0), layout="constrained")
    axes = figure.subplots()
    points, fit = summary.popularity_points, summary.popularity
    axes.set_xlabel(f"rank among {things(summary)}")
    axes.set_ylabel("times named")
    if not points.x:
        _nothing(axes)
        return figure
    axes.plot(points.x, points.y, "o", color=FIRST, markersize=3.5, label=things(summary))
    if fit is not None:
        rank = np.geomspace(1, fit.ranks, 60)
        weights = rank**-fit.exponent
        height = fit.references / (np.arange(1, fit.ranks + 1.0) ** -fit.exponent).sum()
        label = f"Zipf, exponent {fit.exponent:.2f}" + ("" if fit.fits else " (does not fit)")
        axes.plot(rank, height * weights, color=SECOND, linewidth=1.5, linestyle=(0, (5, 2)), label=label)
        axes.legend()
    _scale(axes.xaxis, axes.set_xscale, points.x)
    _scale(axes.yaxis, axes.set_yscale, points.y)
    return figure


def pauses_and_histories(summary: TraceSummary, narrow: bool) -> Figure:
    """Shares of pauses, and of requests by history, up to a length."""
    figure, (left, right) = _two(narrow, shared=False)
    for axes, points, colour, label in (
        (left, summary.gap_points, FIRST, "pause until a user returns, s"),
        (right, summary.history_points, SECOND, "history, tokens"),
    ):
        x, y = np.array(points.x), 100 * np.array(points.y)
        if x.size:
            # A pause of nothing has no place on a logarithmic axis: it stands at its left end.
            if _scale(axes.xaxis, axes.set_xscale, x[x > 0]) and (x == 0).any():
                x = np.maximum(x, x[x > 0].min() / 2)
            axes.step(x, y, where="post", color=colour, linewidth=1.5)
        else:
            _nothing(axes)
        axes.set_ylim(0, 102)
        axes.set_xlabel(label)
        axes.set_ylabel("share up to there, %")
    return figure


def _two(narrow: bool, shared: bool) -> tuple[Figure, tuple[Axes, Axes]]:
    """Two panels: above each other where they share the time, else side by side on a wide page."""
    stacked = shared or narrow
    size = (NARROW_IN if narrow else WIDE_IN, 4.2 if stacked else 2.8)
    figure = Figure(figsize=size, layout="constrained")
    rows, columns = (2, 1) if stacked else (1, 2)
    first, second = figure.subplots(rows, columns, sharex=shared)
    return figure, (first, second)


def _windows(axes: Axes, over: OverTime, values: Any, colour: str) -> None:
    """Draw one value for each window, over all of the window, the last one's too."""
    axes.stairs(values, [*over.start_s, over.end_s], baseline=None, color=colour, linewidth=1.5)


def _numbers(values: list[float | None]) -> Any:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _finish_times(summary: TraceSummary, above: Axes, below: Axes) -> None:
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        axes.set_xlim(summary.over_time.start_s[0], summary.over_time.end_s)
        for phase in summary.phases[1:]:
            axes.axvspan(phase.start_s, phase.end_s, color=SHADE, alpha=0.25, linewidth=0)
    for phase in summary.phases[1:]:
        middle = (phase.start_s + phase.end_s) / 2
        above.annotate(
            phase.label,
            (middle, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=SOFT,
            fontsize="small",
        )
    below.set_xlabel("time, s")
    below.xaxis.set_major_formatter(FuncFormatter(_short))


def _miss_ratio(axes: Axes, curve: Curve | None, colour: str) -> None:
    axes.set_ylim(0, 1.02)
    if curve is None:
        _nothing(axes)
        return
    size, ratio, error = np.array(curve.size), np.array(curve.miss_ratio), np.array(curve.standard_error)
    if error.any():
        axes.fill_between(
            size,
            np.clip(ratio - 2 * error, 0, 1),
            np.clip(ratio + 2 * error, 0, 1),
            color=colour,
            alpha=0.25,
            linewidth=0,
        )
    axes.plot(size, ratio, color=colour, linewidth=1.5)
    _scale(axes.xaxis, axes.set_xscale, size)


def _nothing(axes: Axes) -> None:
    axes.annotate("none in this trace", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color=SOFT)


def _scale(axis: Axis, set_scale: Callable[[str], None], values: Any) -> bool:
    """Make an axis logarithmic, and return True, where its values, all above 0, span a decade; plain numbers on it.

    Over less than a decade there may be no power of ten, and so no number at all.
    """
    decades = np.log10(np.max(values) / np.min(values)) if len(values) else 0.0
    if decades >= 1:
        set_scale("log")
        axis.set_minor_formatter(NullFormatter())
        if decades < 2:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(_short))
    return bool(decades >= 1)


def _short(value: float, _: object = None) -> str:
    """Write a number in few characters: 1500000 as 1.5M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"
