"""The fit of the hardware profiles: each published point, and that the stored numbers are the fitted ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from rich.progress import Progress

from helm_rl import cli
from helm_rl.profiles import fit as fitting
from helm_rl.profiles.hardware import HARDWARE
from helm_rl.profiles.published import POINTS, Point


def test_every_published_point_is_within_a_quarter_and_the_median_within_a_tenth() -> None:
    rows = fitting.predictions()
    errors = [abs(row.error) for row in rows if not row.exact]
    assert len(errors) == 32
    assert max(errors) <= 0.25
    assert median(errors) <= 0.10
    # Those that determine a number of their profile alone: off by no more than its rounding.
    exact = [row for row in rows if row.exact]
    assert {(row.point.hardware, row.point.fits) for row in exact} == {
        ("h100", "compute"),
        ("h100", "attention"),
        ("h100", "gather"),
    }
    assert all(abs(row.error) < 0.005 for row in exact)


@pytest.mark.parametrize("name", HARDWARE)
def test_the_stored_numbers_are_the_fitted_ones_and_the_rest_is_marked(name: str) -> None:
    profile, fitted = HARDWARE[name], fitting.fit(name)
    for field, value in fitted.items():
        assert getattr(profile, field) == round(value, fitting.DIGITS[field]), field
        assert field not in profile.extrapolated
    if not name.startswith("cpu"):  # measured, not published
        assert set(profile.extrapolated) == {"request_ms", *fitting.DIGITS} - set(fitted)


def test_a_point_by_hand() -> None:
    """8 sequences of 4,096 tokens, 3,968 of them cached, 256 candidates each, on the L20."""
    point = next(p for p in POINTS if p.hardware == "l20" and (p.tokens, p.cached) == (4096, 3968))
    tokens = 8 * (128 + 256)
    pairs = 8 * (128 * 3968 + 128 * 128 / 2 + 256 * 4096)
    assert point.linear_flop == tokens * 2 * 8 * 5 * 1024 * 1024
    assert point.pair_flop == pairs * 4 * 8 * 1024
    hardware = replace(HARDWARE["l20"], peak_tflop_s=100.0, linear_efficiency=0.5, pair_efficiency=0.25, batch_ms=1.0)
    by_hand_ms = 1.0 + point.linear_flop / 50e9 + point.pair_flop / 25e9
    assert fitting.predict(point, hardware) == pytest.approx(by_hand_ms)


def test_bytes_that_move_by_hand() -> None:
    hardware = replace(HARDWARE["h100"], local_gb_s=10.0, pcie_gb_s=20.0, onboard_ms=3.0)
    onboard = next(p for p in POINTS if p.hardware == "h100" and p.fits == "onboard" and p.tokens == 1024)
    assert onboard.moved_bytes == 8 * 1024 * 32_768  # .27 GB
    assert fitting.predict(onboard, hardware) == pytest.approx(3.0 + 268_435_456 / 20e6)
    gather = Point("", "h100", "gather", 9.0, moved_bytes=5e7, resident_ms=0.5)
    assert fitting.predict(gather, hardware) == pytest.approx(0.5 + 5.0)
    with pytest.raises(ValueError, match="not published"):
        fitting.predict(next(p for p in POINTS if p.moved_bytes is None), hardware)


def test_the_fit_finds_the_profile_that_made_the_points(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = replace(
        HARDWARE["l20"],
        linear_efficiency=0.41,
        pair_efficiency=0.23,
        batch_ms=0.7,
        local_gb_s=9.0,
        pcie_gb_s=31.0,
        onboard_ms=2.5,
    )
    ours = [replace(point, hardware="l20") for point in POINTS if point.fits != "attention" and point.spread == 1]
    made = [replace(p, ms=fitting.predict(p, truth)) for p in ours if p.moved_bytes is not None]
    monkeypatch.setattr(fitting, "POINTS", tuple(made))
    found = fitting.fit("l20")
    assert set(found) == set(fitting.DIGITS)
    for field, value in found.items():
        assert value == pytest.approx(getattr(truth, field), rel=1e-6), field


def test_attention_that_was_timed_alone_is_told_from_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = replace(HARDWARE["h100"], linear_efficiency=0.31, pair_efficiency=0.17)
    ours = [point for point in POINTS if point.hardware == "h100" and point.fits in ("compute", "attention")]
    monkeypatch.setattr(fitting, "POINTS", tuple(replace(p, ms=fitting.predict(p, truth)) for p in ours))
    assert fitting.fit("h100") == pytest.approx({"linear_efficiency": 0.31, "pair_efficiency": 0.17})


@pytest.mark.parametrize("name", ["l20", "b200"])
def test_the_candidates_come_on_top_of_the_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken as a part of the tokens that the chart counts, the points can be met far less well."""

    def worst() -> float:
        points = [p for p in fitting.POINTS if p.hardware == name and p.fits == "compute"]
        profile = replace(HARDWARE[name], **fitting.fit(name))
        return max(abs(fitting.predict(p, profile) / p.ms - 1) for p in points)

    on_top = worst()
    monkeypatch.setattr(fitting, "POINTS", tuple(replace(point, candidates=0) for point in POINTS))
    assert worst() > 2 * on_top


