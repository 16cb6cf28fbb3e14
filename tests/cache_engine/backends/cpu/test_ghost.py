"""Ghosts: the hits that other sizes would have had, against exact LRU at those sizes."""

from __future__ import annotations

import numpy as np
import pytest

from cache_engine.backends.cpu import ghost as kernels
from cache_engine.jit import kernel
from tests.cache_engine.models import lru_misses, mix


@kernel
def _follow_all(ghost: kernels.GhostState, keys: np.ndarray) -> None:
    for i in range(keys.size):
        kernels.access(ghost, keys[i], 1.0, 1.0)


@kernel
def _follow_runs(ghost: kernels.GhostState, keys: np.ndarray, weights: np.ndarray) -> None:
    for i in range(keys.size):
        kernels.access(ghost, keys[i], weights[i], weights[i])


def zipf(seed: int, n: int, keys: int, exponent: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weight = np.cumsum(np.arange(1, keys + 1) ** -exponent)
    return rng.permutation(keys)[np.searchsorted(weight / weight[-1], rng.random(n))].astype(np.int64)


def hits_up_to(ghost: kernels.GhostState, size: float) -> float:
    """Sampled hits of a cache of `size` units, an edge of a bucket."""
    buckets = size / ghost.sums[kernels.BUCKET]
    assert buckets == round(buckets)
    return float(ghost.hits[: round(buckets)].sum())


def test_without_sampling_every_size_is_exact() -> None:
    keys = zipf(0, 20_000, 2_000, 1.0)
    ghost = kernels.new_ghost_state(1.0, 4_000, 1_024.0, 1_024)
    _follow_all(ghost, keys)
    for slots in (1, 2, 3, 10, 100, 512, 1_000, 1_024):
        assert hits_up_to(ghost, slots) == keys.size - lru_misses(keys.tolist(), slots)
    assert ghost.sums[kernels.ASKED] == keys.size
    assert ghost.sums[kernels.FOLLOWED] == ghost.counts[kernels.LIVE] == np.unique(keys).size


def test_distances_of_a_short_stream_by_hand() -> None:
    """a b c a a b: reuses that need 3, 1 and 3 slots."""
    ghost = kernels.new_ghost_state(1.0, 16, 8.0, 8)
    _follow_all(ghost, np.array([1, 2, 3, 1, 1, 2]))
    assert ghost.hits.tolist() == [1, 0, 2, 0, 0, 0, 0, 0]
    assert hits_up_to(ghost, 3) == 3


@pytest.mark.parametrize("exponent", [0.8, 1.0])
def test_sampled_hit_ratios_err_by_less_than_03(exponent: float) -> None:
    """A quarter of 40,000 keys, sizes of 500 sampled slots and more, ten samples: no bias, a standard error below .016.

    As in SHARDS-adj, what the sample asks short of its expectation counts as hits of every size: it is the most popular
    keys that a sample has too few or too many of, and they hit anywhere.
    """
    rate, span, n = 0.25, 8_192.0, 200_000
    sizes = [2_048, 4_096, 6_144, 8_192]
    errors = []
    for seed in range(10):
        keys = zipf(seed, n, 40_000, exponent)
        whole = kernels.new_ghost_state(1.0, 65_536, span, 256)
        _follow_all(whole, keys)
        exact = [hits_up_to(whole, slots) / n for slots in sizes]
        if seed == 0:
            assert exact == pytest.approx([1 - lru_misses(keys.tolist(), slots) / n for slots in sizes], abs=1e-9)
        ghost = kernels.new_ghost_state(rate, 16_384, span, 256)
        _follow_all(ghost, keys + seed * 1_000_003)
        short = n * rate - ghost.sums[kernels.ASKED]
        errors.append([(hits_up_to(ghost, slots) + short) / (n * rate) for slots in sizes] - np.array(exact))
    assert np.abs(errors).max() < 0.03
    assert np.sqrt(np.mean(np.square(errors), axis=0)).max() < 0.016
    assert np.abs(np.mean(errors, axis=0)).max() < 0.008


def test_the_sample_is_the_share_of_keys_whose_hash_is_low() -> None:
    keys = np.arange(-20_000, 20_000, dtype=np.int64)
    ghost = kernels.new_ghost_state(0.25, 40_000, 100.0, 10)
    _follow_all(ghost, keys)
    wanted = sum(mix(int(key) & (2**64 - 1)) < 2**62 for key in keys)
    assert ghost.counts[kernels.LIVE] == wanted
    assert wanted == pytest.approx(10_000, abs=450)


def test_past_its_bound_the_ghost_forgets_the_oldest_and_nothing_else() -> None:
    """A loop over 100 keys with room for 64: no distance is seen; a loop over 40 among them: every one is."""
    ghost = kernels.new_ghost_state(1.0, 64, 128.0, 128)
    _follow_all(ghost, np.tile(np.arange(100), 50))
    assert ghost.hits.sum() == 0
    assert ghost.counts[kernels.LIVE] <= 64
    _follow_all(ghost, np.tile(np.arange(1000, 1040), 50))
    assert ghost.hits.sum() == 49 * 40
    assert ghost.hits[39] == 49 * 40
    assert ghost.counts[kernels.LIVE] <= 64
    live = ghost.weight[: ghost.counts[kernels.NEXT]]
    assert live.sum() == ghost.sums[kernels.FOLLOWED] == ghost.counts[kernels.LIVE]


def test_runs_of_several_units_weigh_what_they_hold() -> None:
    """Users of 1 to 4 pages: hits in pages against an exact LRU over users that holds whole or no histories."""
    rng = np.random.default_rng(2)
    users = rng.integers(0, 60, 5_000)
    pages = rng.integers(1, 5, 60).astype(np.float64)
    ghost = kernels.new_ghost_state(1.0, 256, 200.0, 200)
    _follow_runs(ghost, users, pages[users])
    assert ghost.sums[kernels.FOLLOWED] == pages.sum()
    total = pages[users].sum()
    for size in (40, 80, 120):
        order: list[int] = []
        held = 0.0
        for user in users.tolist():
            if user in order:
                younger = order[order.index(user) + 1 :]
                # Pages used since, then his own: as many as fit are a prefix, which hits.
                room = size - pages[younger].sum()
                held += min(max(room, 0.0), pages[user])
                order.remove(user)
            order.append(user)
        assert hits_up_to(ghost, size) / total == pytest.approx(held / total, abs=0.01)
