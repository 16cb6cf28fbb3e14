from __future__ import annotations

import pytest

import eval
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from tests.eval.conftest import MakeBundle
from tests.eval.fakes import small_scenario
from tests.eval.test_commands import fake as fake


@pytest.mark.usefixtures("fake")
def test_a_row_for_each_controller_and_draw() -> None:
    table = eval.evaluate(StaticAlpha(0.4), small_scenario(), seeds=2, step=0.1)
    rows = {(row["controller"], row["seed"]): row for row in table.to_pylist()}
    assert {seed for _, seed in rows} == {1_000_001, 1_000_002}
    keys = {"controller", "half_static", "deployable_static", "hindsight_static", "segment_optimum"}
    assert {key for key, _ in rows} == keys
    assert table.num_rows == 2 * len(keys)
    # .4 is as far from the burst's best alpha as from the base's: 40 ms * exp(10 * .2**2).
    assert rows["controller", 1_000_001]["p99_ms"] == pytest.approx(59.67, abs=0.01)
    assert rows["controller", 1_000_001]["title"] == "StaticAlpha"
    assert rows["segment_optimum", 1_000_002]["ratio_gap"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.usefixtures("fake")
def test_a_class_a_function_and_a_bundle_are_controllers_too(make_bundle: MakeBundle) -> None:
    scenario = small_scenario()
    by_function = eval.evaluate(lambda: StaticAlpha(0.4), scenario, seeds=1, step=0.1)
    by_object = eval.evaluate(StaticAlpha(0.4), scenario, seeds=1, step=0.1)
    assert by_function.column("p99_ms") == by_object.column("p99_ms")
    bundle = eval.evaluate(make_bundle(), scenario, seeds=1, step=0.1).to_pylist()
    assert bundle[0]["title"] == "bundle"
    assert bundle[0]["p99_ms"] == pytest.approx(198.12, abs=0.01)  # it stays where the deployable static is


@pytest.mark.usefixtures("fake")
def test_mistakes_are_sentences() -> None:
    class Broken(StaticAlpha):
        def decide(self, *arguments: object) -> float:
            raise ValueError("my mistake")

    with pytest.raises(UserError, match="controller Broken: decide raised ValueError: my mistake"):
        eval.evaluate(Broken(0.5), small_scenario(), seeds=1, step=0.1)
    with pytest.raises(UserError, match="is not a Controller, it has no reset"):
        eval.evaluate(lambda: 3, small_scenario(), seeds=1)  # type: ignore[arg-type,return-value]
    with pytest.raises(UserError, match="reference must be 'quick' or 'full', got 'Full'"):
        eval.evaluate(StaticAlpha(0.5), small_scenario(), reference="Full")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--seeds must be at least 1"):
        eval.evaluate(StaticAlpha(0.5), small_scenario(), seeds=0)
