from __future__ import annotations

import threading

import numpy as np
import pytest

from envs.serving.replay import Replay
from eval.sweep import Work, alpha_grid, curve, pooled_curve, smooth_log, sweep, sweep_adaptively, working
from helm_rl.control.protocol import Controller
from helm_rl.errors import UserError
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from tests.eval.fakes import BASE_MS, CURVATURE, FakeServing, small_scenario

GRID = np.round(np.arange(0.1, 0.901, 0.02), 6)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(small_scenario(), seed=5)


def test_a_parabola_is_smoothed_to_itself() -> None:
    log_p99 = 3.0 + 10.0 * (GRID - 0.43) ** 2
    np.testing.assert_allclose(smooth_log(GRID, log_p99, 0.06), log_p99, atol=1e-9)


def test_smoothing_beats_the_raw_minimum_under_noise() -> None:
    rng = np.random.default_rng(0)
    truth = 3.0 + 10.0 * (GRID - 0.44) ** 2
    raw, smooth = [], []
    for _ in range(200):
        noisy = truth + rng.normal(0.0, 0.02, GRID.size)
        raw.append(GRID[np.argmin(noisy)])
        smooth.append(curve(GRID, np.exp(noisy)).best)
    assert np.std(smooth) < 0.75 * np.std(raw)
    assert np.mean(smooth) == pytest.approx(0.44, abs=0.01)


def test_far_points_of_a_coarse_grid_keep_their_own_values() -> None:
    # A quadratic through .1 to .9 would dip below the plateau beside the cliff.
    at = np.round(np.arange(0.1, 0.91, 0.1), 6)
    log_p99 = np.array([4.0, 4.0, 4.0, 4.0, 9.0, 9.0, 9.0, 9.0, 9.0])
    np.testing.assert_array_equal(smooth_log(at, log_p99, 0.06), log_p99)


def test_flat_set_of_a_parabola() -> None:
    # 10 * d**2 is .016 at d = .04 and .036 at d = .06; it passes ln 1.02 = .0198 at .0438 if linear between them.
    found = curve(GRID, np.exp(3.0 + 10.0 * (GRID - 0.5) ** 2))
    assert found.best == 0.5
    assert found.flat == (pytest.approx((0.4562, 0.5438), abs=1e-4),)


def test_flat_set_of_a_coarse_grid_does_not_claim_what_lies_between() -> None:
    found = curve([0.2, 0.4, 0.6], [100.0, 104.0, 100.0])
    half_percent = 0.2 * np.log(1.02) / np.log(1.04)
    assert found.flat == (
        pytest.approx((0.2, 0.2 + half_percent)),
        pytest.approx((0.6 - half_percent, 0.6)),
    )


def test_where_every_alpha_is_overloaded_the_middle_one_is_named() -> None:
    found = curve(GRID, np.full(GRID.size, 10_000.0))
    assert found.best == 0.5
    assert found.flat == ((0.1, 0.9),)


def test_two_valleys_are_two_flat_intervals() -> None:
    depth = np.minimum(40.0 * (GRID - 0.2) ** 2, 40.0 * (GRID - 0.7) ** 2 + 0.005)
    found = curve(GRID, np.exp(3.0 + np.minimum(depth, 1.0)))
    assert len(found.flat) == 2
    assert found.flat[0][0] <= 0.2 <= found.flat[0][1] < 0.3
    assert found.flat[1][0] <= 0.7 <= found.flat[1][1]


def test_alpha_grid_has_both_ends_and_refuses_silly_steps() -> None:
    assert alpha_grid(0.1, 0.9, 0.02) == GRID.tolist()
    assert alpha_grid(0.1, 0.45, 0.1) == [0.1, 0.2, 0.3, 0.4, 0.45]
    for step in (0.0, -0.02, 0.004, 0.3, float("nan")):
        with pytest.raises(UserError, match="--step"):
            alpha_grid(0.1, 0.9, step)


def test_sweep_over_given_alphas_replays_each_once_from_itself(trace: Trace) -> None:
    fake = FakeServing()
    found = sweep(small_scenario(), trace, [0.6, 0.2, 0.6], replay=fake)
    assert list(found.runs) == [0.2, 0.6]
    assert sorted(fake.calls) == [("StaticAlpha", 0.2, 0), ("StaticAlpha", 0.6, 0)]
    assert found.whole.p99_ms[0] == pytest.approx(2 * BASE_MS * np.exp(CURVATURE * 0.16), rel=1e-5)


