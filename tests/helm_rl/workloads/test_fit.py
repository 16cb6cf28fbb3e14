"""`helm-rl trace fit`: a trace of the fitted scenario has what the trace had."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from helm_rl import cli
from helm_rl.errors import UserError
from helm_rl.scenario import Scenario, load_scenario
from helm_rl.workloads.fit import Fit, catalogue, distances, fit, label, measure
from helm_rl.workloads.fitted import toml
from helm_rl.workloads.generate import generate, zipf_codes
from helm_rl.workloads.inspect import clock_step_s, summarise
from helm_rl.workloads.trace import Trace
from tests.helm_rl.workloads.loads import scenario
from tests.helm_rl.workloads.test_inspect import trace_of

VISITORS = scenario(
    seconds=1200,
    rate=20,
    requests_per_visit=4,
    think_s=40,
    think_sigma=1,
    users=10**10,
    zipf_items=0.9,
    items=5000,
    history_mean=800,
    history_sigma=0.7,
    rate_cv=0.8,
    rate_cv_s=30,
)


def close(asked: Scenario, tolerances: dict[str, float], kind: str) -> None:
    found = fit(generate(asked, 5), "again")
    assert found.kind == kind
    off = {name: difference for name, (_, _, difference) in distances(found).items()}
    for name, tolerance in tolerances.items():
        assert abs(off[name]) < tolerance, (name, off[name])


def test_a_load_of_visitors_is_found_again() -> None:
    """Three fitted traces beside one: what is left is the scatter of one trace of 24,000 requests."""
    tolerances = {
        "rate_per_s": 0.06,
        "returning": 0.03,
        "hot_user_ratio": 0.06,
        "pause_p50_s": 0.08,
        "pause_p90_s": 0.1,
        "zipf_exponent": 0.03,
        "items": 0.05,
        "top_items_share": 0.05,
        "history_mean": 0.06,
        "history_p50": 0.08,
        "history_log_sd": 0.06,
        "new_tokens_mean": 0.05,
        "dispersion_1_s": 0.3,
        "dispersion_10_s": 0.3,
        "users": 0.08,
    }
    close(VISITORS, tolerances, "visitors")


def test_a_load_of_regulars_is_found_again() -> None:
    asked = scenario(seconds=900, rate=30, requests_per_visit=1, users=600, zipf_users=0.6, history_mean=3000)
    tolerances = {"rate_per_s": 0.03, "returning": 0.02, "users": 0.03, "hot_user_ratio": 0.06, "pause_p50_s": 0.12}
    close(asked, tolerances, "regulars")


def test_a_load_of_users_who_come_back_for_visits_is_found_again() -> None:
    asked = scenario(seconds=1500, rate=20, requests_per_visit=3, think_s=6, users=4000)
    tolerances = {
        "returning": 0.02,
        "users": 0.04,
        "hot_user_ratio": 0.06,
        "short_pause_p50_s": 0.1,
        "pause_p90_s": 0.15,
    }
    close(asked, tolerances, "returners")


def test_what_a_trace_lacks_is_said_and_left_at_its_default() -> None:
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(0.2, 2000)).tolist()
    trace = trace_of(times, list(range(2000)), [[]] * 2000, rng.integers(100, 3000, 2000).tolist())
    found = fit(trace, "arrivals")
    assert found.kind == "strangers"
    assert found.measured.items is None
    assert found.measured.pause_p50_s is None
    assert found.scenario.load.zipf_items == 1.05
    assert "items" not in distances(found)
    said = " ".join(found.notes)
    assert "names no item" in said
    assert "no user comes twice" in said
    assert found.scenario.load.rate == pytest.approx(5, rel=0.1)
    assert found.generated.history_mean == pytest.approx(found.measured.history_mean, rel=0.05)


def test_the_steps_of_a_clock_are_no_bursts() -> None:
    trace = generate(scenario(seconds=900, warm_s=100, rate=40, requests_per_visit=3, think_s=5, users=10**10))
    assert clock_step_s(trace) == 0
    floor = trace.arrival_ns // 10**9 * 10**9
    coarse = replace(trace, arrival_ns=floor)
    assert clock_step_s(coarse) == 1
    exact, told = measure(trace), measure(coarse, 1.0)
    assert "0.1" not in told.dispersion
    assert told.dispersion["1"] == pytest.approx(exact.dispersion["1"])
    found = fit(coarse, "coarse")
    off = {name: difference for name, (_, _, difference) in distances(found).items()}
    assert abs(off["pause_p50_s"]) < 0.35  # 3 s or 4
    assert abs(off["returning"]) < 0.03
    assert abs(off["dispersion_1_s"]) < 0.15


@pytest.mark.parametrize(("exponent", "items"), [(0.5, 3000), (0.9, 50_000), (1.05, 10**6), (1.5, 1000)])
def test_the_number_of_items_follows_from_how_many_were_named(exponent: float, items: int) -> None:
    codes = zipf_codes(np.random.default_rng(2), 200_000, exponent, items)
    distinct = np.unique(codes).size
    again = zipf_codes(np.random.default_rng(3), 200_000, exponent, catalogue(exponent, 200_000, distinct))
    assert np.unique(again).size == pytest.approx(distinct, rel=0.02)


@cache
def fitted(path: Path) -> Fit:
    return fit(Trace.load(path), "fitted")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fit") / "some trace.parquet"
    generate(scenario(seconds=200, rate=15, requests_per_visit=3, users=10**10)).save(path)
    return path


def test_the_file_is_the_scenario(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "again.toml"
    assert cli.main(["trace", "fit", str(saved), "--output", str(output), "--slo-ms", "250"]) == 0
    said = capsys.readouterr().out
    assert "hot-user ratio" in said
    assert "users come as" in said
    text = output.read_text()
    assert text.startswith("# Fitted to some trace.parquet by")
    written = load_scenario(output)
    assert (written.name, written.slo_ms) == ("again", 250)
    expected = fit(Trace.load(saved), "again", 250).scenario
    for name in set(type(expected.load).model_fields) - {"rate_end", "phase", "day"}:
        assert getattr(written.load, name) == pytest.approx(getattr(expected.load, name), rel=1e-5), name
    assert written.load.rate == pytest.approx(15, rel=0.1)
    assert cli.main(["trace", "generate", str(output), "--output", str(tmp_path / "t.parquet")]) == 0


def test_the_file_is_the_scenario_that_was_compared_to_the_last_digit(saved: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(95_500, 98_766, 400)
    lengths[0] = 98_765  # .95 of it, to 6 digits, is more than .95 of it
    times = np.cumsum(rng.exponential(0.2, 400)).tolist()
    long = fit(trace_of(times, list(range(400)), [[]] * 400, lengths.tolist()), "long")
    assert long.scenario.load.history_mean > 93_000
    for found in (fitted(saved), long):
        (tmp_path / "x.toml").write_text(toml(found, "x.parquet"))
        assert load_scenario(tmp_path / "x.toml") == found.scenario


def test_logs_of_many_years_are_fitted(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    times = np.sort(rng.uniform(0, 11 * 365 * 86_400, 400)).tolist()
    found = fit(trace_of(times, rng.integers(0, 60, 400).tolist(), [[1]] * 400, [5] * 400), "years")
    (tmp_path / "x.toml").write_text(toml(found, "years.parquet"))
    generated = generate(load_scenario(tmp_path / "x.toml"))
    assert len(generated) == pytest.approx(400, rel=0.3)
    assert generated.end_ns - generated.meta.phases[0].start_ns == pytest.approx(times[-1] * 1e9, rel=0.01)
    assert found.measured.history_log_sd == 0.0


def test_a_rate_is_not_varied_faster_than_a_long_trace_can_be_generated() -> None:
    """Most requests in a millisecond of 11 days: a rate that holds for a moment would change 40 million times."""
    rng = np.random.default_rng(5)
    times = np.sort(np.concatenate([rng.random(200) * 1e-3, rng.random(50) * 1e6])).tolist()
    found = fit(trace_of(times, list(range(250)), [[1]] * 250, [5] * 250), "crowd")
    assert found.scenario.load.rate_cv > 0
    assert found.scenario.seconds / found.scenario.load.rate_cv_s < 100_001
    assert any(note.startswith("dispersion in windows of 0.1 s (-") for note in found.notes)


def test_the_number_of_items_is_fitted_where_no_law_is() -> None:
    rng = np.random.default_rng(6)
    times = np.cumsum(rng.exponential(1, 400)).tolist()
    few = fit(trace_of(times, list(range(400)), [[k % 5] for k in range(400)], [5] * 400), "few")
    assert few.measured.zipf_exponent is None
    assert few.generated.items == pytest.approx(5, abs=0.1)


def test_warm_up_alone_is_no_load() -> None:
    trace = trace_of(list(range(250)), list(range(250)), [[1]] * 250, [5] * 250)
    late = replace(trace, meta=trace.meta.model_copy(update={"measure_from_ns": trace.end_ns}))
    with pytest.raises(UserError, match="is warm-up alone"):
        fit(late, "late")


def test_names_that_toml_must_escape(saved: Path, tmp_path: Path) -> None:
    found = fit(Trace.load(saved), 'a "quoted" \\ name\x07')
    (tmp_path / "x.toml").write_text(toml(found, "a\nname = 3\x00.parquet"))
    assert load_scenario(tmp_path / "x.toml").name == 'a "quoted" \\ name\x07'


@pytest.mark.parametrize("name", ["flames \U0001f525", "\x7f\x1f", "d\xe9j\xe0", "a\tb\\u0041"])
def test_any_name_is_read_again(saved: Path, tmp_path: Path, name: str) -> None:
    found = replace(fitted(saved), scenario=scenario().model_copy(update={"name": name}))
    (tmp_path / "x.toml").write_text(toml(found, name + ".parquet"), encoding="utf-8")
    assert load_scenario(tmp_path / "x.toml").name == name


@pytest.mark.parametrize(
    ("times", "users", "said"),
    [
        (range(200), [0] * 200, "has 200 requests, all by one user; a fit needs at least 2 users"),
        ([0] * 200, list(range(200)), "has 200 requests in 1e-09 s; a scenario's rate is at most"),
    ],
)
def test_a_trace_that_cannot_be_fitted_is_told_what_is_wrong_with_it(
    times: list[float], users: list[int], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        fit(trace_of(list(times), users, [[1]] * 200, [5] * 200), "x")


@pytest.mark.parametrize("users", [2, 5])
def test_few_users_are_fitted_or_refused_in_words(users: int) -> None:
    trace = trace_of([float(i) for i in range(200)], [i % users for i in range(200)], [[1]] * 200, [5] * 200)
    try:
        found = fit(trace, "x")
    except UserError as error:
        found = None
        said = str(error)
    assert found.generated.returning > 0.9 if found else f"by {users} users, cannot be fitted" in said


def test_every_statistic_that_is_off_is_noted_with_its_cause() -> None:
    """Blocks, of which a generated trace names other numbers; more new tokens than are generated."""
    rng = np.random.default_rng(4)
    times = np.cumsum(rng.exponential(0.2, 2000)).tolist()
    items = np.minimum(rng.zipf(1.6, (2000, 3)), 4000).tolist()
    trace = trace_of(times, list(range(2000)), items, rng.integers(3000, 90_000, 2000).tolist())
    blocks = trace.meta.model_copy(update={"content": "blocks", "block_tokens": 1000})
    trace = replace(trace, meta=blocks, new_tokens=np.full(2000, 3000, np.int32))
    found = fit(trace, "blocks")
    off = {name: difference for name, (_, _, difference) in distances(found).items() if abs(difference) > 0.1}
    assert {"items", "new_tokens_mean"} <= set(off)
    for name, difference in off.items():
        (note,) = [note for note in found.notes if f"{label(name, found.measured)} ({difference:+.0%})" in note]
        assert ": " in note
        assert name not in ("items", "top_items_share") or "blocks of 1000 tokens" in note
    assert sum(note.count("%)") for note in found.notes) == len(off)
    assert f"# Not matched: {found.notes[-1]}." in toml(found, "x.parquet").splitlines()


def test_histories_that_are_no_lognormal_are_fitted_by_percentiles(tmp_path: Path) -> None:
    """Three lengths: of a lognormal, half would lie between them."""
    rng = np.random.default_rng(4)
    times = np.cumsum(rng.exponential(0.2, 3000)).tolist()
    lengths = rng.choice([100, 700, 6000], 3000, p=[0.45, 0.15, 0.4])
    found = fit(trace_of(times, list(range(3000)), [[]] * 3000, lengths.tolist()), "lengths")
    off = {name: difference for name, (_, _, difference) in distances(found).items() if name.startswith("history")}
    assert max(map(abs, off.values())) < 0.05
    assert len(found.generated.history_percentiles) == len(found.measured.history_percentiles) == 101
    assert found.generated.history_percentiles[50] == found.generated.history_p50
    generated = generate(found.scenario, 9)
    for low, high, share in ((90, 110, 0.45), (650, 750, 0.15), (5500, 6000, 0.4)):
        within = (generated.history_tokens >= low) & (generated.history_tokens <= high)
        assert within.mean() == pytest.approx(share, abs=0.04)
    (tmp_path / "x.toml").write_text(toml(found, "x.parquet"))
    assert load_scenario(tmp_path / "x.toml").load.history_quantiles == found.scenario.load.history_quantiles
    assert fit(generate(VISITORS, 5), "again").scenario.load.history_quantiles == ()


def test_the_same_words_mean_the_same_in_inspect_and_fit(saved: Path) -> None:
    trace = Trace.load(saved)
    found, said = measure(trace), summarise(trace)
    assert found.hot_user_ratio == said.hot_user_ratio
    assert (found.pause_p50_s, found.pause_p90_s) == (said.return_gap_s.p50, said.return_gap_s.p90)
    assert (found.history_p50, found.history_p90) == (said.history_tokens.p50, said.history_tokens.p90)
    assert (found.rate_per_s, found.returning, found.users) == (said.rate_mean, said.returning, said.users)
    assert found.top_items_share == said.top_items_share
    assert found.new_tokens_mean != said.new_tokens.mean  # that is of all requests
    assert label("new_tokens_mean", found) == "new tokens per request of a user seen before"


def test_what_cannot_be_fitted_is_refused(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="has 3 requests; a fit needs at least 200"):
        fit(trace_of([0, 1, 2], [0, 1, 2], [[1], [1], [1]], [1, 1, 1]), "x")
    for arguments, message in (
        (["--output", str(tmp_path / "no" / "x.toml")], "does not exist"),
        (["--output", str(saved), "--overwrite"], "is what is read"),
        (["--output", str(tmp_path / "x.toml"), "--slo-ms", "0"], "slo-ms = 0 must be"),
        (["--output", str(tmp_path / "x.toml"), "--name", ""], "must have 1 to 200 characters"),
    ):
        assert cli.main(["trace", "fit", str(saved), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.toml").exists()
