"""How the plots of all pages look, in matplotlib's terms."""

from __future__ import annotations

from typing import Any


def page_style(ink: str, soft: str, grid: str) -> dict[str, Any]:
    """Return matplotlib's settings of a plot in an SVG: open axes, a grid behind, text as paths, no formulas.

    ink, soft, grid: colours of text, of axes and of the grid.
    """
    return {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "axes.edgecolor": soft,
        "axes.labelcolor": ink,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": grid,
        "grid.linewidth": 0.7,
        "xtick.color": soft,
        "ytick.color": soft,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "legend.frameon": False,
        "svg.fonttype": "path",
        "text.parse_math": False,  # a name with $ in it is no formula
        "svg.hashsalt": "helm-rl",
    }
