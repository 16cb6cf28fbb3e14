"""The picture of what a run costs over the nodes of its cluster."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from eval.plots import INK, OTHERS, SOFT, log_ms, page
from eval.scaling.summary import Scaling

_MARGIN = 1.8
"""Room beside the outermost points, as a factor."""


def draw_scaling(path: Path, found: Scaling) -> None:
    """Write a PNG or SVG: the cost of a request, and runs per hour on a core, over the number of nodes; all log."""
    wholes = found.wholes
    nodes = [whole.cost.nodes for whole in wholes]
    short = [whole for whole in wholes if whole.cost.share < 1.0]
    with page(path, height_in=3.6) as figure:
        left, right = figure.subplots(1, 2)
        cost_us, per_hour = ([getattr(whole, name) for whole in wholes] for name in ("us_per_request", "runs_per_hour"))
        _line(left, nodes, cost_us, 0)
        left.set_ylabel("us of CPU time per request (log)")
        _line(right, nodes, per_hour, 1)
        linear = [per_hour[0] * nodes[0] / count for count in nodes]
        right.plot(
            nodes, linear, color=SOFT, linewidth=0.9, linestyle=(0, (4, 3)), label="at one node's cost of a request"
        )
        right.set_ylabel("runs per hour on one core (log)")
        right.legend(loc="upper right")
        for axes, values in ((left, cost_us), (right, per_hour + linear)):
            axes.set_ylim(min(values) / _MARGIN, max(values) * _MARGIN)
            if short:
                first = min(whole.cost.nodes for whole in short)
                axes.axvspan(first / 2**0.5, nodes[-1] * 2, color="#f4f4f4", linewidth=0, zorder=0)
                axes.annotate(
                    "from a shorter run", (first / 2**0.5, 0), xycoords=("data", "axes fraction"), xytext=(4, 5),
                    textcoords="offset points", color=SOFT, fontsize="small",
                )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_xlim(nodes[0] / _MARGIN, nodes[-1] * _MARGIN)
            axes.set_xticks(nodes, [f"{count:,}" if k % 2 == 0 else "" for k, count in enumerate(nodes)])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("nodes (log)")


def _line(axes: Axes, nodes: list[int], values: list[float], number: int) -> None:
    log_ms(axes.yaxis, axes.set_yscale)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.plot(nodes, values, "o-", color=OTHERS[number].colour, linewidth=1.6, markersize=4)
    for at in (0, len(nodes) - 1):
        text = f"{values[at]:,.0f}" if values[at] >= 100 else f"{values[at]:.3g}"
        axes.annotate(
            text, (nodes[at], values[at]), xytext=(0, 9), textcoords="offset points", ha="center", color=INK,
            fontweight="bold",
        )  # fmt: skip
