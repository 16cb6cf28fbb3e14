"""Counters out of Prometheus text: ours, vLLM's and Triton's, and out of text that is none."""

from __future__ import annotations

import contextlib
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helm_rl.observation import OBSERVATION_NAMES
from helm_rl.runtime.adapters.prometheus import MOST_LINES, reader
from helm_rl.runtime.counters import Cause, Counters, StaleTelemetry, masked
from helm_rl.runtime.mapping import load_mapping
from helm_rl.runtime.server import metrics_text
from tests.helm_rl.runtime.feeds import spoilt, steady

# As its documentation and source (v1/metrics/loggers.py) have them: names, labels, buckets.
VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 8.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 27453.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 9151.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 10.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 131.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 3.2
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.02",model_name="m"} 100.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.04",model_name="m"} 130.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 141.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 141.0
"""
TRITON = """
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="gr",version="1"} 161
nv_inference_request_success{model="other",version="1"} 4
nv_inference_compute_infer_duration_us{model="gr",version="1"} 1500000
nv_inference_pending_request_count{model="gr",version="1"} 2
nv_inference_request_summary_us{model="gr",version="1",quantile="0.5"} 97
nv_inference_request_summary_us{model="gr",version="1",quantile="0.99"} 10100
"""
OURS = reader(load_mapping("helm-rl"))


def many_labels() -> str:
    """Return 4 MB of lines that each are no longer than they may be."""
    labels = ",".join(f'a{k}="{k}"' for k in range(380))
    return "".join(f'vllm:num_requests_waiting{{{labels},n="{k}"}} 1\n' for k in range(1_000))


def names_masked(counters: Counters) -> set[str]:
    return {name for name, one in zip(OBSERVATION_NAMES, masked(counters), strict=True) if one}


def test_what_our_server_writes_is_read_back() -> None:
    given_ = spoilt(steady(7), rows=None, rows_hit=None)
    counters = reader(load_mapping("helm-rl"))(metrics_text(given_).decode())
    assert spoilt(counters, latency=None) == spoilt(given_, latency=None)


def test_a_signal_that_was_there_must_stay() -> None:
    read = reader(load_mapping("helm-rl"))
    without = metrics_text(spoilt(steady(1), rows=None)).decode()
    assert read(without).rows is None
    assert read(metrics_text(steady(2)).decode()).rows == 16_000
    with pytest.raises(StaleTelemetry, match="there is no helm_rl_engine_rows_total") as caught:
        read(without)
    assert caught.value.cause is Cause.MISSING


def test_a_histogram_of_ours_has_the_same_requests_in_wider_buckets() -> None:
    given_, read = steady(7).latency, OURS(full(7)).latency
    assert given_ is not None
    assert read is not None
    assert read.requests.sum() == given_.requests.sum() == 700
    assert read.edges_ms.size == 201
    (at,) = np.flatnonzero(read.requests)
    assert read.edges_ms[at - 1] < 20 <= read.edges_ms[at] * 1.001
    assert read.edges_ms[at] / read.edges_ms[at - 1] == pytest.approx(math.exp(0.08))


def full(k: int) -> str:
    """Return our server's text with every signal of the mapping."""
    return metrics_text(spoilt(steady(k), completed=1.0, slow=1.0, p99_ms=1.0)).decode()


def test_vllm() -> None:
    counters = reader(load_mapping("vllm"))(VLLM)
    assert (counters.arrivals, counters.history_tokens, counters.history_tokens_hit) == (141, 27453, 9151)
    assert (counters.queue, counters.queue_bound, counters.alpha) == (7, 512, None)
    assert counters.latency is not None
    assert counters.latency.edges_ms.tolist() == [20.0, 40.0, math.inf]
    assert counters.latency.requests.tolist() == [100.0, 30.0, 11.0]
    assert set(OBSERVATION_NAMES) - names_masked(counters) == {
        "kv_hit_rate",
        "mean_history",
        "slo_violation_rate",
        "alpha",
        "p99_over_slo",
        "rate_fast_slow",
        "queue",
        "burst_score",
    }


