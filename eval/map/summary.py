"""What the map says: each cell over its seeds, the slices, the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.map.grid import LOADS, Cell, Grid, Setting
from eval.map.store import Store
from eval.results import Row
from eval.statistics import standard_error
from helm_rl.figures import Figure

WORTH = 0.1
"""Headroom from which adapting is said to pay."""

_Flat = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Found:
    """One cell over its seeds, as means; rate None: no static serves even the least load within the SLO.

    rate: requests/s at the burst's height; headroom: 1 - P99(reference) / P99(best static in hindsight); error: its
    standard error over seeds, NaN for one; planned: the same of the shift and the static of seed 1, unchanged on the
    other seeds' arrivals; bound: what a node with twice the memory would gain over that static; base, burst: their best
    alphas; needed_shift: distance between the alphas within 2 % of the best of each; hindsight: the best static;
    hindsight_ms: its P99; deployable_loss: P99(deployable static) / P99(hindsight static) - 1.
    """

    cell: Cell
    slo_ms: float
    rate: float | None = None
    seeds: int = 0
    headroom: float = float("nan")
    error: float = float("nan")
    planned: float = float("nan")
    bound: float = float("nan")
    base: float = float("nan")
    burst: float = float("nan")
    needed_shift: float = float("nan")
    hindsight: float = float("nan")
    hindsight_ms: float = float("nan")
    deployable_loss: float = float("nan")

    @property
    def shift(self) -> float:
        """Distance between the best alphas of base and burst."""
        return abs(self.base - self.burst)

    @property
    def measured(self) -> bool:
        """Whether there is anything to say."""
        return self.seeds > 0


def summarise(grid: Grid, store: Store, seeds: int) -> list[Found]:
    """Return all cells of which the setting has been prepared, in the grid's order of options."""
    cells = [
        Cell(Setting(model, link, host_gib, history, hot_share), load)
        for model in grid.models
        for link in grid.links
        for host_gib in grid.host_gib
        for history in grid.histories_of(model)
        for hot_share in grid.hot_shares
        for load in grid.loads
    ]
    found = []
    for cell in cells:
        prepared = store.get(cell.setting.key)
        if prepared is not None:
            rows = [row for seed in range(1, seeds + 1) if (row := store.get(cell.key, seed)) is not None]
            found.append(_found(cell, prepared, rows))
    return found


def _found(cell: Cell, prepared: Row, rows: list[Row]) -> Found:
    if prepared["rate"] is None or not rows:
        rate = None if prepared["rate"] is None else prepared["rate"] * LOADS[cell.load]
        return Found(cell, prepared["slo_ms"], rate)
    base = prepared["deployable"][cell.load]

    def gain(better: str, worse: str, of: list[Row]) -> list[float]:
        return [1 - row[better] / row[worse] for row in of]

    headroom = gain("reference_ms", "hindsight_ms", rows)
    later = [row for row in rows if "known_ms" in row]
    return Found(
        cell,
        prepared["slo_ms"],
        rows[0]["rate"],
        len(rows),
        headroom=float(np.mean(headroom)),
        error=standard_error(headroom),
        planned=float(np.mean(gain("known_ms", "known_static_ms", later))) if later else float("nan"),
        bound=float(np.mean(gain("bound_ms", "hindsight_ms", rows))),
        base=base["alpha"],
        burst=float(np.mean([row["burst"] for row in rows])),
        needed_shift=float(np.mean([distance(base["flat"], row["burst_flat"]) for row in rows])),
        hindsight=float(np.mean([row["hindsight"] for row in rows])),
        hindsight_ms=float(np.mean([row["hindsight_ms"] for row in rows])),
        deployable_loss=float(np.mean([row["deployable_ms"] / row["hindsight_ms"] - 1 for row in rows])),
    )


def distance(one: _Flat, other: _Flat) -> float:
    """Distance between two sets of closed intervals (low, high); 0 where they touch."""
    return min(max(0.0, a[0] - b[1], b[0] - a[1]) for a in one for b in other)


def slices(found: Sequence[Found]) -> dict[str, list[Found]]:
    """Return the measured cells by each value of each option: "model.hstu-5", "load.limit", ..."""
    names: dict[str, Callable[[Cell], str]] = {
        "model": lambda cell: cell.setting.model,
        "link": lambda cell: cell.setting.link,
        "host_gib": lambda cell: f"{cell.setting.host_gib:g}",
        "history": lambda cell: f"{cell.setting.history:g}",
        "hot_percent": lambda cell: f"{100 * cell.setting.hot_share:g}",
        "load": lambda cell: cell.load,
    }
    parts: dict[str, list[Found]] = {}
    for name, value in names.items():
        for each in found:
            if each.measured:
                parts.setdefault(f"{name}.{value(each.cell).replace('.', '_')}", []).append(each)
    return parts


def figures(found: Sequence[Found]) -> dict[str, Figure]:
    """Return the figures, of the whole map and of its slices."""
    measured = [each for each in found if each.measured]
    result = {
        "map.cells": Figure(len(measured), "cells", "higher"),
        "map.out_of_reach": Figure(sum(each.rate is None for each in found), "cells", "lower"),
        "map.seeds": Figure(min((each.seeds for each in measured), default=0), "seeds", "higher"),
    }
    if not measured:
        return result
    for name, part in {"": measured, **slices(found)}.items():
        suffix = f".{name}" if name else ""
        headroom = np.array([each.headroom for each in part])
        result[f"map.max_headroom{suffix}"] = Figure(float(headroom.max()), "share of P99", "higher")
        result[f"map.median_headroom{suffix}"] = Figure(float(np.median(headroom)), "share of P99", "higher")
        result[f"map.share_above_10_percent{suffix}"] = Figure(float((headroom > WORTH).mean()), "of cells", "higher")
        shift = max(each.shift for each in part)
        result[f"map.max_shift{suffix}"] = Figure(float(shift), "alpha", "higher")
        loss = np.median([each.deployable_loss for each in part])
        result[f"map.median_deployable_loss{suffix}"] = Figure(float(loss), "of P99", "lower")
    result["map.max_needed_shift"] = Figure(max(each.needed_shift for each in measured), "alpha", "higher")
    bound = np.array([each.bound for each in measured])
    result["map.share_bound_above_10_percent"] = Figure(float((bound > WORTH).mean()), "of cells", "higher")
    planned = [each.planned for each in measured if np.isfinite(each.planned)]
    if planned:
        result["map.max_planned_headroom"] = Figure(max(planned), "share of P99", "higher")
    return result


def as_json(each: Found) -> dict[str, Any]:
    """Return a cell as plain JSON; what is not known is null."""
    setting = each.cell.setting
    values: dict[str, Any] = {
        "model": setting.model,
        "link": setting.link,
        "host_gib": setting.host_gib,
        "history": setting.history,
        "hot_share": setting.hot_share,
        "load": each.cell.load,
        "slo_ms": each.slo_ms,
        "rate": each.rate,
        "seeds": each.seeds,
        "shift": each.shift,
    }
    names = (
        "headroom", "error", "planned", "bound", "base", "burst", "needed_shift", "hindsight", "hindsight_ms",
        "deployable_loss",
    )  # fmt: skip
    values |= {name: getattr(each, name) for name in names}
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in values.items()
    }
