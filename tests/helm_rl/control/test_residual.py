"""The adapter: nothing at first or without a bound, in the end where pages are worth the same, and the way there."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from helm_rl.control.base import BasePolicy
from helm_rl.control.guard import GuardSettings, Mode, Sums
from helm_rl.control.lean import lean
from helm_rl.control.protocol import Resuming
from helm_rl.control.residual import Residual, ResidualNet, ResidualSettings, on_cluster
from helm_rl.control.residual_kernel import LIMIT
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import HIGH, SIZE
from tests.helm_rl.control.test_guard import FALSE, SLO_MS, Service, Told, measured
from tests.helm_rl.policies import BOUNDS, make_bundle, network, still_network

P99 = 6
ALPHA = 5
INTERVAL_S = BOUNDS.interval_s[0]
QUICK = GuardSettings(sample_s=2 * INTERVAL_S, block_s=8 * INTERVAL_S, settle_s=2 * INTERVAL_S, widen=2, harm=1e6)
"""Samples of two intervals, blocks of four samples; nothing is harm enough."""
BOLD = ResidualSettings(pace=0.05, learning_rate=0.05)


@pytest.fixture
def base(tmp_path: Path) -> BasePolicy:
    make_bundle(tmp_path / "b", network(3))
    return BasePolicy.load(tmp_path / "b")


@pytest.fixture
def still(tmp_path: Path) -> BasePolicy:
    """A policy that never moves: what moves is the adapter."""
    make_bundle(tmp_path / "still", still_network())
    return BasePolicy.load(tmp_path / "still")


def observation(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(0, 1, SIZE).astype(np.float32)


@dataclasses.dataclass
class Toy:
    """A service on which rows are worth the more, the more it is hot, and P99 is the lower, the nearer to the best."""

    hot: float
    alpha: float = 0.5

    @property
    def best(self) -> float:
        """The alpha at which pages are worth the same on either side."""
        return 0.5 + self.hot / 20

    def worth(self) -> float:
        """Return what a page of rows saves, where one of keys and values saves 1 ms."""
        return math.exp(12 * (self.best - self.alpha))

    def measure(self, rate: float, p99_ms: float) -> WindowStats:
        p99_ms *= math.exp(10 * abs(self.alpha - self.best))
        # The link is the busier: its milliseconds weigh (.8 / .4)^3 as much as the accelerator's.
        busy = {"link_busy_ns": 600_000_000, "compute_busy_ns": 200_000_000, "alpha": self.alpha}
        margins = {"emb_margin_ms": self.worth() / 8, "kv_margin_ms": 1.5, "kv_margin_link_ms": 0.5}
        return measured(rate, p99_ms, **busy, **margins)


def run(
    adapter: Residual,
    intervals: int,
    seed: int = 1,
    hot_for: int = 10**9,
    told: Told = lambda p99_ms, rng: p99_ms,
) -> list[float]:
    """Serve a toy that turns from hot to cold and back each `hot_for` intervals; return the offsets."""
    service, offsets = Service(seed, noise=0.1), []
    obs = np.full(SIZE, 0.5, np.float32)
    for k in range(intervals):
        toy = Toy(-1.0 if (k // hot_for) % 2 else 1.0)
        obs[0] = float(toy.hot > 0)
        target = adapter.decide(obs, obs[ALPHA], k)
        assert BOUNDS.alpha_min <= target <= BOUNDS.alpha_max
        offsets.append(adapter.offset)
        toy.alpha = obs[ALPHA] = target
        window = toy.measure(*service.next())
        obs[P99] = min(window.p99_ms / SLO_MS, HIGH[P99])
        adapter.feedback(dataclasses.replace(window, p99_ms=told(window.p99_ms, service.rng)))
    return offsets


# The network


def test_the_gradient_is_that_of_the_output_before_its_tanh() -> None:
    net = ResidualNet(5, 4, 1)
    rng = np.random.default_rng(2)
    net.weights[2][...] = rng.standard_normal((4, 1))
    x = rng.standard_normal(5)
    before = math.atanh(net.forward(x))
    ascended = copy.deepcopy(net)
    ascended.ascend(x, 2.0, 1.0)
    for kind in ("weights", "biases"):
        for i, array in enumerate(getattr(net, kind)):
            for at in np.ndindex(array.shape):
                nudged = copy.deepcopy(net)
                getattr(nudged, kind)[i][at] += 1e-6
                slope = (math.atanh(nudged.forward(x)) - before) / 1e-6
                assert getattr(ascended, kind)[i][at] - array[at] == pytest.approx(2 * slope, rel=1e-3, abs=1e-6)


# What a sample says


def sample(**fields: float) -> Sums:
    """Return a sample of a second: the link busy for half of it, the accelerator for three quarters."""
    found = Sums(length_ns=10**9, link_busy_ns=500_000_000, compute_busy_ns=750_000_000)
    return dataclasses.replace(found, **fields)  # type: ignore[arg-type]


def test_the_side_that_a_page_is_worth_more_to_on_the_busier_resource() -> None:
    assert lean(sample(emb_margin_ms=3.0)) == 1.0
    assert lean(sample(kv_margin_ms=3.0)) == -1.0
    # 1 / .5^3 = 8 and 1 / .25^3 = 64: rows 24, keys and values 64 x (2 - .5) = 96
    assert lean(sample(emb_margin_ms=3.0, kv_margin_ms=2.0, kv_margin_link_ms=0.5)) == pytest.approx(-0.6)
    assert lean(sample(emb_margin_ms=12.0, kv_margin_ms=2.0, kv_margin_link_ms=0.5)) == pytest.approx(0.0)
    assert lean(sample(emb_margin_ms=3.0, kv_margin_ms=0.5, kv_margin_link_ms=0.5)) == 1.0
    idle = {"link_busy_ns": 0, "compute_busy_ns": 0}
    assert lean(sample(emb_margin_ms=3.0, kv_margin_ms=1.0, **idle)) == pytest.approx(0.5)
    # More memory may cost: less of it is then what a page is worth
    assert lean(sample(emb_margin_ms=-1.0, kv_margin_ms=1.0, **idle)) == -1.0


def test_a_resource_without_end_of_work_weighs_as_one_busy_for_98_percent() -> None:
    full = lean(sample(emb_margin_ms=1.0, kv_margin_ms=1.0, link_busy_ns=980_000_000))
    assert full == pytest.approx((50**3 - 4**3) / (50**3 + 4**3))
    assert lean(sample(emb_margin_ms=1.0, kv_margin_ms=1.0, link_busy_ns=3 * 10**9)) == full


def test_a_sample_that_says_nothing_leans_nowhere() -> None:
    for fields in (
        {},
        {"length_ns": 0},
        {"emb_margin_ms": math.nan, "kv_margin_ms": 1.0},
        {"emb_margin_ms": math.inf, "kv_margin_ms": 1.0},
        {"kv_margin_ms": math.inf, "kv_margin_link_ms": math.inf},
    ):
        assert lean(sample(**fields)) == 0.0


def test_windows_weigh_by_their_requests() -> None:
    sums = Sums()
    sums.add(measured(300, 50.0, emb_margin_ms=1.0, kv_margin_ms=0.0, link_busy_ns=0, compute_busy_ns=0), 0.5)
    sums.add(measured(100, 50.0, emb_margin_ms=0.0, kv_margin_ms=1.0, link_busy_ns=0, compute_busy_ns=0), 0.5)
    assert lean(sums) == pytest.approx(0.5)
    assert sums.length_ns == 2 * 10**9


# Where it goes


def test_without_a_bound_it_is_the_base_bit_for_bit(base: BasePolicy) -> None:
    layered = Residual(base, ResidualSettings(bound=0.0))
    rng = np.random.default_rng(1)
    seen = [observation(rng) for _ in range(200)]
    got = []
    for i, obs in enumerate(seen):
        layered.feedback(measured(100, 20.0))
        got.append(layered.decide(obs, 0.4, i))
    base.reset(0)
    assert got == [base.decide(obs, 0.4, i) for i, obs in enumerate(seen)]


def test_it_comes_to_where_pages_are_worth_the_same(still: BasePolicy) -> None:
    """From nothing, and three steps of reach away."""
    adapter = Residual(still, ResidualSettings(bound=0.1, stride=0.02, pace=0.02, learning_rate=0.05), QUICK)
    assert adapter.net.forward(np.ones(SIZE + 1)) == 0.0
    offsets = np.array(run(adapter, 800))
    assert offsets[: adapter.guard.sample * 8].max() == 0.0
    assert np.median(offsets[-200:]) == pytest.approx(0.05, abs=0.004)  # the toy's best is .55
    assert offsets.max() < 0.06
    adapter.reset(1)
    assert np.abs(adapter.net.weights[2]).max() == 0


def test_it_learns_which_side_is_better_by_the_load(still: BasePolicy) -> None:
    adapter = Residual(still, BOLD, QUICK)
    run(adapter, 1_000, hot_for=100)
    hot, cold = np.full(SIZE, 0.5, np.float32), np.full(SIZE, 0.5, np.float32)
    hot[0], cold[0] = 1.0, 0.0
    says = [adapter.net.forward(np.append(still.normalised(each), 0.0).astype(np.float64)) for each in (hot, cold)]
    assert says[0] > 0.15
    assert says[1] < -0.15
    learnt = [each.copy() for each in adapter.net.weights]
    adapter.restart(1)
    np.testing.assert_array_equal(adapter.net.weights[2], learnt[2])
    assert still.target is None
    # As after a burst that recovery has steered through.
    run(adapter, 5)
    learnt = [each.copy() for each in adapter.net.weights]
    assert isinstance(adapter, Resuming)
    adapter.resume(0.31)
    np.testing.assert_array_equal(adapter.net.weights[2], learnt[2])
    assert (still.target, adapter.offset) == (None, 0.0)


@pytest.mark.parametrize("kind", FALSE)
def test_told_what_is_false_it_never_acts(still: BasePolicy, kind: str) -> None:
    adapter = Residual(still, BOLD)
    adapter.net.weights[2][...] = 3.0
    assert set(run(adapter, 1_000, told=FALSE[kind])) == {0.0}
    assert adapter.guard.mode is Mode.REST
    assert (adapter.net.weights[2] == 3.0).all()


def test_the_offset_keeps_to_its_pace_and_its_reach(base: BasePolicy) -> None:
    """Whatever the network means: here its signs change all the time, and most that it says is beyond the reach."""
    settings = ResidualSettings(bound=0.12, stride=0.05, pace=0.03)
    adapter = Residual(base, settings, dataclasses.replace(QUICK, block_s=12 * INTERVAL_S, widen=8))
    adapter.net.weights[2][...] = np.random.default_rng(1).normal(0.0, 3.0, adapter.net.weights[2].shape)
    rng = np.random.default_rng(2)
    service, before, most = Service(1), 0.0, {Mode.CONTROL: 0.0, Mode.ACT: 0.0}
    limits = set()
    for k in range(2_000):
        obs = observation(rng)
        rate, p99_ms = service.next()
        obs[P99] = min(p99_ms / SLO_MS, HIGH[P99])
        adapter.feedback(measured(rate, p99_ms))
        adapter.decide(obs, 0.5, k)
        steps = adapter.guard.reach - (adapter.guard.mode is Mode.CONTROL)
        limit = min(settings.stride * steps, settings.bound if adapter.guard.mode is Mode.ACT else 0.1)
        limits.add((adapter.guard.mode, round(limit, 9)))
        assert abs(adapter.offset - before) <= settings.pace * INTERVAL_S + 1e-12
        assert abs(adapter.offset) <= max(limit, abs(before) - settings.pace * INTERVAL_S) + 1e-12
        before = adapter.offset
        most[adapter.guard.mode] = max(most[adapter.guard.mode], abs(before))
    assert limits == {(Mode.CONTROL, each) for each in (0.0, 0.05, 0.1)} | {
        (Mode.ACT, each) for each in (0.05, 0.1, 0.12)
    }
    assert most[Mode.ACT] == pytest.approx(0.12)


def test_control_blocks_go_one_step_less_far(base: BasePolicy) -> None:
    settings = ResidualSettings(bound=0.12, stride=0.05, pace=1.0, learning_rate=0.0)
    adapter = Residual(base, settings, dataclasses.replace(QUICK, widen=8))
    adapter.net.biases[2][...] = 9.0  # all the way to the bound
    rng, service, seen = np.random.default_rng(2), Service(1), set()
    for k in range(1_000):
        obs = observation(rng)
        rate, p99_ms = service.next()
        obs[P99] = min(p99_ms / SLO_MS, HIGH[P99])
        adapter.feedback(measured(rate, p99_ms))
        adapter.decide(obs, 0.5, k)
        seen.add((min(adapter.guard.reach, 4), adapter.guard.mode, round(adapter.offset, 6)))
    acts = {(1, 0.05), (2, 0.1), (3, 0.12), (4, 0.12)}
    controls = {(1, 0.0), (2, 0.05), (3, 0.1), (4, 0.1)}
    expected = {(reach, Mode.ACT, at) for reach, at in acts} | {(reach, Mode.CONTROL, at) for reach, at in controls}
    assert seen == expected
    # A bound that is the last stride's end, but for rounding, leaves controls a step less, too
    odd = Residual(base, ResidualSettings(bound=0.07, stride=0.01))
    assert [odd._limit(mode, 9) for mode in (Mode.ACT, Mode.CONTROL)] == pytest.approx([0.07, 0.06])


def test_it_learns_no_further_than_it_may_go(still: BasePolicy) -> None:
    """Else it would take long to come back from where it never was."""
    never = dataclasses.replace(QUICK, widen=10**6)
    adapter = Residual(still, dataclasses.replace(BOLD, stride=0.02), never)
    run(adapter, 1_000)
    says = adapter.net.forward(np.append(still.normalised(np.full(SIZE, 0.5, np.float32)), 0.0).astype(np.float64))
    assert adapter.guard.reach == 1
    assert says * BOLD.bound == pytest.approx(0.02, rel=0.2)


def test_the_base_sees_the_alpha_without_the_offset(base: BasePolicy) -> None:
    adapter = Residual(base)
    obs = observation(np.random.default_rng(1))
    adapter.decide(obs, 0.5, 0)
    adapter.offset = 0.03
    own = obs.copy()
    own[5] -= np.float32(0.03)
    before = base.target
    assert before is not None
    expected = before + float(np.clip(base.action(own)[0], -1, 1)) * base.step
    adapter.decide(obs, 0.53, 1)
    assert base.target == pytest.approx(min(max(expected, 0.1), 0.9), abs=1e-9)


def test_numbers_that_are_none_change_nothing(base: BasePolicy) -> None:
    adapter = Residual(base, BOLD)
    adapter.net.biases[2][...] = 1.0
    adapter.guard.mode = Mode.ACT  # type: ignore[misc]
    rng = np.random.default_rng(1)
    bad = observation(rng)
    bad[3] = math.nan
    adapter.decide(observation(rng), 0.5, 0)
    offset = adapter.offset
    assert offset == pytest.approx(0.025)  # the pace: it is on its way to .05
    assert math.isfinite(adapter.decide(bad, 0.5, 1))
    assert adapter.offset == offset
    for k in range(20):
        adapter.feedback(measured(100, math.nan, emb_margin_ms=math.nan, kv_margin_ms=math.nan))
        adapter.decide(observation(rng), 0.5, k)
    assert adapter.net.biases[2][0] == 1.0
    assert adapter.offset == pytest.approx(0.05)


def test_steps_are_longer_where_p99_has_left_its_average(base: BasePolicy) -> None:
    adapter = Residual(base, ResidualSettings(rate_gain=0.5))
    for p99_ms, expected in ((50.0, 1.0), (100.0, 1 + 0.5 * 1.0), (1e6, 2.0), (math.nan, 2.0)):
        adapter.feedback(measured(100, p99_ms))
        assert adapter._urgency == pytest.approx(expected, rel=0.02)


def test_what_something_else_steered_through_teaches_nothing(base: BasePolicy) -> None:
    """A sample holds windows of one stretch, and as many decisions as it has windows."""
    adapter = Residual(base, BOLD, QUICK)
    rng, service = np.random.default_rng(1), Service(1)
    stretch, found = 0, []
    learn = adapter._learn

    def listen(sums: Sums, acted: bool) -> None:
        found.append((sums.emb_margin_ms / sums.arrivals, stretch, acted, int(adapter.state.taken[0])))
        learn(sums, acted)

    adapter._learn = listen  # type: ignore[method-assign]
    for k in range(3_000):
        obs = observation(rng)
        rate, p99_ms = service.next()
        obs[P99] = min(p99_ms / SLO_MS, HIGH[P99])
        adapter.feedback(measured(rate, p99_ms, emb_margin_ms=float(stretch)))
        if rng.random() < 0.1:
            adapter.resume(0.5)
            stretch += 1
        adapter.decide(obs, 0.5, k)
    told, at, acted, taken = (np.array(each) for each in zip(*found, strict=True))
    assert len(told) > 500
    assert stretch > 200
    np.testing.assert_allclose(told, at)
    assert set(taken[acted]) == {2}
    assert set(taken[~acted]) <= {0, 1}


def test_nodes_learn_one_network_and_go_as_far_as_their_role_says(still: BasePolicy, tmp_path: Path) -> None:
    bases = [still, *(BasePolicy.load(tmp_path / "still") for _ in range(3))]
    adapters, guard = on_cluster(bases, BOLD, QUICK)
    toys, service = [Toy(1.0) for _ in adapters], Service(1, noise=0.1)
    obs = [np.full(SIZE, 0.5, np.float32) for _ in adapters]
    roles = set()
    for k in range(600):
        rate, p99_ms = service.next()
        for adapter, toy, shown in zip(adapters, toys, obs, strict=True):
            toy.alpha = shown[ALPHA] = adapter.decide(shown, shown[ALPHA], k)
            window = toy.measure(rate, p99_ms * service.rng.lognormal(0, 0.05))
            shown[P99] = min(window.p99_ms / SLO_MS, HIGH[P99])
            adapter.feedback(window)
            reach = adapter.guard.reach - (adapter.guard.mode is Mode.CONTROL)
            roles.add(adapter.guard.mode)
            assert adapter.state.numbers[LIMIT] == pytest.approx(
                min(0.05 * reach, 0.15 if adapter.guard.mode is Mode.ACT else 0.1)
            )
    assert all(adapter.net is adapters[0].net for adapter in adapters)
    assert roles == {Mode.ACT, Mode.CONTROL}
    assert guard.reach > 1
    assert np.mean([adapter.offset for adapter in adapters if adapter.guard.mode is Mode.ACT]) == pytest.approx(
        0.05, abs=0.01
    )


@pytest.mark.parametrize(
    ("field", "value"), [("bound", 0.6), ("stride", 0.0), ("pace", -1.0), ("hidden", 0), ("pull", math.nan)]
)
def test_settings_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"residual adapter: {field} must be within"):
        ResidualSettings(**{field: value})  # type: ignore[arg-type]
