from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval.capacity import Capacity
from eval.headroom import Args, Headroom, Room, answer, bootstrap_error, evaluate
from eval.reference import EFFORT, best_known, segment_optimum
from eval.statistics import Floats
from eval.sweep import Work, sweep
from helm_rl.cli import main as cli
from helm_rl.errors import UserError
from helm_rl.workloads.generate import generate
from tests.eval.fakes import FakeServing, small_scenario

SMALL = """\
name = "small"
slo_ms = 100
seconds = 24
warm_s = 5
[model]
features_per_token = 1
row_bytes = 16384
candidates = 0
[hardware]
pool_gib = 0.25
page_kib = 256
link_gb_s = 0.05
[load]
rate = 60
users = 20000
items = 1000000
think_s = 1.0
history_mean = 100
history_max = 1024
new_tokens_mean = 1
[[load.phase]]
label = "stay"
start_s = 12
seconds = 12
rate = 100
requests_per_visit = 25
hot_fraction = 0.3
hot_items = 500
"""


@pytest.fixture(scope="module")
def made() -> Headroom:
    """On the fake, whose best alphas are .6 and .2 with flat sets of .044 to either side, and both P99s 40 ms."""
    scenario = small_scenario()
    trace = generate(scenario, seed=5)
    work = Work(1, replay=FakeServing())
    swept = sweep(scenario, trace, np.round(np.arange(0.1, 0.91, 0.02), 6), replay=FakeServing())
    schedule = segment_optimum(trace, swept)
    (optimum,) = work.run(scenario, trace, swept.part, [(schedule, float(schedule.alphas[0]), 0)])
    room = Room(swept, optimum, best_known(trace, swept, optimum), 0.6, EFFORT, 42.0)
    bears = {name: Capacity(1.5, 1.53, ()) for name in ("reference", "hindsight_static", "deployable_static")}
    return Headroom(scenario, "burst", False, (room, room), 0.01, bears, 0.02)


def test_headroom_and_shift_of_known_curves(made: Headroom) -> None:
    static_ms = made.rooms[0].static.p99_ms
    assert made.value == pytest.approx(1 - 40 / static_ms, rel=1e-5)
    figures = {name: figure.value for name, figure in made.figures().items()}
    assert figures["headroom.shift"] == pytest.approx(0.4)
    assert figures["headroom.flat_shift"] == pytest.approx(0.4 - 2 * 0.0438, abs=1e-3)
    assert figures["headroom.p99_vs_deployable"] == pytest.approx(40 / 198.12, rel=1e-3)  # 40 ms * exp(10 * .4**2)
    assert figures["headroom.p99_ms.hindsight_static"] == static_ms
    assert figures["headroom.capacity.reference"] == 1.5
    assert all(np.isfinite(value) for value in figures.values())


def test_the_answer_says_whether_it_is_worth_it(made: Headroom) -> None:
    assert answer(made).endswith("Worth it.")
    assert "(± 1.0 %)" in answer(made)
    assert "0.60, the static that could have been deployed" in answer(made)
    assert "that open" in answer(replace(made, error=made.value))

    nothing = replace(made.rooms[0], reference=replace(made.rooms[0].reference, run=made.rooms[0].static))
    flat = replace(made, rooms=(nothing,), error=0.001)
    assert answer(flat).endswith(f"else set alpha to {nothing.swept.hindsight:.2f}.")
    known = replace(flat, rooms=(replace(nothing, deployable=nothing.swept.hindsight),))
    assert answer(known).endswith(f"Not worth it: set alpha to {nothing.swept.hindsight:.2f}.")


def test_where_everything_is_shed_alpha_has_no_say(made: Headroom) -> None:
    room = made.rooms[0]
    shed = {alpha: replace(run, p99_ms=10_000.0) for alpha, run in room.swept.runs.items()}
    swept = replace(room.swept, runs=shed)
    lost = replace(room, swept=swept, reference=replace(room.reference, run=shed[0.5]))
    assert "whatever alpha does" in answer(replace(made, rooms=(lost,)))
    assert "requests in 1 of 2 draws, and so does the best schedule" in answer(replace(made, rooms=(lost, room)))


