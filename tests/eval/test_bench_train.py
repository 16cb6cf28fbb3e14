"""`helm-rl bench train`: what its figures and sentences make of trainings, and what is left out where it cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval import bench_train, training_loops
from eval.bench_train import (
    HELM,
    ITERATION,
    SB3,
    Args,
    Measured,
    figures_of,
    loops_table,
    main,
    return_sentences,
)
from eval.training_loops import Settings, Trained
from helm_rl.errors import UserError
from tests.envs.worlds import QUICK, scenario


def trained(overhead_us: float, simulator_us: float = 500.0) -> Trained:
    return Trained(lambda obs: obs, 1000, (overhead_us + simulator_us) * 1e-3, simulator_us * 1e-3)


def measured(theirs: float = 0.0) -> Measured:
    """Three trainings of each; the peer's policies return `theirs` more than ours, training by training."""
    returns = np.array([[1.0, 3.0], [2.0, 4.0], [3.0, 5.1]])
    runs = {HELM: [trained(20), trained(30), trained(90)], SB3: [trained(50), trained(60), trained(100)]}
    return Measured(runs, {HELM: returns, SB3: returns + theirs}, np.array([-1.0, -2.0]))


def test_an_iteration_is_that_of_the_settings() -> None:
    settings = Settings(1, 0.9)
    assert settings.num_envs * settings.num_steps == ITERATION


def test_figures_are_medians_and_ratios_are_taken_round_by_round() -> None:
    figures = figures_of(measured(0.5))
    value = {name: figure.value for name, figure in figures.items()}
    assert value["train.overhead_us_per_step"] == pytest.approx(30)
    assert value["train.overhead_us_per_step.sb3"] == pytest.approx(60)
    assert value["train.simulator_us_per_step.sb3"] == pytest.approx(500)
    assert value["train.overhead_ratio_vs_sb3"] == pytest.approx(0.5)  # of .4, .5 and .9
    assert figures["train.overhead_ratio_vs_sb3"].goal == 0.5
    assert value["train.steps_per_s"] == pytest.approx(1e6 / 530)
    assert value["train.return"] == pytest.approx(3.0, abs=0.05)
    assert value["train.return_difference.sb3"] == pytest.approx(-0.5)
    assert value["train.return.still"] == -1.5
    assert "train.overhead_ratio_vs_cleanrl_loop" not in figures
    row = [list(column.cells)[1] for column in loops_table(measured()).columns]
    assert row[:5] == ["Stable-Baselines3 PPO", "60.0", "50.0", "100.0", "500.0"]


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [(0.0, "equal within the interval"), (0.5, "NOT equal: ours return less"), (-0.5, "NOT equal: ours return more")],
)
def test_returns_are_equal_only_where_the_interval_holds_zero(theirs: float, verdict: str) -> None:
    assert return_sentences(measured(theirs))[1].endswith(f": {verdict}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timesteps": 1000}, "--timesteps must be at least 1024, got 1000"),
        ({"timesteps": 1500}, "--timesteps must be whole iterations of 1,024, got 1500"),
        ({"repeats": 0}, "--repeats must be at least 1, got 0"),
        ({"episodes": 0}, "--episodes must be at least 1, got 0"),
        ({"json": Path(), "overwrite": True}, "is a folder; name a file"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(Args(**change))


def test_what_cannot_run_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_loops, "EXAMPLE", tmp_path / "cleanrl_ppo.py")
    monkeypatch.setattr(bench_train.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("helm_rl.scenario.load_scenario", lambda name: scenario(**QUICK))
    main(Args(timesteps=1024, repeats=1, episodes=1, json=tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["train.overhead_us_per_step"]["value"] > 0
    assert not [name for name in figures if "sb3" in name or "cleanrl" in name or "regret" in name]
    out = capsys.readouterr().out.replace("\n", " ")
    assert "examples/cleanrl_ppo.py is left out: it comes with the repository alone." in out
    assert "Stable-Baselines3 PPO is left out: it is not installed (pip install 'helm-rl[bench]')." in out


@pytest.mark.parametrize(("seconds", "said"), [(61.2, "61 s"), (float("inf"), "did not come to a regret of 5 %")])
def test_regret_is_timed_where_asked_for(
    seconds: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_train, "measure", lambda *_: measured())
    monkeypatch.setattr(bench_train, "seconds_to_regret", lambda: seconds)
    main(Args(regret=True, json=tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["train.seconds_to_regret_05"]["value"] == (seconds if np.isfinite(seconds) else None)
    assert said in capsys.readouterr().out
