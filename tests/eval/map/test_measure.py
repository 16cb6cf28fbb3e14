from __future__ import annotations

import numpy as np
import pytest

from eval.map import measure
from eval.map.grid import Cell, Grid, Setting
from tests.eval.map.fakes import FakePlayer

SETTING = Setting("decoder-0.2b", "remote-ps", 0.0, 1500.0, 0.5)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakePlayer]:
    class Fake(FakePlayer):
        pass

    monkeypatch.setattr(measure, "Player", Fake)
    return Fake


@pytest.mark.parametrize("most", [37.0, 230.0])
def test_the_largest_rate_is_found_to_three_percent(fake: type[FakePlayer], most: float) -> None:
    fake.most_rate = most
    found = measure.largest_rate(Grid(), SETTING)
    assert found is not None
    assert most / 1.03 <= found <= most


def test_where_the_least_load_is_too_much_there_is_no_rate(fake: type[FakePlayer]) -> None:
    fake.most_rate = 9.0  # the base alone must have 5 requests/s, half of all
    assert measure.prepare(Grid(), SETTING) == {
        "key": SETTING.key, "rate": None, "slo_ms": 100.0, "deployable": {}
    }  # fmt: skip


@pytest.mark.parametrize("hot_share", [0.05, 0.2, 0.5, 0.8])
def test_a_rate_that_is_too_low_for_a_p99_is_out_of_reach(fake: type[FakePlayer], hot_share: float) -> None:
    setting = Setting("decoder-0.2b", "remote-ps", 0.0, 1500.0, hot_share)
    rates = []
    for most in np.geomspace(4.0, 60.0, 12) / (1 - hot_share):
        fake.most_rate = most
        prepared = measure.prepare(Grid(), setting)
        rates.append(prepared["rate"])
        if prepared["rate"] is not None:
            found = measure.measure(Grid(), Cell(setting, "moderate"), 1, prepared, None)
            assert found["requests"] > 1_000
    assert rates[0] is None
    assert rates[-1] is not None


def test_the_deployable_static_is_best_on_the_base(fake: type[FakePlayer]) -> None:
    fake.most_rate = 60.0
    found = measure.prepare(Grid(), SETTING)
    assert found["deployable"]["limit"]["alpha"] == found["deployable"]["moderate"]["alpha"] == 0.6
    # CURVATURE * d**2 = ln 1.02 at d = .0445; straight lines between the fine points lie a little inside.
    assert found["deployable"]["limit"]["flat"] == (pytest.approx((0.556, 0.644), abs=0.002),)


def test_a_cell_in_which_the_best_alpha_moves_has_the_headroom_of_the_shift() -> None:
    prepared = {"rate": 60.0, "deployable": {"limit": {"alpha": 0.6}}}
    found = measure.measure(Grid(), Cell(SETTING, "limit"), 1, prepared, None)
    assert found["hindsight"] == 0.4
    assert found["burst"] == 0.2
    assert found["rate"] == pytest.approx(57.0)
    assert found["hindsight_ms"] == pytest.approx(40 * np.exp(0.4), rel=1e-5)
    assert found["deployable_ms"] == pytest.approx(40 * np.exp(1.6), rel=1e-5)
    assert found["reference_ms"] == found["bound_ms"] == pytest.approx(40.0, rel=1e-5)
    assert (found["shift"]["before"], found["shift"]["during"]) == (0.6, 0.2)
    assert "known_ms" not in found


def test_a_plan_of_seed_1_is_held_against_the_static_of_seed_1() -> None:
    prepared = {"rate": 60.0, "deployable": {"limit": {"alpha": 0.6}}}
    known = {
        "hindsight": 0.34,  # off by .06: the base then takes exp(10 * .26**2)
        "burst": 0.2,
        "shift": {"before": 0.6, "during": 0.3, "after": 0.6, "go_s": 0.0, "go_ramp_s": 0.0,
                  "return_s": 0.0, "return_ramp_s": 0.0},
    }  # fmt: skip
    found = measure.measure(Grid(), Cell(SETTING, "limit"), 2, prepared, known)
    assert found["known_static_ms"] == pytest.approx(40 * np.exp(0.676), rel=1e-5)
    assert found["known_ms"] == pytest.approx(40 * np.exp(0.1), rel=1e-5)
    assert found["hindsight"] == 0.4  # its own, though only what is near seed 1's was played
    assert found["reference_ms"] == pytest.approx(40.0, rel=1e-2)


def test_where_twice_the_memory_gains_nothing_no_shift_is_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.eval.map.fakes.BEST", {"base": 0.5, "burst": 0.5})
    monkeypatch.setattr(measure, "search", lambda *_: pytest.fail("there is nothing to find"))
    prepared = {"rate": 60.0, "deployable": {"limit": {"alpha": 0.5}}}
    found = measure.measure(Grid(), Cell(SETTING, "limit"), 1, prepared, None)
    assert found["reference_ms"] == found["hindsight_ms"] == found["bound_ms"]
    assert found["hindsight"] == found["burst"] == 0.5
