"""What a server cannot give, and what it must not say."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helm_rl.observation import OBSERVATION_NAMES
from helm_rl.runtime.counters import MONOTONE, Cause, Counters, Latencies, disagree, masked, unfit
from tests.helm_rl.runtime.feeds import EDGES_MS, spoilt, steady

GAUGES = (
    *("queue", "queue_bound", "alpha", "backlog_pages", "pages", "emb_margin_ms", "kv_margin_ms", "kv_margin_link_ms"),
    "revision",
)


def masked_names(counters: Counters) -> set[str]:
    return {name for name, one in zip(OBSERVATION_NAMES, masked(counters), strict=True) if one}


def test_a_server_that_gives_all_masks_nothing_and_one_that_counts_arrivals_alone_leaves_three() -> None:
    assert masked_names(steady(1)) == set()
    assert set(OBSERVATION_NAMES) - masked_names(Counters(arrivals=1.0)) == {"alpha", "rate_fast_slow", "burst_score"}


@pytest.mark.parametrize(
    ("missing", "features"),
    [
        (("returning",), {"hot_user_ratio"}),
        (("history_tokens_hit",), {"kv_hit_rate"}),
        (("history_tokens",), {"kv_hit_rate", "mean_history"}),
        (("rows",), {"emb_hit_rate"}),
        (("latency",), {"slo_violation_rate", "p99_over_slo"}),
        (("link_busy_s",), {"link_util", "link_demand"}),
        (("queue_bound", "pages"), {"queue", "backlog"}),
        (("alpha", "shed", "clock_s", "revision"), set()),
    ],
)
def test_a_feature_is_masked_when_a_counter_that_it_needs_is_not_there(
    missing: tuple[str, ...], features: set[str]
) -> None:
    assert masked_names(spoilt(steady(1), **dict.fromkeys(missing))) == features


def test_without_a_histogram_other_counters_serve() -> None:
    counters = spoilt(steady(1), latency=None, completed=100.0, slow=3.0)
    assert masked_names(counters) == {"p99_over_slo"}
    assert masked_names(spoilt(counters, p99_ms=40.0)) == set()


def test_sound_readings_are_taken() -> None:
    assert unfit(steady(0)) is unfit(steady(7)) is None
    assert disagree(steady(3), steady(4), 1.0) is None
    assert disagree(steady(3), steady(3), 1.0) is Cause.STALE  # its clock stands still
    assert disagree(spoilt(steady(3), clock_s=None), spoilt(steady(3), clock_s=None), 1.0) is None  # nobody came


@settings(max_examples=200)
@given(
    st.sampled_from((*MONOTONE, *GAUGES)),
    st.sampled_from((math.nan, math.inf, -math.inf, -1.0, -1e300, 1e300)),
)
def test_no_counter_may_be_infinite_negative_or_no_number(name: str, value: float) -> None:
    wrong = unfit(spoilt(steady(3), **{name: value}))
    if not math.isfinite(value):
        assert wrong is Cause.NOT_FINITE
    elif "_margin_" in name and value == -1.0:
        assert wrong is None
    else:
        assert wrong is Cause.ABSURD


@pytest.mark.parametrize("name", MONOTONE)
def test_a_counter_that_falls_or_leaps_is_seen(name: str) -> None:
    before, after = (steady(k, completed=100.0 * k, slow=1.0 * k, shed=1.0 * k) for k in (3, 4))
    assert disagree(before, after, 1.0) is None
    assert disagree(before, spoilt(after, **{name: getattr(before, name) - 0.001}), 1.0) is Cause.BACKWARDS
    assert disagree(before, spoilt(after, **{name: getattr(after, name) + 1e15}), 1.0) is Cause.ABSURD


@pytest.mark.parametrize(("clock_s", "cause"), [(4.1, None), (3.2, None), (9.0, Cause.ABSURD), (3.0, Cause.STALE)])
def test_the_servers_clock_keeps_pace_with_ours(clock_s: float, cause: Cause | None) -> None:
    assert disagree(steady(3), spoilt(steady(4), clock_s=clock_s), 1.0) is cause


def test_an_answer_that_is_much_older_than_it_seems_is_stale() -> None:
    assert disagree(steady(3), steady(4), 1.9) is None
    assert disagree(steady(3), steady(4), 4.5) is Cause.STALE


@pytest.mark.parametrize(
    ("edges_ms", "requests", "cause"),
    [
        ([10.0, 20.0, math.inf], [1.0, 2.0, 3.0], None),
        ([10.0, 20.0, math.inf], [1.0, math.nan, 3.0], Cause.NOT_FINITE),
        ([10.0, math.nan, math.inf], [1.0, 2.0, 3.0], Cause.NOT_FINITE),
        ([10.0, 20.0, math.inf], [1.0, -2.0, 3.0], Cause.ABSURD),
        ([10.0, 10.0, math.inf], [1.0, 2.0, 3.0], Cause.ABSURD),
        ([0.0, 10.0, math.inf], [1.0, 2.0, 3.0], Cause.ABSURD),
        ([], [], Cause.ABSURD),
        ([math.inf], [3.0], Cause.ABSURD),  # of which nothing is known but their number
        ([10.0, 20.0], [1.0, 2.0, 3.0], Cause.MALFORMED),  # compiled code would read beyond the end
        ([[10.0, 20.0]], [[1.0, 2.0]], Cause.MALFORMED),
        ([10, 20], [1, 2], Cause.MALFORMED),
    ],
)
def test_histograms_are_looked_at(edges_ms: Any, requests: Any, cause: Cause | None) -> None:
    assert unfit(spoilt(steady(1), latency=Latencies(np.array(edges_ms), np.array(requests)))) is cause


def test_without_arrivals_there_is_nothing() -> None:
    assert unfit(spoilt(steady(1), arrivals=None)) is Cause.MISSING


def test_histograms_must_go_on_from_each_other() -> None:
    before, after = steady(3), steady(4)
    assert before.latency is not None

    def with_requests(change: float, edges: Any = EDGES_MS) -> Counters:
        assert after.latency is not None
        requests = after.latency.requests.copy()
        requests[100] += change
        return dataclasses.replace(after, latency=Latencies(edges, requests))

    assert disagree(before, with_requests(5.0), 1.0) is None
    assert disagree(before, with_requests(-5.0), 1.0) is Cause.BACKWARDS
    assert disagree(before, with_requests(1e9), 1.0) is Cause.ABSURD
    assert disagree(before, with_requests(0.0, EDGES_MS * 1.5), 1.0) is Cause.BACKWARDS
