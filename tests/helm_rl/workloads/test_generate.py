"""The generator: what a scenario asks for is what its traces have."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest

from helm_rl.errors import UserError
from helm_rl.scenario import Tenant, load_scenario, scenario_hash, scenario_names
from helm_rl.workloads.generate import generate, zipf_codes
from helm_rl.workloads.trace import Trace
from tests.helm_rl.workloads.loads import flash_sale, scenario


def chi_square(seen: np.ndarray, expected: np.ndarray | float) -> float:
    """Pearson's statistic in standard deviations above its mean; beyond 4.5 the law is another."""
    free = seen.size - 1
    return float((((seen - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free))


def exponential_distance(values: np.ndarray, mean: float) -> float:
    """Kolmogorov and Smirnov's sqrt(n) * D against the exponential law; above 2.2 one time in 8,000."""
    law = 1 - np.exp(-np.sort(values) / mean)
    steps = np.arange(values.size + 1) / values.size
    return float(np.sqrt(values.size) * max((steps[1:] - law).max(), (law - steps[:-1]).max()))


def counts(trace: Trace, phase: int, width_s: float) -> np.ndarray:
    """Requests of a phase in consecutive windows over its whole span."""
    meta = trace.meta.phases[phase]
    edges = np.arange(meta.start_ns, meta.end_ns + 1, round(width_s * 1e9))
    return np.histogram(trace.arrival_ns[trace.phase == phase], edges)[0]


def columns_digest(trace: Trace) -> str:
    """Return the sha256 (hex) over the columns of a trace, its meta data left out."""
    digest = hashlib.sha256()
    for name in (
        "arrival_ns",
        "user",
        "tenant",
        "phase",
        "history_tokens",
        "new_tokens",
        "item_offsets",
        "item_values",
    ):
        digest.update(np.ascontiguousarray(getattr(trace, name)).data)
    return digest.hexdigest()


@pytest.fixture(scope="module")
def burst() -> Trace:
    return generate(flash_sale())


def test_a_seed_gives_the_same_trace_and_another_seed_another(burst: Trace) -> None:
    burst.validate()
    assert generate(flash_sale()).hash() == burst.hash()
    assert generate(flash_sale(), seed=1).hash() == burst.hash()
    other = generate(flash_sale(), seed=2)
    assert other.meta.seed == 2
    assert not np.array_equal(other.arrival_ns[:100], burst.arrival_ns[:100])
    assert not np.array_equal(other.user[:100], burst.user[:100])


def test_the_base_load_does_not_change_with_the_phases_beside_it(burst: Trace) -> None:
    steady = generate(scenario())
    base = burst.phase == 0
    assert np.array_equal(burst.arrival_ns[base], steady.arrival_ns)
    assert np.array_equal(burst.user[base], steady.user)
    assert np.array_equal(burst.new_tokens[base], steady.new_tokens)


def test_the_meta_data_say_what_was_drawn(burst: Trace) -> None:
    meta = burst.meta
    assert (meta.name, meta.source, meta.content) == ("test", "generator", "law")
    assert meta.scenario_hash == scenario_hash(flash_sale())
    assert (meta.users, meta.items, meta.law_items, meta.zipf_items) == (400_000, 300_000_000, 300_000_000, 1.05)
    assert [phase.label for phase in meta.phases] == ["base", "burst"]
    assert (meta.phases[0].start_ns, meta.phases[0].end_ns) == (-60_000_000_000, 600_000_000_000)
    assert (meta.phases[1].start_ns, meta.phases[1].end_ns) == (120_000_000_000, 180_000_000_000)
    assert meta.phases[1].factor == pytest.approx((140 + 420) / 140)
    assert meta.measure_from_ns == 0


def test_rates_are_as_asked_within_five_percent() -> None:
    traces = [generate(flash_sale(), seed) for seed in range(10)]
    base = np.mean([(trace.phase == 0).sum() for trace in traces]) / 660
    phase = np.mean([(trace.phase == 1).sum() for trace in traces]) / 60
    assert base == pytest.approx(140, rel=0.01)
    assert phase == pytest.approx(420, rel=0.05)


@pytest.mark.parametrize("per_visit", [1.0, 15.0])
def test_a_constant_load_is_stationary_from_its_first_instant(per_visit: float) -> None:
    """Without the visits already under way a load of 15 requests per visit would start at a 15th of its rate."""
    load = scenario(seconds=200, warm_s=0, rate=300, requests_per_visit=per_visit, think_s=4)
    windows = sum(counts(generate(load, seed), 0, 10) for seed in range(20))
    # A visit's requests come together, so counts vary more than Poisson's, by up to 2 * per_visit.
    error = np.sqrt(2 * per_visit / (20 * 10 * 300))
    assert np.abs(windows / (20 * 10 * 300) - 1).max() < 4 * error


def test_a_drift_follows_its_line() -> None:
    """The visits of a drifting load must start ahead of it: requests come up to a minute after a visit begins."""
    asked = scenario(
        warm_s=60,
        rate=200,
        rate_end=50,
        requests_per_visit=4,
        phase=[{"start_s": 0, "seconds": 600, "rate": 0, "rate_end": 420, "requests_per_visit": 15}],
    )
    traces = [generate(asked, seed) for seed in range(8)]
    base = np.mean([counts(trace, 0, 60) for trace in traces], axis=0) / 60
    hot = np.mean([counts(trace, 1, 60) for trace in traces], axis=0) / 60
    middle = np.arange(30, 600, 60)
    # Four standard deviations: those of 8 draws of 60 s, whose requests come in visits.
    for found, expected, per_visit in ((base[1:], 200 - 150 * middle / 600, 4), (hot, 420 * middle / 600, 15)):
        assert (np.abs(found - expected) < 4 * np.sqrt(2 * per_visit * expected / 60 / 8)).all()
        assert found.mean() == pytest.approx(expected.mean(), rel=0.03)
    assert base[0] == pytest.approx(200, rel=0.05)
    assert traces[0].meta.phases[0].drifts
    assert traces[0].meta.phases[1].rate_end == 420


def test_a_ramp_comes_up_and_goes_down_linearly() -> None:
    asked = scenario(
        rate=5,
        phase=[{"start_s": 100, "seconds": 300, "ramp_s": 100, "rate": 300, "requests_per_visit": 2, "think_s": 2}],
    )
    traces = [generate(asked, seed) for seed in range(4)]
    found = np.mean([counts(trace, 1, 20) for trace in traces], axis=0) / 20
    middle = np.arange(10, 300, 20)
    expected = 300 * np.minimum(np.minimum(middle, 300 - middle) / 100, 1)
    assert (np.abs(found - expected) < 4 * np.sqrt(4 * expected / 20 / 4)).all()
    assert traces[0].meta.phases[1].ramp_s == 100
    assert traces[0].meta.phases[1].factor == pytest.approx((5 + 200) / 5, rel=1e-3)


def test_a_load_that_ends_faster_than_its_visits_starts_none() -> None:
    """It may exceed the rate asked by the visits under way; it must never fall below, nor draw a negative rate."""
    asked = scenario(rate=400, rate_end=0, requests_per_visit=30, think_s=10)
    found = np.mean([counts(generate(asked, seed), 0, 60) for seed in range(6)], axis=0)[1:] / 60
    expected = 400 - 400 * np.arange(30, 600, 60) / 600
    np.testing.assert_allclose(found[:5], expected[:5], rtol=0.1)
    assert found[-1] > expected[-1]
    assert found[-1] < found[-2] < found[-3]


@pytest.mark.parametrize("name", scenario_names())
def test_every_shipped_scenario_makes_a_sound_trace(name: str) -> None:
    trace = generate(load_scenario(name))
    trace.validate()
    for index, phase in enumerate(trace.meta.phases):
        seconds = (phase.end_ns - phase.start_ns) / 1e9
        assert phase.rate is not None
        most = max(phase.rate, phase.rate_end or 0)
        assert 0.3 * most < (trace.phase == index).sum() / seconds < 1.1 * most


def test_a_phase_stays_in_its_window_and_a_load_in_its_span(burst: Trace) -> None:
    for index, phase in enumerate(burst.meta.phases):
        arrival = burst.arrival_ns[burst.phase == index]
        assert arrival.min() >= phase.start_ns
        assert arrival.max() < phase.end_ns
        assert arrival.min() < phase.start_ns + 200_000_000
        assert arrival.max() > phase.end_ns - 200_000_000


def visits(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Requests and gaps (s) of users, each of whom comes for one visit at most."""
    order = np.argsort(trace.user, kind="stable")
    user, arrival = trace.user[order], trace.arrival_ns[order]
    same = user[1:] == user[:-1]
    return np.unique(user, return_counts=True)[1], np.diff(arrival)[same] / 1e9


def test_requests_per_visit_and_pauses() -> None:
    asked = scenario(seconds=4000, warm_s=0, rate=25, requests_per_visit=5, think_s=2, users=10**10, history_sigma=0)
    trace = generate(asked)
    per_user, pauses = visits(trace)
    assert per_user.mean() == pytest.approx(5, rel=0.05)
    # Geometric: P(1) = 1/5, and each further request follows with 4/5.
    assert (per_user == 1).mean() == pytest.approx(0.2, abs=0.02)
    assert (per_user > 10).mean() == pytest.approx(0.8**10, abs=0.02)
    assert pauses.mean() == pytest.approx(2, rel=0.05)
    assert exponential_distance(pauses[:2000], 2) < 2.2


def test_arrivals_of_single_requests_are_poisson() -> None:
    trace = generate(scenario(seconds=1000, warm_s=0, rate=50, requests_per_visit=1))
    gaps = np.diff(trace.arrival_ns)[:20_000] / 1e9
    assert exponential_distance(gaps, 1 / 50) < 2.2


def test_users_are_drawn_evenly() -> None:
    trace = generate(scenario(seconds=1000, warm_s=0, rate=100, requests_per_visit=1, users=50))
    seen = np.bincount(trace.user, minlength=50)
    assert abs(chi_square(seen, seen.mean())) < 4.5


def test_histories_grow_by_what_is_appended_up_to_the_limit() -> None:
    asked = scenario(rate=50, users=300, history_mean=500, history_max=1000, new_tokens_mean=8)
    trace = generate(asked)
    assert trace.history_tokens.max() == 1000
    assert trace.new_tokens.mean() == pytest.approx(8, rel=0.03)
    for user in range(20):
        mine = trace.user == user
        history, new = trace.history_tokens[mine].astype(int), trace.new_tokens[mine].astype(int)
        expected = history[0] - new[0] + np.cumsum(new)
        assert np.array_equal(history, np.minimum(expected, 1000)) or history[0] == 1000
    again = generate(asked, seed=9)
    first = np.unique(trace.user, return_index=True)[1]
    first_again = np.unique(again.user, return_index=True)[1]
    before = trace.history_tokens[first] - trace.new_tokens[first]
    before_again = again.history_tokens[first_again] - again.new_tokens[first_again]
    free = (trace.history_tokens[first] < 1000) & (again.history_tokens[first_again] < 1000)
    assert free.sum() > 200
    assert np.array_equal(before[free], before_again[free])


@pytest.mark.parametrize(("mean", "sigma", "limit"), [(1500, 1.0, 8192), (1500, 1.0, 3000), (100, 2.0, 4096)])
def test_the_mean_history_is_the_one_asked_the_limit_included(mean: float, sigma: float, limit: int) -> None:
    trace = generate(
        scenario(
            rate=100, requests_per_visit=1, users=10**10, history_mean=mean, history_sigma=sigma, history_max=limit
        )
    )
    before = trace.history_tokens - trace.new_tokens
    assert before.mean() == pytest.approx(mean, rel=0.04)
    middle = before[(before > 5) & (before < limit // 2)]
    assert middle.size > 1000


def test_histories_are_lognormal() -> None:
    trace = generate(
        scenario(
            rate=100, requests_per_visit=1, users=10**10, history_mean=3000, history_sigma=0.5, history_max=1 << 24
        )
    )
    logarithm = np.log(trace.history_tokens - trace.new_tokens)
    assert logarithm.std() == pytest.approx(0.5, rel=0.02)
    assert logarithm.mean() == pytest.approx(np.log(3000) - 0.125, abs=0.01)
    assert abs((((logarithm - logarithm.mean()) / logarithm.std()) ** 3).mean()) < 0.05


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 2.5])
def test_item_codes_follow_the_law_exactly(exponent: float) -> None:
    codes = zipf_codes(np.random.default_rng(3), 200_000, exponent, 40)
    weights = np.arange(1, 41.0) ** -exponent
    expected = weights / weights.sum() * codes.size
    seen = np.bincount(codes, minlength=40)
    assert seen.size == 40
    assert abs(chi_square(seen, expected)) < 4.5


def test_the_exponent_can_be_fitted_from_the_items(burst: Trace) -> None:
    """Over codes below 1e5 the log-likelihood has its maximum at the exponent asked."""
    base = np.repeat(burst.phase == 0, np.diff(burst.item_offsets))
    codes = burst.item_values[base]
    head = codes[codes < 100_000]
    rank = np.arange(1, 100_001.0)
    exponents = np.arange(0.95, 1.16, 0.01)
    likelihood = [-s * np.log(head + 1.0).mean() - np.log((rank**-s).sum()) for s in exponents]
    assert exponents[int(np.argmax(likelihood))] == pytest.approx(1.05, abs=0.011)


@pytest.mark.parametrize(("exponent", "items"), [(1.05, 10**12), (5.0, 10**12), (0.2, 10**12), (1.0, 1), (9.0, 2)])
def test_extreme_laws_stay_in_range(exponent: float, items: int) -> None:
    codes = zipf_codes(np.random.default_rng(0), 10_000, exponent, items)
    assert codes.min() >= 0
    assert codes.max() < items


def test_the_hot_set_takes_its_share_of_its_phase_alone(burst: Trace) -> None:
    phase = burst.meta.phases[1]
    of_phase = np.repeat(burst.phase == 1, np.diff(burst.item_offsets))
    hot = (burst.item_values >= phase.hot_first) & (burst.item_values < phase.hot_first + phase.hot_items)
    assert hot[of_phase].mean() == pytest.approx(0.6, abs=0.01)
    assert hot[~of_phase].mean() < 1e-4
    codes = burst.item_values[of_phase & hot] - phase.hot_first
    assert abs(chi_square(np.bincount(codes, minlength=phase.hot_items), codes.size / phase.hot_items)) < 4.5


def test_hot_sets_of_phases_are_disjoint() -> None:
    phase = {"seconds": 10, "rate": 10, "requests_per_visit": 1, "hot_fraction": 0.5, "hot_items": 30}
    trace = generate(scenario(items=100, phase=[phase | {"start_s": 10}, phase | {"start_s": 15}]))
    first, second = trace.meta.phases[1:]
    assert first.hot_first + 30 <= second.hot_first
    assert second.hot_first + 30 <= 100
    assert (first.label, second.label) == ("phase 1", "phase 2")
    trace.validate()


def test_a_burst_trace_takes_well_under_a_second() -> None:
    generate(scenario())
    best = np.inf
    for _ in range(3):
        begin = time.perf_counter()
        trace = generate(flash_sale())
        best = min(best, time.perf_counter() - begin)
    assert len(trace) > 100_000
    assert best < 1.0


def test_what_cannot_be_generated_is_refused() -> None:
    with pytest.raises(UserError, match="lower seconds or the rates"):
        generate(scenario(seconds=1e7, rate=1e4))
    with pytest.raises(UserError, match=r"requests_per_visit = 100 with think_s = 86400 .* 5\.1e\+08 requests would"):
        generate(scenario(seconds=30, rate=60, requests_per_visit=100, think_s=86_400))
    with pytest.raises(UserError, match="has no request"):
        generate(scenario(seconds=0.001, warm_s=0, rate=1e-6))
    with pytest.raises(UserError, match="seed = -1"):
        generate(scenario(), seed=-1)


def test_tenants_have_their_shares_of_the_users(burst: Trace) -> None:
    """Half, three eighths and an eighth; a user stays with his own, and nothing else about the trace changes."""
    tenants = (Tenant(name="a", share=4.0), Tenant(name="b", share=3.0), Tenant(name="c"))
    shared = generate(flash_sale().model_copy(update={"tenant": tenants}))
    users, first = np.unique(shared.user, return_index=True)
    counts = np.bincount(shared.tenant[first], minlength=3)
    assert chi_square(counts, users.size * np.array([0.5, 0.375, 0.125])) < 4.5
    of = dict(zip(users.tolist(), shared.tenant[first].tolist(), strict=True))
    assert [of[user] for user in shared.user.tolist()] == shared.tenant.tolist()
    assert shared.tenant.dtype == np.int32
    for name in ("arrival_ns", "user", "history_tokens", "item_values"):
        assert np.array_equal(getattr(shared, name), getattr(burst, name))
    # Whose history is long does not depend on whose tenant he is.
    means = [shared.history_tokens[shared.tenant == tenant].mean() for tenant in range(3)]
    assert max(means) / min(means) < 1.05
    one = generate(flash_sale().model_copy(update={"tenant": tenants[:1]}))
    assert not one.tenant.any()
    assert not burst.tenant.any()


# What the shipped scenarios drew when the map and their loads were measured on it: another draw needs new measurements.
DRAWN = {
    ("burst", 1): "c0b1bced487ed8dcf57eb8b3a956e87baeef0d7b06ceaf7f9a0c948d22015027",
    ("burst", 7): "39a15b4f037d274a6326c985c4221dd0105ffd999ea9bcb627648a5968f67123",
    ("steady", 1): "f1c600b41cdc51ed21517f0f1746e3e0cb7aaca0b1fcc0891e2bc61e944a02cb",
    ("steady", 7): "6601b0736cd302ba6bd674d2f6ea24e4ab5f917832302eada723403326c671a4",
    ("trend", 1): "4eeeebeff71d433051894c41d16c59e2e09daaa18da7b07467c46145899a9d9e",
    ("trend", 7): "8031c48240e81709a6e2badf0ea1ecec0ab47e07f9adf9c458a029d90b87cf58",
}
SCENARIO_HASHES = {
    "burst": "fabf62c87985972251a470ae46d09ac18a5330e8679ebe8539ad370bb476ed9e",
    "steady": "a862bd1611a9a82168fd83e6f2c8cdb90c57ae823d8b7bee9607057d1bc39b4e",
    "trend": "59cf59b41490a20902d4764629cb6eb93e839610e58fc9fac5ac285767755e2a",
}


@pytest.mark.parametrize(("name", "seed"), DRAWN)
def test_shipped_scenarios_draw_what_was_measured(name: str, seed: int) -> None:
    assert columns_digest(generate(load_scenario(name), seed)) == DRAWN[name, seed]


@pytest.mark.parametrize("name", SCENARIO_HASHES)
def test_a_new_field_does_not_change_the_hash_of_a_scenario_without_it(name: str) -> None:
    assert scenario_hash(load_scenario(name)) == SCENARIO_HASHES[name]
