"""Which node serves a request: each router by hand, by chance where it draws, and where nodes are down."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from helm_rl.profiles.hardware import resolve_hardware
from helm_rl.profiles.model import resolve_model
from helm_rl.routing import NOWHERE, ROUTERS, RouterState, choose, miss_costs_ms, new_router, own_node
from helm_rl.scenario import HardwareSection, ModelSection, RouterSection

DRAWS = 20_000


def router(
    policy: str,
    nodes: int = 3,
    weights: tuple[float, float, float] = (2.0, 1.0, 1.0),
    kv: tuple[float, ...] = (),
    emb: tuple[float, ...] = (),
    load: tuple[float, ...] = (),
    down: tuple[int, ...] = (),
    affinity: float = 0.0,
    load_limit: float = 0.85,
) -> RouterState:
    section = RouterSection.model_validate({"policy": policy, "affinity": affinity, "load_limit": load_limit})
    state = new_router(section, nodes, weights)
    for known, values in ((state.kv, kv), (state.emb, emb), (state.load, load)):
        known[: len(values)] = values
    state.up[list(down)] = False
    return state


def users_of(state: RouterState, count: int = 2_000) -> np.ndarray:
    return np.array([own_node(state, user) for user in range(count)])


def test_helms_score_by_hand() -> None:
    """Weights 2, 1, 1 are .5, .25, .25: .4 + .125 - .15 = .375, then .225, then .2 + .175 - .025 = .35."""
    known: dict[str, Any] = {"kv": (0.8, 0.0, 0.4), "emb": (0.5, 0.9, 0.7), "load": (0.6, 0.0, 0.1)}
    assert {choose(router("helm", **known), user, ticket) for user in range(5) for ticket in range(5)} == {0}
    # At a load of .8 the first has .325 left, less than the third; .03 for his own node turns that round.
    busier = known | {"load": (0.8, 0.0, 0.1)}
    assert {choose(router("helm", **busier), user, 0) for user in range(5)} == {2}
    liking = router("helm", **busier, affinity=0.03)
    own = users_of(liking, 60)
    assert [choose(liking, user, 7) for user in range(60)] == [0 if node == 0 else 2 for node in own]
    assert set(own) == {0, 1, 2}


def test_only_the_proportions_of_the_weights_matter() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        known: dict[str, Any] = {name: tuple(rng.random(5)) for name in ("kv", "emb", "load")}
        one = router("helm", 5, (2.0, 1.0, 1.0), **known, load_limit=1.0)
        other = router("helm", 5, (200.0, 100.0, 100.0), **known, load_limit=1.0)
        assert choose(one, 3, 9) == choose(other, 3, 9)


@pytest.mark.parametrize("policy", ["helm", "kv-aware"])
def test_a_best_node_beyond_the_limit_gives_way_to_the_least_loaded(policy: str) -> None:
    known: dict[str, Any] = {"weights": (8.0, 1.0, 1.0), "kv": (1.0, 0.0, 0.5)}
    assert choose(router(policy, **known, load=(0.85, 0.3, 0.2)), 0, 0) == 0
    assert choose(router(policy, **known, load=(0.86, 0.3, 0.2)), 0, 0) == 2
    assert choose(router(policy, **known, load=(0.86, 0.2, 0.3)), 0, 0) == 1
    # Where everybody is beyond it, the least loaded may well be the best.
    assert choose(router(policy, **known, load=(1.5, 1.6, 1.7)), 0, 0) == 0


def test_kv_aware_sees_neither_rows_nor_own_nodes() -> None:
    known: dict[str, Any] = {"kv": (0.5, 0.4, 0.0), "emb": (0.0, 1.0, 0.0)}
    assert choose(router("kv-aware", **known, affinity=10.0), 1, 0) == 0
    assert choose(router("helm", **known), 1, 0) == 1


def test_users_without_a_history_go_to_their_own_node() -> None:
    idle = router("helm", 8, affinity=0.05)
    assert [choose(idle, user, 3 * user) for user in range(200)] == users_of(idle, 200).tolist()


def test_equals_take_turns() -> None:
    """Without it, the first node would be everybody's."""
    for policy in ("helm", "kv-aware", "least-loaded"):
        chosen = np.bincount([choose(router(policy, 4), 0, ticket) for ticket in range(4_000)], minlength=4)
        assert chosen.min() > 850, policy


def test_own_nodes_are_spread_evenly_and_only_a_lost_nodes_users_move() -> None:
    whole = users_of(router("user-hash", 8), 8_000)
    counts = np.bincount(whole, minlength=8)
    assert abs(counts - 1_000).max() < 4.5 * np.sqrt(8_000 * 1 / 8 * 7 / 8)
    without = users_of(router("user-hash", 8, down=(3,)), 8_000)
    moved = whole != without
    assert np.array_equal(moved, whole == 3)
    # They spread over all that are left.
    assert np.bincount(without[moved], minlength=8)[[0, 1, 2, 4, 5, 6, 7]].min() > 90
    assert [choose(router("user-hash", 8, load=(9.0,) * 8), user, 1) for user in range(50)] == whole[:50].tolist()


