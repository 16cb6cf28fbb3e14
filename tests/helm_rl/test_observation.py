"""Observation schema v1: every formula on windows made by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helm_rl import observation
from helm_rl.metrics import WindowStats
from helm_rl.observation import HIGH, LOW, OBSERVATION_NAMES, SIZE, ObservationBuilder, schema_hash

SECOND = 1_000_000_000
SLO_MS = 100.0

FULL: dict[str, Any] = {
    "start_ns": 0,
    "end_ns": SECOND,
    "arrivals": 200,
    "returning": 50,
    "completed": 160,
    "slow": 40,
    "shed": 20,
    "history_tokens": 180_000,
    "history_tokens_hit": 45_000,
    "rows": 1000.0,
    "rows_hit": 900.0,
    "log_latency_sum": -1.0,
    "tail_cost_sum": 1.0,
    "latency_ms_sum": 5000.0,
    "p99_ms": 150.0,
    "link_busy_ns": 400_000_000,
    "compute_busy_ns": 800_000_000,
    "queue": 128,
    "queue_bound": 512,
    "alpha": 0.35,
    "target": 0.4,
    "backlog_pages": 64,
    "moved_pages": 7,
    "pages": 256,
    "emb_margin_ms": 0.5,
    "kv_margin_ms": 0.25,
}
EMPTY: dict[str, Any] = {
    **FULL,
    **dict.fromkeys(("arrivals", "returning", "completed", "slow", "shed"), 0),
    **dict.fromkeys(("history_tokens", "history_tokens_hit", "link_busy_ns", "compute_busy_ns", "queue"), 0),
    **dict.fromkeys(("rows", "rows_hit", "log_latency_sum", "tail_cost_sum", "latency_ms_sum"), 0.0),
}


def window(start_s: float = 0.0, end_s: float = 1.0, base: dict[str, Any] = FULL, **changes: Any) -> WindowStats:
    times = {"start_ns": round(start_s * SECOND), "end_ns": round(end_s * SECOND)}
    return WindowStats(**{**base, **times, **changes})


def named(values: np.ndarray) -> dict[str, float]:
    return dict(zip(OBSERVATION_NAMES, values.tolist(), strict=True))


def test_names_and_order_are_those_of_schema_1() -> None:
    assert (
        *("hot_user_ratio", "kv_hit_rate", "emb_hit_rate", "mean_history", "slo_violation_rate", "alpha"),
        *("p99_over_slo", "rate_fast_slow", "link_util", "compute_util", "link_demand", "compute_demand", "queue"),
        *("emb_margin", "kv_margin", "backlog", "burst_score"),
    ) == OBSERVATION_NAMES
    assert SIZE == 17
    assert observation.SCHEMA_VERSION == 1


def test_every_formula_on_one_window() -> None:
    got = ObservationBuilder(SLO_MS).update(window(burst_score=1.4))
    assert got.dtype == np.float32
    assert got.shape == (17,)
    expected = {
        "hot_user_ratio": 50 / 200,
        "kv_hit_rate": 45 / 180,
        "emb_hit_rate": 0.9,
        "mean_history": math.log1p(180_000 / 180) / math.log1p(32768),  # 20 of 200 were shed: their history is unread
        "slo_violation_rate": 40 / 160,
        "alpha": 0.35,
        "p99_over_slo": 1.5 / 4,
        "rate_fast_slow": 0.0,  # both means start with the first window
        "link_util": 0.4,
        "compute_util": 0.8,
        "link_demand": 400 / 200 / SLO_MS,
        "compute_demand": 800 / 200 / SLO_MS,
        "queue": 0.25,
        "emb_margin": math.tanh(100 * 0.5 / SLO_MS),
        "kv_margin": math.tanh(100 * 0.25 / SLO_MS),
        "backlog": 0.25,
        "burst_score": 0.7,
    }
    assert named(got) == pytest.approx(expected, rel=1e-6)


def test_clips() -> None:
    changes = {
        "p99_ms": 1e7,
        "link_busy_ns": 30 * SECOND,
        "compute_busy_ns": 30 * SECOND,
        "history_tokens": 2**40,
        "emb_margin_ms": 1e9,
        "kv_margin_ms": -1e9,
    }
    got = named(ObservationBuilder(SLO_MS).update(window(**changes)))
    assert {got[name] for name in ("p99_over_slo", "link_util", "compute_util", "mean_history", "emb_margin")} == {1.0}
    assert got["link_demand"] == 1.0
    assert got["kv_margin"] == 0.0


def test_windows_shorter_than_a_second_are_taken_together() -> None:
    builder = ObservationBuilder(SLO_MS)
    for k in range(4):
        got = builder.update(window(k * 0.25, (k + 1) * 0.25, arrivals=10 * k + 10, returning=k))
    assert named(got)["hot_user_ratio"] == pytest.approx(6 / 100)
    assert named(got)["link_util"] == pytest.approx(1.0)  # 4 times .4 s in one second
    # The next one takes the place of the first.
    got = builder.update(window(1.0, 1.25, arrivals=50, returning=40))
    assert named(got)["hot_user_ratio"] == pytest.approx((1 + 2 + 3 + 40) / (20 + 30 + 40 + 50))
    # A window of two seconds takes the place of all.
    got = builder.update(window(1.25, 3.25, arrivals=100, returning=100))
    assert named(got)["hot_user_ratio"] == 1.0
    assert named(got)["link_util"] == pytest.approx(0.2)


@pytest.mark.parametrize("interval_s", [0.005, 0.3])
def test_what_is_taken_together_is_never_less_than_a_second(interval_s: float) -> None:
    builder = ObservationBuilder(SLO_MS)
    busy = round(0.4 * interval_s * SECOND)
    steps = round(3 / interval_s)
    for k in range(steps):
        # One arrival in the last second only.
        late = (k + 1) * interval_s > 2.0 + 1e-9
        counts = {"arrivals": 1, "returning": int(late), "link_busy_ns": busy}
        got = builder.update(window(k * interval_s, (k + 1) * interval_s, **counts))
    assert len(builder._windows) == math.ceil(1.0 / interval_s)
    assert named(got)["hot_user_ratio"] == pytest.approx(1.0, abs=interval_s)
    assert named(got)["link_util"] == pytest.approx(0.4)


def test_values_stand_while_nothing_comes_and_their_age_is_counted() -> None:
    builder = ObservationBuilder(SLO_MS)
    first = named(builder.update(window()))
    assert builder.age_s == 0.0
    for k in range(1, 4):
        got = named(builder.update(window(k, k + 1, EMPTY, alpha=0.5, p99_ms=150.0)))
        assert builder.age_s == k
    stands = ("hot_user_ratio", "kv_hit_rate", "emb_hit_rate", "mean_history", "slo_violation_rate")
    for name in (*stands, "link_demand", "compute_demand", "p99_over_slo"):
        assert got[name] == first[name] > 0
    # What is a state or a share of time does not stand.
    assert got["alpha"] == 0.5
    assert got["link_util"] == got["compute_util"] == got["queue"] == 0.0
    builder.update(window(4, 5))
    assert builder.age_s == 0.0


def test_a_short_silence_does_not_erase_the_second() -> None:
    builder = ObservationBuilder(SLO_MS)
    builder.update(window(0.0, 0.5, arrivals=10, returning=5))
    got = builder.update(window(0.5, 1.0, EMPTY))
    assert named(got)["hot_user_ratio"] == 0.5
    assert builder.age_s == 0.5


def test_before_the_first_request_all_is_zero() -> None:
    got = named(ObservationBuilder(SLO_MS).update(window(0, 1, EMPTY, p99_ms=math.nan, emb_margin_ms=0.0)))
    assert got.pop("alpha") == pytest.approx(0.35)
    assert got.pop("backlog") == 0.25
    assert got.pop("kv_margin") > 0
    assert set(got.values()) == {0.0}


def test_everything_shed() -> None:
    shed = {"shed": 200, "completed": 200, "slow": 200, "history_tokens": 0, "history_tokens_hit": 0, "rows": 0.0}
    got = named(ObservationBuilder(SLO_MS).update(window(**shed)))
    assert got["slo_violation_rate"] == 1.0
    assert got["kv_hit_rate"] == got["emb_hit_rate"] == got["mean_history"] == 0.0


def test_arrivals_fast_over_slow() -> None:
    """EMAs of 2 s and 60 s; until 60 s are seen, the slow one is the plain mean of what was."""
    builder = ObservationBuilder(SLO_MS)
    for k in range(300):
        got = builder.update(window(k, k + 1, arrivals=100))
    assert named(got)["rate_fast_slow"] == pytest.approx(0.0, abs=1e-6)
    for k in range(300, 304):
        got = builder.update(window(k, k + 1, arrivals=400))
    fast = 400 - 300 * math.exp(-4 / 2)
    slow = 400 - 300 * math.exp(-4 / 60)
    assert named(got)["rate_fast_slow"] == pytest.approx(math.tanh(math.log(fast / slow)), rel=1e-5)
    for k in range(304, 400):
        got = builder.update(window(k, k + 1, arrivals=0))
    assert named(got)["rate_fast_slow"] == pytest.approx(-1.0, abs=1e-6)

    young = ObservationBuilder(SLO_MS)
    for k, arrivals in enumerate((100, 300, 200)):
        got = young.update(window(k, k + 1, arrivals=arrivals))
    kept = math.exp(-1 / 2)
    fast = 100.0
    for arrivals, seen in ((300, 2), (200, 3)):
        weight = max(1 - kept, 1 / seen)
        fast += weight * (arrivals - fast)
    assert named(got)["rate_fast_slow"] == pytest.approx(math.tanh(math.log(fast / 200)), rel=1e-5)


def test_a_window_of_the_same_rate_in_pieces_changes_nothing() -> None:
    long, short = ObservationBuilder(SLO_MS), ObservationBuilder(SLO_MS)
    for k in range(100):
        rate = 50 if k < 80 else 500
        got = long.update(window(k, k + 1, arrivals=rate))
        for j in range(10):
            pieces = short.update(window(k + j / 10, k + (j + 1) / 10, arrivals=rate // 10))
    assert named(got)["rate_fast_slow"] == pytest.approx(named(pieces)["rate_fast_slow"], abs=0.01)
    assert named(got)["rate_fast_slow"] > 0.7


def test_reset_forgets() -> None:
    builder = ObservationBuilder(SLO_MS)
    fresh = builder.update(window(arrivals=77))
    builder.update(window(1, 2, arrivals=500))
    builder.update(window(2, 3, EMPTY))
    builder.reset()
    assert builder.age_s == 0.0
    assert np.array_equal(builder.update(window(arrivals=77)), fresh)


def test_an_observation_is_the_callers_own() -> None:
    builder = ObservationBuilder(SLO_MS)
    first = builder.update(window())
    kept = first.copy()
    second = builder.update(window(1, 2, EMPTY))
    assert np.array_equal(first, kept)
    second[:] = 0.123
    assert named(builder.update(window(2, 3, EMPTY)))["hot_user_ratio"] == 0.25


COUNTS = st.integers(0, 10**6)
AMOUNTS = st.floats(0, 1e12)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_always_finite_and_within_the_bounds(data: st.DataObject) -> None:
    builder = ObservationBuilder(data.draw(st.floats(1e-3, 1e6)))
    time_ns = data.draw(st.integers(-(10**15), 10**15))
    for _ in range(4):
        start_ns, time_ns = time_ns, time_ns + data.draw(st.integers(0, 10**11))
        values: dict[str, Any] = {"start_ns": start_ns, "end_ns": time_ns}
        for field in dataclasses.fields(WindowStats):
            if field.name not in values:
                values[field.name] = data.draw(COUNTS if field.type == "int" else AMOUNTS)
        values["pages"] = values["queue_bound"] = 10**6
        values["p99_ms"] = data.draw(st.one_of(st.just(math.nan), AMOUNTS))
        values["shed"] = min(values["shed"], values["arrivals"])
        values["rows_hit"] = min(values["rows_hit"], values["rows"])
        got = builder.update(WindowStats(**values))
        assert np.isfinite(got).all()
        assert (got >= LOW).all()
        assert (got <= HIGH).all()


def test_bounds() -> None:
    assert LOW.tolist() == [0.0] * 7 + [-1.0] + [0.0] * 9
    assert HIGH.tolist() == [1.0] * 17


def test_the_hash_changes_with_names_order_and_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    # Bundles in the field name this one: it may only change together with SCHEMA_VERSION or a formula's version.
    released = schema_hash()
    assert released == "ce23157347d89310df86cc1d2e6c185ce1f306f0a8937f35b3c175ec60a89444"
    seen = {released}
    for name in OBSERVATION_NAMES:
        monkeypatch.setattr(observation, "_FORMULAS", {**observation._FORMULAS, name: 3})
        seen.add(schema_hash())
        monkeypatch.undo()
    monkeypatch.setattr(observation, "OBSERVATION_NAMES", OBSERVATION_NAMES[::-1])
    seen.add(schema_hash())
    monkeypatch.undo()
    monkeypatch.setattr(observation, "SCHEMA_VERSION", 2)
    seen.add(schema_hash())
    monkeypatch.undo()
    assert len(seen) == 1 + 17 + 2
    assert schema_hash() == released


def test_the_burst_score_is_the_largest_of_the_last_second_and_bounded() -> None:
    builder = ObservationBuilder(SLO_MS)
    quarters = [0.1, 0.9, 0.2, 0.3, 0.4, 7.0]
    scores = [
        named(builder.update(window(k / 4, (k + 1) / 4, burst_score=score)))["burst_score"]
        for k, score in enumerate(quarters)
    ]
    assert scores == pytest.approx([0.05, 0.45, 0.45, 0.45, 0.45, 1.0])
