"""The file of an adapter: what it has learnt comes back bit for bit, and what was not written so is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helm_rl.control.base import BasePolicy
from helm_rl.control.guard import Guard, Mode
from helm_rl.control.residual import Learnt, Residual
from helm_rl.control.residual_file import ResidualOrigin, SavedResidual, load_residual, save_residual
from helm_rl.errors import UserError
from tests.helm_rl.control.test_guard import FALSE
from tests.helm_rl.control.test_residual import BOLD, QUICK, run
from tests.helm_rl.policies import make_bundle, still_network

ORIGIN = ResidualOrigin(
    policy_sha256="a" * 64, scenario="trend", scenario_hash="0" * 64, intervals=800, measured={"residual.tripped": 0.0}
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BasePolicy:
    path = tmp_path_factory.mktemp("policy") / "b"
    make_bundle(path, still_network())
    return BasePolicy.load(path)


@pytest.fixture(scope="module")
def learnt(base: BasePolicy) -> Learnt:
    adapter = Residual(base, dataclasses.replace(BOLD, hidden=8), QUICK)
    run(adapter, 300)
    return adapter.learnt()


@pytest.fixture
def adapter(base: BasePolicy, learnt: Learnt) -> Residual:
    return Residual.of(base, learnt)


def test_what_was_learnt_comes_back_bit_for_bit(learnt: Learnt, tmp_path: Path) -> None:
    assert min(len(learnt.guard.claimed), len(learnt.guard.acting), learnt.guard.since + learnt.guard.reach - 1) > 0
    assert any(map(any, learnt.weights[2]))
    save_residual(tmp_path / "r.json", SavedResidual(learnt, ORIGIN))
    assert load_residual(tmp_path / "r.json", "a" * 64) == SavedResidual(learnt, ORIGIN)


def test_an_adapter_goes_on_from_it_and_comes_back_to_it(base: BasePolicy, learnt: Learnt) -> None:
    other = Residual.of(base, learnt)
    assert other.learnt() == learnt
    assert isinstance(other.guard, Guard)
    assert other.guard.may_act
    assert other.guard.reach == learnt.guard.reach > 1
    first = run(other, 200, 2)
    assert max(first) > 0.03
    after = other.learnt()
    assert after != learnt
    other.reset(0)
    assert other.learnt() == learnt
    assert run(other, 200, 2) == first
    assert other.learnt() == after
    again = Residual.of(base, learnt)
    assert run(again, 200, 2) == first
    assert again.learnt() == after


def test_a_guard_at_rest_stays_at_rest(adapter: Residual) -> None:
    run(adapter, 400, told=FALSE["inverted"])
    assert adapter.guard.mode is Mode.REST
    resting = adapter.learnt()
    assert 1_500 < resting.guard.left < 2_000  # of 1,000 s, in intervals of half a second
    left = 30
    resting = dataclasses.replace(resting, guard=dataclasses.replace(resting.guard, left=left))
    other = Residual.of(adapter.base, resting)
    assert run(other, left) == [0.0] * left  # the first decision comes before any window
    assert other.guard.mode is Mode.REST
    run(other, 1)
    assert other.guard.mode is Mode.CONTROL
    assert other.learnt().guard.reach == 1


def test_above_another_policy_it_is_refused(adapter: Residual, tmp_path: Path) -> None:
    save_residual(tmp_path / "r.json", SavedResidual(adapter.learnt(), ORIGIN))
    with pytest.raises(UserError, match=r"r\.json: learnt above the policy aaaaaaaaaaaa\.\.\., and this one is bbbb"):
        load_residual(tmp_path / "r.json", "b" * 64)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d["settings"].update(bound=0.7), r"residual adapter: bound must be within 0 and 0.5, not 0.7"),
        (lambda d: d["settings"].pop("pace"), r"settings.pace: field required"),
        (lambda d: d["settings"].update(hidden=9), r"layer 0 of the network has not 18 inputs and 9 outputs"),
        (lambda d: d["weights"][1][3].pop(), r"layer 1 of the network has not 8 inputs and 8 outputs"),
        (lambda d: d["biases"].pop(), r"layer 2 of the network"),
        (lambda d: d["weights"].append([[0.0]]), r"expected 3 layers"),
        (lambda d: d["guard_settings"].update(settle_s=4.0), r"settle_s must be at least 0 and below block_s = 4,"),
        (lambda d: d["guard_settings"].update(sample_s=1e6), r"sample_s must be above 0 and at most 600"),
        (lambda d: d["guard_settings"].update(memory=10**9), r"memory must be at least 8 and at most 1,000,000"),
        (lambda d: d["guard"]["cost"]["inverse"].pop(), r"guard.cost: expected weights and an inverse of 4 features"),
        (lambda d: d["guard"]["claimed"].pop(), r"claimed and observed are of one length"),
        (lambda d: d["guard"]["acting"][0].append(0.0), r"guard.acting.0: .* at most 2"),
        (lambda d: d["guard"].update(reach=0), r"guard.reach: input should be greater than or equal to 1"),
        (lambda d: d["guard"].update(left=-1), r"guard.left: input should be greater than or equal to 0"),
        (lambda d: d.update(spread=1.0), r"spread: extra inputs are not permitted"),
        (lambda d: d.update(kind="burst_detector"), r"kind: input should be 'residual_adapter'"),
        (lambda d: d.update(format_version=3), r"format_version: 3 is newer than 2"),
        (lambda d: d.update(format_version=1), r"format_version: input should be 2"),
        (lambda d: d["guard"].pop("p99"), r"guard.p99: field required"),
    ],
)
def test_a_spoilt_file_is_refused(
    adapter: Residual, tmp_path: Path, spoil: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = tmp_path / "r.json"
    save_residual(path, SavedResidual(adapter.learnt(), ORIGIN))
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=message) as error:
        load_residual(path, "a" * 64)
    assert str(error.value).startswith(str(path))


def test_numbers_that_are_none_are_refused(adapter: Residual, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    learnt = adapter.learnt()
    learnt.weights[0][0][0] = float(np.nan)
    with pytest.raises(ValueError, match="finite"):
        save_residual(path, SavedResidual(learnt, ORIGIN))
    assert not path.exists()
