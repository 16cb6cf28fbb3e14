from __future__ import annotations

import numpy as np
import pytest

import envs.training_traces
from eval.comparison import (
    DEPLOYABLE,
    HALF,
    HINDSIGHT,
    MOST_DRAWS,
    OPTIMUM,
    POLICY,
    SEEDS_FROM,
    STEADY_SEEDS_FROM,
    Comparison,
    Contestant,
    compare,
    figure_word,
    provenance,
    steady_scenario,
)
from eval.sweep import Work
from helm_rl.control.schedule import ScheduledAlpha
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.scenario import load_scenario
from helm_rl.workloads.generate import generate
from tests.eval.fakes import BASE_MS, CURVATURE, FakeServing, small_scenario

AT_BEST = 2 * BASE_MS


def follower() -> Contestant:
    """Knows the segments, moves 10 s late: in transition for a quarter of each 40 s segment."""
    times = [-20_000_000_000, 50_000_000_000, 90_000_000_000]
    return Contestant(POLICY, "policy", "late", lambda: ScheduledAlpha(times, [0.56, 0.2, 0.6]))


def run(fake: FakeServing, **arguments: object) -> Comparison:
    work = Work(2, replay=fake)
    try:
        return compare(small_scenario(), work, **arguments)  # type: ignore[arg-type]
    finally:
        work.close()


@pytest.fixture(scope="module")
def fake() -> FakeServing:
    return FakeServing()


@pytest.fixture(scope="module")
def comparison(fake: FakeServing) -> Comparison:
    return run(fake, seeds=2, policies=[follower()])


def test_steady_load_has_neither_phases_nor_drift() -> None:
    steady = steady_scenario(load_scenario("trend"))
    assert steady.load.phase == ()
    assert steady.load.rate_end is None
    assert steady.load.rate == load_scenario("trend").load.rate


def test_deployable_static_is_the_best_on_steady_arrivals_of_other_seeds(comparison: Comparison) -> None:
    # Steady has the base regime alone, whose best alpha is .6.
    assert comparison.deployable == 0.6
    seeds = [result.seed for result in comparison.results]
    assert seeds == [SEEDS_FROM + 1, SEEDS_FROM + 2]
    assert not set(seeds) & set(range(STEADY_SEEDS_FROM, STEADY_SEEDS_FROM + 100))


def test_statics_are_what_their_names_say(comparison: Comparison) -> None:
    for result in comparison.results:
        assert result.alphas[HALF] == 0.5
        assert result.alphas[DEPLOYABLE] == 0.6
        hindsight = result.runs[HINDSIGHT].p99_ms
        assert hindsight == min(run.p99_ms for run in result.sweep.runs.values())
        assert result.runs[HALF] is result.sweep.runs[0.5]
        # Half way between .2 and .6, weighted by nothing: P99 is the worse side's.
        assert result.alphas[HINDSIGHT] == pytest.approx(0.4, abs=0.021)


def test_segment_optimum_reaches_every_minimum(comparison: Comparison) -> None:
    for result in comparison.results:
        assert [curve.best for curve in result.sweep.settled] == [0.6, 0.2, 0.6]
        assert result.runs[OPTIMUM].p99_ms == pytest.approx(AT_BEST, rel=1e-5)
        assert result.reference.winner == OPTIMUM
        np.testing.assert_allclose(result.runs[OPTIMUM].alpha[10:50], 0.6, atol=1e-6)
        np.testing.assert_allclose(result.runs[OPTIMUM].alpha[50:90], 0.2, atol=1e-6)


def test_policy_starts_at_the_deployable_alpha(comparison: Comparison, fake: FakeServing) -> None:
    started = [(name, alpha0) for name, alpha0, _ in fake.calls if name == "ScheduledAlpha"]
    assert started.count(("ScheduledAlpha", 0.6)) == 4  # the optimum and the policy, on two draws


def test_gaps_by_half_and_flat_gap(comparison: Comparison) -> None:
    # Settled halves: [20, 40) at .56, [60, 80) at .2, [100, 120) at .6; flat set of .6 is .556 to .644.
    assert comparison.estimate(POLICY, "ratio_gap").value == pytest.approx((20 * 0.04) / 60, abs=1e-6)
    assert comparison.estimate(POLICY, "flat_gap").value == pytest.approx(0.0, abs=1e-6)
    # Transitions: 20 s at .04, then 10 s at |.56 - .2| and 10 s at 0, then 10 s at |.2 - .6| and 10 s at 0.
    transition = (20 * 0.04 + 10 * 0.36 + 10 * 0.4) / 60
    assert comparison.estimate(POLICY, "ratio_gap_transition").value == pytest.approx(transition, abs=1e-6)
    edge = 0.0438  # of a flat set, see test_sweep.py
    flat_transition = (10 * (0.36 - edge) + 10 * (0.4 - edge)) / 60
    assert comparison.estimate(POLICY, "flat_gap_transition").value == pytest.approx(flat_transition, abs=1e-4)
    assert comparison.results[0].gaps(POLICY, "settled", 0).ratio == pytest.approx(0.04, abs=1e-6)
    assert comparison.estimate(DEPLOYABLE, "ratio_gap").value == pytest.approx(0.4 / 3, abs=1e-6)