def test_a_schedule_that_spares_the_shedding_is_worth_it(made: Headroom) -> None:
    room = made.rooms[0]
    shed = {alpha: replace(run, p99_ms=10_000.0) for alpha, run in room.swept.runs.items()}
    told = answer(replace(made, rooms=(replace(room, swept=replace(room.swept, runs=shed)),)))
    assert "would lower P99 by 99.6 %" in told or "would lower P99 by 100 %" in told
    assert "whatever alpha does" not in told
    assert "counts as a P99 of 10,000 ms; the schedule does not. Worth it." in told


def tails(rng: np.random.Generator, blocks: int, requests: int, scale: Floats) -> tuple[Floats, np.ndarray]:
    block = np.repeat(np.arange(blocks), requests)
    return rng.exponential(1.0, blocks * requests) * scale[block] + 1.0, block


def test_the_bootstrap_error_is_the_spread_over_new_traces() -> None:
    rng = np.random.default_rng(0)
    spread, guessed = [], []
    for turn in range(200):
        # Blocks differ, and both sides differ alike from block to block.
        scale = rng.lognormal(0.0, 0.5, 100)
        static, block = tails(rng, 100, 100, 20 * scale)
        better, _ = tails(rng, 100, 100, 16 * scale)
        spread.append(1 - np.quantile(better, 0.99) / np.quantile(static, 0.99))
        if turn % 40 == 0:
            guessed.append(bootstrap_error(static, better, block))
    assert np.mean(guessed) == pytest.approx(np.std(spread), rel=0.35)


def test_the_bootstrap_knows_two_equal_tails() -> None:
    static, block = tails(np.random.default_rng(1), 50, 100, np.full(50, 20.0))
    assert bootstrap_error(static, static, block) == 0.0
    assert bootstrap_error(static, static * 0.8, block) < 0.003  # a constant factor, to a bin


def test_a_recorded_trace_is_answered_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario, path = tmp_path / "small.toml", tmp_path / "shop.parquet"
    scenario.write_text(SMALL)
    assert cli(["trace", "generate", str(scenario), "--output", str(path), "--seed", "3"]) == 0
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    capsys.readouterr()
    common = ["--scenario", str(scenario), "--step", "0.1", "--replays", "1"]
    assert cli(["eval", "headroom", str(path), *common, "--json", str(figures), "--plot", str(plot)]) == 0
    out, _ = capsys.readouterr()
    assert " ".join(out.split()).startswith("On this trace (small) adapting alpha would lower P99 by ")
    assert "resampling blocks of 10 s" in " ".join(out.split())
    assert "--replays 1" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 120
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = {name: each["value"] for name, each in json.loads(figures.read_text())["figures"].items()}
    assert 0.0 <= found["headroom.value"] < 1.0
    assert (found["headroom.error"] > 0.0) == (found["headroom.value"] > 0.0)  # 0 where a static is the best known
    ratio = found["headroom.p99_ms.reference"] / found["headroom.p99_ms.hindsight_static"]
    assert found["headroom.value"] == pytest.approx(1 - ratio)
    assert found["headroom.p99_ms.reference"] <= found["headroom.p99_ms.segment_optimum"]
    # The P99 is either side of the SLO at this load as the capacity is of 1.
    for name in ("reference", "hindsight_static", "deployable_static"):
        assert (found[f"headroom.capacity.{name}"] >= 1.0) == (found[f"headroom.p99_ms.{name}"] <= 100.0)
    assert found["headroom.capacity.deployable_static"] > 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": 0}, "--seeds must be at least 1, got 0"),
        ({"seeds": 2, "trace": Path("x.parquet")}, "a recorded trace is one set of arrivals"),
        ({"trace": Path("nowhere.parquet")}, "nowhere.parquet does not exist"),
        ({"scenario": "burts"}, "burts is neither a shipped scenario"),
        ({"step": 0.5}, "--step must lie in"),
        ({"replays": -1}, "--replays must be at least 0, got -1"),
        ({"jobs": 0}, "--jobs must be at least 1"),
        ({"plot": Path("plot.gif")}, "must end in .png or .svg"),
        ({"plot": Path("no/such/folder/x.png")}, "the folder no/such/folder does not exist"),
        ({"json": Path("same"), "plot": Path("same")}, "name the same file"),
    ],
)
def test_bad_arguments_are_refused(
    change: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        evaluate(Args(**change))  # type: ignore[arg-type]
