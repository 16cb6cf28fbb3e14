"""What a suite's report shows of other commands' results: cells of `eval map`, figures of `bench decision`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.map.store import CELLS
from eval.suite.plots import MapCell
from helm_rl.errors import UserError

MOST_BYTES = 16 << 20
MOST_CELLS = 100_000

DECISION = {
    "decision.p50_us": "one decision on alpha, whole (median)",
    "decision.p99_us": "one decision on alpha (99 %)",
    "decision.ratio_vs_torch": "network alone in torch over that",
    "decision.ratio_vs_onnxruntime": "network alone in onnxruntime over that",
    "router.p50_us": "one routing decision among 32 nodes (median)",
}
"""Figures of `helm-rl bench decision` that are shown, and in which words."""


def read_map(folder: Path) -> list[MapCell]:
    """Read the cells of a map that were measured; UserError if the folder has none."""
    path = folder / CELLS
    cells = _read(path, "--map", "a folder of helm-rl eval map")
    if not isinstance(cells, list) or len(cells) > MOST_CELLS:
        raise UserError(f"{path}: is no list of a map's cells; --map takes a folder of helm-rl eval map")
    found = []
    for number, cell in enumerate(cells):
        where = f"{path}, cell {number}"
        if not isinstance(cell, dict):
            raise UserError(f"{where}: is no table")
        if cell.get("headroom") is None:
            continue  # out of reach
        group = f"{_text(cell, 'model', where)}, {_text(cell, 'link', where)}"
        found.append(MapCell(group, _number(cell, "headroom", where), _number(cell, "deployable_loss", where)))
    if not found:
        raise UserError(f"{path}: no cell of this map was measured")
    return found


def read_decision(path: Path) -> dict[str, str]:
    """Read the times of decisions, as what they are of -> how long they took; UserError if the file has none."""
    document = _read(path, "--decision", "what helm-rl bench decision --json wrote")
    figures = document.get("figures") if isinstance(document, dict) else None
    if not isinstance(figures, dict):
        raise UserError(f"{path}: has no figures; --decision takes what helm-rl bench decision --json wrote")
    found = {}
    for name, title in DECISION.items():
        figure = figures.get(name)
        if isinstance(figure, dict) and figure.get("value") is not None:
            value = _number(figure, "value", f"{path}, {name}")
            found[title] = f"{value:.3g} µs" if name.endswith("_us") else f"{value:.3g} times"
    if not found:
        raise UserError(f"{path}: has no figure of decisions; --decision takes those of helm-rl bench decision")
    return found


def _read(path: Path, option: str, wanted: str) -> Any:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UserError(f"{path}: holds {size} bytes, too many for {wanted}")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{option}: there is no {path}; it takes {wanted}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; {option} takes {wanted}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is no JSON; {option} takes {wanted}") from None


def _number(table: dict[str, Any], name: str, where: str) -> float:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:  # NaN fails too
        raise UserError(f"{where}: {name} must be a number, found {str(value)[:40]}")
    return float(value)


def _text(table: dict[str, Any], name: str, where: str) -> str:
    value = table.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 100:
        raise UserError(f"{where}: {name} must be a short text, found {str(value)[:40]}")
    return value
