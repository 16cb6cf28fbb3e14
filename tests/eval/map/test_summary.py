from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from eval.map.command import Args, report
from eval.map.grid import Grid
from eval.map.plot import draw, heat_map
from eval.map.store import Store
from eval.map.summary import Found, as_json, distance, figures, summarise
from tests.eval.map.fakes import later_row, row, setting_row

GRID = Grid(("decoder-0.2b",), ("remote-ps",), (0.0, 96.0), (1500.0,), (0.5,), ("limit",))


@pytest.fixture
def found(tmp_path: Path) -> list[Found]:
    """Two cells: one measured on three seeds, one out of reach."""
    with Store(tmp_path / "map", GRID.options()) as store:
        store.add(setting_row())
        store.add(setting_row(key="decoder-0.2b remote-ps 96 1500 0.5", rate=None, deployable={}))
        store.add(row())
        store.add(later_row(reference_ms=90.0, burst=0.3))
        store.add(later_row(seed=3, reference_ms=85.0, burst=0.1, known_ms=110.0))
        store.add(later_row(seed=4, reference_ms=1.0))  # more seeds than asked for
        return summarise(GRID, store, 3)


def test_a_cell_is_the_mean_of_its_seeds(found: list[Found]) -> None:
    cell = found[0]
    assert cell.seeds == 3
    assert cell.headroom == pytest.approx(0.15)  # of .2, .1 and .15
    assert cell.error == pytest.approx(0.05 / np.sqrt(3))
    assert cell.planned == pytest.approx(-0.025)  # of .05 and -.1
    assert cell.bound == pytest.approx(0.25)
    assert cell.burst == pytest.approx(0.2)
    assert cell.shift == pytest.approx(0.5)
    assert cell.needed_shift == pytest.approx(0.3)  # from .6, the base's flat set, to .3, the burst's
    assert cell.deployable_loss == pytest.approx(1.5)


def test_a_cell_out_of_reach_has_no_figures(found: list[Found]) -> None:
    assert not found[1].measured
    assert found[1].rate is None
    assert as_json(found[1])["headroom"] is None
    assert as_json(found[0])["headroom"] == pytest.approx(0.15)


def test_flat_sets_apart_and_overlapping() -> None:
    assert distance([[0.6, 0.8]], [[0.1, 0.2], [0.3, 0.45]]) == pytest.approx(0.15)
    assert distance([[0.1, 0.2]], [[0.3, 0.45]]) == pytest.approx(0.1)
    assert distance([[0.1, 0.9]], [[0.3, 0.45]]) == 0.0


def test_figures_are_those_of_the_help(found: list[Found]) -> None:
    values = figures(found)
    assert values["map.cells"].value == values["map.out_of_reach"].value == 1
    assert values["map.max_headroom"].value == pytest.approx(0.15)
    assert values["map.share_above_10_percent"].value == 1.0
    assert values["map.max_shift"].value == pytest.approx(0.5)
    assert values["map.max_headroom.model.decoder-0_2b"].value == pytest.approx(0.15)
    assert values["map.max_planned_headroom"].value == pytest.approx(-0.025)
    text = re.sub(r"\s+", "", Args.__doc__ or "")
    whole, sliced = re.findall(r"map\.\{([a-z0-9_,]+)\}", text)
    suffixes = (
        ".model.decoder-0_2b",
        ".link.remote-ps",
        ".host_gib.0",
        ".history.1500",
        ".hot_percent.50",
        ".load.limit",
    )
    expected = {f"map.{name}" for name in whole.split(",")}
    expected |= {f"map.{name}{suffix}" for name in sliced.split(",") for suffix in suffixes}
    assert set(values) == expected


def test_a_map_of_nothing_is_told(capsys: pytest.CaptureFixture[str], found: list[Found]) -> None:
    report(found[1:])
    assert "in all of 1 cells even a light load misses the SLO" in capsys.readouterr().out
    assert figures(found[1:])["map.cells"].value == 0


def test_the_report_names_the_best_cell_and_the_sum(capsys: pytest.CaptureFixture[str], found: list[Found]) -> None:
    report(found)
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "15.0 ± 2.9 %" in told
    assert "saves at most 15 % of P99" in told
    assert "over 10 % in 1 of 1 cells" in told
    assert "1 more cells are out of reach" in told


def test_the_picture_has_every_cell(tmp_path: Path, found: list[Found]) -> None:
    (axes, _bar) = heat_map(GRID, found).axes
    texts = [text.get_text() for text in axes.texts]
    assert {"15 %", ".70 → .20", "out of\nreach"} <= set(texts)
    assert [path.name for path in draw(tmp_path, GRID, found)] == ["map.png", "map.svg"]
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"
