"""Small runs of each measure: figures that a wrong measure would not give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache_engine import EmbeddingCache, HbmPool
from eval.engine import caches, ghosts, memory, misses, peers, resize, speed
from eval.engine.loads import Load, zipf
from tests.cache_engine.models import lru_misses


def silent(text: str) -> None:
    assert text


needs_libcachesim = pytest.mark.skipif(not peers.installed(peers.LIBCACHESIM), reason="libcachesim is not installed")
needs_cachetools = pytest.mark.skipif(not peers.installed(peers.CACHETOOLS), reason="cachetools is not installed")


@needs_libcachesim
def test_libcachesims_lru_is_exact_and_goes_on_where_it_was() -> None:
    keys = zipf(np.random.default_rng(0), 20_000, 2_000, 1.0) - 1  # -1 and the like are keys as well
    with peers.LibCacheSimTrace(keys) as trace:
        assert peers.libcachesim_miss_ratio("LRU", 100, trace) * keys.size == pytest.approx(
            lru_misses(keys.tolist(), 100)
        )
        late = peers.libcachesim_miss_ratio("LRU", 100, trace, start=5_000)
    both, early = lru_misses(keys.tolist(), 100), lru_misses(keys[:5_000].tolist(), 100)
    assert late * 15_000 == pytest.approx(both - early)


@needs_cachetools
def test_cachetools_serves_what_it_is_given() -> None:
    cache = peers.CacheTools(2)
    assert cache.look_up([1, 2, 1, 3]) > 0
    assert sorted(cache._cache) == [1, 3]


def test_the_compiled_loop_does_what_the_public_call_does() -> None:
    keys = zipf(np.random.default_rng(1), 10_050, 5_000, 1.0)
    pool, emb = caches.make_cache(1_024, policy=caches.DEFAULT_POLICY)
    caches.Compiled(pool, emb, 100).look_up(keys)
    public = caches.make_cache(1_024, policy=caches.DEFAULT_POLICY)[1]
    caches.look_up(public, keys, 100)
    assert emb.stats() == public.stats()
    assert emb.stats().requested == 0


@needs_libcachesim
@needs_cachetools
def test_speed_figures() -> None:
    case = speed.SpeedCase(2_048, 10_000, 1.2, 20.0)
    figures = speed.measure_speed(case, caches.LRU, 3, 10_000, silent)
    rates = {name: figure.value for name, figure in figures.items() if figure.unit == "1/s"}
    assert len(rates) == 4
    assert all(10_000 < rate < 1e9 for rate in rates.values())
    ratio = figures["engine.ratio_vs_cachetools.2048.compiled"]
    assert ratio.goal == 20.0
    expected = rates["engine.lookups_per_s.2048.compiled"] / rates["engine.lookups_per_s.2048.cachetools"]
    assert 0.1 < ratio.value / expected < 10  # the median round and the best ones, on a machine with other work


@needs_libcachesim
def test_batches_that_are_small_miss_as_often_as_exact_lru() -> None:
    figures = misses.measure_batches(2_048, 100_000, silent)
    errors = {name: figure.value for name, figure in figures.items() if ".batch_1_" in name}
    assert len(errors) == len(misses.SHARES)
    worst = figures["engine.miss_ratio_error.2048"]
    assert worst.value == max(abs(errors[f"engine.miss_ratio_error.2048.batch_1_{k}"]) for k in (256, 128, 64, 32))
    assert worst.value < 0.01
    assert abs(errors["engine.miss_ratio_error.2048.batch_1_2"]) > worst.value


@needs_libcachesim
def test_policies_are_compared_on_each_stream_at_sizes_that_fit_it() -> None:
    few = Load("few", lambda n: zipf(np.random.default_rng(2), n, 2_000, 0.8))
    many = Load("many", lambda n: zipf(np.random.default_rng(3), n, 50_000, 0.8))
    figures = misses.measure_policies([few, many], (1_024, 4_096), 60_000, silent)
    sizes = {tuple(name.split(".")[2:4]) for name in figures if name.endswith("libcachesim_lru")}
    assert sizes == {("few", "192"), ("many", "1024"), ("many", "4096"), ("mean", "libcachesim_lru")}
    own, exact = (figures[f"engine.policy.many.4096.{name}"].value for name in ("lru", "libcachesim_lru"))
    assert own == pytest.approx(exact, abs=0.01)
    assert figures["engine.policy.many.1024.lru"].value > own + 0.05


@pytest.mark.parametrize("forgets", [False, True])
def test_resize_figures(forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which the cache that moves takes 6 us, one that stays 2 us, and a step 5 us; the first step 1 s.

    A cache that forgets all it is asked for while it moves loses its hits.
    """
    made: list[tuple[HbmPool, EmbeddingCache]] = []
    now_s = 0.0
    make, look_up, migrate = caches.make_cache, EmbeddingCache.lookup, HbmPool.migrate
    steps = 0

    def making(*args: Any, **kwargs: Any) -> tuple[HbmPool, EmbeddingCache]:
        made.append(make(*args, **kwargs))
        return made[-1]

    def looking_up(emb: EmbeddingCache, *args: Any) -> Any:
        nonlocal now_s
        now_s += 6e-6 if emb is made[0][1] else 2e-6
        if forgets and emb is made[0][1] and made[0][0].backlog:
            emb.invalidate(*args)
        return look_up(emb, *args)

    def migrating(pool: HbmPool, budget: int) -> Any:
        nonlocal now_s, steps
        if made and pool is made[0][0]:
            now_s += 5e-6 if steps >= 2 else 1.0  # what is compiled or loaded first, of a shrink and of a growth
            steps += 1
        return migrate(pool, budget)

    monkeypatch.setattr(resize, "make_cache", making)
    monkeypatch.setattr(EmbeddingCache, "lookup", looking_up)
    monkeypatch.setattr(HbmPool, "migrate", migrating)
    monkeypatch.setattr(resize, "time", SimpleNamespace(thread_time=lambda: now_s))
    figures = {
        name.removeprefix("engine.resize_"): f for name, f in resize.measure_resize(8_192, "lru", 1, silent).items()
    }
    assert steps == 2 + 2 * resize.MOVED_PAGES
    expected = {"p99_us": 6.0, "p99_us.with_step": 11.0, "p99_us.still": 2.0}
    expected |= {f"{p}_ratio{end}": value for p in ("p50", "p99") for end, value in (("", 3.0), (".with_step", 5.5))}
    assert {name: figures[name].value for name in expected} == pytest.approx(expected)
    drops = {kind: figures[f"hit_drop_10k.{kind}"].value for kind in ("shrink", "growth")}
    assert all(drop > 0.3 if forgets else abs(drop) < 0.02 for drop in drops.values())
    assert figures["hit_drop_10k"].value == max(drops.values())


