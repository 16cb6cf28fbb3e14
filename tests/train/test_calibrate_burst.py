"""`helm-rl train burst` from end to end on a small node, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import train.calibrate_burst as command
from helm_rl.control.detector_file import load_detector
from helm_rl.errors import UserError
from helm_rl.scenario import load_scenario, scenario_hash
from tests.envs.worlds import trace
from tests.train.test_firings import arrivals_ms
from train.calibrate_burst import Args, main
from train.detection import Cell, Found

SCENARIO = """
name = "small"
slo_ms = 100
seconds = 40
warm_s = 5
seed = 1
[hardware]
pool_gib = 2
[load]
rate = 60
users = 500
items = 1e5
[[load.phase]]
label = "burst"
start_s = 15
seconds = 15
rate = 200
requests_per_visit = 4
"""


@pytest.fixture
def args(tmp_path: Path) -> Args:
    (tmp_path / "small.toml").write_text(SCENARIO)
    return Args(output=tmp_path / "detector.json", scenario=str(tmp_path / "small.toml"), quick=True)


def test_it_writes_a_detector_its_figures_and_plots(
    args: Args, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "RATES", (20.0, 67.0, 140.0))
    trace(arrivals_ms((100, 50), (10, 300), (60, 50))).save(tmp_path / "my log.parquet")
    args = replace(
        args,
        false_alarm_s=20.0,
        logs=(tmp_path / "my log.parquet",),
        plots=tmp_path / "plots",
        json=tmp_path / "figures.json",
    )
    main(args)
    figures = {name: row["value"] for name, row in json.loads(args.json.read_text())["figures"].items()}
    detector = load_detector(args.output)
    assert detector.origin.scenario_hash == scenario_hash(load_scenario(args.scenario))
    assert detector.origin.false_alarm_s == 20.0
    assert detector.settings.threshold == figures["burst.threshold_nats"]
    assert detector.settings.p99_sigmas == figures["burst.p99_sigmas"]
    assert detector.rule is not None
    assert detector.rule.alpha_hot == figures["recovery.alpha_hot"] <= figures["recovery.alpha_cold"]
    assert figures["burst.firings_per_hour.my_log"] == pytest.approx(3600 / 170, rel=0.01)
    assert figures["burst.found_within_1s.67.2"] > 0.8
    assert figures["burst.found_within_1s.140.1_5.dispersion_2"] <= figures["burst.found_within_1s.140.2.dispersion_2"]
    assert figures["recovery.p99_ratio"] == pytest.approx(
        figures["recovery.p99_ms"] / figures["recovery.p99_ms.without"]
    )
    plots = {path.name for path in (tmp_path / "plots").iterdir()}
    assert plots == {"found.svg", "roc.svg", "firings-my_log.svg", "recovery.svg"}
    out = capsys.readouterr().out
    assert "20 s were asked for" in out
    assert "my_log: 1 firings" in out
    with pytest.raises(UserError, match=r"detector\.json exists already"):
        main(args)


def test_names_of_figures_hold_factors_with_underscores() -> None:
    none = Found(command.np.zeros(1))
    assert command.cell_name(Cell(67.0, 1.0, 1.5, 1000.0, none, none)) == "67.1_5"
    assert command.cell_name(Cell(1500.0, 4.0, 2.0, 1000.0, none, none)) == "1500.2.dispersion_4"
    assert command.cell_name(Cell(2.0, 1.0, 2.0, 1000.0, none, none)) == "2.2"


def test_what_cannot_be_is_refused_before_any_work(args: Args, tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("")
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "log.parquet", tmp_path / "a" / "log.parquet"):
        trace([1.0, 2.0]).save(path)
    logs = (tmp_path / "log.parquet", tmp_path / "a" / "log.parquet")
    for changes, message in (
        ({"false_alarm_s": 0.5}, "--false-alarm-s must be from 1 to 100000, not 0.5"),
        ({"draws": 0}, "--draws must be from 1 to 1000, not 0"),
        ({"jobs": 0}, "--jobs must be from 1"),
        ({"logs": logs}, "two of --logs are called log"),
        ({"plots": tmp_path / "plots"}, "plots exists already"),
        ({"policy": tmp_path / "none"}, "no such bundle folder"),
        ({"output": tmp_path / "no" / "detector.json"}, "does not exist"),
        ({"scenario": "nowhere"}, "nowhere"),
    ):
        with pytest.raises(UserError, match=message):
            main(replace(args, **changes))  # type: ignore[arg-type]
