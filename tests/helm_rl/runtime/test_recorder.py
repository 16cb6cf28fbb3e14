"""What a server tells of its requests."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from helm_rl.metrics import p99_ms
from helm_rl.runtime.recorder import RequestRecorder


def test_requests_users_and_times_are_counted() -> None:
    now = [0.0]
    recorder = RequestRecorder(lambda: now[0])
    for at_s, user in ((0, 1), (10, 2), (59, 1), (120, 1), (121, 2), (181, 2)):
        now[0] = float(at_s)
        recorder.arrived(user)
    recorder.arrived()
    recorder.refused()
    recorder.busy(link_s=0.5)
    recorder.busy(link_s=0.25)
    assert (recorder.arrivals, recorder.shed, recorder.link_s, recorder.compute_s) == (7, 1, 0.75, None)
    assert recorder.returning == 2  # after 59 s, and after 60
    assert len(recorder._came_s) == 1


def test_users_that_are_never_told_of_are_not_known() -> None:
    recorder = RequestRecorder()
    recorder.arrived()
    assert recorder.returning is None


def test_latencies_are_a_histogram_of_which_the_p99_is_near() -> None:
    recorder = RequestRecorder()
    took = np.random.default_rng(1).lognormal(3, 0.7, 3000)
    threads = [
        threading.Thread(target=lambda part: [recorder.served(one) for one in part], args=(part,))
        for part in np.split(took, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    latencies = recorder.latencies()
    assert latencies.requests.sum() == 3000
    at = np.searchsorted(np.cumsum(latencies.requests), 0.99 * 3000)
    assert latencies.edges_ms[at] == pytest.approx(p99_ms(took), rel=0.011)
    recorder.served(0.0)
    recorder.served(math.inf)
    assert latencies.requests.sum() == 3000
    assert recorder.latencies().requests[0] == recorder.latencies().requests[-1] == 1


def test_what_is_no_time_is_refused_and_counts_for_nothing() -> None:
    recorder = RequestRecorder()
    recorder.busy(link_s=1.0, compute_s=2.0)
    with pytest.raises(ValueError, match="latency_ms must be a number, not nan"):
        recorder.served(math.nan)
    for seconds in (math.nan, -1.0, math.inf):
        with pytest.raises(ValueError, match="compute_s must be a number of seconds of at least 0"):
            recorder.busy(link_s=1.0, compute_s=seconds)
    assert (recorder.link_s, recorder.compute_s) == (1.0, 2.0)
    assert recorder.latencies().requests.sum() == 0
