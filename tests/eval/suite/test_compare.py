from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.comparison import DEPLOYABLE, POLICY
from eval.suite.compare import figures, left_out, pairs
from eval.suite.runs import MEASURES, RUNS, Read, Runs, read_runs, write_runs
from eval.suite.suite import Suite
from eval.suite.summary import Summary, summarise
from helm_rl.cli import main as cli
from helm_rl.errors import UserError


@pytest.fixture(scope="module")
def summary(suite: Suite) -> Summary:
    return summarise(suite)


@pytest.fixture
def run(summary: Summary, tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    write_runs(tmp_path / "a" / RUNS, summary)
    return tmp_path / "a"


def slower(run: Path, factor: float) -> Path:
    """Another suite, whose policy takes so many times as long on Burst."""
    document = json.loads((run / RUNS).read_text())
    values = document["cells"]["decoder.burst"]["controllers"][POLICY]["values"]
    values["p99_ms"] = [factor * value for value in values["p99_ms"]]
    other = run.parent / "b"
    other.mkdir()
    (other / RUNS).write_text(json.dumps(document))
    return other


def test_runs_are_read_as_they_were_written(run: Path, summary: Summary) -> None:
    found = read_runs(run).runs
    cell = found.cells["decoder.burst"]
    assert cell.controllers[DEPLOYABLE].values["p99_ms"] == tuple(summary.cells[2].p99(DEPLOYABLE))
    assert set(cell.controllers[DEPLOYABLE].values) == set(MEASURES)
    assert len(cell.traces) == 2


def test_a_suite_is_the_same_as_itself(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["eval", "compare", str(run), str(run)]) == 0
    assert "96 of 96 controllers on the loads of both came to the same P99s in both." in capsys.readouterr().out


def test_a_slower_policy_is_listed_by_how_much(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures_path = tmp_path / "figures.json"
    assert cli(["eval", "compare", str(run), str(slower(run, 1.25)), "--json", str(figures_path)]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "decoder.burst" in line]
    assert "HELM" in line
    assert "+25.0 %" in line
    found = {name: figure["value"] for name, figure in json.loads(figures_path.read_text())["figures"].items()}
    assert found["compare.decoder.burst.policy.p99_ratio"] == pytest.approx(1.25)
    assert found["compare.decoder.trend.policy.p99_ratio"] == 1.0
    assert found["compare.all.policy.improvement"] == pytest.approx((5 * 0.5 + 0.0) / 6)


def test_only_draws_that_both_have_are_compared(run: Path) -> None:
    one = read_runs(run).runs
    cells = {}
    for name, cell in one.cells.items():
        controllers = {
            key: each.model_copy(update={"values": {m: v[1:] for m, v in each.values.items()}})
            for key, each in cell.controllers.items()
        }
        cells[name] = cell.model_copy(update={"traces": cell.traces[1:], "controllers": controllers})
    other = Read(Path("b"), Runs(helm_rl="0", cells=cells))
    found = pairs(Read(run, one), other)
    assert {len(pair.first) for pair in found} == {1}
    assert set(figures(found)) == set(figures(pairs(Read(run, one), Read(run, one))))
    strangers = {name: cell.model_copy(update={"traces": ("0",)}) for name, cell in cells.items()}
    with pytest.raises(UserError, match="have no load with the same arrivals in common"):
        pairs(Read(run, one), Read(Path("b"), Runs(helm_rl="0", cells=strangers)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "document: input should be an object"),
        ('{"helm_rl": "0", "cells": {}}', "cells: dictionary should have at least 1 item"),
        (
            '{"helm_rl": "0", "cells": {"a": {"scenario": "s", "slo_ms": 0, "traces": ["t"], "controllers": {}}}}',
            "slo_ms",
        ),
        (
            '{"helm_rl": "0", "cells": {"a": {"scenario": "s", "slo_ms": 1, "traces": ["t"], "controllers": '
            '{"p": {"title": "P", "identity": "", "values": {"p99_ms": [1]}}}}}}',
            "cells.a: p has the values p99_ms, not ",
        ),
    ],
)
def test_what_is_no_suite_is_a_sentence(
    run: Path, tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "b"
    other.mkdir()
    assert cli(["eval", "compare", str(run), str(other)]) == 2
    assert "there is no runs.json in it" in capsys.readouterr().err
    (other / RUNS).write_text(text)
    assert cli(["eval", "compare", str(run), str(other)]) == 2
    said_here = capsys.readouterr()
    assert said in said_here.err
    assert said_here.out == ""


def test_what_is_left_out_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = read_runs(run)
    document = json.loads((run / RUNS).read_text())
    cells = document["cells"]
    del cells["hstu.burst"]["controllers"]["naive"]
    cells["new.load"] = cells.pop("decoder.steady")
    cells["decoder.trend"]["scenario"] = "another"
    cells["decoder.burst"]["traces"] = ["x", "y"]
    cells["hstu.trend"]["traces"][0] = "z"
    other = run.parent / "b"
    other.mkdir()
    (other / RUNS).write_text(json.dumps(document))
    assert left_out(one, read_runs(other)) == [
        "decoder.steady (only in A)",
        "decoder.trend (another scenario in B)",
        "decoder.burst (other arrivals in B)",
        "new.load (only in B)",
        "2 draws of hstu.trend (only in one)",
        "naive (only in A)",
    ]
    assert cli(["eval", "compare", str(run), str(other)]) == 0
    assert "Not compared: decoder.steady (only in A);" in capsys.readouterr().out
    assert cli(["eval", "compare", str(run), str(run)]) == 0
    assert "Not compared" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [0, -1.5])
def test_a_p99_that_is_no_latency_is_a_sentence(run: Path, capsys: pytest.CaptureFixture[str], value: float) -> None:
    document = json.loads((run / RUNS).read_text())
    document["cells"]["decoder.burst"]["controllers"][POLICY]["values"]["p99_ms"][0] = value
    (run / RUNS).write_text(json.dumps(document))
    assert cli(["eval", "compare", str(run), str(run)]) == 2
    assert "cells.decoder.burst: policy has a p99_ms that is no latency" in capsys.readouterr().err
