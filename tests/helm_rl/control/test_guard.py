"""The guard: what is to be believed may act, what harms is made to rest, whatever the load does meanwhile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helm_rl.control.guard import ControlNodes, Expected, Guard, GuardSettings, Mode, agreement, worse
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from tests.helm_rl.test_observation import window

SAMPLE_S = GuardSettings.sample_s  # the interval of most of these guards: a sample each
SLO_MS = 100.0
SHORT = GuardSettings(block_s=20.0, settle_s=5.0)  # blocks of 4 samples, of which 3 count
HARM = math.log(1.3)

Told = Callable[[float, np.random.Generator], float]
"""From the P99 that was measured, in ms, to the one that the feedback tells."""
FALSE: dict[str, Told] = {
    "constant": lambda p99_ms, rng: 50.0,
    "random": lambda p99_ms, rng: 50.0 * rng.lognormal(0, 0.5),
    "inverted": lambda p99_ms, rng: 2500.0 / p99_ms,
}


def measured(rate: float, p99_ms: float, **changes: Any) -> WindowStats:
    """Return a window of a second in which `rate` requests came and were served."""
    arrivals = max(round(rate), 1)
    fields = {"arrivals": arrivals, "completed": arrivals, "returning": 0, "history_tokens": 1500 * arrivals}
    return window(**fields | {"p99_ms": p99_ms} | changes)


class Service:
    """P99 in ms, interval by interval, under a load that goes up and down, with weather that it does not explain."""

    def __init__(self, seed: int, noise: float = 0.2, drift: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self._noise, self._drift, self._at, self._weather = noise, drift, 0, 0.0

    def next(self) -> tuple[float, float]:
        """Return requests, and P99 without the learner."""
        self._at += 1
        self._weather = 0.5 * self._weather + self._noise * self.rng.normal()
        load = 200 * (1 + 0.5 * math.sin(self._at / 18)) * self.rng.lognormal(0, 0.1)
        return load, 50 * (load / 200) ** 1.5 * math.exp(self._weather + self._drift * self._at)


def steps(mode: Mode, reach: int) -> int:
    """Return how far a learner that goes as far as it may goes."""
    return {Mode.CONTROL: reach - 1, Mode.ACT: reach, Mode.REST: 0}[mode]


def serve(
    guard: Guard,
    intervals: int,
    harm: float = 0.0,
    seed: int = 1,
    told: Told = lambda p99_ms, rng: p99_ms,
    flattered: float = 0.0,
    drift: float = 0.0,
) -> tuple[list[Mode], list[int]]:
    """Run a guard whose learner multiplies P99 by e^harm with each step, until it rests; return modes and reaches.

    flattered: what of `harm` the feedback does not tell.
    """
    service = Service(seed, drift=drift)
    modes, reaches = [], []
    for _ in range(intervals):
        modes.append(guard.mode)
        reaches.append(guard.reach)
        load, p99_ms = service.next()
        gone = steps(guard.mode, guard.reach)
        p99_ms *= math.exp(harm * gone)
        claimed = told(p99_ms * math.exp(-flattered * gone), service.rng)
        guard.take(measured(load, claimed), p99_ms / SLO_MS)
        if guard.tripped and harm:
            break
    return modes, reaches


# What is said of numbers


def test_agreement_is_the_t_of_a_regressions_slope() -> None:
    rng = np.random.default_rng(1)
    assert agreement([1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 2, 2, 3, 3, 4, 4.0]) == pytest.approx(10.95445, abs=1e-4)
    stats = pytest.importorskip("scipy.stats")
    for size in (8, 20, 150):
        x = rng.normal(size=size)
        for slope in (0.0, 0.3, -2.0):
            y = slope * x + rng.normal(size=size)
            line = stats.linregress(x, y)
            assert agreement(x.tolist(), y.tolist()) == pytest.approx(line.slope / line.stderr)


def test_what_does_not_vary_or_is_too_little_agrees_with_nothing() -> None:
    rises = np.arange(20.0)
    assert agreement(rises[:7].tolist(), rises[:7].tolist()) == 0.0
    assert agreement(rises.tolist(), [3.0] * 20) == agreement([3.0] * 20, rises.tolist()) == 0.0
    assert agreement(rises.tolist(), (2 * rises + 1).tolist()) == math.inf
    assert agreement(rises.tolist(), (-rises).tolist()) == -math.inf


def test_worse_is_students_t_as_the_normal_law_has_it() -> None:
    acting = [(0.1, 0.5), (0.3, 0.2), (-0.2, 0.1), (0.0, 0.6)]
    control = [(0.2, 0.4), (0.5, 0.3), (0.3, 0.5)]
    assert math.isnan(worse(acting, control[:2]))
    assert math.isnan(worse(acting[:2], control))
    # By hand, for the feedback: means .05 and 1/3, squares .13 and .04667 about them, 5 free
    t = (1 / 3 - 0.05) / math.sqrt((0.13 + 0.14 / 3) / 5 * (1 / 4 + 1 / 3))
    assert worse(acting, control) == pytest.approx(41 / 43 * math.sqrt(5 * math.log1p(t * t / 5)))
    assert worse([(3.0, 9.0)] * 3 + [(3.1, 9.1)], control) < -4.0
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    for shift, sizes in itertools.product((-0.8, 0.0, 0.8), ((3, 3), (8, 3), (40, 13))):
        one, other = rng.normal(size=sizes[0]) - shift, rng.normal(size=sizes[1])
        chance = stats.ttest_ind(other, one, alternative="greater").pvalue
        found = worse([(x, x) for x in one.tolist()], [(x, x) for x in other.tolist()])
        assert found == pytest.approx(stats.norm.isf(chance), abs=0.05)


# One node


def test_blocks_come_by_lot_and_a_quarter_of_them_are_controls() -> None:
    guard = Guard(GuardSettings(block_s=15.0, settle_s=5.0, harm=1e6), interval_s=SAMPLE_S)
    modes = np.array([mode is Mode.ACT for mode in serve(guard, 3 * (3 + 4 * 60))[0]]).reshape(-1, 3)
    assert (modes == modes[:, :1]).all()
    assert not modes[:3].any()  # 9 samples, of which 8 are needed to be believed
    plans = modes[3:, 0].reshape(-1, 4)
    assert (plans.sum(axis=1) == 3).all()
    assert len({tuple(plan) for plan in plans.tolist()}) == 4


@pytest.mark.parametrize("interval_s", [0.1, 1.0, 2.0, 10.0])
def test_blocks_last_as_long_at_every_interval(interval_s: float) -> None:
    guard = Guard(GuardSettings(harm=1e6), interval_s=interval_s)
    assert guard.sample * guard.block * interval_s == pytest.approx(60.0)
    assert guard.sample * guard.settle * interval_s == pytest.approx(20.0)
    modes = serve(guard, round(960 / interval_s))[0]
    changes = [k * interval_s for k in range(1, len(modes)) if modes[k] is not modes[k - 1]]
    assert len(changes) >= 4
    assert all(at % 60.0 == pytest.approx(0.0, abs=1e-6) or at % 60.0 == pytest.approx(60.0) for at in changes)


def test_true_feedback_is_believed_within_the_patience() -> None:
    for seed in range(10):
        guard = Guard(seed=seed, interval_s=SAMPLE_S)
        modes, _ = serve(guard, guard.settings.patience, seed=seed)
        assert guard.believed
        assert guard.may_act
        assert guard.tripped == 0
        assert Mode.ACT in modes


@pytest.mark.parametrize("kind", FALSE)
def test_false_feedback_is_never_believed_and_ends_in_rest(kind: str) -> None:
    for seed in range(10):
        guard = Guard(seed=seed, interval_s=SAMPLE_S)
        patience = guard.settings.patience
        modes, _ = serve(guard, patience + 30, seed=seed, told=FALSE[kind])
        assert modes == [Mode.CONTROL] * patience + [Mode.REST] * 30
        assert not guard.may_act


def test_feedback_that_turns_false_ends_in_rest() -> None:
    guard = Guard(GuardSettings(harm=1e6), interval_s=SAMPLE_S)
    assert Mode.ACT in serve(guard, 300)[0]
    modes, _ = serve(guard, 300, told=FALSE["inverted"], seed=2)
    assert Mode.REST in modes


@pytest.mark.parametrize("flattered", [0.0, HARM])
def test_what_harms_is_made_to_rest_within_forty_blocks(flattered: float) -> None:
    """By 30 %, as the feedback tells or only the observation shows."""
    rested = 0
    for seed in range(10):
        guard = Guard(seed=seed, interval_s=SAMPLE_S)
        serve(guard, 40 * guard.block, HARM, seed, flattered=flattered)
        rested += guard.tripped == 1 and guard.mode is Mode.REST and not guard.may_act and guard.believed
    assert rested >= 9


@pytest.mark.parametrize("drift", [-5e-4, 0.0, 5e-4])
def test_what_does_no_harm_seldom_rests_whatever_the_hours_do(drift: float) -> None:
    """P99 falls or rises by a third in forty blocks, and the learner changes nothing."""
    rested = 0
    for seed in range(20):
        guard = Guard(seed=seed, interval_s=SAMPLE_S)
        serve(guard, 40 * guard.block, seed=seed, drift=drift)
        rested += guard.tripped > 0
    assert rested <= 2


def test_the_reach_grows_only_where_acting_is_no_worse() -> None:
    settings = GuardSettings(block_s=20.0, settle_s=5.0, harm=1e6)
    for harm, grows in ((-HARM, True), (HARM, False)):
        grown = 0
        for seed in range(10):
            modes, reaches = serve(Guard(settings, seed, SAMPLE_S), 50 * 4, harm, seed)
            blocks = [(modes[k], reaches[k]) for k in range(0, len(modes), 4)]
            acted = 0
            for (mode, reach), (_, after) in itertools.pairwise(blocks):
                acted = acted + (mode is Mode.ACT)
                assert after - reach in (0, 1)
                if after > reach:
                    assert acted >= settings.widen
                    acted = 0
            grown += blocks[-1][1] > 1
        assert grown == 10 if grows else grown <= 1


def test_rest_is_twice_as_long_each_time() -> None:
    guard = Guard(GuardSettings(patience=12, rest_s=50.0), interval_s=SAMPLE_S)
    modes, _ = serve(guard, 250, told=FALSE["constant"])
    runs = [(mode, len(list(each))) for mode, each in itertools.groupby(modes)]
    assert runs[:8] == [(mode, k) for k in (10, 20, 40, 80) for mode, k in ((Mode.CONTROL, 12), (Mode.REST, k))]


def test_a_rest_has_an_end_however_often_it_came_to_one() -> None:
    guard = Guard(GuardSettings(patience=12), interval_s=SAMPLE_S)
    guard.tripped = 2**31 - 1
    serve(guard, 12, told=FALSE["constant"])
    assert guard.mode is Mode.REST
    assert guard.state().left == 1 << 30


def test_windows_without_requests_or_numbers_prove_nothing() -> None:
    """A window in which nothing was served tells the P99 of the one before."""
    guard = Guard(GuardSettings(patience=12), interval_s=SAMPLE_S)
    rng = np.random.default_rng(1)
    for k in range(100):
        p99_ms = 50 * rng.lognormal()
        idle = window(arrivals=0, completed=0, p99_ms=p99_ms)
        guard.take(idle, p99_ms / SLO_MS)
        guard.take(measured(100, math.nan), p99_ms / SLO_MS)
        guard.take(measured(100, p99_ms), (math.nan, 0.0)[k % 2])
    assert (guard.mode, guard.tripped, guard.believed) == (Mode.CONTROL, 0, False)
    assert guard.state().claimed == guard.state().observed == []


def test_an_interrupted_block_begins_anew() -> None:
    guard = Guard(SHORT, interval_s=SAMPLE_S)
    serve(guard, 12)
    assert guard.mode is Mode.ACT
    for _ in range(50):
        for _ in range(3):
            guard.take(measured(100, 5e4), 500.0)  # as if by what steered then
        guard.interrupt()
    assert guard.state().acting == []
    assert guard.mode is Mode.ACT
    guard = Guard(SHORT, interval_s=SAMPLE_S, state=guard.state())
    guard.take(measured(100, 50.0), 0.5)
    guard.interrupt()
    modes, _ = serve(guard, 9)
    assert len(set(modes[:4])) == len(set(modes[4:8])) == 1
    assert guard.state().acting or guard.state().control


def test_what_was_seen_goes_on_bit_for_bit() -> None:
    guard = Guard(SHORT, interval_s=SAMPLE_S)
    serve(guard, 120)
    seen = guard.state()
    assert min(len(seen.acting), len(seen.control), seen.reach, seen.since) > 0
    others = [Guard(SHORT, 3, SAMPLE_S, seen) for _ in range(2)]
    assert [other.state() for other in others] == [seen, seen]
    assert serve(others[0], 100, seed=2) == serve(others[1], 100, seed=2)
    assert others[0].state() == others[1].state() != seen
    assert guard.state() == seen  # nothing of it is shared
    serve(guard, 200, told=FALSE["inverted"])
    assert guard.mode is Mode.REST
    resting = Guard(SHORT, 3, SAMPLE_S, guard.state())
    left = resting.state().left
    assert serve(resting, left + 1)[0] == [Mode.REST] * left + [Mode.CONTROL]
    assert resting.state().claimed != guard.state().claimed  # after it all is asked anew


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("settle_s", 60.0, r"settle_s must be at least 0 and below block_s = 60, not 60.0"),
        ("sample_s", 1e6, r"sample_s must be above 0 and at most 600, not 1000000.0"),
        ("rest_s", 0.0, r"rest_s must be above 0 and at most 1e\+06, not 0.0"),
        ("patience", 1, "patience must be at least 2 and at most 1,000,000, not 1"),
        ("memory", 10**30, "memory must be at least 8 and at most 1,000,000, not 1"),
        ("harm", math.nan, "harm must be a number of at least 0, not nan"),
        ("agree", -1.0, "agree must be a number of at least 0, not -1.0"),
    ],
)
def test_settings_out_of_range_are_named(field: str, value: float, message: str) -> None:
    with pytest.raises(UserError, match=f"guard: {message}"):
        GuardSettings(**{field: value})  # type: ignore[arg-type]


# A cluster


def serve_cluster(
    guard: ControlNodes, intervals: int, harm: float = 0.0, seed: int = 1, told: Told = lambda p99_ms, rng: p99_ms
) -> list[tuple[Mode, ...]]:
    """Run a cluster's guard as `serve` does one node's, all nodes under one load, until it rests; return the modes."""
    service = Service(seed)
    modes = []
    for _ in range(intervals):
        load, weather_ms = service.next()
        for node in guard.nodes:
            gone = steps(node.mode, node.reach)
            p99_ms = weather_ms * service.rng.lognormal(harm * gone, 0.1)
            node.take(measured(load, told(p99_ms, service.rng)), p99_ms / SLO_MS)
        modes.append(tuple(node.mode for node in guard.nodes))
        if guard.tripped:
            break
    return modes


def test_roles_of_nodes_are_drawn_anew_for_each_block_and_a_quarter_of_them_are_controls() -> None:
    guard = ControlNodes(8, SHORT, interval_s=SAMPLE_S)
    modes = serve_cluster(guard, 4 * 30)[1:]  # an interval is over when the first node reports the next
    blocks = [modes[k : k + 4] for k in range(3, len(modes) - 3, 4)]
    assert all(len(set(block)) == 1 for block in blocks)
    assert all(block[0].count(Mode.ACT) == 6 for block in blocks)
    assert len({block[0] for block in blocks}) > 10
    assert set(itertools.chain(*modes[:3])) == {Mode.CONTROL}  # the first block: nothing is known yet


def test_control_nodes_find_harm_in_fewer_blocks_than_one_node_needs() -> None:
    rested = 0
    for seed in range(10):
        guard = ControlNodes(4, SHORT, seed, SAMPLE_S)
        serve_cluster(guard, 8 * 4, HARM, seed)
        rested += guard.tripped == 1 and {node.mode for node in guard.nodes} == {Mode.REST}
    assert rested >= 9


def test_the_error_of_a_control_node_that_many_are_held_against_makes_no_harm() -> None:
    """Of 7 nodes one is a control: what it was worse or better by is in the gain of all six others."""
    rested = 0
    for seed in range(20):
        guard = ControlNodes(7, SHORT, seed, SAMPLE_S)
        serve_cluster(guard, 30 * 4, seed=seed)
        rested += guard.tripped > 0
    assert rested <= 2


@pytest.mark.parametrize("kind", FALSE)
def test_false_feedback_makes_all_nodes_rest(kind: str) -> None:
    for seed in range(5):
        guard = ControlNodes(4, SHORT, seed, SAMPLE_S)
        modes = serve_cluster(guard, 30, seed=seed, told=FALSE[kind])
        assert guard.tripped == 1
        assert len(modes) == 17  # 60 samples of four nodes are there after four blocks, and then one reports again
        assert set(itertools.chain(*modes[:-1])) == {Mode.CONTROL}
        assert set(modes[-1]) == {Mode.REST}


def test_after_the_rest_they_are_asked_anew() -> None:
    guard = ControlNodes(4, GuardSettings(block_s=20.0, settle_s=5.0, rest_s=35.0, patience=12), interval_s=SAMPLE_S)
    modes = []
    for _ in range(65):
        for node in guard.nodes:
            node.take(measured(100, 50.0), 0.5)
        modes.append({node.mode for node in guard.nodes})
    runs = [(mode, len(list(each))) for (mode,), each in itertools.groupby(modes)]
    assert runs[:6] == [(mode, k) for k in (7, 14, 28) for mode, k in ((Mode.CONTROL, 4), (Mode.REST, k))]


def gains(guard: ControlNodes) -> np.ndarray:
    return np.abs([each for each, _ in guard.state().acting])


@pytest.mark.parametrize("broken", ["down", "interrupted", "neither"])
def test_a_node_that_is_down_or_interrupted_counts_for_nothing_and_holds_nobody_up(broken: str) -> None:
    guard = ControlNodes(4, GuardSettings(block_s=20.0, settle_s=5.0, harm=1e6), interval_s=SAMPLE_S)
    rng = np.random.default_rng(1)
    for k in range(4 * 30 + 1):
        weather = rng.lognormal(0, 0.3)
        for number, node in enumerate(guard.nodes):
            odd = number == 2 and 81 <= k < 84  # within one block
            if broken == "down" and odd and k == 83:
                continue
            if broken == "interrupted" and odd:
                node.interrupt()
            p99_ms = 50 * weather * rng.lognormal(0, 0.02) * (1e3 if odd else 1.0)
            node.take(measured(100, p99_ms), p99_ms / SLO_MS)
    assert len(gains(guard)) == 29  # of 30: in the first all were controls
    assert (gains(guard).max() > 0.5) == (broken == "neither")


def test_one_node_has_no_control() -> None:
    with pytest.raises(UserError, match="at least 2 nodes, not 1"):
        ControlNodes(1)


# What a load costs


@pytest.mark.parametrize("known", [(0.0, 0.0), (7.0, 0.5)])
def test_what_a_load_never_tells_is_not_forgotten_until_nothing_but_noise_comes_out(known: tuple[float, float]) -> None:
    """Users who never return, or histories of one length and a fixed share of users who do, for hours."""
    expected = Expected()
    rng = np.random.default_rng(1)
    off = []
    for _ in range(10_000):
        rate = math.log(100) + 0.1 * rng.standard_normal()
        off.append(expected.better(np.array([1.0, rate, *known]), 0.5 * rate + 0.1 * rng.standard_normal()))
    assert np.std(off[-1_000:]) == pytest.approx(0.1, rel=0.15)
    # Then a few users return: what one sample costs says little about them
    expected.better(np.array([1.0, math.log(100), known[0], known[1] + 0.01]), 0.5 * math.log(100) + 0.3)
    assert abs(expected.state().weights[3]) < 5.0
