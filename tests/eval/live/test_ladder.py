"""The ladder of prefills: who comes when, and what of it was cached."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from envs.serving.live import LiveNode
from eval.live.ladder import CROWD, LENGTHS, batches_of, climb, flop, ladder, lengths
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import Scenario, load_scenario
from tests.eval.live.small import SMALL


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    (tmp_path / "small.toml").write_text(SMALL)
    return load_scenario(tmp_path / "small.toml")


def test_lengths_double_up_to_the_longest() -> None:
    assert lengths(1024) == [32, 64, 128, 256, 512, 1024]
    assert lengths(100) == [16, 16, 16, 25, 50, 100]


def test_each_length_comes_in_three_parts_alone_and_in_crowds(scenario: Scenario) -> None:
    trace = ladder(scenario, 256, 4)
    trace.validate()
    sizes = [numbers.size for numbers in batches_of(trace)]
    assert sizes == ([1] * 3 * LENGTHS + [CROWD] * 3 * LENGTHS) * 2
    for user in range(trace.meta.users):
        history, new = (column[trace.user == user].tolist() for column in (trace.history_tokens, trace.new_tokens))
        length = history[-1]
        assert history == [length // 2, length, length]
        assert new == [length // 2, length // 2, length // 16]


def test_what_was_computed_before_is_found_and_batches_of_the_same_work_are_one(scenario: Scenario) -> None:
    with contextlib.closing(LiveNode(scenario, ladder(scenario, 256, 4), table_rows=1 << 12)) as node:
        found = climb(node)
    shapes = {(batch.users, batch.tokens, batch.cached) for batch in found}
    for users in (1, CROWD):
        assert {(users, 128, 0), (users, 256, 128), (users, 256, 240), (users, 64, 32)} <= shapes
    assert all(batch.ms > 0 for batch in found)
    one, crowd = (next(b for b in found if (b.users, b.tokens, b.cached) == (n, 256, 128)) for n in (1, CROWD))
    assert crowd.linear_flop == CROWD * one.linear_flop
    model = resolve_model(scenario.model)
    assert one.linear_flop == (128 + 16) * model.flops_per_token
    assert one.pair_flop == (128 * (128 + 64) + 16 * 256) * model.flops_per_pair


def test_flop_are_those_of_the_model_clock(scenario: Scenario) -> None:
    model = resolve_model(scenario.model)
    linear, pair = flop(model, np.array([0, 30]), np.array([40, 40]))
    assert linear.tolist() == [56 * model.flops_per_token, 26 * model.flops_per_token]
    assert pair.tolist() == [(800 + 640) * model.flops_per_pair, (350 + 640) * model.flops_per_pair]
