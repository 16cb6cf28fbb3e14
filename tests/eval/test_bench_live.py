"""`helm-rl bench live`: its figures on a short run, and that a wrong byte or growing memory ends it with status 1."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import envs.serving.payload
from envs.live_env import HelmLiveEnv
from envs.serving.live import LiveNode
from eval import bench_live
from eval.bench_live import Args, main, verdict
from eval.growth import GROWTH_LIMIT_MIB
from helm_rl import cli
from helm_rl.errors import UserError
from helm_rl.figures import Figure
from tests.envs.worlds import trace

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
interval_s = 0.1
rate_per_s = 2
[load]
rate = 40
users = 200
items = 100000
history_mean = 300
history_max = 1024
"""


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "short.toml").write_text(SCENARIO)
    return {"scenario": str(tmp_path / "short.toml"), "seconds": 1.5, "warm_s": 0.5, "table_rows": 1 << 15}


def command(options: dict[str, Any], *more: str) -> list[str]:
    named = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    return ["bench", "live", *(word for pair in named for word in pair), *more]


def test_figures_of_a_short_run(options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command(options, "--json", str(tmp_path / "figures.json"))) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    value = {name.removeprefix("live."): figure["value"] for name, figure in figures.items()}
    assert 1.4 < value["seconds"] < 3
    assert 20 <= value["requests"] <= 40 * value["seconds"] * 2
    assert value["shed"] == value["wrong_bytes"] == 0
    assert value["resizes"] == 15  # at every interval
    assert 15 * 40 <= value["pages_moved"] <= 15 * 52  # of 256 pages, .2 of alpha a step
    assert value["rows_verified"] > 64 * value["requests"]  # the candidates, and what a KV miss reads
    assert value["pages_verified"] > value["requests"]
    assert 0 < value["engine_share"] < 1
    assert 0 < value["p99_ms"] < 1500
    printed = capsys.readouterr().out
    assert re.search(r"live\.resizes +│ +15 │ +at least 15 │ yes", printed)
    assert re.search(r"live\.wrong_bytes +│ +0 │ +at most 0 │ yes", printed)
    assert all(name in printed for name in figures)


def test_every_score_of_a_network_is_checked(options: dict[str, Any], tmp_path: Path) -> None:
    network = "[model]\nprofile = 'hstu-3'\nlayers = 2\nd_model = 32\nheads = 1\nvalue_bytes = 4\n"
    text = SCENARIO.replace("[model]\n", network).replace("head_dim = 8", "head_dim = 16")
    (tmp_path / "short.toml").write_text(text)
    assert cli.main(command(options, "--json", str(tmp_path / "figures.json"))) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    value = {name.removeprefix("live."): figure["value"] for name, figure in figures.items()}
    assert value["lost"] == value["wrong_bytes"] == value["wrong_scores"] == value["pages_verified"] == 0
    assert value["scores_verified"] == pytest.approx(16 * value["requests"], abs=16 * 40)
    assert value["pages_moved"] > 0


def test_a_load_is_generated_for_as_long_as_it_takes(options: dict[str, Any], tmp_path: Path) -> None:
    short = SCENARIO.replace("seconds = 20", "seconds = 1")
    (tmp_path / "short.toml").write_text(short)
    assert cli.main(command(options, "--json", str(tmp_path / "figures.json"))) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["live.requests"]["value"] > 20


def test_a_machine_that_is_late_ends_when_the_time_is_over(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step that begins late takes the intervals that have passed in one."""
    step = HelmLiveEnv.step
    calls: list[int] = []

    def late(env: HelmLiveEnv, action: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            time.sleep(0.35)
        return step(env, action)

    monkeypatch.setattr(HelmLiveEnv, "step", late)
    assert cli.main(command(options, "--json", str(tmp_path / "figures.json"))) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert len(calls) < 20
    assert figures["live.resizes"]["goal"] == len(calls) - 5
    assert figures["live.seconds"]["value"] == pytest.approx(1.5, abs=0.11)


def test_a_wrong_byte_ends_it_with_status_1_and_is_in_the_figures(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = envs.serving.payload.make_table

    def damaged(table: int, rows: int, row_bytes: int) -> Any:
        bytes_ = made(table, rows, row_bytes)
        bytes_[0, 0] ^= 1
        return bytes_

    monkeypatch.setattr(envs.serving.payload, "make_table", damaged)
    with pytest.raises(SystemExit) as ended:
        cli.main(command(options | {"seconds": 0.3}, "--json", str(tmp_path / "figures.json")))
    assert str(ended.value).startswith("error: ")
    assert str(ended.value).endswith(
        " bytes and 0 scores served were wrong"
    )  # Python prints it, and exits with status 1
    assert json.loads((tmp_path / "figures.json").read_text())["figures"]["live.wrong_bytes"]["value"] > 0


def test_memory_that_grows_is_no_sound_run(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    end = LiveNode._end

    def leaking(self: LiveNode, served: Any) -> None:
        kept.append(np.ones(1 << 20, np.uint8))  # a MiB a batch
        end(self, served)

    monkeypatch.setattr(LiveNode, "_end", leaking)
    with pytest.raises(SystemExit, match=r"memory is not flat: it grew by .* MiB"):
        main(Args(**options))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"rss_growth_mib": GROWTH_LIMIT_MIB}, None),
        ({"rss_growth_mib": GROWTH_LIMIT_MIB + 1}, "memory is not flat"),
        ({"rss_growth_mib": float("nan")}, "memory is not flat"),
        ({"lost": 2}, "2 requests were neither served nor shed"),
        ({"wrong_bytes": 1}, "1 bytes and 0 scores served were wrong"),
        ({"wrong_scores": 3}, "0 bytes and 3 scores served were wrong"),
        ({"pages_verified": 0, "scores_verified": 1}, None),
        ({"rows_verified": 0}, "nothing was checked"),
        ({"pages_verified": 0}, "nothing was checked"),
        ({"resizes": 0}, "no page changed owner"),
    ],
)
def test_verdict(change: dict[str, float], complaint: str | None) -> None:
    sound = {"lost": 0, "wrong_bytes": 0, "wrong_scores": 0, "rows_verified": 5, "pages_verified": 5}
    values = sound | {"scores_verified": 0, "resizes": 2, "rss_growth_mib": -3} | change
    found = verdict({f"live.{name}": Figure(value, "", "lower") for name, value in values.items()})
    assert (found is None) if complaint is None else (found is not None and complaint in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": float("nan")}, "--seconds must be above 0"),
        ({"speed": float("inf")}, r"--speed must be \.01 to 100, got inf"),
        ({"warm_s": 0}, "--warm-s must be above 0"),
        ({"json": Path(), "overwrite": True}, "is a folder; name a file"),
        ({"trace": Path("absent.parquet")}, "absent.parquet does not exist"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(Args(**(options | change)))


def test_a_trace_that_is_too_short_is_refused_with_its_length(options: dict[str, Any], tmp_path: Path) -> None:
    trace([100.0 * k for k in range(20)]).save(tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"t.parquet lasts 1.9 s at speed 1; --warm-s and --seconds ask for 2"):
        main(Args(**options, trace=tmp_path / "t.parquet"))
    assert bench_live.__doc__ is not None
