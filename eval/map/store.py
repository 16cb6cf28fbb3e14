"""The folder of a map: its results as they come, and what is made of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from eval.map.rows import check_row
from eval.results import OPTIONS, RESULTS, Kind, Results

CELLS = "cells.json"
PICTURES = ("map.png", "map.svg")
FILES = (OPTIONS, RESULTS, CELLS, *PICTURES)
"""All that a map's folder holds."""


class Store(Results):
    """The results of a map."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        super().__init__(folder, Kind("map", FILES, partial(check_row, loads=options.get("loads", ()))), options)
