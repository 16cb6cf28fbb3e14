"""The guard: what helps may act, what harms or proves nothing is made to rest, whatever the load does meanwhile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from helm_rl.control.guard import ControlNodes, Expected, Guard, GuardSettings, Mode, Verdict
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from tests.helm_rl.test_observation import window

Effect = Callable[[float], float]
"""From the offset, in units of its bound, to ln of what it multiplies a latency by."""


def measured(rate: float, tail_cost: float) -> WindowStats:
    arrivals = max(round(rate), 1)
    return window(
        arrivals=arrivals,
        completed=arrivals,
        returning=0,
        history_tokens=1500 * arrivals,
        tail_cost_sum=arrivals * tail_cost,
    )


def serve(guard: Guard, intervals: int, claimed: Effect, observed: Effect, acting: float = 1.0, seed: int = 1) -> float:
    """Run a guard whose learner is sure of `acting`, under a load that goes up and down; return the mean offset."""
    rng = np.random.default_rng(seed)
    sides, side = [], 1.0
    begins = True
    for k in range(intervals):
        if guard.mode is Mode.TRY and begins:
            side = 1.0 if rng.random() < 0.5 else -1.0
        offset = side if guard.mode is Mode.TRY else acting if guard.mode is Mode.ACT else 0.0
        sides.append(offset)
        load = 200 * (1 + 0.5 * math.sin(k / 90)) * rng.lognormal(0, 0.1)
        cost = (load / 200) ** 3 * rng.lognormal(0, 0.5)
        p99 = 0.5 * cost**0.25 * math.exp(observed(offset))
        verdict = guard.take(measured(load, 0.2 * cost * math.exp(claimed(offset))), p99)
        begins = verdict is not None or guard.mode is Mode.REST
        if verdict is not None and verdict.mode is Mode.TRY:
            guard.judge(verdict, acting * side)
    return float(np.mean(sides))


def test_blocks_of_each_kind_come_by_lot_and_last_as_long_as_they_should() -> None:
    guard = Guard(GuardSettings(block=5, settle=1, probation=10_000))
    modes = []
    for _ in range(5 * 600):
        modes.append(guard.mode)
        guard.take(measured(100, 0.2), 0.5)
    blocks = np.array([mode is Mode.TRY for mode in modes]).reshape(-1, 5)
    assert (blocks == blocks[:, :1]).all()
    assert (blocks[:, 0].reshape(-1, 3).sum(axis=1) == 2).all()
    assert {tuple(each) for each in blocks[:, 0].reshape(-1, 3)} == {(1, 1, 0), (1, 0, 1), (0, 1, 1)}


def test_what_helps_is_proven_and_acts_most_of_the_time() -> None:
    proven = 0
    for seed in range(10):
        guard = Guard(seed=seed)
        mean = serve(guard, 4_000, lambda x: -0.3 * x, lambda x: -0.1 * x, seed=seed)
        proven += guard.proven and guard.tripped == 0
        assert mean > 0.2 or not guard.proven
    assert proven >= 9


@pytest.mark.parametrize("drift", [-1.0, 1.0])
def test_what_the_hours_do_is_no_merit_and_no_fault_of_the_learner(drift: float) -> None:
    """A learner that is sure of itself and draws its sides so, while latency falls or rises for another reason."""

    def proven(effect: float) -> int:
        found = 0
        for seed in range(20):
            guard = Guard(GuardSettings(probation=30), seed)
            rng = np.random.default_rng(seed)
            odds, side, blocks = 0.7, 1.0, 0
            begins, judged = True, 0
            while judged < 45:
                if guard.mode is Mode.TRY and begins:
                    side = 1.0 if rng.random() < 0.5 * (1.0 + odds) else -1.0
                tried = side if guard.mode is Mode.TRY else 0.0
                cost = 0.2 * math.exp(drift * blocks / 60 - effect * tried) * rng.lognormal(0, 0.2)
                verdict = guard.take(measured(200 * rng.lognormal(0, 0.1), cost), 0.5 * cost**0.25)
                begins = verdict is not None
                blocks += begins
                if guard.mode is Mode.REST:
                    break
                if verdict is not None and verdict.mode is Mode.TRY:
                    guard.judge(verdict, odds * side)
                    judged += 1
            found += guard.proven
        return found

    assert proven(0.0) <= 5
    assert proven(0.1) >= 15


@pytest.mark.parametrize(
    ("claimed", "observed"),
    [
        (lambda x: 0.0, lambda x: 0.0),  # it changes nothing
        (lambda x: 0.3 * x, lambda x: 0.1 * x),  # it harms
        (lambda x: -0.3 * x, lambda x: 0.1 * x),  # the feedback says the contrary of what is so
        (lambda x: 0.3 * x, lambda x: -0.1 * x),
    ],
)
def test_what_harms_or_proves_nothing_is_made_to_rest(claimed: Effect, observed: Effect) -> None:
    rested = 0
    for seed in range(20):
        guard = Guard(seed=seed)
        mean = serve(guard, 3_000, claimed, observed, seed=seed)
        rested += guard.tripped > 0
        assert abs(mean) < 0.35
    assert rested >= 18


def test_feedback_that_never_changes_or_only_rolls_dice_proves_nothing() -> None:
    rng = np.random.default_rng(1)
    for constant in (True, False):
        rested = 0
        for seed in range(10):
            guard = Guard(seed=seed)
            for _ in range(3_000):
                side = 1.0 if rng.random() < 0.5 else -1.0
                noise = 1.0 if constant else rng.lognormal(0, 1.0)
                verdict = guard.take(measured(100, 0.2 * noise), 0.5 * math.exp(-0.2 * side) * rng.lognormal(0, 0.1))
                if verdict is not None and verdict.mode is Mode.TRY:
                    guard.judge(verdict, side)
            rested += guard.tripped > 0
        assert rested >= 9


def test_acting_that_turns_bad_ends() -> None:
    guard = Guard()
    serve(guard, 3_000, lambda x: -0.3 * x, lambda x: -0.1 * x)
    assert guard.proven
    serve(guard, 3_000, lambda x: 0.3 * x, lambda x: 0.1 * x, seed=2)
    assert guard.tripped >= 1


def test_rest_is_twice_as_long_each_time() -> None:
    guard = Guard(GuardSettings(block=4, settle=1, probation=10, rest=50))
    modes = []
    rng = np.random.default_rng(1)
    for _ in range(3_000):
        modes.append(guard.mode is Mode.REST)
        verdict = guard.take(measured(100, 0.2 * rng.lognormal()), 0.5 * rng.lognormal())
        if verdict is not None and verdict.mode is Mode.TRY:
            guard.judge(verdict, -1.0 if verdict.claimed > 0 else 1.0)  # always wrong
    changes = np.flatnonzero(np.diff(np.array([False, *modes, False]).astype(int)))
    pauses = np.diff(changes)[::2]
    assert len(pauses) >= 4
    assert pauses[:4].tolist() == [50, 100, 200, 400]


def test_windows_without_requests_or_numbers_prove_nothing() -> None:
    guard = Guard(GuardSettings(probation=2))
    for _ in range(500):
        verdict = guard.take(window(arrivals=0, completed=0, tail_cost_sum=0.0), math.nan)
        if verdict is not None:
            assert math.isnan(verdict.claimed)
            assert math.isnan(verdict.observed)
            guard.judge(verdict, 1.0)
    assert not guard.proven
    assert guard.tripped == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("settle", 20, "settle must be at least 0 and below block = 20, not 20"),
        ("probation", 1, "probation must be at least 2, not 1"),
        ("harm", math.nan, "harm must be a number of at least 0, not nan"),
        ("memory", 10**30, "memory must be at least 2 and at most 1,000,000, not 1"),
    ],
)
def test_settings_out_of_range_are_named(field: str, value: float, message: str) -> None:
    with pytest.raises(UserError, match=f"guard: {message}"):
        GuardSettings(**{field: value})  # type: ignore[arg-type]


def serve_cluster(
    guard: ControlNodes, intervals: int, claimed: Effect, observed: Effect, acting: float = 1.0, seed: int = 1
) -> float:
    """Run a cluster's guard as `serve` does one node's, all nodes under one load; return the mean offset."""
    rng = np.random.default_rng(seed)
    side = dict.fromkeys(guard.nodes, 1.0)
    begins = dict.fromkeys(guard.nodes, True)
    offsets = []
    for k in range(intervals):
        load = 200 * (1 + 0.5 * math.sin(k / 90)) * rng.lognormal(0, 0.1)
        weather = (load / 200) ** 3 * rng.lognormal(0, 0.5)  # for all nodes alike
        for node in guard.nodes:
            if node.mode is Mode.TRY and begins[node]:
                side[node] = 1.0 if rng.random() < 0.5 else -1.0
            offset = side[node] if node.mode is Mode.TRY else acting if node.mode is Mode.ACT else 0.0
            offsets.append(offset)
            cost = weather * rng.lognormal(0, 0.1)
            p99 = 0.5 * cost**0.25 * math.exp(observed(offset))
            verdict = node.take(measured(load, 0.2 * cost * math.exp(claimed(offset))), p99)
            begins[node] = verdict is not None
            if verdict is not None and verdict.mode is Mode.TRY:
                node.judge(verdict, acting * side[node])
    return float(np.mean(offsets))


def test_roles_of_nodes_are_drawn_anew_for_each_block_and_half_of_them_are_controls() -> None:
    guard = ControlNodes(6, GuardSettings(block=5, settle=1, probation=10_000))
    roles = []
    for _ in range(5 * 40 + 1):
        roles.append(tuple(node.mode for node in guard.nodes))
        for node in guard.nodes:
            node.take(measured(100, 0.2), 0.5)
    blocks = [roles[5 * k + 1] for k in range(40)]  # an interval is over when the first node reports the next
    assert all(roles[5 * k + 1 : 5 * k + 6] == [blocks[k]] * 5 for k in range(40))
    assert all(block.count(Mode.TRY) == block.count(Mode.OFF) == 3 for block in blocks)
    assert len(set(blocks)) > 10


def test_control_nodes_prove_what_helps_many_times_sooner_than_one_node_could() -> None:
    effects: tuple[Effect, Effect] = (lambda x: -0.15 * x, lambda x: -0.05 * x)
    proven = 0
    for seed in range(10):
        guard = ControlNodes(8, seed=seed)
        mean = serve_cluster(guard, 600, *effects, seed=seed)
        proven += guard.proven and guard.tripped == 0
        assert mean > 0.1 or not guard.proven
    assert proven >= 9


@pytest.mark.parametrize(
    ("claimed", "observed"),
    [
        (lambda x: 0.0, lambda x: 0.0),
        (lambda x: 0.3 * x, lambda x: 0.1 * x),
        (lambda x: -0.3 * x, lambda x: 0.1 * x),
        (lambda x: 0.3 * x, lambda x: -0.1 * x),
    ],
)
def test_what_harms_or_proves_nothing_rests_on_all_nodes(claimed: Effect, observed: Effect) -> None:
    rested = 0
    for seed in range(10):
        guard = ControlNodes(8, seed=seed)
        serve_cluster(guard, 1_000, claimed, observed, seed=seed)
        rested += guard.tripped > 0
        assert guard.tripped == 0 or len({node.mode is Mode.REST for node in guard.nodes}) == 1
    assert rested >= 9


def test_after_the_rest_they_try_again() -> None:
    guard = ControlNodes(4, GuardSettings(block=5, settle=1, probation=4, rest=7))
    tried = 0
    for k in range(200):
        for node in guard.nodes:
            verdict = node.take(measured(100 + k % 7, 0.2), 0.5)
            if verdict is not None and verdict.mode is Mode.TRY:
                node.judge(verdict, 1.0)
                tried += 1
    assert guard.tripped >= 2
    assert tried > 4


def test_a_node_that_is_down_counts_for_nothing_and_holds_nobody_up() -> None:
    guard = ControlNodes(4, GuardSettings(block=5, settle=1, probation=10_000))
    verdicts = dict.fromkeys(guard.nodes, 0)
    for k in range(300):
        for number, node in enumerate(guard.nodes):
            if number == 2 and 100 <= k < 103:  # within one block
                continue
            verdict = node.take(measured(100, 0.2), 0.5)
            verdicts[node] += verdict is not None and math.isfinite(verdict.claimed)
    counts = list(verdicts.values())
    assert counts[0] == counts[1] == counts[3] == 57  # of 59; the first teach what to expect
    assert 55 <= counts[2] < 57


def test_one_node_has_no_control() -> None:
    with pytest.raises(UserError, match="at least 2 nodes, not 1"):
        ControlNodes(1)


def test_verdicts_that_come_in_together_make_it_rest_once() -> None:
    guard = ControlNodes(32, GuardSettings(block=5, settle=1, probation=40, rest=1_000))
    rng = np.random.default_rng(1)
    while guard.tripped == 0:
        taken = [(node, node.take(measured(100, 0.2 * rng.lognormal()), 0.5 * rng.lognormal())) for node in guard.nodes]
        for node, verdict in taken:
            if verdict is not None and verdict.mode is Mode.TRY:
                node.judge(verdict, -math.copysign(1.0, verdict.claimed))  # always wrong
    assert guard.tripped == 1
    assert guard._left == 1_000


def test_a_rest_has_an_end_however_often_it_came_to_one() -> None:
    guard = Guard()
    guard.tripped = 2**31 - 1
    for _ in range(guard.settings.probation):
        guard.judge(Verdict(Mode.TRY, -0.1, -0.1), 1.0)
    assert guard.mode is Mode.REST
    assert guard.state().left == 1 << 30


def test_an_interrupted_block_begins_anew() -> None:
    guard = Guard(GuardSettings(block=5, settle=1, probation=10_000))
    mode = guard.mode
    for _ in range(4):
        assert guard.take(measured(100, 50.0), 1.0) is None
    guard.interrupt()
    verdicts = [guard.take(measured(100, 0.2), 0.5) for _ in range(5)]
    assert [each is not None for each in verdicts] == [False] * 4 + [True]
    assert verdicts[-1] is not None
    assert verdicts[-1].mode is mode
    resting = Guard(GuardSettings(rest=7), state=dataclasses.replace(guard.state(), left=7))
    resting.interrupt()
    assert resting.mode is Mode.REST


def test_a_node_that_is_interrupted_or_down_in_a_block_comes_to_no_number() -> None:
    guard = ControlNodes(4, GuardSettings(block=5, settle=1, probation=10_000))
    rng = np.random.default_rng(1)
    whole: list[tuple[int, int]] = []
    broken: list[tuple[int, int]] = []
    for k in range(5 * 60 + 1):
        for number, node in enumerate(guard.nodes):
            if number == 2 and 102 <= k < 104:
                continue
            if number == 1 and k == 133:
                node.interrupt()
            verdict = node.take(measured(100 * rng.lognormal(0, 0.1), 0.2 * rng.lognormal()), 0.5)
            if verdict is not None and k > 60:
                at = (number, (k - 1) // 5)
                (whole if math.isfinite(verdict.claimed) else broken).append(at)
    assert broken == [(2, 20), (1, 26)]
    assert len(whole) > 4 * 45


@pytest.mark.parametrize("known", [(0.0, 0.0), (7.0, 0.5)])
def test_what_a_load_never_tells_is_not_forgotten_until_nothing_but_noise_comes_out(known: tuple[float, float]) -> None:
    """Users who never return, or histories of one length and a fixed share of users who do, for a day."""
    expected = Expected()
    rng = np.random.default_rng(1)
    off = []
    for _ in range(5_000):
        rate = math.log(100) + 0.1 * rng.standard_normal()
        off.append(expected.better(np.array([1.0, rate, *known]), 0.5 * rate + 0.1 * rng.standard_normal()))
    assert np.std(off[-1_000:]) == pytest.approx(0.1, rel=0.15)
    # Then a few users return: what one block costs says little about them
    expected.better(np.array([1.0, math.log(100), known[0], known[1] + 0.01]), 0.5 * math.log(100) + 0.3)
    assert abs(expected.state().weights[3]) < 5.0