def test_regret_and_headroom(comparison: Comparison) -> None:
    # 10 s of base load are served at .2 (a tenth of the requests, one in 20 of them twice as slow), 10 s of the burst
    # at .56: under 1 % of all requests are slower than the fast ones of the former.
    late = BASE_MS * np.exp(CURVATURE * 0.4**2)
    p99 = comparison.estimate(POLICY, "p99_ms").value
    assert p99 == pytest.approx(late, rel=1e-4)
    assert comparison.estimate(POLICY, "regret").value == pytest.approx(late / AT_BEST - 1, rel=1e-4)
    headroom, error = comparison.headroom()
    hindsight = [result.runs[HINDSIGHT].p99_ms for result in comparison.results]
    assert headroom == pytest.approx(np.mean([1 - AT_BEST / each for each in hindsight]), rel=1e-4)
    assert error >= 0.0


def test_figures_have_the_names_of_the_design(comparison: Comparison) -> None:
    figures = comparison.figures()
    for controller in (POLICY, HALF, DEPLOYABLE, HINDSIGHT, OPTIMUM):
        for name in ("p99_ms", "slo", "ratio_gap", "flat_gap", "regret", "throughput"):
            assert f"default.burst.single.{controller}.{name}" in figures
    assert figures["default.burst.headroom"].value == comparison.headroom()[0]
    ratio = figures["default.burst.p99_vs_deployable_static"].value
    policy, deployable = (comparison.estimate(key, "p99_ms").value for key in (POLICY, DEPLOYABLE))
    assert ratio == pytest.approx(policy / deployable, rel=1e-4)
    assert not any("decide" in name or name.endswith("_us") for name in figures)
    assert figures["default.burst.single.policy.slo"].better == "higher"


def test_noise_floor_is_the_spread_of_the_best_alpha_over_seeds() -> None:
    wobble = {SEEDS_FROM + 1: -0.04, SEEDS_FROM + 2: 0.0, SEEDS_FROM + 3: 0.04}
    found = run(FakeServing({"base": 0.6, "burst": 0.2}, wobble), seeds=3)
    np.testing.assert_allclose(found.best_alphas()[:, 0], [0.56, 0.6, 0.64])
    np.testing.assert_allclose(found.noise_floor(), [0.04, 0.04, 0.04])
    assert np.isnan(run(FakeServing(), seeds=1).noise_floor()).all()


def test_same_seeds_give_the_same_figures(comparison: Comparison) -> None:
    again = run(FakeServing(), seeds=2, policies=[follower()])
    assert again.figures() == comparison.figures()
    assert provenance(again) == provenance(comparison)


def test_a_policy_that_beats_the_reference_is_replayed_again_and_reported() -> None:
    # The static optimum of the settled halves is .6; the trick: nothing is better, but here the reference is
    # made worse
    # by a fake that punishes schedules, so a static policy at the right alphas wins against them.
    class Punishing(FakeServing):
        def __call__(self, scenario, trace, controller, *, alpha0, seed):  # type: ignore[no-untyped-def]
            replay = super().__call__(scenario, trace, controller, alpha0=alpha0, seed=seed)
            if type(controller) is ScheduledAlpha:
                replay.latency_ms[:] *= 10.0
            return replay

    class Knowing(ScheduledAlpha):
        pass

    times = [-20_000_000_000, 40_000_000_000, 80_000_000_000]
    policy = Contestant(POLICY, "policy", "knows", lambda: Knowing(times, [0.6, 0.2, 0.6]))
    fake = Punishing()
    found = run(fake, seeds=1, policies=[policy])
    result = found.results[0]
    assert result.reference.winner == f"static_{result.alphas[HINDSIGHT]:g}"
    assert result.runs[OPTIMUM].p99_ms > result.runs[HINDSIGHT].p99_ms  # printed as it is
    assert found.estimate(POLICY, "regret").value < 0
    assert result.rechecked == (POLICY,)
    assert sum(name == "Knowing" for name, _, _ in fake.calls) == 2
    assert any("the reference was beaten" in note for note in found.notes)


