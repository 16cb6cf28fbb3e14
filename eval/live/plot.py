"""The plot of modelled on measured latency, quantile by quantile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from eval.live.errors import Measured
from eval.plots import INK, OTHERS, SOFT, log_ms, page
from helm_rl.metrics import quantile_ms

QUANTILES = (*np.arange(0.01, 0.99, 0.01), *np.arange(0.99, 0.9995, 0.001))


def draw_quantiles(path: Path, found: Mapping[str, Measured]) -> None:
    """Write a PNG or SVG: modelled over measured latency at each quantile, a line for each load; on the diagonal both
    are the same, and between the grey lines they are within 20 %.
    """
    with page(path, height_in=4.6) as figure:
        axes = figure.subplots()
        low, high = np.inf, 0.0
        for (title, measured), look in zip(found.items(), OTHERS, strict=False):
            live = [quantile_ms(measured.live_ms, q) for q in QUANTILES]
            model = [quantile_ms(measured.model_ms, q) for q in QUANTILES]
            axes.plot(live, model, color=look.colour, linestyle=look.dashes, linewidth=1.6, label=title)
            for q, mark in ((0.5, "o"), (0.99, "D")):
                at = quantile_ms(measured.live_ms, q), quantile_ms(measured.model_ms, q)
                label = f"P{100 * q:g}" if look is OTHERS[0] else None
                axes.plot(*at, mark, color=look.colour, markeredgecolor=INK, markersize=6, label=label)
            low, high = min(low, *live, *model), max(high, *live, *model)
        ends = np.array([low / 1.2, high * 1.2])
        axes.plot(ends, ends, color=INK, linewidth=0.9)
        for factor in (0.8, 1.2):
            axes.plot(ends, factor * ends, color=SOFT, linewidth=0.7, linestyle=(0, (4, 3)))
        log_ms(axes.xaxis, axes.set_xscale)
        log_ms(axes.yaxis, axes.set_yscale)
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)
        axes.set_xlabel("measured latency (ms, log)")
        axes.set_ylabel("modelled latency (ms, log)")
        axes.legend(loc="upper left")
