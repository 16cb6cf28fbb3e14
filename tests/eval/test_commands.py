from __future__ import annotations

import json
from pathlib import Path

import pytest

import envs.serving.replay
from eval import p99_latency, ratio_gap
from eval.command import EvalArgs, evaluate, policy_contestant
from eval.comparison import Contestant
from eval.summary import headline
from helm_rl.checkpoint import DETECTOR_FILE, POLICY_FILE, RESIDUAL_FILE, load_bundle
from helm_rl.cli import main as cli
from helm_rl.control.base import BasePolicy
from helm_rl.control.detector_file import save_detector
from helm_rl.control.residual import Residual
from helm_rl.control.residual_file import SavedResidual, save_residual
from helm_rl.errors import UserError
from helm_rl.export import export
from helm_rl.workloads.generate import generate
from tests.eval.conftest import MakeBundle
from tests.eval.fakes import FakeServing, small_scenario
from tests.helm_rl.control.test_detector_file import DETECTOR
from tests.helm_rl.control.test_residual_file import ORIGIN

SCENARIO = """\
name = "burst"
slo_ms = 100
seconds = 120
warm_s = 10
[control]
interval_s = {interval_s}
[load]
rate = {rate}
users = 1000
[[load.phase]]
label = "burst"
start_s = 40
seconds = 40
rate = 50
requests_per_visit = 2.0
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO.format(interval_s=1.0, rate=100))
    return str(path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeServing:
    fake = FakeServing()
    monkeypatch.setattr(envs.serving.replay, "replay", fake)
    return fake


def test_p99_prints_the_table_and_writes_figures(
    scenario: str, fake: FakeServing, make_bundle: MakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    status = cli(
        ["eval", "p99", "--policy", str(make_bundle()), "--scenario", scenario, "--seeds", "2", "--json", str(figures)]
    )
    out, err = capsys.readouterr()
    assert status == 0, err
    document = json.loads(figures.read_text())
    assert document["bundles"] == {"policy": load_bundle(tmp_path / "bundle").config.files}
    # The bundle never moves: from the deployable .6 it serves the burst as the deployable static does.
    found = {name: figure["value"] for name, figure in document["figures"].items()}
    assert found["default.burst.p99_vs_deployable_static"] == 1.0
    assert found["default.burst.single.policy.p99_ms"] == pytest.approx(198.12, abs=0.01)  # 40 ms * exp(10 * .4**2)
    assert found["default.burst.single.segment_optimum.p99_ms"] == pytest.approx(40.0, abs=0.01)
    assert found["default.burst.single.policy.ratio_gap"] == pytest.approx(0.4 / 3, abs=1e-6)
    for title in ("policy", "static 0.5", "deployable static", "hindsight static", "per-segment optimum"):
        assert title in out
    assert "198.1" in out
    assert "--reference full` searches" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 120


def test_ratio_gap_lists_every_segment(
    scenario: str, fake: FakeServing, make_bundle: MakeBundle, capsys: pytest.CaptureFixture[str]
) -> None:
    ratio_gap.main(ratio_gap.Args(scenario=scenario, policy=(make_bundle(),), seeds=1))
    out = capsys.readouterr().out
    rows = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
    assert ["burst", "40", "80", "0.20", "-", "0.16 to 0.24", "40.0", "0.400"] in cells
    assert ["base", "80", "120", "0.60", "-", "0.56 to 0.64", "40.0", "0.000"] in cells
    assert ["policy", "0.133", "0.133", "0.119", "0.119"] in cells


def test_names_are_no_markup(fake: FakeServing, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label = "[/b] $y^$ <i>"
    fake.best = {"base": 0.6, label: 0.2}
    path = tmp_path / "odd.toml"
    text = SCENARIO.format(interval_s=1.0, rate=100).replace('name = "burst"', 'name = "[/red] :fire: $x_{"')
    path.write_text(text.replace('label = "burst"', f'label = "{label}"'))
    for command in ("p99", "ratio-gap"):
        report = tmp_path / f"{command}.html"
        assert cli(["eval", command, "--scenario", str(path), "--seeds", "1", "--report", str(report)]) == 0
        assert "[/red] :fire: $x_{" in capsys.readouterr().out
        assert "[/b] $y^$ &lt;i&gt;" in report.read_text()


def test_without_a_policy_the_statics_are_mapped(scenario: str, fake: FakeServing) -> None:
    comparison = evaluate(EvalArgs(scenario=scenario, seeds=1))
    assert [row.key for row in comparison.rows] == [
        "half_static",
        "deployable_static",
        "hindsight_static",
        "segment_optimum",
    ]
    assert "policy" not in headline(comparison)


def test_a_moving_policy_moves_at_its_rate_from_the_deployable_alpha(
    scenario: str, fake: FakeServing, make_bundle: MakeBundle
) -> None:
    comparison = evaluate(EvalArgs(scenario=scenario, policy=(make_bundle(action=-0.5),), seeds=1))
    alpha = comparison.results[0].runs["policy"].alpha
    assert alpha[:3] == pytest.approx([0.57, 0.54, 0.51], abs=1e-6)
    assert alpha[-1] == pytest.approx(0.1, abs=1e-6)


def test_several_policies_stand_side_by_side(scenario: str, fake: FakeServing, make_bundle: MakeBundle) -> None:
    first, other = make_bundle("first"), make_bundle("Other one", action=-0.5)
    comparison = evaluate(EvalArgs(scenario=scenario, policy=(first, other), seeds=1))
    assert [row.key for row in comparison.rows][:2] == ["policy", "other_one"]
    assert [row.title for row in comparison.rows][:2] == ["policy", "Other one"]
    assert comparison.results[0].runs["policy"].alpha.std() == 0
    assert comparison.results[0].runs["other_one"].alpha[-1] == pytest.approx(0.1, abs=1e-6)
    assert "default.burst.single.other_one.p99_ms" in comparison.figures()
    for name in ("Policy", "kv-first", "other  ONE"):
        with pytest.raises(UserError, match="is the name of another controller here; rename the folder"):
            evaluate(EvalArgs(scenario=scenario, policy=(first, other, make_bundle(name)), seeds=1))


def test_a_trace_file_takes_the_place_of_the_load(scenario: str, fake: FakeServing, tmp_path: Path) -> None:
    trace = generate(small_scenario(name="Shop 7"), seed=3)
    trace.save(tmp_path / "trace.parquet")
    comparison = evaluate(EvalArgs(scenario=scenario, trace=tmp_path / "trace.parquet"))
    assert comparison.results[0].trace_hash == trace.hash()
    assert "default.shop_7.single.segment_optimum.p99_ms" in comparison.figures()
    with pytest.raises(UserError, match="--seeds 2: a recorded trace is one set of arrivals"):
        evaluate(EvalArgs(scenario=scenario, trace=tmp_path / "trace.parquet", seeds=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": 0}, "--seeds must be at least 1, got 0"),
        ({"seeds": -3}, "--seeds must be at least 1, got -3"),
        ({"seeds": 10**11}, "--seeds must be at least 1 and at most 1000000, got 100000000000"),
        ({"seed": -1}, "--seed must lie in 0 to 999997, got -1"),
        ({"seed": 999_998}, "--seed must lie in 0 to 999997, got 999998"),
        ({"jobs": 0}, "--jobs must be at least 1"),
        ({"step": 0.0}, "--step must lie in"),
        ({"scenario": "burts"}, "burts is neither a shipped scenario"),
        ({"policy": (Path("nowhere"),)}, "nowhere: no such bundle folder"),
        ({"trace": Path("nowhere.parquet")}, "nowhere.parquet does not exist"),
        ({"json": Path("no/such/folder/x.json")}, "the folder no/such/folder does not exist"),
        ({"json": Path("same"), "report": Path("same")}, "name the same file"),
    ],
)
def test_bad_arguments_are_refused_before_any_replay(
    scenario: str,
    fake: FakeServing,
    change: dict[str, object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"scenario": scenario, **change}
    with pytest.raises(UserError, match=message):
        evaluate(EvalArgs(**arguments))  # type: ignore[arg-type]
    assert fake.calls == []
    assert not (tmp_path / "same").exists()


def test_existing_outputs_are_refused_unless_overwritten(scenario: str, fake: FakeServing, tmp_path: Path) -> None:
    for name in ("json", "report"):
        path = tmp_path / f"old.{name}"
        path.write_text("mine")
        with pytest.raises(UserError, match="exists already"):
            evaluate(EvalArgs(scenario=scenario, seeds=1, **{name: path}))  # type: ignore[arg-type]
        assert path.read_text() == "mine"
    assert fake.calls == []
    evaluate(EvalArgs(scenario=scenario, seeds=1, json=tmp_path / "old.json", overwrite=True))
    assert json.loads((tmp_path / "old.json").read_text())["figures"]


def test_a_trace_that_is_too_short_is_refused(scenario: str, fake: FakeServing, tmp_path: Path) -> None:
    trace = generate(small_scenario(), seed=3).between(-10_000_000_000, 5_000_000_000)
    trace.save(tmp_path / "short.parquet")
    with pytest.raises(UserError, match="a P99 needs at least 1000"):
        evaluate(EvalArgs(scenario=scenario, trace=tmp_path / "short.parquet"))
    assert fake.calls == []


def test_a_scenario_with_sparse_segments_is_refused(fake: FakeServing, tmp_path: Path) -> None:
    path = tmp_path / "sparse.toml"
    path.write_text(SCENARIO.format(interval_s=1.0, rate=30).replace("seconds = 40\n", "seconds = 2\n"))
    with pytest.raises(UserError, match="1 of its segments hold too few requests"):
        evaluate(EvalArgs(scenario=str(path), seeds=1))


def test_a_scenario_without_a_base_load_is_refused(fake: FakeServing, tmp_path: Path) -> None:
    path = tmp_path / "phases.toml"
    path.write_text(SCENARIO.format(interval_s=1.0, rate=0))
    with pytest.raises(UserError, match=r"load\.rate is 0, so there is no Steady load"):
        evaluate(EvalArgs(scenario=str(path), seeds=1))
    assert fake.calls == []


def test_a_bundle_for_another_interval_or_range_is_refused(make_bundle: MakeBundle) -> None:
    with pytest.raises(UserError, match="the policy was trained for 5 s between decisions, and 1 s was asked for"):
        policy_contestant(make_bundle("slow", interval_s=5.0), small_scenario())
    with pytest.raises(UserError, match=r"bounds.alpha_max is 0.8, .* control.alpha_max = 0.9"):
        policy_contestant(make_bundle("narrow", alpha_max=0.8), small_scenario())


def test_layers_can_be_taken_off_for_a_comparison(
    scenario: str, fake: FakeServing, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    plain = make_bundle("plain")
    save_detector(tmp_path / "d.json", DETECTOR)
    export(plain, tmp_path / "full", detector=tmp_path / "d.json")
    adapter = Residual(BasePolicy.load(plain))
    origin = ORIGIN.model_copy(update={"policy_sha256": load_bundle(plain).config.files[POLICY_FILE]})
    save_residual(tmp_path / "r.json", SavedResidual(adapter.learnt(), origin))
    export(tmp_path / "full", tmp_path / "all", residual=tmp_path / "r.json")

    def keys(*policies: Path, ablate: bool = True) -> list[str]:
        found = evaluate(EvalArgs(scenario=scenario, seeds=1, policy=policies, ablate=ablate))
        return [row.key for row in found.rows if isinstance(row, Contestant)]

    assert keys(plain) == ["policy"]
    assert keys(tmp_path / "all", ablate=False) == ["policy"]
    assert keys(tmp_path / "full") == ["policy", "policy_base"]
    everything = ["policy", "policy_base", "policy_base_residual", "policy_base_recovery"]
    assert keys(tmp_path / "all", tmp_path / "full") == [*everything, "full", "full_base"]

    evaluate(
        EvalArgs(scenario=scenario, seeds=1, policy=(tmp_path / "all",), ablate=True, json=tmp_path / "figures.json")
    )
    measured = json.loads((tmp_path / "figures.json").read_text())["bundles"]
    files = load_bundle(tmp_path / "all").config.files
    assert {key: set(found) for key, found in measured.items()} == {
        "policy": {POLICY_FILE, RESIDUAL_FILE, DETECTOR_FILE},
        "policy_base": {POLICY_FILE},
        "policy_base_residual": {POLICY_FILE, RESIDUAL_FILE},
        "policy_base_recovery": {POLICY_FILE, DETECTOR_FILE},
    }
    assert measured["policy"] == files
    assert measured["policy_base_recovery"].items() <= files.items()


def test_a_bundle_with_another_observation_is_refused(make_bundle: MakeBundle) -> None:
    bundle = make_bundle()
    config = json.loads((bundle / "config.json").read_text())
    config["observation"]["schema_hash"] = "0" * 64
    (bundle / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="observation"):
        policy_contestant(bundle, small_scenario())


def test_ctrl_c_leaves_no_file(scenario: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(envs.serving.replay, "replay", interrupted)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        evaluate(EvalArgs(scenario=scenario, seeds=1, json=tmp_path / "x.json", report=tmp_path / "x.html"))
    assert sorted(tmp_path.iterdir()) == before


def test_help_names_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("p99", "ratio-gap"):
        with pytest.raises(SystemExit) as stop:
            cli(["eval", command, "--help"])
        assert stop.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "noise_floor" in text
        assert "--policy" in text
    assert p99_latency.Args.__doc__


def test_a_static_that_sheds_is_said_to(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs.serving.replay, "replay", FakeServing(shed=2000))
    text = headline(evaluate(EvalArgs(scenario=scenario, seeds=1)))
    assert "took 10,000 ms (more than 1 % were shed), the best" in text
