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
from helm_rl.control.guard import GuardSettings, Mode
from helm_rl.control.residual import Residual, ResidualSettings
from helm_rl.control.residual_file import ResidualOrigin, SavedResidual, load_residual, save_residual
from helm_rl.errors import UserError
from tests.helm_rl.control.test_residual import run
from tests.helm_rl.policies import make_bundle, network

ORIGIN = ResidualOrigin(
    policy_sha256="a" * 64, scenario="trend", scenario_hash="0" * 64, intervals=800, measured={"residual.tripped": 0.0}
)
GUARD = GuardSettings(block=10, settle=2, probation=10, rest=50)


@pytest.fixture
def adapter(tmp_path: Path) -> Residual:
    make_bundle(tmp_path / "b", network(3))
    adapter = Residual(BasePolicy.load(tmp_path / "b"), ResidualSettings(hidden=8, learning_rate=0.2), GUARD)
    run(adapter, 800, 1, gain=1.0)
    return adapter


def test_what_was_learnt_comes_back_bit_for_bit(adapter: Residual, tmp_path: Path) -> None:
    learnt = adapter.learnt()
    assert learnt.guard.claimed
    assert any(map(any, learnt.weights[2]))
    save_residual(tmp_path / "r.json", SavedResidual(learnt, ORIGIN))
    assert load_residual(tmp_path / "r.json", "a" * 64) == SavedResidual(learnt, ORIGIN)


def test_an_adapter_goes_on_from_it_and_comes_back_to_it(adapter: Residual) -> None:
    learnt = adapter.learnt()
    other = Residual.of(adapter.base, learnt)
    assert other.learnt() == learnt
    assert other.guard.proven == adapter.guard.proven
    first = run(other, 400, 2, gain=1.0)
    assert other.learnt() != learnt
    other.reset(0)
    assert other.learnt() == learnt
    assert run(other, 400, 2, gain=1.0) == first


def test_a_guard_at_rest_stays_at_rest(adapter: Residual) -> None:
    learnt = adapter.learnt()
    resting = dataclasses.replace(learnt, guard=dataclasses.replace(learnt.guard, left=30, tripped=1))
    other = Residual.of(adapter.base, resting)
    assert other.guard.mode is Mode.REST
    assert run(other, 30, 3, gain=1.0) == [0.0] * 30
    run(other, 1, 4, gain=1.0)
    assert other.guard.mode is not Mode.REST


def test_above_another_policy_it_is_refused(adapter: Residual, tmp_path: Path) -> None:
    save_residual(tmp_path / "r.json", SavedResidual(adapter.learnt(), ORIGIN))
    with pytest.raises(UserError, match=r"r\.json: learnt above the policy aaaaaaaaaaaa\.\.\., and this one is bbbb"):
        load_residual(tmp_path / "r.json", "b" * 64)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d["settings"].update(bound=0.7), r"residual adapter: bound must be within 0 and 0.5, not 0.7"),
        (lambda d: d["settings"].update(hidden=9), r"layer 0 of the network has not 18 inputs and 9 outputs"),
        (lambda d: d["weights"][1][3].pop(), r"layer 1 of the network has not 8 inputs and 8 outputs"),
        (lambda d: d["biases"].pop(), r"layer 2 of the network"),
        (lambda d: d["weights"].append([[0.0]]), r"expected 3 layers"),
        (lambda d: d["guard_settings"].update(settle=10), r"settle must be at least 0 and below block = 10"),
        (lambda d: d["guard"]["cost"]["inverse"].pop(), r"guard.cost: expected weights and an inverse of 4 features"),
        (lambda d: d["guard"]["claimed"].pop(), r"followed, claimed and observed are of one length"),
        (lambda d: d["guard"].update(left=-1), r"guard.left: input should be greater than or equal to 0"),
        (lambda d: d.update(spread=0.0), r"spread: input should be greater than 0"),
        (lambda d: d.update(kind="burst_detector"), r"kind: input should be 'residual_adapter'"),
        (lambda d: d.update(format_version=2), r"format_version: 2 is newer than 1"),
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
