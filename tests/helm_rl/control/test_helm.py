"""The whole controller: what torch and plain Python make of the same, its ladder of fallbacks, and what it learns."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from helm_rl.control import burst, kernel
from helm_rl.control.base import BasePolicy
from helm_rl.control.burst import BurstSettings
from helm_rl.control.guard import GuardSettings, Mode
from helm_rl.control.helm import CAUSES, Helm, Limits
from helm_rl.control.protocol import Controller, FloatArray, Resuming, Watching
from helm_rl.control.recovery import Recovery, RecoveryRule
from helm_rl.control.residual import Residual, ResidualSettings
from helm_rl.errors import UserError
from helm_rl.observation import HIGH, LOW, SIZE
from tests.helm_rl.control.test_guard import measured
from tests.helm_rl.policies import BOUNDS, make_bundle, network

NET = network(3)
RULE = RecoveryRule(alpha_cold=0.95, alpha_hot=0.2)  # a part of it beyond the bounds
INTERVAL_S = BOUNDS.interval_s[0]
INTERVAL_NS = round(INTERVAL_S * 1e9)
ADAPTER = ResidualSettings(learning_rate=0.2, pace=0.06)  # .03 a decision, and up to .05 at first
DETECTOR = BurstSettings(least_s=1.0, calm_s=0.5, threshold=12.0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "b"
    make_bundle(path, NET)
    return path


def stack(policy: Path, guard: GuardSettings | None = None) -> tuple[BasePolicy, Residual, Recovery]:
    base = BasePolicy.load(policy)
    adapter = Residual(base, ADAPTER, guard)
    return base, adapter, Recovery(adapter, RULE, DETECTOR, rate_per_s=0.02)


def acting(policy: Path, seed: int = 5) -> Helm:
    """Return all layers, the adapter acting on a network that says something."""
    helm = Helm(*stack(policy))
    assert helm.adapter is not None
    helm.adapter.net.weights[2][...] = np.random.default_rng(seed).normal(0.0, 0.7, (16, 1))
    helm.adapter.guard.mode = Mode.ACT  # type: ignore[misc]
    return helm


# Against torch


@dataclass
class Shown:
    """What one decision is shown."""

    observation: FloatArray
    applied: float
    after_ns: int
    age_ns: int
    burst: bool


class Reference:
    """The decision in torch's modules and plain Python, as the documents have it, with no line of the kernel's."""

    def __init__(self, helm: Helm) -> None:
        assert helm.adapter is not None
        layers: list[torch.nn.Module] = []
        for weight, bias in zip(helm.adapter.net.weights, helm.adapter.net.biases, strict=True):
            linear = torch.nn.Linear(*weight.shape, dtype=torch.float64)
            linear.weight.data, linear.bias.data = torch.tensor(weight.T.copy()), torch.tensor(bias)
            layers += [linear, torch.nn.Tanh()]
        self.offsets = torch.nn.Sequential(*layers)
        self.counts = dict.fromkeys(CAUSES, 0)
        self.target: float | None = None
        self.safe: float | None = None
        self.returning: float | None = None
        self.offset = 0.0
        self.took_over = False
        self.now_ns = 0

    def decide(self, shown: Shown) -> float:
        self.now_ns += shown.after_ns
        passed_ns = shown.after_ns
        if passed_ns > 1.5 * INTERVAL_NS:
            self.counts["late"] += 1
            passed_ns = INTERVAL_NS
        cause = self.fault(shown)
        if cause is None:
            self.safe = self.bounded(self.sound(shown, passed_ns * 1e-9))
            return self.safe
        self.counts[cause] += 1
        if self.safe is not None:
            return self.safe
        return self.bounded(shown.applied) if 0 <= shown.applied <= 1 else math.nan

    def fault(self, shown: Shown) -> str | None:
        read = shown.observation[:1] if shown.burst else shown.observation
        if shown.age_ns > 3 * INTERVAL_NS:
            return "stale"
        if not np.isfinite(read).all():
            return "not_finite"
        if (read < LOW[: read.size]).any() or (read > HIGH[: read.size]).any():
            return "out_of_range"
        known = 0 <= shown.applied <= 1
        return None if shown.burst or known or (self.target is not None and not self.took_over) else "no_alpha"

    def sound(self, shown: Shown, passed_s: float) -> float:
        if shown.burst:
            self.took_over = True
            return RULE.alpha_cold + (RULE.alpha_hot - RULE.alpha_cold) * float(shown.observation[0])
        if self.took_over:
            self.took_over, self.returning, self.target, self.offset = False, shown.applied, None, 0.0
        own = torch.from_numpy(shown.observation.copy())
        own[5] = min(max(float(own[5]) - self.offset, 0.0), 1.0)
        before = self.target
        with torch.no_grad():
            action = min(max(float(NET(own)), -1.0), 1.0)
            start = shown.applied - self.offset if before is None else before
            self.target = self.bounded(start + action * BOUNDS.rate_per_s * INTERVAL_S)
            moved = 0.0 if before is None else (self.target - before) / (BOUNDS.rate_per_s * INTERVAL_S)
            x = torch.cat([NET.normaliser(own).double(), torch.tensor([moved], dtype=torch.float64)])
            meant = min(max(ADAPTER.bound * float(self.offsets(x)), -ADAPTER.stride), ADAPTER.stride)
            pace = ADAPTER.pace * INTERVAL_S
            self.offset += min(max(meant - self.offset, -pace), pace)
        target = self.bounded(self.target + self.offset)
        if self.returning is not None:
            step = 0.02 * passed_s
            if abs(target - self.returning) <= step:
                self.returning = None
            else:
                self.returning += math.copysign(step, target - self.returning)
                return self.returning
        return target

    @staticmethod
    def bounded(alpha: float) -> float:
        return min(max(alpha, BOUNDS.alpha_min), BOUNDS.alpha_max)


anything = st.floats(width=32)
spans_ns = st.sampled_from([INTERVAL_NS, INTERVAL_NS, INTERVAL_NS // 5, 10 * INTERVAL_NS, 0])


@st.composite
def shown(draw: st.DrawFn) -> Shown:
    """Most of what is drawn is as it should be, some is anything."""
    x = draw(arrays(np.float32, SIZE, elements=st.floats(0, 1, width=32)))
    x = np.where(draw(st.booleans()), x, LOW + x * (HIGH - LOW)).astype(np.float32)
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 3]))):
        x[draw(st.integers(0, SIZE - 1))] = draw(anything)
    return Shown(
        x,
        draw(st.one_of(st.floats(0, 1), st.floats(0, 1), st.floats())),
        draw(spans_ns),
        draw(st.sampled_from([0, 0, 0, INTERVAL_NS, 4 * INTERVAL_NS])),
        draw(st.sampled_from([False, False, False, True])),
    )


@settings(max_examples=150, deadline=None)
@given(drawn=st.lists(shown(), min_size=1, max_size=12))
def test_it_decides_as_torch_and_plain_python_do(policy: Path, drawn: list[Shown]) -> None:
    helm = acting(policy)
    reference = Reference(helm)
    now_ns = 0
    for k, one in enumerate(drawn):
        one.after_ns = 0 if k == 0 else one.after_ns
        now_ns += one.after_ns
        helm.detector.counts[burst.ACTIVE] = one.burst
        got = helm.decide(one.observation, one.applied, now_ns, one.age_ns)
        assert got == pytest.approx(reference.decide(one), rel=0, abs=1e-6, nan_ok=True)
        assert math.isnan(got) or BOUNDS.alpha_min <= got <= BOUNDS.alpha_max
        assert not (math.isnan(got) and (0 <= one.applied <= 1 or reference.safe is not None))
    assert helm.fallbacks() == reference.counts


# Against the layers one by one


def windows(rng: np.random.Generator, count: int) -> list[FloatArray]:
    """Return observations that drift."""
    found = [rng.uniform(0, 1, SIZE).astype(np.float32)]
    for _ in range(count - 1):
        found.append(np.clip(found[-1] + rng.normal(0, 0.1, SIZE), 0, 1).astype(np.float32))
    return found


def test_the_whole_decides_and_learns_as_its_layers_do(policy: Path) -> None:
    """Bit for bit, through bursts, hand-backs, and blocks of each kind."""
    blocks = GuardSettings(sample_s=1.0, block_s=3.0, settle_s=1.0, widen=2, harm=1.0, rest_s=5.0, memory=60)
    whole, layered = Helm(*stack(policy, blocks)), stack(policy, blocks)[2]
    assert isinstance(layered.inner, Residual)
    controllers: tuple[Controller, Controller] = (whole, layered)
    for one in controllers:
        one.reset(4)
    rng = np.random.default_rng(2)
    applied, roles, offsets, bursts = 0.5, set(), set(), 0
    for k, observation in enumerate(windows(rng, 1_000)):
        rate = 10.0 if k % 90 in (80, 81, 82) else 2.0
        for arrivals in rng.poisson(rate, 50):
            found = [one.tick(int(arrivals), math.nan, 0) for one in controllers]
            assert found[0] == found[1]
            bursts += found[0]
        margins = {"emb_margin_ms": rng.random(), "kv_margin_ms": rng.random(), "compute_busy_ns": 400_000_000}
        p99_ms = 100 * float(observation[6]) * rng.lognormal(0, 0.1)
        for one in controllers:
            one.feedback(measured(100, p99_ms, **margins))
        got, expected = (one.decide(observation, applied, k * INTERVAL_NS) for one in controllers)
        assert got == min(max(expected, BOUNDS.alpha_min), BOUNDS.alpha_max)
        roles.add((layered.inner.guard.mode, min(layered.inner.guard.reach, 2)))
        offsets.add(layered.inner.offset)
        applied = min(max(got, applied - 0.05), applied + 0.05)
    assert {mode for mode, _ in roles} == set(Mode)
    assert roles >= {(Mode.ACT, 1), (Mode.ACT, 2)}
    assert len(offsets) > 100
    assert bursts > 5
    assert whole.adapter is not None
    assert whole.adapter.learnt() == layered.inner.learnt()
    assert sum(whole.fallbacks().values()) == 0


def test_without_layers_it_is_the_base(policy: Path) -> None:
    helm, base = Helm(BasePolicy.load(policy)), BasePolicy.load(policy)
    assert not isinstance(helm, Watching)
    assert isinstance(helm, Resuming)
    assert not helm.tick(10**6, 1e9, 0)
    for k, observation in enumerate(windows(np.random.default_rng(1), 100)):
        assert helm.decide(observation, 0.4, k * INTERVAL_NS) == base.decide(observation, 0.4, 0)


def test_an_adapter_without_a_bound_is_not_there(policy: Path) -> None:
    base = BasePolicy.load(policy)
    helm, alone = Helm(base, Residual(base, ResidualSettings(bound=0.0))), BasePolicy.load(policy)
    for k, observation in enumerate(windows(np.random.default_rng(1), 50)):
        helm.feedback(measured(100, 20.0))
        assert helm.decide(observation, 0.4, k * INTERVAL_NS) == alone.decide(observation, 0.4, 0)


# Fallbacks

GOOD = np.full(SIZE, 0.5, np.float32)


def test_what_was_held_is_counted_by_cause_until_a_reset(policy: Path) -> None:
    helm = acting(policy)
    assert helm.fallbacks() == dict.fromkeys(CAUSES, 0)
    assert math.isnan(helm.decide(GOOD, math.nan, 0))
    assert helm.decide(np.full(SIZE, np.nan, np.float32), 0.95, 0) == BOUNDS.alpha_max
    safe = helm.decide(GOOD, 0.5, 0)
    bad = GOOD.copy()
    for k, (value, held) in enumerate([(np.inf, True), (-0.01, True), (1.01, True), (0.4, False)]):
        bad[3] = value
        assert (helm.decide(bad, 0.1, (k + 1) * INTERVAL_NS) == safe) == held
    safe = helm.decide(GOOD, 0.5, 5 * INTERVAL_NS)
    assert helm.decide(np.zeros(SIZE, np.float32), 0.5, 6 * INTERVAL_NS, 3 * INTERVAL_NS + 1) == safe
    assert helm.decide(np.zeros(SIZE, np.float32), 0.5, 7 * INTERVAL_NS, 3 * INTERVAL_NS) != safe
    helm.decide(GOOD, 0.5, 9 * INTERVAL_NS)
    counted = {"not_finite": 2, "out_of_range": 2, "stale": 1, "late": 1, "no_alpha": 1, "network": 0}
    assert helm.fallbacks() == counted
    helm.resume(0.3)
    helm.decide(GOOD, 0.3, 100 * INTERVAL_NS)  # not late: it was not at work
    assert helm.fallbacks() == counted
    helm.reset(0)
    assert helm.fallbacks() == dict.fromkeys(CAUSES, 0)


def test_a_network_that_overflows_is_counted_and_moves_nothing(policy: Path) -> None:
    base = BasePolicy.load(policy)
    base.state.std[...] = 1e-3  # so that signals are clipped at 10, and weights times them infinite
    first = base.state.weights[: SIZE * 64].reshape(SIZE, 64)
    first[::2], first[1::2] = 3e38, -3e38
    helm = Helm(base)
    rng = np.random.default_rng(1)
    assert [helm.decide(one, 0.4, 0) for one in windows(rng, 20)] == [0.4] * 20
    assert helm.fallbacks()["network"] == 20


def test_an_adapter_that_overflows_is_counted_and_adds_nothing(policy: Path) -> None:
    helm, base = acting(policy), BasePolicy.load(policy)
    assert helm.adapter is not None
    helm.base.state.std[...] = base.state.std[...] = 1e-3  # as above
    first = helm.adapter.net.weights[0]
    first[::2], first[1::2] = 1e308, -1e308
    for one in windows(np.random.default_rng(1), 20):
        assert helm.decide(one, 0.4, 0) == base.decide(one, 0.4, 0)
    assert helm.fallbacks()["network"] == 20


def test_the_rule_stays_within_the_bounds(policy: Path) -> None:
    helm = acting(policy)
    helm.detector.counts[burst.ACTIVE] = 1
    assert helm.decide(np.zeros(SIZE, np.float32), 0.5, 0) == BOUNDS.alpha_max  # RULE: .95


def test_a_late_call_on_the_way_back_moves_by_one_interval_at_most(policy: Path) -> None:
    base = BasePolicy.load(policy)
    helm = Helm(base, None, Recovery(base, RULE, DETECTOR, rate_per_s=0.02))
    seen = windows(np.random.default_rng(1), 100)
    decided = max(seen, key=lambda one: abs(float(base.action(one)[0])))  # by .03 an interval: always ahead
    helm.detector.counts[burst.ACTIVE] = 1
    helm.decide(decided, 0.5, 0)
    helm.detector.counts[burst.ACTIVE] = 0
    now_ns = INTERVAL_NS
    before = helm.decide(decided, 0.5, now_ns)
    for after_ns, moved in ((INTERVAL_NS, 0.01), (INTERVAL_NS * 3 // 2, 0.015), (100 * INTERVAL_NS, 0.01)):
        now_ns += after_ns
        target = helm.decide(decided, 0.5, now_ns)
        assert abs(target - before) == pytest.approx(moved)
        before = target
    assert helm.fallbacks()["late"] == 1


def test_it_goes_on_from_what_something_else_has_set(policy: Path) -> None:
    helm = acting(policy)
    for k in range(20):
        helm.decide(GOOD, 0.5, k * INTERVAL_NS)
    helm.resume(0.8)
    bad = np.full(SIZE, np.nan, np.float32)
    assert helm.decide(bad, 0.8, 0) == 0.8
    assert abs(helm.decide(GOOD, 0.8, INTERVAL_NS) - 0.8) <= 0.03 + 0.05


@pytest.mark.parametrize(
    "changed",
    [
        GOOD.astype(np.float64),
        np.repeat(GOOD, 2)[::2],
        GOOD.tolist(),
        np.broadcast_to(np.float32(0.5), (SIZE,)),
    ],
)
def test_observations_of_another_make_are_taken_as_well(policy: Path, changed: FloatArray) -> None:
    compiled = kernel.decide.signatures  # type: ignore[attr-defined]
    assert acting(policy).decide(changed, 0.5, 0) == acting(policy).decide(GOOD, 0.5, 0)
    assert kernel.decide.signatures == compiled  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(7,), (1, SIZE), ()])
def test_observations_of_another_shape_are_an_error(policy: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape \(17,\), got"):
        acting(policy).decide(np.zeros(shape, np.float32), 0.5, 0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["stale", "late"])
def test_limits_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"limits: {name} must be above 0 and at most 1,000,000 intervals"):
        Limits(**{name: value})


def test_memory_stays_as_it_is(policy: Path) -> None:
    """Where no feedback comes, too: a sample then has no end."""
    helm = acting(policy)
    assert helm.adapter is not None
    offsets: npt.NDArray[np.float64] = np.empty(20_000)
    helm.decide(GOOD, 0.5, 0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for k in range(offsets.size):
            helm.decide(GOOD, 0.5, k)
            offsets[k] = helm.adapter.offset
        assert tracemalloc.get_traced_memory()[0] - before < 4096
    finally:
        tracemalloc.stop()
    assert np.abs(offsets).max() == pytest.approx(0.05)
    assert int(helm.adapter.state.taken[0]) == round(5.0 / INTERVAL_S)
