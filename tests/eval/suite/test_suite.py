from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from eval.comparison import DEPLOYABLE, HALF, HINDSIGHT, OPTIMUM, POLICY
from eval.results import RESULTS, Results, Row
from eval.suite.command import SUITE
from eval.suite.entries import SINGLE
from eval.suite.plan import FULL, QUICK, expected_requests, minutes
from eval.suite.records import packed
from eval.suite.suite import Suite
from eval.suite.summary import Summary, summarise
from eval.suite.tasks import perform
from helm_rl.errors import UserError
from helm_rl.scenario import load_scenario
from helm_rl.workloads.generate import generate
from tests.eval.fakes import BASE_MS, CURVATURE
from tests.eval.suite.worlds import SMALL, measured, small_plan

P99_MS = 2 * BASE_MS


@pytest.fixture(scope="module")
def summary(suite: Suite) -> Summary:
    return summarise(suite)


def p99(distance: float) -> float:
    return P99_MS * float(np.exp(CURVATURE * distance**2))


def test_statics_are_what_the_serving_model_says(summary: Summary) -> None:
    steady, trend, burst = summary.cells[:3]
    assert [cell.name for cell in summary.cells[:3]] == ["decoder.steady", "decoder.trend", "decoder.burst"]
    # Steady is best at .6, Trend at .4; in Burst .6 is best outside and .2 inside, so P99 is least halfway.
    for cell in (steady, trend, burst):
        assert cell.comparison.deployable == 0.6
    assert steady.p99(DEPLOYABLE) == pytest.approx([p99(0.0)] * 2)
    assert trend.p99(DEPLOYABLE) == pytest.approx([p99(0.2)] * 2)
    assert burst.p99(DEPLOYABLE) == pytest.approx([p99(0.4)] * 2)
    assert burst.p99(HINDSIGHT) == pytest.approx([p99(0.2)] * 2)
    assert burst.p99(OPTIMUM) == pytest.approx([p99(0.0)] * 2)
    assert burst.p99(HALF) == pytest.approx([p99(0.3)] * 2)
    room, error = burst.comparison.headroom()
    assert (room, error) == (pytest.approx(1 - p99(0.0) / p99(0.2)), pytest.approx(0.0, abs=1e-6))
    assert burst.shift == pytest.approx(0.4)


def test_the_best_single_static_is_one_over_all_loads(summary: Summary) -> None:
    # In ln P99 each load counts by the square of the distance to its best alpha, Burst by that to the worse of two.
    for cell in summary.cells:
        assert cell.comparison.results[0].alphas[SINGLE] == pytest.approx(0.4)
    steady, trend, burst = summary.cells[:3]
    mean = np.mean(np.log([cell.p99(SINGLE)[0] for cell in (steady, trend, burst)]))
    for alpha in (0.1, 0.3, 0.5, 0.7):
        other = [max(abs(alpha - best) for best in bests) for bests in ((0.6,), (0.4,), (0.2, 0.6))]
        assert mean <= np.mean(np.log([p99(distance) for distance in other])) + 1e-6


def test_a_policy_that_stays_is_the_deployable_static(summary: Summary) -> None:
    for cell in summary.cells:
        assert cell.p99(POLICY) == pytest.approx(cell.p99(DEPLOYABLE))
        assert cell.comparison.ratio(POLICY, DEPLOYABLE).value == pytest.approx(1.0)
    burst = summary.cells[2]
    gain, room = 1 - p99(0.4) / p99(0.2), 1 - p99(0.0) / p99(0.2)
    assert burst.captured == pytest.approx(gain / room)
    assert burst.violations(POLICY) == (2, 2)  # 198 ms, of an SLO of 100
    assert burst.violations(HINDSIGHT) == (0, 2)
    assert summary.violations(POLICY) == 1.0
    assert summary.improvement(POLICY).value == 0.5
    assert summary.improvement(DEPLOYABLE).value == 0.5


def test_capacities_are_those_of_load_that_changes_nothing(summary: Summary) -> None:
    # The model's latency knows no load: within the SLO at any multiple, or at none.
    steady, _, burst = summary.cells[:3]
    assert steady.capacities[POLICY] == (16.0,)
    assert burst.capacities[DEPLOYABLE] == (0.0,)
    assert burst.capacities[HINDSIGHT] == (16.0,)
    ratio = burst.capacity_ratio(HINDSIGHT)
    assert ratio is not None
    assert ratio.value == 0.0
    assert burst.capacity_ratio(DEPLOYABLE) is None


def test_figures_have_the_names_that_the_help_promises(summary: Summary) -> None:
    found = summary.figures()
    for family in ("decoder", "hstu"):
        for pattern in ("steady", "trend", "burst"):
            for name in ("headroom", "headroom_error", "captured", "p99_vs_single_static", "p99_vs_deployable_static",
                         "p99_vs_hindsight_static", "capacity_vs_deployable_static", "shift"):  # fmt: skip
                assert f"{family}.{pattern}.{name}" in found
            for controller in (POLICY, "marginal_hits", "naive", "host_tier_96", HALF, SINGLE, OPTIMUM):
                for metric in ("p99_ms", "slo", "ratio_gap", "flat_gap", "regret", "throughput"):
                    assert f"{family}.{pattern}.single.{controller}.{metric}" in found
    assert found["decoder.burst.single.policy.p99_ms"].value == pytest.approx(p99(0.4))
    assert found["burst.violations.helm"].value == 1.0
    assert found["all.policy.p99_vs_hindsight_static"].value > 1