def test_the_least_loaded() -> None:
    assert {choose(router("least-loaded", load=(0.3, 0.1, 0.2)), user, user) for user in range(9)} == {1}
    assert {choose(router("least-loaded", load=(0.3, 0.1, 0.2), down=(1,)), user, user) for user in range(9)} == {2}


def test_two_choices_take_the_better_of_two() -> None:
    """With loads in order, node j of N is the better one in ((N - j)^2 - (N - j - 1)^2) / N^2 of the draws."""
    chosen = np.bincount([choose(router("two-choices", 4, load=(0.0, 0.1, 0.2, 0.3)), 0, t) for t in range(DRAWS)])
    assert chosen / DRAWS == pytest.approx([7 / 16, 5 / 16, 3 / 16, 1 / 16], abs=0.016)
    chosen = np.bincount(
        [choose(router("two-choices", 4, load=(0.0, 0.1, 0.2, 0.3), down=(0,)), 0, t) for t in range(DRAWS)],
        minlength=4,
    )
    assert chosen / DRAWS == pytest.approx([0, 5 / 9, 3 / 9, 1 / 9], abs=0.016)


def test_chance_is_even_and_follows_from_the_ticket() -> None:
    state = router("random", 5, down=(2,))
    chosen = [choose(state, 0, ticket) for ticket in range(DRAWS)]
    assert np.bincount(chosen, minlength=5) / DRAWS == pytest.approx([0.25, 0.25, 0, 0.25, 0.25], abs=0.016)
    assert chosen[:100] == [choose(state, 99, ticket) for ticket in range(100)]


def test_round_robin_takes_turns() -> None:
    assert [choose(router("round-robin", 3), 5, ticket) for ticket in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [choose(router("round-robin", 3, down=(1,)), 5, ticket) for ticket in range(6)] == [0, 2, 2, 0, 2, 2]


@pytest.mark.parametrize("policy", ROUTERS)
def test_a_node_that_is_down_is_never_chosen(policy: str) -> None:
    rng = np.random.default_rng(2)
    for ticket in range(300):
        down = tuple(np.flatnonzero(rng.random(5) < 0.5).tolist())
        # What is known of a lost node may still look splendid.
        known: dict[str, Any] = {name: tuple(rng.random(5)) for name in ("kv", "emb", "load")}
        state = router(policy, 5, **known, down=down, affinity=0.2, load_limit=float(rng.random()))
        k = choose(state, int(rng.integers(1000)), ticket)
        assert (k == NOWHERE) == (len(down) == 5)
        assert k not in down


@pytest.mark.parametrize("policy", ROUTERS)
def test_where_no_node_is_up_there_is_nowhere_to_go(policy: str) -> None:
    assert {choose(router(policy, 3, down=(0, 1, 2)), user, user) for user in range(5)} == {NOWHERE}


@pytest.mark.parametrize("policy", ROUTERS)
def test_one_node_serves_all(policy: str) -> None:
    assert {choose(router(policy, 1, load=(3.0,)), user, user) for user in range(5)} == {0}


def test_costs_of_a_miss_by_hand() -> None:
    """A row of 512 B takes 1.28 us of .4 GB/s; 1,500 tokens and 256 candidates read 32 each: 56,192 rows, 71.9 ms."""
    section = HardwareSection.model_validate({"link_gb_s": 0.4})
    model = resolve_model(ModelSection())
    profile = resolve_hardware(section)
    kv, emb, load = miss_costs_ms(model, profile, section, 1500.0, 0.1, 100.0)
    assert emb == pytest.approx(56_192 * 1.28e-3)
    assert load == 100.0
    # Without the history: a tenth of its 48,000 rows, and its compute.
    compute_ms = profile.prefill_ns(model.flops_per_token * 1500, model.flops_per_pair * 1500**2 / 2) * 1e-6
    assert kv == pytest.approx(48_000 * 0.1 * 1.28e-3 + compute_ms)
    assert compute_ms > 1.0
    # A history of twice the length is worth more than twice: attention.
    assert miss_costs_ms(model, profile, section, 3000.0, 0.1, 100.0)[0] > 2 * kv


def test_weights_are_the_costs_in_proportion() -> None:
    state = new_router(RouterSection(), 2, (30.0, 10.0, 60.0))
    assert state.params[:3] == pytest.approx([0.3, 0.1, 0.6])
    assert state.params[3:].tolist() == [0.05, 0.85]


def test_every_router_of_the_scenario_is_there() -> None:
    names = RouterSection.model_fields["policy"].annotation.__args__  # type: ignore[union-attr]
    assert set(names) == set(ROUTERS)
    assert sorted(ROUTERS.values()) == list(range(len(names)))
    for one, other in itertools.combinations(names, 2):
        assert ROUTERS[one] != ROUTERS[other]
