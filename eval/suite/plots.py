"""The plots of a suite's report: each controller against the best static in hindsight, and the map of headroom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from eval.comparison import DEPLOYABLE, HALF, HINDSIGHT, OPTIMUM, POLICY, REFERENCE, Comparison, Row
from eval.plots import GRID, INK, NARROW_IN, SOFT, WIDE_IN
from eval.suite.cells import RECORDED
from eval.suite.summary import CellSummary, Summary

MOST_RATIO = 10.0
"""P99s beyond this multiple of the hindsight static's are drawn at the edge."""
LEAST_RATIO = 0.4
LOOKS = (("o", "#0072b2"), ("s", "#d55e00"), ("^", "#009e73"), ("D", "#cc79a7"))
"""Marker and colour of each pattern, in order."""


def against_hindsight(summary: Summary, narrow: bool) -> Figure:
    """P99 of each controller over that of the best static in hindsight: a panel per family, a marker per pattern."""
    families = list(dict.fromkeys(cell.cell.family for cell in summary.cells))
    rows = [row for row in summary.rows if row.key not in (HINDSIGHT, HALF)]
    height = 0.19 * len(rows) + 0.9
    if narrow:
        figure = Figure(figsize=(NARROW_IN, height * len(families)), layout="constrained")
        panels = figure.subplots(len(families), 1, squeeze=False)[:, 0]
    else:
        figure = Figure(figsize=(WIDE_IN, height), layout="constrained")
        panels = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
    shown: dict[str, Any] = {}  # one legend for all panels: each by itself hid the title of a narrow one
    for place, (axes, family) in enumerate(zip(panels, families, strict=True)):
        cells = [cell for cell in summary.cells if cell.cell.family == family]
        _panel(axes, rows, cells)
        axes.set_title(family, loc="left", color=INK, fontweight="bold")
        if narrow or place == 0:
            axes.set_yticks(range(len(rows)), [row.title for row in reversed(rows)])
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(map(str, labels), handles, strict=True))
        if narrow or place == len(families) // 2:
            axes.set_xlabel("P99 / P99 of the best" + ("\n" if narrow else " ") + "static in hindsight")
    figure.legend(list(shown.values()), list(shown), loc="outside upper right", ncols=2 if narrow else len(shown))
    return figure


def _panel(axes: Axes, rows: Sequence[Row], cells: Sequence[CellSummary]) -> None:
    axes.axvline(1.0, color=INK, linewidth=0.9)
    offsets = np.linspace(0.24, -0.24, len(cells)) if len(cells) > 1 else [0.0]
    for cell, offset, (marker, colour) in zip(cells, offsets, LOOKS, strict=False):
        for place, row in enumerate(reversed(rows)):
            if row.key not in cell.comparison.results[0].runs:
                continue
            found = cell.comparison.ratio(row.key, HINDSIGHT)
            ends = found.interval or (found.value, found.value)
            low, high = np.clip(ends, LEAST_RATIO, MOST_RATIO)
            axes.plot([low, high], [place + offset] * 2, color=colour, linewidth=3, alpha=0.3, solid_capstyle="butt")
            beyond = found.value > MOST_RATIO
            at = float(np.clip(found.value, LEAST_RATIO, MOST_RATIO))
            axes.plot(at, place + offset, ">" if beyond else marker, color=colour, markersize=4.5, clip_on=False)
        axes.plot([], [], marker, color=colour, markersize=4.5, label=cell.cell.title)
    axes.set_xscale("log")
    axes.set_xlim(LEAST_RATIO, MOST_RATIO)
    axes.set_xticks([0.5, 1, 2, 5, 10], [".5", "1", "2", "5", "10"])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=GRID)


def through_a_burst(comparison: Comparison) -> Comparison:
    """Return a comparison with the few rows that a plot over time can show."""
    last = REFERENCE if any(row.key == REFERENCE for row in comparison.rows) else OPTIMUM
    shown = (POLICY, DEPLOYABLE, HINDSIGHT, last)
    return replace(comparison, rows=tuple(row for row in comparison.rows if row.key in shown))


@dataclass(frozen=True)
class MapCell:
    """One cell of `helm-rl eval map`: shares of P99."""

    group: str
    headroom: float
    deployable_loss: float


def map_strips(found: Sequence[MapCell], narrow: bool) -> Figure:
    """Headroom, and what the deployable static loses, of every cell of the map: a line per model and link."""
    groups = list(dict.fromkeys(each.group for each in found))
    figure = Figure(figsize=(NARROW_IN if narrow else WIDE_IN, 0.3 * len(groups) * (2 if narrow else 1) + 1.2))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(2, 1) if narrow else figure.subplots(1, 2, sharey=True)
    texts = (
        "a schedule gains on the best static\nin hindsight, % of P99",
        "the deployable static is slower\nby, % of P99",
    )
    for axes, text, name in zip(panels, texts, ("headroom", "deployable_loss"), strict=True):
        for place, group in enumerate(reversed(groups)):
            values = 100 * np.array([getattr(each, name) for each in found if each.group == group])
            spread = np.linspace(-0.25, 0.25, values.size) if values.size > 1 else np.zeros(1)
            axes.plot(np.maximum(values, 0.1), place + spread, "o", color="#d55e00", markersize=3.5, alpha=0.6)
        axes.set_xscale("log")
        axes.set_xlim(left=0.08)
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.axvline(10, color=SOFT, linewidth=0.9, linestyle=(0, (1, 2)))
        axes.set_xlabel(text)
        axes.set_yticks(range(len(groups)), list(reversed(groups)))
        axes.tick_params(axis="y", length=0)
    return figure


def _plain(value: float, _: Any = None) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def burst_cells(summary: Summary) -> list[CellSummary]:
    """The Burst of each family."""
    return [cell for cell in summary.cells if cell.cell.family != RECORDED and cell.cell.pattern == "burst"]