def test_an_impossible_pair_of_efficiencies_becomes_one() -> None:
    """The B200's points would have attention run above the chip's peak."""
    fitted = fitting.fit("b200")
    assert fitted["linear_efficiency"] == fitted["pair_efficiency"] < 1
    assert fitting.fit("l20")["linear_efficiency"] < fitting.fit("l20")["pair_efficiency"] < 1


def test_the_command_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profiles.json"
    assert cli.main(["bench", "profiles", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert set(figures) == {
        "profiles.points",
        "profiles.points.exact",
        "profiles.point_error.median",
        "profiles.point_error.max",
    }
    assert figures["profiles.points"]["value"] == 32
    assert figures["profiles.point_error.max"]["goal"] == 0.25
    errors = [abs(row.error) for row in fitting.predictions() if not row.exact]
    assert figures["profiles.point_error.max"]["value"] == max(errors)
    out = capsys.readouterr().out
    assert f"{POINTS[0].ms:.4g}" in out
    assert all(name in out for name in HARDWARE)
    assert cli.main(["bench", "profiles", "--json", str(file)]) == 2
    assert "profiles.json" in capsys.readouterr().err
    assert cli.main(["bench", "profiles", "--json", str(tmp_path), "--overwrite"]) == 2


def test_this_processor_can_be_measured() -> None:
    with Progress(disable=True) as progress:
        figures = fitting.measure_cpu(progress, repeats=1, table_bytes=1 << 26)
    assert {name: figure.unit for name, figure in figures.items()} == {
        "cpu.peak_gflop_s": "GFLOP/s",
        "cpu.linear_gflop_s": "GFLOP/s",
        "cpu.pair_gflop_s": "GFLOP/s",
        "cpu.gather_gb_s": "GB/s",
        "cpu.copy_gb_s": "GB/s",
    }
    for name, figure in figures.items():
        assert 0.05 < figure.value < 20_000, name


@pytest.mark.parametrize("batch_ms", [0.0, 2.5])
def test_batches_of_known_times_give_the_speeds_back(batch_ms: float) -> None:
    linear = np.array([1e9, 2e9, 5e8, 4e9, 3e9])
    pair = np.array([1e8, 3e9, 2e9, 1e7, 8e8])
    ms = batch_ms + linear / 40e6 + pair / 25e6  # 40 and 25 GFLOP/s
    found = fitting.fit_batches(linear, pair, ms, peak_tflop_s=0.1)
    assert found == pytest.approx({"linear_efficiency": 0.4, "pair_efficiency": 0.25, "batch_ms": batch_ms}, abs=1e-6)


def test_a_batch_of_one_speed_for_all_costs_at_least_nothing() -> None:
    """Attention looks faster than the peak, so one speed is fitted; times grow faster than the work."""
    linear, pair = np.array([1e9, 2e9, 4e9]), np.array([1e9, 3e9, 5e9])
    ms = np.array([1.0, 3.0, 9.0])
    found = fitting.fit_batches(linear, pair, ms, peak_tflop_s=2.0)
    (ms_per_flop,) = fitting.least_squares([linear + pair], ms)
    assert found["batch_ms"] == 0
    assert found["linear_efficiency"] == found["pair_efficiency"] == pytest.approx(1e-9 / 2.0 / ms_per_flop)


def test_a_batch_costs_at_least_nothing() -> None:
    linear = np.array([1e9, 2e9, 5e8, 4e9])
    pair = np.array([1e8, 3e9, 2e9, 1e7])
    ms = linear / 40e6 + pair / 25e6 - 5.0
    assert fitting.fit_batches(linear, pair, ms, peak_tflop_s=0.1)["batch_ms"] == 0