def test_triton() -> None:
    counters = reader(load_mapping("triton"))(TRITON)
    assert (counters.arrivals, counters.compute_busy_s, counters.p99_ms, counters.queue) == (165, 1.5, 10.1, 2)
    seen = set(OBSERVATION_NAMES) - names_masked(counters)
    assert seen == {"alpha", "p99_over_slo", "rate_fast_slow", "compute_util", "compute_demand", "queue", "burst_score"}


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda text: text.replace("vllm:request_success_total", "vllm:request_done_total"), Cause.MISSING),
        (lambda text: text.replace("seconds_bucket", "seconds_bin"), Cause.MISSING),
        (lambda text: "", Cause.MISSING),
        (lambda text: text.replace("27453.0", "many"), Cause.MALFORMED),
        (lambda text: text.replace("27453.0", ""), Cause.MALFORMED),
        (lambda text: text.replace("27453.0", "1" + "0" * 400), Cause.MALFORMED),
        (lambda text: text.replace('le="0.02"', 'le="fast"'), Cause.MALFORMED),
        (lambda text: text.replace('le="0.02",', ""), Cause.MALFORMED),
        (lambda text: text.replace('"stop"', '"stop'), Cause.MALFORMED),
        (lambda text: text.replace('"stop"', f'"{"s" * 5000}"'), Cause.MALFORMED),
        (lambda text: text + "vllm:num_requests_waiting 1\n" * MOST_LINES, Cause.MALFORMED),
        (lambda text: text + many_labels(), Cause.MALFORMED),
        (lambda text: text.removesuffix(".0\n"), Cause.MALFORMED),  # an answer that broke off, and had no length
        (lambda text: text + 'vllm:num_requests_waiting{model_name="m",engine="1"} 4.0\n', Cause.MALFORMED),
        (lambda text: text + VLLM, Cause.MALFORMED),  # a proxy's two servers in one answer
    ],
)
def test_text_that_lacks_something_or_cannot_be_read(spoil: object, cause: Cause) -> None:
    assert callable(spoil)
    with pytest.raises(StaleTelemetry) as caught:
        reader(load_mapping("vllm"))(spoil(VLLM))
    assert caught.value.cause is cause


def test_histograms_with_edges_of_their_own_are_not_added_up() -> None:
    """Of what lies below an edge that one of them lacks nothing is known."""
    more = "".join(
        f'vllm:time_to_first_token_seconds_bucket{{engine="1",le="{edge}",model_name="m"}} 100.0\n'
        for edge in ("0.02", "0.04", "+Inf")
    )
    latency = reader(load_mapping("vllm"))(VLLM + more).latency
    assert latency is not None
    assert latency.requests.tolist() == [200.0, 30.0, 11.0]
    for text in (more.replace("0.04", "0.08"), more.replace('le="0.04"', 'le="0.020"'), more[: more.rindex("vllm")]):
        with pytest.raises(StaleTelemetry, match="with different edges") as caught:
            reader(load_mapping("vllm"))(VLLM + text)
        assert caught.value.cause is Cause.MALFORMED


def test_numbers_that_are_none_are_read_as_such() -> None:
    assert math.isnan(reader(load_mapping("vllm"))(VLLM.replace("27453.0", "NaN")).history_tokens or 0.0)


def test_of_two_shares_none_is_the_sum() -> None:
    twice = full(1) + 'helm_rl_engine_alpha{node="2"} 0.5\n'
    with pytest.raises(StaleTelemetry, match="there are 2 of helm_rl_engine_alpha: name one by its labels"):
        OURS(twice)


def test_metrics_that_nobody_asked_for_may_be_what_they_like() -> None:
    junk = 'other{a="b} nonsense\n# TYPE broken\n{{{{\n\x00\n' + "x" * 100_000
    assert OURS(junk + "\n" + full(3)).arrivals == 300


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200), st.integers(0, 2000), st.integers(0, 200))
def test_no_text_raises_anything_else(junk: str, at: int, cut: int) -> None:
    text = VLLM[:at] + junk + VLLM[at + cut :]
    with contextlib.suppress(StaleTelemetry):
        reader(load_mapping("vllm"))(text)


def test_reading_is_quick() -> None:
    """Within a large page of others' metrics; a scrape takes a few ms."""
    page = full(5) + 'other_bucket{le="0.5",path="/a",code="200"} 17\n' * 20_000
    begun = time.process_time()
    OURS(page)
    assert time.process_time() - begun < 0.5
