"""`helm-rl bench control`: a short run with real processes, and what its figures must not show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.bench_control import uncounted, verdict
from eval.control.faults import FAULTS
from helm_rl import cli
from helm_rl.checkpoint import BoundsSection
from helm_rl.figures import Figure
from helm_rl.runtime.counters import Cause
from tests.helm_rl.runtime.feeds import make_bundle_at

SCENARIO = """
name = "short"
slo_ms = 50
seconds = 20
warm_s = 1
[model]
kv_heads = 1
head_dim = 8
features_per_token = 4
row_bytes = 64
candidates = 16
[hardware]
pool_gib = 0.015625
page_kib = 64
[control]
alpha_min = 0.15
alpha_max = 0.85
[load]
rate = 40
users = 200
items = 100000
history_mean = 300
history_max = 1024
"""
BOUNDS = BoundsSection(alpha_min=0.15, alpha_max=0.85, rate_per_s=0.06, interval_s=(0.1,))


@pytest.mark.slow
def test_a_short_run_with_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One cycle: every fault, a bad bundle, a good one, a kill, and the end."""
    (tmp_path / "short.toml").write_text(SCENARIO)
    make_bundle_at(tmp_path / "bundle", 0.15)
    before = {file.name: file.read_bytes() for file in (tmp_path / "bundle").iterdir()}
    options = {
        "scenario": "short.toml",
        "seconds": "1",
        "interval-s": "0.15",
        "compute-scale": "0",
        "table-rows": "32768",
    }
    words = [
        word
        for name, value in options.items()
        for word in (f"--{name}", value.replace("short", str(tmp_path / "short")))
    ]
    status = cli.main(["bench", "control", str(tmp_path / "bundle"), *words, "--json", str(tmp_path / "figures.json")])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    value = {name.removeprefix("control."): figure["value"] for name, figure in figures.items()}
    assert (value["cycles"], value["kills"], value["reloads_ok"], value["reloads_bad"]) == (1, 1, 1, 1)
    assert all(value[f"injected.{fault.name}"] == fault.answers for fault in FAULTS)
    answers = sum(fault.answers for fault in FAULTS if fault.cause is not None)
    assert sum(number for name, number in value.items() if name.startswith("refused.")) >= answers + 2
    assert value["refused.baseline"] == 2  # at the start of either process
    assert value["targets_unapplied"] >= 6
    assert 0.15 <= value["alpha_asked_min"] <= value["alpha_asked_max"] <= 0.85
    assert value["requests"] > 20 * value["seconds"]
    assert value["longest_gap_s"] < 2
    assert value["lost"] == value["wrong_bytes"] == 0
    assert value["rows_verified"] > 64 * value["requests"] < 64 * value["pages_verified"]
    assert value["pages_moved"] > 0
    assert all(name in printed.out for name in figures)
    assert {file.name: file.read_bytes() for file in (tmp_path / "bundle").iterdir()} == before


SOUND: dict[str, float] = {
    "alpha_asked_min": 0.2,
    "alpha_asked_max": 0.8,
    "longest_gap_s": 0.3,
    **{f"injected.{fault.name}": 3 for fault in FAULTS},
    "uncounted": 0,
    "intervals": 100,
    "decisions": 60,
    "intervals_missed": 0,
    "kills": 2,
    "reloads_ok": 2,
    "reloads_bad": 2,
    "cycles": 2,
    "log_lines_wrong": 0,
    "exit_status": 0,
    "lost": 0,
    "wrong_bytes": 0,
    "wrong_scores": 0,
    "rows_verified": 9,
    "pages_verified": 0,
    "scores_verified": 9,
    "pages_moved": 9,
    "rss_growth_mib": 3,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"alpha_asked_max": 0.9}, "alpha from 0.2 to 0.9 was asked for"),
        ({"alpha_asked_min": 0.1}, "alpha from 0.1 to 0.8 was asked for"),
        ({"alpha_asked_min": float("inf"), "alpha_asked_max": -float("inf")}, "was asked for"),
        ({"longest_gap_s": 2.5}, "serving stopped for 2.50 s"),
        ({"injected.late": 0, "injected.nan": 0}, "nan, late never happened"),
        ({"uncounted": 1}, "1 faults were not counted"),
        ({"intervals_missed": 2}, "2 intervals were missed"),
        ({"reloads_bad": 1}, "a bad bundle must be refused"),
        ({"decisions": 10}, "fewer than a third of the intervals"),
        ({"log_lines_wrong": 1}, "1 lines of its log were no JSON"),
        ({"exit_status": -15}, "it ended with status -15"),
        ({"lost": 2}, "2 requests were neither served nor shed"),
        ({"wrong_bytes": 1}, "1 bytes and 0 scores served were wrong"),
        ({"wrong_scores": 3}, "0 bytes and 3 scores served were wrong"),
        ({"pages_verified": 9, "scores_verified": 0}, None),
        ({"rows_verified": 0}, "nothing was checked"),
        ({"scores_verified": 0}, "nothing was checked"),
        ({"pages_moved": 0}, "no page changed owner"),
        ({"rss_growth_mib": 17}, "it grew by 17.0 MiB"),
        ({"rss_growth_mib": float("nan")}, "memory is not flat"),
    ],
)
def test_a_run_that_is_not_sound_is_told(changes: dict[str, Any], said: str | None) -> None:
    figures = {f"control.{name}": Figure(value, "", "lower") for name, value in (SOUND | changes).items()}
    complaint = verdict(figures, BOUNDS)
    assert (complaint is None) == (said is None)
    assert said is None or (complaint is not None and said in complaint)


@pytest.mark.parametrize(
    ("refused", "wrong"),
    [
        ({Cause.MISSING: 4, Cause.STALE: 4, Cause.LATE: 2}, 0),
        ({Cause.MISSING: 3, Cause.STALE: 4, Cause.LATE: 2}, 1),
        ({Cause.MISSING: 3, Cause.STALE: 4, Cause.LATE: 3}, 0),  # its answer came too late
        ({Cause.MISSING: 3, Cause.STALE: 5, Cause.LATE: 2}, 2),  # one was taken for another
        ({Cause.MISSING: 4, Cause.STALE: 4, Cause.LATE: 1}, 1),
        ({Cause.MISSING: 4, Cause.STALE: 4, Cause.LATE: 9}, 0),
    ],
)
def test_faults_are_counted_by_their_own_causes(refused: dict[Cause, float], wrong: float) -> None:
    assert uncounted({Cause.MISSING: 4, Cause.STALE: 4, Cause.LATE: 2}, refused) == wrong


@pytest.mark.parametrize("interval", ["nan", "0", "11"])
def test_an_interval_that_cannot_be_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "control", "helm-base-v1", "--interval-s", interval]) == 2
    assert "--interval-s must be .005 to 10, got" in capsys.readouterr().err
