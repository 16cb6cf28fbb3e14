"""Rewards against P99: bias, noise and wrong ways, on curves whose truth is known; and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.reward import CANDIDATES, Args, lesson, main, needed
from helm_rl.errors import UserError
from tests.helm_rl.test_observation import window

ALPHAS = np.round(np.arange(0.1, 0.91, 0.04), 6)


def test_bias_is_the_distance_of_what_is_rewarded_to_what_has_the_least_p99() -> None:
    tail_ms = 50.0 * (1 + (ALPHAS - 0.5) ** 2)
    rng = np.random.default_rng(1)
    shared = rng.normal(size=400)  # what both alphas meet alike, and pairing takes away
    own = rng.normal(size=(ALPHAS.size, 400))

    def rewards(peak: float) -> np.ndarray:
        return -((ALPHAS - peak) ** 2)[:, None] + 0.05 * shared + 0.01 * own

    right = lesson(ALPHAS, rewards(0.5), 0.5, tail_ms, 0.04)
    assert abs(right.bias) <= 0.04
    # .0064 of reward apart, with variances of 2 * (.05^2 + .01^2), or paired of 2 * .01^2.
    assert right.intervals == pytest.approx(1.96**2 * 0.0052 / 0.0064**2, rel=0.35)
    assert right.paired == pytest.approx(1.96**2 * 0.0002 / 0.0064**2, rel=0.35)
    wrong = lesson(ALPHAS, rewards(0.7), 0.5, tail_ms, 0.04)
    assert wrong.bias == pytest.approx(0.2, abs=0.041)
    assert wrong.given_up == pytest.approx(wrong.bias**2, rel=1e-6)
    assert wrong.intervals == wrong.paired == math.inf


def test_a_gain_of_nothing_is_never_told_from_none() -> None:
    assert needed(0.0, 1.0) == math.inf
    assert needed(-1.0, 1.0) == math.inf
    assert needed(1.0, 2.0) == pytest.approx(1.96**2 * 2)


def test_candidates_by_hand() -> None:
    latency_ms = np.array([50.0, 100.0, 300.0], np.float32)
    busy = {"arrivals": 4, "link_busy_ns": 8_000_000, "compute_busy_ns": 0}
    seen = window(completed=3, slow=1, tail_cost_sum=6.0, log_latency_sum=-1.5, **busy)
    expected = {
        "p99": -3.0,
        "log": 0.5,
        "log_tail": 0.5 - 4 * 2 / 3,
        "excess": -2 / 3,
        "within_slo": 2 / 3,
        "paper": 2 / 3 - 2,
        "power_1": -3.5 / 3,
        "power_2": -5.25 / 3,
        "power_8": -(0.5**8 + 1 + 256) / 3,
        "log_power": -math.log((0.5**4 + 1 + 16) / 3) / 4,
        "demand": -0.02,
        "power_4": -(0.5**4 + 1 + 16) / 3,
        "ours": -math.log1p(2.0 / 0.25),
    }
    for name, value in expected.items():
        assert CANDIDATES[name][1](seen, latency_ms, 100.0) == pytest.approx(value), name


def test_the_command_writes_what_it_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.toml"
    path.write_text(
        'name = "small one"\nslo_ms = 100\nseconds = 40\nwarm_s = 5\n'
        "[hardware]\npool_gib = 2\n[load]\nrate = 40\nusers = 500\nitems = 1e5\n"
    )
    main(Args(scenario=(str(path),), step=0.08, json=tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())["figures"]
    assert {name.split(".")[1] for name in figures} == {"small_one"}
    assert len(figures) == 4 * len(CANDIDATES)
    assert "small one: what rewards teach in" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--step must divide 0\.08, got 0\.05"):
        main(Args(step=0.05))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"step": 0.0}, r"--step must lie in 0\.005 to 0\.2, got 0\.0"),
        ({"step": math.nan}, r"--step must lie in 0\.005 to 0\.2, got nan"),
        ({"step": 0.16}, r"--step must divide 0\.08, got 0\.16"),
        ({"draws": 0}, "--draws must be at least 1, got 0"),
        ({"scenario": ()}, "--scenario needs at least one scenario"),
        ({"scenario": ("burst", "burst")}, "--scenario: two of them have one name in the figures: burst, burst"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_replay(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        main(Args(**wrong))


def test_a_scenario_that_tells_no_two_alphas_or_intervals_apart_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(
        'name = "odd"\nslo_ms = 100\nseconds = 38\nwarm_s = 5\n[hardware]\npool_gib = 2\n'
        "[load]\nrate = 40\nusers = 500\nitems = 1e5\n[control]\ninterval_s = 10\nalpha_min = 0.4\nalpha_max = 0.6\n"
    )
    with pytest.raises(UserError, match="from 19 to 38 s, is shorter than 2 intervals of 10 s"):
        main(Args(scenario=(str(path),), step=0.08))
    path.write_text(path.read_text().replace("alpha_max = 0.6", "alpha_max = 0.45"))
    with pytest.raises(UserError, match=r"alpha_min = 0\.4 and alpha_max = 0\.45 lie less than 0\.08 apart"):
        main(Args(scenario=(str(path),)))
