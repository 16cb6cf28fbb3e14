from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.results import RESULTS
from eval.suite import command
from eval.suite.command import FIGURES, REPORT
from eval.suite.runs import RUNS
from helm_rl.cli import main as cli
from tests.eval.conftest import MakeBundle
from tests.eval.suite.test_cells import azure
from tests.eval.suite.worlds import SMALL, small_plan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--families", "seven"], "--families: 'seven' is unknown; known: decoder, hstu, large"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--nodes", "-1"], "--nodes must lie in 0 to 512, got -1"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--policy", "nowhere"], "nowhere: no such bundle folder"),
        (["--controller", "nowhere:Rule"], "there is no module nowhere"),
        (["--controller", "helm_rl.control.rules:RegimeRule"], "it needs alpha_cold, alpha_hot"),
        (["--traces", "nowhere"], "--traces nowhere: no such folder"),
        (["--map", "nowhere"], "--map: there is no nowhere/cells.json"),
        (["--decision", "nowhere.json"], "--decision: there is no nowhere.json"),
        (["--json", "out/figures.json"], "--json names the suite's own folder"),
    ],
)
def test_what_does_not_fit_is_said_before_the_work(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    assert cli(["eval", "suite", "--output", "out", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert list((tmp_path / "out").iterdir()) == []


def test_a_foreign_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert cli(["eval", "suite", "--output", str(tmp_path)]) == 2
    assert "holds other files and no suite" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_way_on_a_small_node(
    make_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = list(small_plan().cells)
    size = replace(SMALL, seeds=1, nodes=2, cluster_seeds=1, cluster_steps=(0.4, 0.2))
    monkeypatch.setattr(command, "cells", lambda families: list(cells))
    monkeypatch.setattr(command, "QUICK", size)
    out = tmp_path / "out"
    arguments = ["eval", "suite", "--quick", "--output", str(out), "--policy", str(make_bundle()), "--nodes", "2"]
    assert cli(arguments) == 0
    said = capsys.readouterr()
    assert "about " in said.err
    assert "decoder.burst" in said.out
    assert "HELM" in said.out
    assert {path.name for path in out.iterdir()} == {"options.json", RESULTS, REPORT, FIGURES, RUNS}
    figures: dict[str, Any] = json.loads((out / FIGURES).read_text())["figures"]
    assert 0 < figures["decoder.burst.single.policy.p99_ms"]["value"] < 10_001
    for router in ("helm", "random", "kv_aware"):
        assert 0 < figures[f"decoder.burst.{router}.one_node_static.p99_ms"]["value"] < 10_001
    clustered = [figures[f"decoder.burst.helm.{key}.p99_ms"]["value"] for key in ("hindsight_static", "policy")]
    assert clustered[0] <= figures["decoder.burst.helm.deployable_static.p99_ms"]["value"]
    assert all(value > 0 for value in clustered)
    # Again: nothing is left to measure, and the same comes out.
    before = (out / RESULTS).read_bytes()
    assert cli(arguments) == 0
    assert (out / RESULTS).read_bytes() == before
    assert json.loads((out / FIGURES).read_text())["figures"] == figures
    assert cli(["eval", "compare", str(out), str(out)]) == 0


def test_what_is_shown_in_the_report_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    map_folder, decision = tmp_path / "map", tmp_path / "decision.json"
    map_folder.mkdir()
    decision.write_text("{}")
    for given, json_file in ((("--decision", decision), decision), (("--map", map_folder), map_folder / "cells.json")):
        arguments = ["--json", str(json_file), "--overwrite", *map(str, given)]
        assert cli(["eval", "suite", "--output", str(tmp_path / "out"), *arguments]) == 2
        assert "is what is read, or lies in it" in capsys.readouterr().err


def test_recorded_arrivals_need_the_node_that_serves_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    azure(tmp_path / "azure.csv", [0.0, 1.0, 3.0])
    arguments = ["--output", str(tmp_path / "out"), "--traces", str(tmp_path), "--families", "hstu"]
    assert cli(["eval", "suite", *arguments]) == 2
    assert "served by the node of decoder; add it to --families" in capsys.readouterr().err


def test_a_folder_s_name_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    command._announce(small_plan(), command.Args(output=Path("out[/b]:boom:")))
    assert "out[/b]:boom:" in capsys.readouterr().err