def test_ghosts_are_held_against_caches_of_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts, "ROWS_PER_PAGE", 32)
    load = Load("zipf", lambda n: zipf(np.random.default_rng(4), n, 60_000, 0.9))
    figures = ghosts.measure_gains([load], 500_000, 2, silent)
    worst = 0.0
    for policy in caches.POLICIES:
        for pages in ghosts.STEPS:
            gain = figures[f"engine.ghost_gain.zipf.{pages}.{policy}"].value
            error = figures[f"engine.ghost_gain_error.zipf.{pages}.{policy}"].value
            assert gain > 0
            assert abs(error) < 0.5
            worst = max(worst, abs(error))
        assert figures[f"engine.ghost_within_two_errors.{policy}"].value >= 0.5  # of six; a good one has .95 of many
    assert figures["engine.ghost_gain_error"].value >= worst


def test_the_cost_of_a_ghost_is_a_share_of_a_lookups_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that a lookup takes 4 ticks of, 5 with a ghost, and more from round to round."""
    now_s, calls = 0.0, 0

    def looking_up(emb: EmbeddingCache, keys: np.ndarray, batch: int) -> None:
        nonlocal now_s, calls
        now_s += (4 if emb.ghost is None else 5) * keys.size * (1 + calls // 2)
        calls += 1

    monkeypatch.setattr(ghosts, "ROWS_PER_PAGE", 32)
    monkeypatch.setattr(ghosts, "look_up", looking_up)
    monkeypatch.setattr(ghosts, "time", SimpleNamespace(thread_time=lambda: now_s))
    figures = ghosts.measure_cost(np.arange(1_000), "lru", 10, silent)
    assert calls == 2 + 20
    assert figures["engine.ghost_cost"].value == pytest.approx(0.25)
    assert figures["engine.ghost_cost.standard_error"].value == pytest.approx(0, abs=1e-9)


def test_a_chase_is_slower_than_a_gather_of_as_many_bytes() -> None:
    point = memory.measure_memory(1 << 18, "lru", 3, silent)
    assert point.metadata_bytes > 1 << 22
    assert point.chase > 2 * point.gather
    fit, too_large = memory.fitting_slots([12, 40])
    assert (fit, too_large) == ([4_096], [1 << 40])
