"""The node as one server: its latencies request by request, the stall, and Little's law."""

from __future__ import annotations

import numpy as np
import pytest

from eval.model.queues import (
    STATIONS,
    FloatArray,
    Station,
    little_error,
    measure_stall,
    measure_waits,
    serve,
    single_server,
)


def lindley(arrival_ms: FloatArray, service_ms: FloatArray) -> FloatArray:
    """Return the waits of a single server: what is left of the last one's stay when the next one comes."""
    waits = np.zeros(arrival_ms.size)
    for i in range(1, waits.size):
        waits[i] = max(0.0, waits[i - 1] + service_ms[i - 1] - (arrival_ms[i] - arrival_ms[i - 1]))
    return waits


@pytest.mark.parametrize("station", STATIONS)
def test_every_wait_is_that_of_the_recursion(station: Station) -> None:
    rng = np.random.default_rng(1)
    n = 3_000
    arrival_ns = np.rint(np.cumsum(rng.exponential(1250.0, n)) * 1e6).astype(np.int64)
    drawn = rng.exponential(1000.0, n)
    server = single_server(station, arrival_ns, drawn)
    assert server.service_ms == pytest.approx(drawn, abs=0.5)
    waits = server.waits_ms(serve(server, 100).latency_ms)
    expected = lindley(arrival_ns * 1e-6, server.service_ms)
    assert expected.max() > 5_000
    # Behind the link, a batch under way may be waited for; latencies are float32.
    late = waits - expected
    assert late.min() > -0.01
    assert late.max() < (0.01 if station == "accelerator" else server.rest_ms)


def test_a_stall_shows_in_the_p99() -> None:
    figures = measure_stall(lambda text: None)
    for station in STATIONS:
        assert 900 < figures[f"model.stall_p99_ms.{station}"].value < 910
    assert figures["model.stall_p99_error"].value < 0.02
    assert figures["model.little_error.stall"].value < 0.001


def test_littles_law_by_hand() -> None:
    arrival_ms, inside_ms = np.array([-1.0, 0.0, 1.0, 3.0, 5.0]), np.array([2.0, 2.0, 1.0, 9.0, 1.0])
    # Inside [0, 4): 1, 2, 1, 1 and 0 ms, so 5 / 4 are there on the average.
    assert little_error(1.25, arrival_ms, inside_ms, 4.0) == pytest.approx(0.0)
    assert little_error(1.5, arrival_ms, inside_ms, 4.0) == pytest.approx(0.2)
    assert little_error(1.25, arrival_ms, inside_ms * 1.1, 4.0) > 0.03


def test_waits_are_within_five_standard_errors_of_theory() -> None:
    figures = measure_waits(20_000, 2_000, lambda text: None)
    for law in ("md1", "mm1"):
        for load in (50, 80):
            worst = 0.0
            for station in STATIONS:
                name = f"model.{law}_error.{load}.{station}"
                assert figures[name].value < 5 * figures[f"{name}.standard_error"].value
                worst = max(worst, figures[name].value)
            assert figures[f"model.{law}_error.{load}"].value == worst
            assert figures[f"model.{law}_error.{load}"].goal == 0.02
    assert figures["model.little_error.queues"].value < 0.1
