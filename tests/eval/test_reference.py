from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import eval.reference
from envs.serving.node import NodeSim
from envs.serving.replay import replay
from eval.comparison import OPTIMUM, POLICY, REFERENCE, Contestant, compare
from eval.reference import (
    Effort,
    Reference,
    best_known,
    cut_times,
    reference,
    segment_optimum,
)
from eval.segments import Run, measured_part
from eval.sweep import Sweep, Work, sweep
from helm_rl.control.schedule import ScheduledAlpha
from helm_rl.metrics import p99_ms
from helm_rl.scenario import Scenario, TelemetrySection
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace

GRID = [0.1, 0.3, 0.5, 0.7, 0.9]
COARSE = Effort(step=0.2, finer=(), piece_s=60.0, piece_requests=1)


def two_segments(rate: float = 40, warm_s: float = 0) -> Scenario:
    """10 s of users who hardly return, then 10 s of users who stay beside them: the best alpha falls by .3 or more.

    A token is one row of as many bytes as its keys and values take, so that 1,024 pages and few lookups do; the model
    is so deep that a token's compute costs about as much as its row.
    """
    stay = {"label": "stay", "start_s": 10, "seconds": 10, "rate": 200, "requests_per_visit": 25, "hot_fraction": 0.3}
    return Scenario.model_validate(
        {
            "name": "small",
            "slo_ms": 100,
            "seconds": 20,
            "warm_s": warm_s,
            "model": {
                "layers": 512,
                "heads": 4,
                "kv_heads": 1,
                "head_dim": 8,
                "features_per_token": 1,
                "row_bytes": 16384,
                "candidates": 0,
            },
            "hardware": {"pool_gib": 0.25, "page_kib": 256, "link_gb_s": 0.07},
            "load": {
                "rate": rate,
                "users": 20_000,
                "items": 1_000_000,
                "think_s": 1.0,
                "history_mean": 100,
                "history_max": 1024,
                "new_tokens_mean": 1,
                "phase": [{**stay, "hot_items": 500}],
            },
        }
    )


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work(2)
    yield work
    work.close()


def prepared(small: Scenario, trace: Trace, work: Work, alphas: list[float]) -> tuple[Sweep, Run]:
    """The statics at these alphas, and the replay of the segments' best ones."""
    swept = sweep(small, trace, alphas)
    schedule = segment_optimum(trace, swept)
    (optimum,) = work.run(small, trace, swept.part, [(schedule, float(schedule.alphas[0]), 0)])
    return swept, optimum


def replayed_ms(small: Scenario, trace: Trace, schedule: ScheduledAlpha, node: NodeSim | None = None) -> float:
    run = replay(small, trace, schedule, alpha0=float(schedule.alphas[0]), node=node)
    return p99_ms(run.latency_ms[run.measured])


def test_a_state_may_be_restored_in_another_simulator() -> None:
    small = two_segments()
    trace = generate(small, seed=3)
    one, other = NodeSim(small, trace, 0.3), NodeSim(small, trace, 0.9)
    one.run(5_000_000_000)
    saved = one.save()
    other.run(15_000_000_000)  # it has a past of its own
    for node in (one, other):
        node.restore(saved)
        node.set_target(0.7)
        node.run(15_000_000_000)
        node.drain()
    np.testing.assert_array_equal(one.latency_ms, other.latency_ms)
    assert one.alpha == other.alpha == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("seed", [1, 2])
def test_it_equals_brute_force_over_two_segments(seed: int, work: Work) -> None:
    small = two_segments()
    trace = generate(small, seed=seed)
    swept, optimum = prepared(small, trace, work, GRID)
    found = reference(small, trace, swept, optimum, work, COARSE)

    node = NodeSim(small, trace)
    times = cut_times(small, trace, swept.part, COARSE)
    assert times.tolist() == [0, 10_000_000_000]
    everything = {
        path: replayed_ms(small, trace, ScheduledAlpha(times, path), node) for path in itertools.product(GRID, repeat=2)
    }
    best = min(everything, key=lambda path: everything[path])
    assert found.p99_ms == everything[best]
    assert tuple(found.schedule.alphas) == best
    assert everything[best] < min(everything[alpha, alpha] for alpha in GRID)