def test_adaptive_sweep_finds_the_known_optimum_of_every_segment_with_few_replays(trace: Trace) -> None:
    fake = FakeServing({"base": 0.58, "burst": 0.22})
    work = Work(2, replay=fake)
    found = sweep_adaptively(small_scenario(), trace, work, also=[0.5])
    work.close()
    assert [each.best for each in found.settled] == [0.58, 0.22, 0.58]
    assert found.settled[0].flat == (pytest.approx((0.5362, 0.6238), abs=1e-3),)
    assert found.settled[1].flat == (pytest.approx((0.1762, 0.2638), abs=1e-3),)
    assert 0.5 in found.runs
    assert len(fake.calls) == len(found.runs) < 41  # each alpha once, and not the whole grid

    # The whole run: brute force over the grid. 1 % of all requests must lie beyond the P99 of the worse side.
    whole = sweep(small_scenario(), trace, GRID, replay=fake)
    assert found.whole.best == whole.whole.best
    assert found.hindsight == whole.hindsight
    assert found.runs[found.hindsight].p99_ms == min(run.p99_ms for run in whole.runs.values())


@pytest.mark.parametrize("best", [0.1, 0.14, 0.36, 0.88, 0.9])
def test_adaptive_sweep_walks_to_minima_between_coarse_points_and_at_the_bounds(trace: Trace, best: float) -> None:
    work = Work(2, replay=FakeServing({"base": best, "burst": best}))
    found = sweep_adaptively(small_scenario(), trace, work)
    work.close()
    assert [each.best for each in found.settled] == [best] * 3
    assert found.whole.best == best


def test_step_is_honoured(trace: Trace) -> None:
    work = Work(1, replay=FakeServing({"base": 0.55, "burst": 0.55}))
    found = sweep_adaptively(small_scenario(), trace, work, step=0.05)
    work.close()
    assert found.whole.best == 0.55
    assert all(abs(alpha / 0.05 - round(alpha / 0.05)) < 1e-9 for alpha in found.runs)


def test_pooled_curve_averages_logs_at_shared_alphas(trace: Trace) -> None:
    low = sweep(small_scenario(), trace, [0.4, 0.5, 0.6], replay=FakeServing({"base": 0.4, "burst": 0.4}))
    high = sweep(small_scenario(), trace, [0.5, 0.6, 0.7], replay=FakeServing({"base": 0.6, "burst": 0.6}))
    pooled = pooled_curve([low, high])
    assert pooled.alphas.tolist() == [0.5, 0.6]
    np.testing.assert_allclose(np.log(pooled.p99_ms / (2 * BASE_MS)), [CURVATURE * 0.01, CURVATURE * 0.02], atol=1e-5)


def test_replays_run_two_at_a_time_after_the_first_in_the_main_thread(trace: Trace) -> None:
    """Where the first compiles, Ctrl-C ends it there, and would wait for it in another thread."""
    both = threading.Barrier(2, timeout=20)
    fake = FakeServing()
    threads = []

    def meet(scenario: Scenario, trace: Trace, controller: Controller, *, alpha0: float, seed: int) -> Replay:
        threads.append(threading.current_thread())
        if len(threads) > 1:
            both.wait()  # breaks, and raises, unless a second replay is under way
        return fake(scenario, trace, controller, alpha0=alpha0, seed=seed)

    assert len(sweep(small_scenario(), trace, [0.2, 0.4, 0.5, 0.6, 0.8], jobs=2, replay=meet).runs) == 5
    assert [each is threading.main_thread() for each in threads] == [True] + 4 * [False]


def test_an_error_in_a_replay_is_raised_and_stops_the_rest(trace: Trace) -> None:
    seen = []

    def fail(scenario: Scenario, trace: Trace, controller: Controller, *, alpha0: float, seed: int) -> Replay:
        seen.append(alpha0)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        sweep(small_scenario(), trace, GRID, jobs=1, replay=fail)
    assert len(seen) < GRID.size


@pytest.mark.parametrize("jobs", [-1, 0, 1025, 3_000_000_000])
def test_jobs_that_no_system_has_are_refused(jobs: int) -> None:
    message = f"--jobs must be at least 1 and at most 1024, got {jobs}"
    with pytest.raises(UserError, match=message):
        Work(jobs, replay=FakeServing())
    with pytest.raises(UserError, match=message), working(jobs, FakeServing()):
        pass
