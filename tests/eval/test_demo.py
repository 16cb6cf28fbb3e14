from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import envs.serving.replay
import helm_rl.export
from eval import demo
from eval.demo import Args, Size, main, refuse_output, run
from helm_rl.errors import UserError
from helm_rl.workloads.trace import Trace
from tests.eval.conftest import MakeBundle
from tests.eval.fakes import FakeServing
from tests.eval.test_commands import SCENARIO
from train import ppo_base


@pytest.fixture
def small(tmp_path: Path) -> Size:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO.format(interval_s=1.0, rate=100))
    return Size(scenario=str(path), timesteps=64, num_envs=2, num_steps=32, draws=2, step=0.05)


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch, make_bundle: MakeBundle) -> SimpleNamespace:
    """Replays by the fake, training that leaves a mark, and a bundle that always asks for more EMB."""
    seen = SimpleNamespace(trained=[], fail_in_training=False)
    ready = make_bundle("ready", action=0.1)

    def train(args: ppo_base.Args) -> Path:
        if seen.fail_in_training:
            raise KeyboardInterrupt
        seen.trained.append(args)
        (args.runs / "run").mkdir(parents=True)
        (args.runs / "run" / "events").write_text("log")
        return args.runs / "run"

    def export(run: Path, output: Path, overwrite: bool = False) -> None:
        assert (run / "events").exists()
        ready.rename(output)

    monkeypatch.setattr(ppo_base, "train", train)
    monkeypatch.setattr(helm_rl.export, "export", export)
    monkeypatch.setattr(envs.serving.replay, "replay", FakeServing())
    return seen


def test_the_demo_leaves_all_its_files_and_says_last_where_the_report_is(
    tmp_path: Path,
    small: Size,
    rehearsal: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "Size", lambda: small)
    output = tmp_path / "out"
    main(Args(output=output, seed=4))
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"Report: {output / 'report.html'}"
    assert [line[:6] for line in err.splitlines() if line[1:5] == " of "] == [f"{n} of 5" for n in range(1, 6)]
    assert {path.name for path in output.iterdir()} == {
        "report.html",
        "figures.json",
        "bundle",
        "trace.parquet",
        "runs",
    }
    (trained,) = rehearsal.trained
    assert trained.seed == 4
    assert trained.total_timesteps == 64
    trace = Trace.load(output / "trace.parquet")
    page = (output / "report.html").read_text()
    assert trace.hash() in page  # what lies beside the report is what was evaluated
    assert "time taken" in page
    figures = json.loads((output / "figures.json").read_text())["figures"]
    # .1 * .06 per s, from .6 to .9: |alpha - alpha*| is .006 t, and in the burst .4 + .006 t.
    assert figures["default.burst.single.policy.ratio_gap"]["value"] == pytest.approx(
        sum(
            min(0.3, 0.006 * (t + 10)) + (0.4 if 60 < t <= 80 else 0.0)
            for t in (*range(21, 41), *range(61, 81), *range(101, 121))
        )
        / 60,
        abs=1e-4,
    )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_interrupted_demo_leaves_nothing_and_an_earlier_one_stands(
    tmp_path: Path, small: Size, rehearsal: SimpleNamespace
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "report.html").write_text("earlier")
    rehearsal.fail_in_training = True
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        run(Args(output=output, overwrite=True), small)
    assert sorted(tmp_path.rglob("*")) == before
    assert (output / "report.html").read_text() == "earlier"


def test_a_stopped_demo_says_that_no_run_is_left(
    tmp_path: Path, rehearsal: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    rehearsal.fail_in_training = True
    with pytest.raises(KeyboardInterrupt):
        main(Args(output=tmp_path / "out"))
    assert capsys.readouterr().err.splitlines()[-1].startswith("the demo was stopped: nothing of it is kept")
    assert list(tmp_path.glob("*out*")) == []


def test_existing_outputs_are_refused(tmp_path: Path, small: Size, rehearsal: SimpleNamespace) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "report.html").write_text("earlier")
    with pytest.raises(UserError, match="exists already"):
        run(Args(output=output), small)
    assert rehearsal.trained == []
    refuse_output(output, overwrite=True)


def test_overwriting_spares_folders_that_no_demo_made(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis.tex, which no demo made"):
        refuse_output(tmp_path, overwrite=True)
    with pytest.raises(UserError, match="is not a folder"):
        refuse_output(tmp_path / "thesis.tex", overwrite=True)


def test_a_file_is_no_folder_to_put_the_output_in(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for below in ("file/out", "file/sub/out"):
        with pytest.raises(UserError, match="does not exist; make it first"):
            refuse_output(tmp_path / below, overwrite=False)


def test_a_negative_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--seed must lie in 0 to"):
        run(Args(output=tmp_path / "out", seed=-1), Size())
    assert list(tmp_path.iterdir()) == []
