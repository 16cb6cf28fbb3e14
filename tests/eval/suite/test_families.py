from __future__ import annotations

import pytest

from eval.suite.calibrate import SHARE, limits
from eval.suite.families import FAMILIES, PATTERNS, scenario_of
from helm_rl.scenario import LoadSection, Scenario


def height(load: LoadSection) -> float:
    return load.rate + load.phase[0].rate


def shape(scenario: Scenario) -> object:
    """All of a load but its rates and histories."""
    bare = {"rate": 0.0, "rate_end": None}
    phases = tuple(phase.model_copy(update=bare) for phase in scenario.load.phase)
    return scenario.load.model_copy(update={**bare, "phase": phases, "history_mean": 1500.0})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_one_node_under_three_loads(family: str) -> None:
    found = [scenario_of(family, pattern) for pattern in PATTERNS]
    assert [one.name.rpartition("-")[2] for one in found] == list(PATTERNS)
    assert len({(one.model, one.hardware, one.control, one.slo_ms, one.load.history_mean) for one in found}) == 1
    for pattern, one in zip(PATTERNS, found, strict=True):
        first = scenario_of("decoder", pattern)
        assert shape(one) == shape(first)
        assert (one.seconds, one.warm_s) == (first.seconds, first.warm_s)
    steady, trend, burst = found
    assert steady.load.rate == trend.load.rate
    assert burst.load.rate / height(burst.load) == pytest.approx(0.2, abs=0.003)
    assert trend.load.rate_end / (trend.load.rate_end + trend.load.phase[0].rate_end) == pytest.approx(0.1, abs=0.003)


def test_the_loads_are_those_that_calibration_finds() -> None:
    steady, trend, burst = (scenario_of("large", pattern) for pattern in PATTERNS)
    found = limits(steady)
    assert steady.load.rate == pytest.approx(SHARE * found.steady, rel=0.01)
    assert trend.load.rate_end + trend.load.phase[0].rate_end == pytest.approx(SHARE * found.mix, rel=0.01)
    assert height(burst.load) == pytest.approx(SHARE * found.burst, rel=0.01)