def test_a_second_replay_that_differs_is_an_error() -> None:
    flips = iter([0.6, 0.58, 0.56])

    def fickle() -> StaticAlpha:
        return StaticAlpha(next(flips))

    fake = FakeServing({"base": 0.6, "burst": 0.6}, wobble={SEEDS_FROM + 1: 0.005})
    # On the grid the best is .6 (off by .005); a policy at .605 beats every static.
    flips = iter([0.605, 0.58])
    policy = Contestant(POLICY, "policy", "fickle", fickle)
    with pytest.raises(RuntimeError, match="the same arrivals gave a P99"):
        run(fake, seeds=1, policies=[policy])


def test_recorded_arrivals_take_the_deployable_alpha_from_their_first_quarter() -> None:
    trace = generate(small_scenario(), seed=9)
    found = run(FakeServing(), seeds=1, trace=trace)
    assert found.deployable == 0.6  # the first 30 of 120 s are base
    assert "first quarter" in found.deployable_basis
    assert found.results[0].seed is None
    assert found.results[0].trace_hash == trace.hash()
    assert provenance(found)["arrivals"] == "recorded"
    with pytest.raises(UserError, match="--seeds must be 1"):
        run(FakeServing(), seeds=2, trace=trace)


def test_training_on_the_evaluated_trace_is_said() -> None:
    trace = generate(small_scenario(), seed=9)
    policy = Contestant(POLICY, "policy", "", lambda: StaticAlpha(0.5), trained_on=(trace.hash(),))
    assert any(
        "trained on these very arrivals" in note
        for note in run(FakeServing(), seeds=1, trace=trace, policies=[policy]).notes
    )


def test_training_seeds_are_out_of_reach() -> None:
    assert STEADY_SEEDS_FROM + MOST_DRAWS < envs.training_traces.SEEDS_FROM
    assert SEEDS_FROM + MOST_DRAWS <= STEADY_SEEDS_FROM


def test_seeds_below_one_are_refused() -> None:
    with pytest.raises(UserError, match="--seeds must be at least 1, got 0"):
        run(FakeServing(), seeds=0)


def test_half_is_kept_within_the_bounds() -> None:
    scenario = small_scenario(control={"alpha_min": 0.1, "alpha_max": 0.4})
    work = Work(2, replay=FakeServing({"base": 0.3, "burst": 0.2}))
    found = compare(scenario, work, seeds=1)
    work.close()
    assert found.results[0].alphas[HALF] == 0.4


@pytest.mark.parametrize(
    ("curvature", "busy", "said"),
    [
        (0.0, (0.031, 0.124), "busy 3.1 % of the time and the accelerator 12.4 %, far less than they could be: only a"),
        (0.001, (0.031, 0.124), "from 0.1 to 0.9, lies within 0.5 % of the others; at 0.5 the link is busy 3.1 %"),
        (0.0, (0.5, 0.124), "the link is busy 50.0 % of the time and the accelerator 12.4 %"),
        (0.0, (0.031, 0.9), "and the accelerator 90.0 %"),
    ],
)
def test_where_all_splits_do_alike_it_is_said_with_what_there_was_to_do(
    curvature: float, busy: tuple[float, float], said: str
) -> None:
    (note,) = run(FakeServing(curvature=curvature, busy=busy), seeds=2).notes
    assert said in note
    assert note.startswith("the split does not matter to these arrivals: every row's P99, and that of each of ")
    assert note.endswith("tell splits apart") == (max(busy) < 0.5)


def test_where_splits_differ_nothing_is_said_of_them_being_alike() -> None:
    # From .1 to .9 about .6: exp(.02 * .25) is just over .5 %.
    assert run(FakeServing({"base": 0.6, "burst": 0.6}, curvature=0.021, busy=(0.01, 0.01))).notes == ()
    assert len(run(FakeServing({"base": 0.6, "burst": 0.6}, curvature=0.018, busy=(0.01, 0.01))).notes) == 1
    # All shed alike: that is no light load.
    assert not [note for note in run(FakeServing(shed=4000, curvature=0.0)).notes if "does not matter" in note]


def test_figure_words() -> None:
    assert figure_word("Conversation-Trace.jsonl") == "conversation_trace_jsonl"
    assert figure_word("***") == "unnamed"


def test_a_segment_that_no_static_can_serve_is_named() -> None:
    class Full(FakeServing):
        def __call__(self, scenario, trace, controller, *, alpha0, seed):  # type: ignore[no-untyped-def]
            replay = super().__call__(scenario, trace, controller, alpha0=alpha0, seed=seed)
            burst = (trace.arrival_ns >= 40_000_000_000) & (trace.arrival_ns < 80_000_000_000)
            replay.latency_ms[burst] = 10_000.0
            return replay

    found = run(Full(), seeds=1)
    assert found.notes == (
        "in burst from 40 s every static sheds more than 1 % of the requests: alpha* means nothing there",
    )
    assert found.results[0].runs[HALF].shed > 4000
