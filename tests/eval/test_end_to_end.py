"""With the real simulator: a sweep, and the whole demo twice, on a load that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eval.comparison import DEPLOYABLE, HINDSIGHT, OPTIMUM, POLICY
from eval.demo import Args, Size, run
from eval.sweep import sweep
from helm_rl.checkpoint import load_bundle
from helm_rl.scenario import load_scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace

SMALL = """\
name = "small"
slo_ms = 100
seconds = 45
warm_s = 10
[hardware]
pool_gib = 6
[load]
rate = 60
users = 20000
items = 3e7
[[load.phase]]
label = "burst"
start_s = 15
seconds = 15
rate = 60
requests_per_visit = 15
think_s = 1.0
hot_fraction = 0.6
"""


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_a_sweep_is_the_same_on_one_thread_and_on_two(scenario_file: Path) -> None:
    scenario = load_scenario(scenario_file)
    trace = generate(scenario, seed=5)
    alone = sweep(scenario, trace, [0.1, 0.5, 0.9], jobs=1)
    together = sweep(scenario, trace, [0.9, 0.1, 0.5], jobs=2)
    np.testing.assert_array_equal(alone.whole.p99_ms, together.whole.p99_ms)
    for one, two in zip(alone.runs.values(), together.runs.values(), strict=True):
        np.testing.assert_array_equal(one.settled_p99_ms, two.settled_p99_ms)
        np.testing.assert_array_equal(one.tail_ms, two.tail_ms)
    assert len(set(alone.whole.p99_ms.tolist())) == 3  # alpha matters
    for alpha, found in alone.runs.items():
        np.testing.assert_allclose(found.alpha, alpha, atol=0.01)  # a static stays where it is, to a page
    assert [span.label for span in alone.part.spans] == ["base", "burst", "base"]


def test_the_same_seed_gives_the_same_figures_from_trace_to_report(scenario_file: Path, tmp_path: Path) -> None:
    size = Size(str(scenario_file), timesteps=128, num_envs=2, num_steps=64, draws=1, step=0.2)
    first = run(Args(output=tmp_path / "one", seed=3), size)
    run(Args(output=tmp_path / "two", seed=3), size)
    figures = [json.loads((tmp_path / name / "figures.json").read_text())["figures"] for name in ("one", "two")]
    assert figures[0] == figures[1]

    result = first.results[0]
    assert Trace.load(tmp_path / "one" / "trace.parquet").hash() == result.trace_hash
    assert load_bundle(tmp_path / "one" / "bundle").config.training.steps == 128
    # The policy starts at the deployable alpha and moves no faster than it may.
    moves = np.abs(np.diff(np.concatenate([[first.deployable], result.runs[POLICY].target])))
    assert moves.max() <= 0.06 + 1e-6
    assert result.runs[POLICY].alpha.std() > 0
    # The optimum stands at each segment's alpha*, a page or so and a moment of migration apart.
    assert result.gaps(OPTIMUM, "settled").ratio < 0.01
    statics = [found.p99_ms for found in result.sweep.runs.values()]
    assert result.runs[HINDSIGHT].p99_ms == min(statics)
    assert result.reference.p99_ms == min([*statics, result.runs[OPTIMUM].p99_ms])
    assert result.runs[DEPLOYABLE] is result.sweep.runs[first.deployable]
    page = (tmp_path / "one" / "report.html").read_text()
    assert f"{first.estimate(POLICY, 'p99_ms').value:.1f}" in page