def test_it_equals_brute_force_over_four_pieces(work: Work) -> None:
    """Here states are given up that brute force keeps, and the best of them may have been: it comes within 1 %."""
    small = two_segments()
    trace = generate(small, seed=11)
    alphas = [0.34, 0.56, 0.78]
    part = measured_part(trace)
    times = cut_times(small, trace, part, replace(COARSE, piece_s=5.0))
    assert len(times) == 4
    node = NodeSim(small, trace)
    everything = {
        path: replayed_ms(small, trace, ScheduledAlpha(times, path), node)
        for path in itertools.product(alphas, repeat=4)
    }
    best = min(everything, key=lambda path: everything[path])
    search = eval.reference._Search(small, trace, part, times, work)
    static_ms = min(everything[(alpha,) * 4] for alpha in alphas)
    found = search.run([alphas] * 4, np.geomspace(0.75 * static_ms, static_ms, 4))
    assert found.p99_ms == everything[tuple(found.path)] <= 1.01 * everything[best]
    assert found.p99_ms < 0.95 * static_ms
    assert search.replays < 0.2 * len(everything)


@pytest.mark.parametrize("rate", [5, 120])
def test_it_never_replays_worse_than_a_static(rate: int, work: Work) -> None:
    # From a load that any alpha serves to one that none does.
    small = two_segments(rate)
    trace = generate(small, seed=4)
    swept, optimum = prepared(small, trace, work, [0.1, 0.34, 0.5, 0.9])
    found = reference(small, trace, swept, optimum, work, replace(COARSE, finer=(0.1,), piece_s=5.0))
    assert found.p99_ms <= min(run.p99_ms for run in swept.runs.values())
    assert found.p99_ms <= optimum.p99_ms
    assert replayed_ms(small, trace, found.schedule) == found.p99_ms


def test_finer_alphas_and_pieces_gain(work: Work) -> None:
    small = two_segments()
    trace = generate(small, seed=1)
    swept, optimum = prepared(small, trace, work, GRID)
    coarse = reference(small, trace, swept, optimum, work, COARSE)
    fine = reference(small, trace, swept, optimum, work, replace(COARSE, finer=(0.1, 0.05), piece_s=5.0))
    assert fine.p99_ms < coarse.p99_ms
    assert fine.piece_s == pytest.approx(5.0)
    assert fine.replays > coarse.replays > 0


def test_it_is_the_same_on_one_thread_and_on_two() -> None:
    small = two_segments()
    trace = generate(small, seed=2)
    found: list[Reference] = []
    for jobs in (1, 2):
        work = Work(jobs)
        swept, optimum = prepared(small, trace, work, GRID)
        found.append(reference(small, trace, swept, optimum, work, replace(COARSE, finer=(0.1,), piece_s=5.0)))
        work.close()
    assert found[0].schedule.alphas.tolist() == found[1].schedule.alphas.tolist()
    assert found[0].trials == found[1].trials
    assert found[0].replays == found[1].replays


def test_requests_count_in_the_piece_in_which_they_end(work: Work) -> None:
    """A queue that outlasts a piece: the counts along the way are those of the latencies at the end."""
    small = two_segments(rate=90, warm_s=5)
    trace = generate(small, seed=4)
    part = measured_part(trace)
    times = cut_times(small, trace, part, replace(COARSE, piece_s=4.0))
    search = eval.reference._Search(small, trace, part, times, work)
    thresholds = np.array([200.0, 5000.0, 1e9])  # the last one keeps all paths
    path = [0.3, 0.7, 0.7, 0.3, 0.1, 0.1, 0.9]  # warm-up, then three pieces a segment
    found = search.run([[alpha] for alpha in path], thresholds)
    assert found.path == path
    run = replay(small, trace, ScheduledAlpha(times, path), alpha0=path[0])
    measured = run.latency_ms[run.measured]
    assert found.p99_ms == p99_ms(measured) > 200.0
    assert found.slower == tuple(int((measured > threshold).sum()) for threshold in thresholds)
    assert int((measured > thresholds[0]).sum()) > 0
    assert search.replays == 1.0


def test_a_budget_ends_the_search(work: Work) -> None:
    small = two_segments()
    trace = generate(small, seed=1)
    swept, optimum = prepared(small, trace, work, GRID)
    found = reference(small, trace, swept, optimum, work, replace(COARSE, replays=0.0))
    known = best_known(trace, swept, optimum)
    assert (found.winner, found.p99_ms, found.replays) == (known.winner, known.p99_ms, 0.0)
    assert found.trials == ()


