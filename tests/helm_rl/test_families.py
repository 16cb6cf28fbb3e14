"""The shipped families and the day have what their comments say."""

from __future__ import annotations

import numpy as np
import pytest

from helm_rl.scenario import load_scenario
from helm_rl.workloads.fit import measure
from helm_rl.workloads.generate import generate


def test_short_videos_are_watched_as_published() -> None:
    scenario = load_scenario("short-video")
    load = scenario.load
    assert 86_400 * load.rate / load.users == pytest.approx(322_278_385 / 5.1 / 27_285 / 31, rel=0.01)
    found = measure(generate(scenario.model_copy(update={"seconds": 6000.0})))
    assert found.zipf_exponent == pytest.approx(load.zipf_items, rel=0.05)
    assert found.history_mean == pytest.approx(6342, rel=0.05)
    # Of a law of so many items, the top 1 % have 44 % of the views.
    rank = np.arange(1, load.items + 1, 1000, dtype=np.float64) + 499.5
    head = np.arange(1, 1001.0) ** -load.zipf_items
    weights = np.concatenate([[head.sum()], 1000 * rank[1:] ** -load.zipf_items])
    assert weights[: load.items // 100_000].sum() / weights.sum() == pytest.approx(0.44, abs=0.005)
    # Shares of pauses within a session: .09, .41 and .79 of all up to 10, 60 and 300 s, of .93 that are within one.
    z = (np.log([10, 60, 300]) - np.log(load.think_s) + load.think_sigma**2 / 2) / load.think_sigma
    np.testing.assert_allclose(z, [-1.30, -0.15, 1.03], atol=0.13)


def test_a_shops_users_mostly_come_once() -> None:
    load = load_scenario("shop").load
    assert 1 / load.requests_per_visit == pytest.approx(0.55, abs=0.005)
    assert load.rate == pytest.approx(100_150_807 / (9 * 86_400), rel=0.01)
    found = measure(generate(load_scenario("shop")))
    assert found.history_mean == pytest.approx(1500, rel=0.03)
    assert found.zipf_exponent == pytest.approx(1.052, rel=0.02)


def test_histories_of_readers_are_long() -> None:
    trace = generate(load_scenario("books"))
    within = (trace.history_tokens >= 8000) & (trace.history_tokens <= 15_000)
    assert within.mean() > 0.75
    assert trace.history_tokens.mean() == pytest.approx(11_500, rel=0.03)


def test_the_day_has_its_peak_and_its_trough() -> None:
    scenario = load_scenario("diurnal")
    day = scenario.load.day
    assert len(day) == 24
    assert max(day) / np.mean(day) * scenario.load.rate == pytest.approx(160, rel=0.01)
    trace = generate(scenario)
    counts = np.histogram(trace.arrival_ns, np.linspace(0, 600e9, 25))[0] / 25
    expected = np.array(day) / np.mean(day) * scenario.load.rate
    np.testing.assert_allclose(counts, expected, atol=4.5 * np.sqrt(160 / 25) + 5)