def test_nothing_is_measured_twice(suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = Suite(suite.plan, suite.store)
    assert all(again.get(result) is not None for stage in again.stages() for result in stage.results)
    # A stage's results are there once each, under keys of their own.
    keys = [(result.key, result.seed) for stage in again.stages() for result in stage.results]
    assert len(set(keys)) == len(keys)


@pytest.mark.usefixtures("fake_serving")
def test_a_stopped_suite_goes_on_and_comes_to_the_same(still_bundle: Path, tmp_path: Path) -> None:
    plan = small_plan(still_bundle)
    whole = repr(summarise(measured(plan, tmp_path / "whole")).figures())
    store = Results(tmp_path / "parts", SUITE, {"helm_rl": "test"})
    done = 0
    for stage in Suite(plan, store).stages():
        for result in stage.results:
            if done < 10:
                store.add(perform(result))
                done += 1
        if done == 10:
            break
    store.close()
    with open(tmp_path / "parts" / RESULTS, "a") as file:
        file.write('{"key": "cut sh')
    assert repr(summarise(measured(plan, tmp_path / "parts")).figures()) == whole
    lines = (tmp_path / "parts" / RESULTS).read_text().splitlines()
    assert len({json.loads(line)["hash"] + json.loads(line)["key"] for line in lines}) == len(lines)


@pytest.mark.usefixtures("fake_serving")
def test_another_policy_measures_only_itself(still_bundle: Path, make_bundle: object, tmp_path: Path) -> None:
    measured(small_plan(still_bundle), tmp_path / "suite")
    before = len((tmp_path / "suite" / RESULTS).read_text().splitlines())
    mover = make_bundle("mover", action=0.5)  # type: ignore[operator]
    suite = measured(small_plan(mover), tmp_path / "suite")
    rows = [json.loads(line) for line in (tmp_path / "suite" / RESULTS).read_text().splitlines()[before:]]
    assert {row["key"].split(".")[2] for row in rows} == {POLICY}
    assert {row["kind"] for row in rows} == {"run", "capacity"}
    summary = summarise(suite)
    assert summary.cells[0].p99(POLICY) != pytest.approx(summary.cells[0].p99(DEPLOYABLE))


def test_settings_make_the_hash(suite: Suite) -> None:
    cell = suite.cells[0]
    one = suite.statics_of(cell, 1)
    assert one.hash == suite.statics_of(cell, 1).hash
    assert one.hash != suite.statics_of(cell, 2).hash
    finer = Suite(replace(suite.plan, size=replace(SMALL, step=0.05)), suite.store)
    assert finer.get(finer.deployable_of("decoder")) is None
    row = suite.store.get(one.key, 1)
    assert row is not None
    assert row["settings"]["step"] == 0.1
    assert row["hash"] == one.hash


@pytest.mark.parametrize("name", ["burst", "trend", "hstu-burst", "steady"])
def test_requests_are_expected_as_drawn(name: str) -> None:
    scenario = load_scenario(name)
    assert expected_requests(scenario) == pytest.approx(len(generate(scenario, seed=4)), rel=0.03)


def test_the_time_that_it_takes_is_within_what_is_promised() -> None:
    from eval.suite.command import Args, plan_of

    full = plan_of(Args(output=Path("out")))
    quick = plan_of(Args(output=Path("out"), quick=True))
    assert full.size == replace(FULL)
    assert quick.size == replace(QUICK)
    assert minutes(list(full.stage_cpu_s().values()), 2) < 180
    assert minutes(list(quick.stage_cpu_s().values()), 2) < 5


def stored(suite: Suite, changed: Row) -> Suite:
    """The same suite, one of whose rows is another."""
    rows = suite.store.rows | {(changed["key"], changed["seed"]): changed}
    store = SimpleNamespace(get=lambda *at: rows.get(at), folder=Path("out"))
    return Suite(suite.plan, store)  # type: ignore[arg-type]


def test_a_result_of_another_kind_is_none(suite: Suite) -> None:
    result = suite.run_of(suite.cells[0], 1, suite.plan.entries[0])
    capacity = next(row for row in suite.store.rows.values() if row["kind"] == "capacity")
    other = stored(suite, capacity | {"key": result.key, "seed": 1, "hash": result.hash})
    assert suite.get(result) is not None
    assert other.get(result) is None


def test_results_that_do_not_go_with_their_arrivals_are_named(suite: Suite) -> None:
    cell = suite.plan.cell("decoder", "burst")
    statics = suite.store.rows[suite.statics_of(cell, 1).key, 1]
    still = suite.store.rows[suite.run_of(cell, 1, suite.plan.entries[0]).key, 1]
    few = {name: statics["result"][name][:2] for name in ("alphas", "runs")}
    short = {f"{part}_p99_ms": packed([20.0]) for part in ("segment", "transition", "settled")}
    for row, fields, said in ((still, short, "has not the segments of its arrivals"), (statics, few, "lacks alpha")):
        damaged = stored(suite, row | {"result": row["result"] | fields})
        with pytest.raises(UserError, match=rf"results.jsonl: the result {row['key']}, draw 1, {said}"):
            summarise(damaged)
