"""`helm-rl bench trace`: its figures are there, mean what they say, and its arguments are checked."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from eval import bench_trace
from eval.workload import curves, fit, generator
from helm_rl import cli
from helm_rl.figures import Figure
from helm_rl.scenario import LoadSection


def test_a_quick_run_writes_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("libcachesim")
    asked = ["bench", "trace", "--quick", "--parts", "generate", "curves", "fit", "--traces", str(tmp_path)]
    assert cli.main([*asked, "--json", str(tmp_path / "f.json")]) == 0
    said = capsys.readouterr().out
    assert "has no sample of azure, mooncake, ragpulse, twitter" in said.replace("\n", " ")
    figures = json.loads((tmp_path / "f.json").read_text())["figures"]
    assert {"trace.ids_per_s.generate", "trace.mrc_error", "trace.mrc_speedup"} <= figures.keys()
    assert all(figure["goal"] is None for figure in figures.values())
    for statistic in ("rate", "exponent", "pause_median", "pause_sigma", "hot_user_ratio", "history_mean"):
        assert 0 <= figures[f"trace.generate_error.{statistic}"]["value"] < 0.1
    assert figures["trace.mrc_error"]["value"] < 0.06  # of about 500 keys
    assert figures["trace.mrc_error.0.5"]["value"] < figures["trace.mrc_error.0.01"]["value"]
    assert cli.main([*asked, "--json", str(tmp_path / "f.json")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_run_that_is_ended_removes_the_log_that_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_trace, "measure", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        bench_trace.main(bench_trace.Args())
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_held_against_the_generator_is_its_law() -> None:
    load = LoadSection(rate=1, requests_per_visit=3, think_s=60 * np.exp(0.5), think_sigma=1)
    assert generator._hot_user_ratio(load) == pytest.approx(2 / 3 / 2)  # the median pause is 60 s
    assert generator._dispersion(load) == 1
    varied = LoadSection(rate=5, rate_cv=1, rate_cv_s=0.001)
    assert generator._dispersion(varied) == pytest.approx(1.01, abs=1e-4)
    assert generator._dispersion(LoadSection(rate=5, rate_cv=1, rate_cv_s=1e5)) == pytest.approx(51, rel=0.01)


def test_a_wrong_curve_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libcachesim")
    right = curves.measure(50_000)["trace.mrc_error"].value
    monkeypatch.setattr(curves, "RATE", 1.0)
    exact = curves.measure(50_000)["trace.mrc_error"].value
    assert exact < 1e-4 < right


def test_fits_stand_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / "azure_llm_2023"
    folder.mkdir()
    rng = np.random.default_rng(1)
    seconds = np.cumsum(rng.exponential(0.5, 400))
    rows = [
        f"2023-11-16 18:{int(s // 60):02d}:{s % 60:010.7f},{tokens},5"
        for s, tokens in zip(seconds, rng.integers(50, 900, 400), strict=True)
    ]
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n"
    )
    figures, notes = fit.measure(tmp_path)
    assert list(notes) == ["azure"]
    rate = figures["trace.fit.azure.rate_per_s.measured"].value
    assert rate == pytest.approx(400 / (seconds[-1] - seconds[0]), rel=0.01)
    generated = figures["trace.fit.azure.rate_per_s.generated"].value
    assert figures["trace.fit.azure.rate_per_s"].value == pytest.approx(abs(generated / rate - 1))
    titles = [str(table.title) for table in bench_trace.tables(figures | {"trace.x": Figure(1, "", "lower", 2)})]
    assert titles == ["Goals", "Fitted scenarios"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "10"], "--rows must be at least 1,000, got 10"),
        (["--parts", "fit", "fit"], "--parts names a part twice: fit fit"),
        (["--traces", "no"], "--traces no is not a folder"),
        (["--json", "no/x.json"], "the folder no does not exist"),
    ],
)
def test_wrong_arguments_are_told(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "trace", *arguments]) == 2
    assert said in capsys.readouterr().err
