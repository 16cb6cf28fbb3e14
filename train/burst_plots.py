"""Plots of a burst detector's calibration: what it finds beside the limit, its delays on logs, the recovery rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from helm_rl.files import atomic_file
from train.detection import Cell
from train.firings import Firings
from train.recovery_fit import Fit

OURS, LIMIT, INK = "#d55e00", "#0072b2", "#222222"
MARKS = ("o", "s", "^", "D", "v", "P")
_STYLE: Any = {
    "font.size": 9.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "text.parse_math": False,  # a name with $ in it is no formula
    "svg.hashsalt": "helm-rl",
}


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG or PNG, by the path's suffix."""
    with atomic_file(path) as aside:
        figure.savefig(aside, format=path.suffix[1:].lower(), metadata={"Date": None} if path.suffix == ".svg" else {})


def figure_of(columns: int, rows: int = 1, height_in: float = 2.8) -> tuple[Figure, Any]:
    """Return a figure and its axes, [rows, columns]."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.1 * columns + 0.6, height_in * rows), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.subplots(rows, columns, squeeze=False)


def found_plot(cells: Sequence[Cell]) -> Figure:
    """Share of bursts found within a second (above) and 95th percentile of the delay (below), over the factor."""
    dispersions = sorted({cell.dispersion for cell in cells})
    rates = sorted({cell.rate for cell in cells})
    with mpl.rc_context(_STYLE):
        figure, axes = figure_of(len(dispersions), 2)
        for column, dispersion in enumerate(dispersions):
            for place, rate in enumerate(rates):
                mine = sorted(
                    (cell for cell in cells if cell.rate == rate and cell.dispersion == dispersion),
                    key=lambda cell: cell.factor,
                )
                factors = [cell.factor for cell in mine]
                colour = mpl.colormaps["viridis"](0.9 * place / max(1, len(rates) - 1))
                drawn = {"color": colour, "marker": MARKS[place % len(MARKS)], "markersize": 4}
                limit = {**drawn, "linestyle": (0, (1.2, 1.6)), "alpha": 0.7}
                above, below = axes[0][column], axes[1][column]
                above.plot(factors, [cell.ours.within for cell in mine], label=f"{rate:g} requests/s", **drawn)
                above.plot(factors, [cell.limit.within for cell in mine], **limit)
                below.plot(factors, [cell.ours.quantile_s(0.95) for cell in mine], **drawn)
                below.plot(factors, [cell.limit.quantile_s(0.95) for cell in mine], **limit)
            axes[0][column].axhline(0.95, color=INK, linewidth=0.8)
            axes[0][column].set(title=f"index of dispersion {dispersion:g}", ylim=(-0.03, 1.03))
            axes[1][column].axhline(1.0, color=INK, linewidth=0.8)
            axes[1][column].set(xlabel="rate in the burst over the normal one", yscale="log")
        axes[0][0].set_ylabel("share found within 1 s")
        axes[1][0].set_ylabel("95th percentile of the delay, s")
        axes[0][0].legend(title="full: detector, dotted: limit", fontsize=7)
    return figure


def roc_plot(cells: Sequence[Cell]) -> Figure:
    """False alarms an hour against the share found within a second, of the detector and the limit."""
    kinds = sorted({(cell.rate, cell.factor, cell.dispersion) for cell in cells})
    with mpl.rc_context(_STYLE):
        figure, axes = figure_of(2)
        for place, kind in enumerate(kinds):
            mine = sorted(
                (cell for cell in cells if (cell.rate, cell.factor, cell.dispersion) == kind),
                key=lambda cell: cell.false_alarm_s,
            )
            an_hour = [3600.0 / cell.false_alarm_s for cell in mine]
            side = axes[0][0] if kind[2] <= 1.0 else axes[0][1]
            drawn = {"marker": MARKS[place % len(MARKS)], "markersize": 4}
            (line,) = side.plot(
                an_hour, [cell.ours.within for cell in mine], label=f"{kind[0]:g} requests/s, x{kind[1]:g}", **drawn
            )
            side.plot(an_hour, [cell.limit.within for cell in mine], linestyle=(0, (1.2, 1.6)), color=line.get_color())
        for side, title in zip(axes[0], ("Poisson arrivals", "overdispersed arrivals"), strict=True):
            side.set(xscale="log", xlabel="false alarms an hour", ylim=(-0.03, 1.03), title=title)
            side.legend(title="full: detector, dotted: limit", fontsize=7)
        axes[0][0].set_ylabel("share found within 1 s")
    return figure


def firings_plot(firings: Firings) -> Figure:
    """A log's arrivals with the firings marked, and what arrivals did around a firing in the mean."""
    with mpl.rc_context(_STYLE):
        figure, axes = figure_of(2)
        whole, around = axes[0]
        whole.plot(firings.time_s / 60.0, firings.rate, color=INK, linewidth=0.7)
        for at_s in firings.fired_s:
            whole.axvline(at_s / 60.0, color=OURS, linewidth=0.8, alpha=0.7)
        whole.set(
            xlabel="minutes", ylabel="requests/s", title=f"{firings.name}: {firings.per_hour:.2f} firings an hour"
        )
        if firings.around.size:
            for one in firings.around[:200]:
                around.plot(firings.around_s, one, color=OURS, linewidth=0.4, alpha=0.25)
            around.plot(firings.around_s, np.median(firings.around, axis=0), color=INK, linewidth=1.6, label="median")
            around.legend()
        around.axvline(0.0, color=OURS, linewidth=0.8)
        around.set(xlabel="seconds from a firing", ylabel="arrivals / the minute before")
    return figure


def recovery_plot(fit: Fit) -> Figure:
    """P99 of bursts' first seconds and of the whole run, over both alphas of the rule; the fitted one is marked."""
    with mpl.rc_context(_STYLE):
        figure, axes = figure_of(2)
        hot = [rule.alpha_hot for rule in fit.tried]
        cold = [rule.alpha_cold for rule in fit.tried]
        sides = (("first_ms", "first 10 s of bursts"), ("whole_ms", "whole run"))
        for side, (name, title) in zip(axes[0], sides, strict=True):
            values = np.array([getattr(one, name) for one in fit.tried.values()])
            drawn = side.scatter(hot, cold, c=values, s=130, marker="s", cmap="viridis_r", norm="log")
            side.plot(fit.rule.alpha_hot, fit.rule.alpha_cold, "x", color=OURS, markersize=11, markeredgewidth=2.5)
            side.set(
                xlabel="alpha where all users are hot", title=f"P99, {title}; {getattr(fit.without, name):.0f} without"
            )
            figure.colorbar(drawn, ax=side, label="ms")
        axes[0][0].set_ylabel("alpha where none is")
    return figure