def test_pieces_are_long_enough_to_be_worth_a_state() -> None:
    small = two_segments(warm_s=3)
    trace = generate(small, seed=1)
    part = measured_part(trace)
    short = cut_times(small, trace, part, Effort(piece_s=0.001, piece_requests=500))
    assert np.diff(np.searchsorted(trace.arrival_ns, short[1:])).mean() > 250
    times = cut_times(small, trace, part, Effort(piece_s=4.0, piece_requests=1))
    start = int(trace.arrival_ns[0])  # just after -3 s: intervals of 1 s end just after whole seconds
    assert ((times - start) // 1_000_000_000).tolist() == [0, 3, 7, 10, 13, 17, 20][: len(times)]
    assert set(((times - start) % 1_000_000_000).tolist()) == {0}


def test_a_comparison_with_the_search_holds_regret_against_it(work: Work) -> None:
    small = two_segments()
    trace = generate(small, seed=1)
    effort = replace(COARSE, finer=(0.1,), piece_s=5.0)
    found = compare(small, work, seeds=1, trace=trace, step=0.2, effort=effort)
    result = found.results[0]
    assert [row.key for row in found.rows][-1] == REFERENCE
    assert result.runs[REFERENCE].p99_ms == result.reference.p99_ms
    assert found.estimate(REFERENCE, "regret").value == 0.0
    assert found.estimate(OPTIMUM, "regret").value > 0.0
    figures = found.figures()
    assert figures["default.small.single.reference.p99_ms"].value == result.reference.p99_ms
    assert figures["default.small.headroom"].value == 1 - result.reference.p99_ms / min(
        run.p99_ms for run in result.sweep.runs.values()
    )


def test_a_controller_that_beats_the_search_is_replayed_again_and_reported(work: Work) -> None:
    """The search is kept from any pass; the schedule that brute force finds then wins, as a policy."""
    small = two_segments()
    trace = generate(small, seed=11)
    times = cut_times(small, trace, measured_part(trace), replace(COARSE, piece_s=5.0))
    best = min(
        itertools.product([0.78], [0.78, 0.56], [0.9, 0.78, 0.56, 0.34], [0.56, 0.34, 0.2]),
        key=lambda path: replayed_ms(small, trace, ScheduledAlpha(times, path)),
    )

    def make() -> ScheduledAlpha:
        schedule = ScheduledAlpha(times, best)
        schedule.reset = lambda seed: None  # type: ignore[method-assign]
        return schedule

    policy = Contestant(POLICY, "policy", "knows", make)
    found = compare(small, work, seeds=1, trace=trace, policies=[policy], step=0.2, effort=replace(COARSE, replays=0.0))
    assert found.estimate(POLICY, "regret").value < 0
    assert found.results[0].rechecked == (POLICY,)
    assert any("the reference was beaten" in note for note in found.notes)


def test_a_schedule_keeps_its_times_though_telemetry_is_late_or_lost(work: Work) -> None:
    blind = two_segments()
    trace = generate(blind, seed=15)  # on which the search finds a schedule
    found = []
    for telemetry in (TelemetrySection(), TelemetrySection(delay_s=30), TelemetrySection(loss=0.9)):
        seen = blind.model_copy(update={"telemetry": telemetry})
        swept, optimum = prepared(seen, trace, work, GRID)
        found.append(reference(seen, trace, swept, optimum, work, replace(COARSE, piece_s=5.0)))
    assert found[0].winner == "dynamic_programming"
    assert found[0].p99_ms == found[1].p99_ms == found[2].p99_ms


def test_a_schedule_that_replays_otherwise_is_an_error(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    small = two_segments()
    trace = generate(small, seed=15)  # on which the search finds a schedule
    swept, optimum = prepared(small, trace, work, GRID)

    def other(*args: object, **keywords: object) -> object:
        found = replay(*args, **keywords)  # type: ignore[arg-type]
        found.latency_ms[:] += 1
        return found

    monkeypatch.setattr(work, "_replay", other)
    with pytest.raises(RuntimeError, match="along the search"):
        reference(small, trace, swept, optimum, work, replace(COARSE, piece_s=5.0))
