"""Miss-ratio curves: exact against caches replayed one by one, sampled within their own error."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helm_rl.errors import UserError
from helm_rl.workloads.curves import embedding_curve, kv_curve, miss_ratio_curve
from helm_rl.workloads.generate import generate, zipf_codes
from tests.helm_rl.workloads.loads import scenario

keys_of_a_few = st.lists(st.integers(0, 12), min_size=1, max_size=120)


def lru_misses(keys: list[int], size: int) -> int:
    """Misses of a cache of `size` keys that evicts the one whose last use is longest ago."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for key in keys:
        misses += key not in cache
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > size:
            cache.popitem(last=False)
    return misses


def tokens_found(users: list[int], histories: list[int], new: list[int], size: int) -> int:
    """Tokens found by a cache of `size` tokens that takes from the end of the history whose last use is longest ago."""
    cache: OrderedDict[int, int] = OrderedDict()
    found = 0
    for user, history, appended in zip(users, histories, new, strict=True):
        found += min(cache.get(user, 0), history - appended)
        cache[user] = history
        cache.move_to_end(user)
        excess = sum(cache.values()) - size
        while excess > 0:
            last = next(iter(cache))
            taken = min(excess, cache[last])
            cache[last] -= taken
            excess -= taken
            if cache[last] == 0:
                del cache[last]
    return found


@settings(deadline=None)
@given(keys_of_a_few)
def test_every_key_followed_is_exact(keys: list[int]) -> None:
    sizes = np.arange(1.0, 15.0)
    curve = miss_ratio_curve(np.array(keys), rate=1, sizes=sizes)
    expected = [lru_misses(keys, int(size)) / len(keys) for size in sizes]
    np.testing.assert_allclose(curve.miss_ratio, expected, atol=1e-12)
    assert curve.working_set == len(set(keys))
    assert curve.followed == len(keys)
    assert not curve.standard_error.any()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=60))
def test_histories_lose_their_ends_first(requests: list[tuple[int, int, int]]) -> None:
    users, histories, new = [], [], []
    for user, grown, appended in requests:  # a history does not shrink
        before = max((h for u, h in zip(users, histories, strict=True) if u == user), default=0)
        users.append(user)
        histories.append(before + grown)
        new.append(min(appended, before + grown))
    sizes = np.arange(1.0, 70.0, 4)
    asked = np.array(histories, dtype=float)
    useful = asked - np.array(new)
    curve = miss_ratio_curve(np.array(users), kept=asked, asked=asked, useful=useful, rate=1, sizes=sizes)
    expected = [1 - tokens_found(users, histories, new, int(size)) / sum(histories) for size in sizes]
    np.testing.assert_allclose(curve.miss_ratio, expected, atol=1e-12)


def test_any_int64_is_a_key() -> None:
    keys = np.array([-(2**63), 2**63 - 1, -1, 0, -(2**63), -1])
    assert miss_ratio_curve(keys, rate=1, sizes=np.array([4.0])).miss_ratio == pytest.approx([4 / 6])


def test_a_sample_is_within_its_error() -> None:
    """Ten exponents and seeds, at 5 %: deviations as large as the standard errors say, and no bias."""
    sizes = np.array([300.0, 1000.0, 3000.0, 10_000.0])
    deviations = []
    for seed in range(10):
        keys = zipf_codes(np.random.default_rng(seed), 200_000, 0.6 + 0.06 * seed, 50_000)
        exact = miss_ratio_curve(keys, rate=1, sizes=sizes)
        sampled = miss_ratio_curve(keys ^ (seed << 40), rate=0.05, sizes=sizes)
        assert 0.02 < sampled.followed / keys.size < 0.09
        deviations.append((sampled.miss_ratio - exact.miss_ratio) / sampled.standard_error)
        assert sampled.working_set == pytest.approx(exact.working_set, rel=0.1)
    found = np.array(deviations)
    assert 0.4 < found.std() < 1.6
    assert abs(found.mean(axis=1)).max() < 4
    assert abs(found.mean()) < 1.2


def test_a_miss_ratio_falls_with_the_size_down_to_the_first_uses() -> None:
    keys = zipf_codes(np.random.default_rng(1), 100_000, 1.0, 20_000)
    curve = miss_ratio_curve(keys, rate=1)
    assert (np.diff(curve.miss_ratio) <= 0).all()
    assert curve.miss_ratio[-1] == pytest.approx(np.unique(keys).size / keys.size)
    assert curve.size[0] == 1
    assert curve.size[-1] == np.unique(keys).size


def test_the_curves_of_a_trace() -> None:
    trace = generate(scenario(seconds=60, rate=100, requests_per_visit=4, users=2000, items=5000))
    emb = embedding_curve(trace, sizes=np.array([500.0]))
    assert emb.miss_ratio[0] == lru_misses(trace.item_values.tolist(), 500) / trace.item_values.size
    kv = kv_curve(trace, sizes=np.array([200_000.0]))
    found = tokens_found(trace.user.tolist(), trace.history_tokens.tolist(), trace.new_tokens.tolist(), 200_000)
    assert kv.miss_ratio[0] == pytest.approx(1 - found / trace.history_tokens.sum(), abs=1e-12)


def test_a_few_references_are_all_followed_and_many_are_sampled() -> None:
    assert miss_ratio_curve(np.arange(1000)).rate == 1
    many = miss_ratio_curve(np.arange(1 << 21) % 5000)
    assert many.rate == 0.5
    assert many.standard_error.max() > 0


def test_what_has_no_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="no reference"):
        miss_ratio_curve(np.zeros(0, np.int64))
    for rate in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="rate must be"):
            miss_ratio_curve(np.arange(3), rate=rate)
    trace = generate(scenario(seconds=5, rate=10))
    none = trace.between(0, 10**9)
    empty = type(trace)(
        **{name: getattr(none, name) for name in ("arrival_ns", "user", "tenant", "phase", "history_tokens")},
        new_tokens=np.zeros(len(none), np.int32),
        item_offsets=np.zeros(len(none) + 1, np.int64),
        item_values=np.zeros(0, np.int64),
        meta=none.meta,
    )
    with pytest.raises(UserError, match="names no item"):
        embedding_curve(empty)
