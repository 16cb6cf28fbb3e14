"""The heat map: a panel per model and link, headroom as colour, best alphas and percent in each cell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from eval.map.grid import Grid
from eval.map.store import PICTURES
from eval.map.summary import Found
from helm_rl.files import atomic_file

INK = "#222222"
SOFT = "#6b6b6b"
NOTHING = "#ececec"
COLOURS = LinearSegmentedColormap.from_list("headroom", ["#fbfaf5", "#fce3b0", "#f6b26b", "#dd6a3a", "#9c2a1d"])
LEAST_TOP = 0.2
"""Headroom of the darkest colour, at the least: a map without any stays pale."""
WIDTH_IN = 10.0
DPI = 150

_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.0,
    "svg.fonttype": "path",
    "text.parse_math": False,
    "svg.hashsalt": "helm-rl",
}


def draw(folder: Path, grid: Grid, found: Sequence[Found]) -> list[Path]:
    """Write map.png and map.svg into `folder` and return their paths."""
    paths = [folder / name for name in PICTURES]
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = heat_map(grid, found)
        FigureCanvasAgg(figure)
        for path in paths:
            with atomic_file(path) as aside:
                kind = path.suffix[1:]
                metadata = {"Date": None, "Creator": "helm-rl"} if kind == "svg" else {"Software": "helm-rl"}
                figure.savefig(aside, format=kind, dpi=DPI, metadata=metadata)
    return paths


def heat_map(grid: Grid, found: Sequence[Found]) -> Figure:
    """Return the figure: panels by model and link; rows: history and hot share; columns: host tier and load."""
    by_cell = {each.cell: each for each in found}
    rows = max(len(grid.histories_of(model)) for model in grid.models) * len(grid.hot_shares)
    panel_in = 0.75 + 0.4 * rows
    height_in = 1.4 + panel_in * len(grid.models)
    figure = Figure(figsize=(WIDTH_IN, height_in), facecolor="white")
    top = max(LEAST_TOP, *(each.headroom for each in found if each.measured), 0.0)
    norm = Normalize(0.0, top)
    axes = figure.subplots(len(grid.models), len(grid.links), squeeze=False)
    figure.subplots_adjust(
        left=0.125,
        right=0.99,
        wspace=0.33,
        bottom=0.95 / height_in,
        top=1 - 1.0 / height_in,
        hspace=0.72 / (panel_in - 0.6),
    )
    for (row, model), (column, link) in itertools.product(enumerate(grid.models), enumerate(grid.links)):
        _panel(axes[row][column], grid, by_cell, model, link, norm)
    _title(figure, found, height_in)
    bar = figure.add_axes((0.125, 0.25 / height_in, 0.3, 0.12 / height_in))
    figure.colorbar(ScalarMappable(norm, COLOURS), cax=bar, orientation="horizontal")
    bar.set_xticks(np.linspace(0, top, 5), [f"{100 * value:.0f} %" for value in np.linspace(0, top, 5)])
    bar.tick_params(length=0, labelcolor=SOFT)
    bar.set_title(
        "P99 that a schedule of alpha saves over the best static in hindsight", loc="left", fontsize=8, color=INK
    )
    figure.text(
        0.99, 0.3 / height_in,
        "small: best alpha (embedding cache's share) of the base → of the burst\n"
        "grey: even a light load misses the SLO, whatever alpha",
        ha="right", va="center", color=SOFT, linespacing=1.5,
    )  # fmt: skip
    return figure


def _title(figure: Figure, found: Sequence[Found], height_in: float) -> None:
    measured = [each for each in found if each.measured]
    title = "Where adapting alpha pays"
    if measured:
        best = max(each.headroom for each in measured)
        worth = sum(each.headroom > 0.1 for each in measured)
        title += f": at most {100 * best:.0f} % of P99; over 10 % in {worth} of {len(measured)} cells"
    figure.text(0.01, 1 - 0.22 / height_in, title, fontsize=12, fontweight="bold", color=INK, va="center")
    figure.text(
        0.01, 1 - 0.45 / height_in,
        "A burst of users who return comes on top of a constant base of users who hardly do, and ends. "
        "KV host tier and load from left to right.",
        fontsize=8.5, color=SOFT, va="center",
    )  # fmt: skip


def _panel(axes: Axes, grid: Grid, by_cell: dict[Any, Found], model: str, link: str, norm: Normalize) -> None:
    columns = list(itertools.product(grid.host_gib, grid.loads))
    rows = list(itertools.product(grid.histories_of(model), grid.hot_shares))
    cells = {
        (each.cell.setting.host_gib, each.cell.load, each.cell.setting.history, each.cell.setting.hot_share): each
        for each in by_cell.values()
        if each.cell.setting.model == model and each.cell.setting.link == link
    }
    for (y, (history, hot)), (x, (host_gib, load)) in itertools.product(enumerate(rows), enumerate(columns)):
        each = cells.get((host_gib, load, history, hot))
        _cell(axes, x, y, each, norm)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [load for _, load in columns])
    axes.set_yticks(range(len(rows)), [f"{history:,.0f} tokens\n{100 * hot:.0f} % hot" for history, hot in rows])
    axes.tick_params(length=0, labelcolor=INK, pad=3, labelsize=7.5)
    axes.xaxis.tick_bottom()
    for spine in axes.spines.values():
        spine.set_visible(False)
    for at, host_gib in enumerate(grid.host_gib):
        middle = (at + 0.5) * len(grid.loads) - 0.5
        name = "no host tier" if host_gib == 0 else f"host tier {host_gib:g} GiB"
        axes.text(middle, -0.62, name, ha="center", va="bottom", color=SOFT, fontsize=7.5)
        if at:
            axes.axvline(at * len(grid.loads) - 0.5, color="white", linewidth=4)
    axes.set_title(f"{model}, {link}", loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=16)


def _cell(axes: Axes, x: int, y: int, each: Found | None, norm: Normalize) -> None:
    if each is None or not each.measured:
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=NOTHING, edgecolor="white", linewidth=1.2))
        if each is not None and each.rate is None:
            axes.text(x, y, "out of\nreach", ha="center", va="center", color=SOFT, fontsize=7)
        return
    axes.add_patch(
        Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=COLOURS(norm(each.headroom)), edgecolor="white", linewidth=1.2)
    )
    ink = "white" if norm(each.headroom) > 0.7 else INK
    axes.text(
        x,
        y - 0.02,
        f"{100 * each.headroom:.0f} %",
        ha="center",
        va="bottom",
        color=ink,
        fontsize=8.5,
        fontweight="bold",
    )
    axes.text(
        x, y + 0.08, f"{_alpha(each.base)} → {_alpha(each.burst)}", ha="center", va="top", color=ink, fontsize=6.8
    )


def _alpha(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")
