"""`helm-rl eval live` and `helm-rl calibrate hardware` on a small scenario, and what they refuse."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_engine.backends.device import CudaUnavailableError
from envs.serving.live_compute import Network
from eval.live import command, hardware, reuse
from eval.live.ladder import Batch
from eval.live.overhead import USERS, Overhead
from helm_rl import cli
from helm_rl.errors import UserError
from helm_rl.figures import Figure
from helm_rl.profiles.hardware import HARDWARE
from helm_rl.profiles.hardware_file import load_hardware
from helm_rl.profiles.published import POINTS
from tests.eval.live.small import SMALL


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "small.toml").write_text(SMALL)
    return str(tmp_path / "small.toml")


def test_this_machine_is_measured_and_tried(small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "IDLE_S", 3.0)
    monkeypatch.setattr(hardware, "WARM_S", 1.0)
    output = tmp_path / "mine.toml"
    options = ["--rounds", "2", "--seconds", "2", "--table-rows", "4096", "--plot", str(tmp_path / "q.png")]
    asked = ["calibrate", "hardware", "--scenario", small, "--output", str(output), *options]
    assert cli.main([*asked, "--json", str(tmp_path / "f.json")]) == 0
    profile = load_hardware(output)
    figures = json.loads((tmp_path / "f.json").read_text())["figures"]
    value = {name.removeprefix("calibrate."): figure["value"] for name, figure in figures.items()}
    assert profile.peak_tflop_s == pytest.approx(value["peak_gflop_s"] * 1e-3)
    assert profile.request_ms == value["request_ms"] >= 0
    assert value["in_service"] > 0.5
    assert 0 < profile.linear_efficiency <= 1
    assert 0 < profile.local_gb_s < profile.pcie_gb_s * 100
    assert profile.hbm_gib > 0.1
    assert profile.source.startswith("measured: ")
    assert profile.extrapolated == ()
    assert {"p50_error", "p99_error", "others_share", "prefill_error.max"} <= set(value)
    assert figures["calibrate.p99_error"]["goal"] == 0.2
    assert (tmp_path / "q.png").read_bytes()[:4] == b"\x89PNG"
    assert cli.main(asked) == 2  # it exists


def test_the_parts_of_eval_live(small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(command, "OVERHEAD_ROUNDS", 3)
    monkeypatch.setattr(command, "REUSE_ROUNDS", 1)
    monkeypatch.setattr(reuse, "LENGTHS", (128, 512, 1024))
    waits: list[Network] = []
    monkeypatch.setattr(Network, "wait", lambda network: waits.append(network))
    options = ["--seconds", "12", "--warm-s", "1", "--table-rows", "4096", "--statics", "0.4", "--loads", "0.3"]
    asked = ["eval", "live", "--scenario", small, *options, "--plot", str(tmp_path / "q.svg")]
    assert cli.main([*asked, "--json", str(tmp_path / "f.json")]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())["figures"]
    entrants = {name.split(".")[2] for name in figures if name.startswith("live.contest.")}
    assert entrants == {"deployable_static", "static_40"}
    assert figures["live.model_p50_error.30"]["goal"] == 0.1
    assert figures["live.model_p99_error.30"]["goal"] == 0.2
    assert figures["live.replayed_p99_error.30"]["goal"] is None
    assert figures["live.overhead"]["goal"] == 0.03
    assert len(waits) == 2 * USERS * (1 + 3)  # each request on plain tensors, before it is timed and timed
    assert "live.p99_vs_deployable_static" not in figures  # without a policy
    assert 0 <= figures["live.contest.static_40.slo"]["value"] <= 1
    assert {f"live.reuse.1024.{share}" for share in ("50", "75", "87.5", "93.75")} <= set(figures)
    assert 0 < figures["live.reuse.1024.93.75"]["value"] < 1
    assert figures["live.reuse_error.l20"]["value"] < 1
    assert (tmp_path / "q.svg").read_text().startswith("<?xml")
    printed = capsys.readouterr().out
    assert "paced to 0.01 GB/s" in printed
    assert "Other processes took" in printed


def test_published_savings_by_hand() -> None:
    told = reuse.published("l20")
    assert told[4096][0.5] == pytest.approx(1 - 43 / 71.5)
    assert told[2048][1920 / 2048] == pytest.approx(1 - 6.2 / 30.2)
    assert set(told) == {1024, 2048, 4096}
    assert len([p for p in POINTS if p.hardware == "l20" and p.fits == "compute"]) == sum(map(len, told.values())) + 3


def test_overhead_is_the_median_over_pairs() -> None:
    plain = np.array([1.0, 2.0, 4.0])
    found = Overhead(plain * [1.1, 1.5, 1.2], plain, plain * 1.01, plain, 0, 0.0)
    assert found.wall == pytest.approx(0.2)
    assert found.cpu == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": ()}, "--parts must name at least one of model, contest"),
        ({"parts": ("reuse", "reuse")}, "none twice"),
        ({"seconds": float("nan")}, "--seconds must be 5 to 86,400, got nan"),
        ({"block_s": 0.0}, "--block-s must be 0.5 to"),
        ({"warm_s": -1.0}, "--warm-s must be 1 to"),
        ({"loads": (0.3, 1.2)}, r"--loads must lie in \.01 to \.95, got 0.3 1.2"),
        ({"loads": ()}, r"--loads must lie in \.01 to \.95, got none"),
        ({"loads": (0.301, 0.304)}, "--loads must be a hundredth apart, got 0.301 0.304"),
        ({"table_rows": 0}, "--table-rows must lie in 1 to 2147483647, got 0"),
        ({"statics": (0.5, 0.501)}, "--statics must be a hundredth apart, got 0.5 0.501"),
        ({"statics": (0.95,)}, "--statics must lie in 0.1 to 0.9, got 0.95"),
        ({"parts": ("reuse",), "plot": Path("q.png")}, "--plot draws what part model measures"),
        ({"scenario": "burst"}, r"model\.architecture must be hstu"),
        ({"hardware": Path("absent.toml")}, "absent.toml: no such file"),
        ({"policy": Path("absent")}, "absent"),
        ({"seed": -1}, "--seed must lie in"),
    ],
)
def test_eval_live_refuses_what_cannot_be(change: dict[str, Any], message: str, small: str) -> None:
    with pytest.raises(UserError, match=message):
        command.main(command.Args(**({"scenario": small} | change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": Path("mine.json")}, "--output must end in .toml"),
        ({"rounds": 1}, "--rounds must be 2 to"),
        ({"seconds": 0.5}, "--seconds must be 0, for no trial"),
        ({"table_rows": 0}, "--table-rows must lie in 1 to 2147483647, got 0"),
        ({"load": 0.0}, r"--load must be \.01 to"),
        ({"seconds": 0.0, "plot": Path("q.png")}, "--plot draws the trial"),
        ({"scenario": "burst"}, r"model\.architecture must be hstu"),
    ],
)
def test_calibrate_refuses_what_cannot_be(change: dict[str, Any], message: str, small: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        hardware.main(hardware.Args(**({"output": tmp_path / "o.toml", "scenario": small} | change)))


def test_a_pool_that_is_too_small_for_the_overhead_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    """8 histories of 220 tokens in pages of 64 take 32 pages; of 31 the KV cache gets nine tenths."""
    (tmp_path / "tight.toml").write_text(SMALL.replace("pool_gib = 0.03125", f"pool_gib = {31 / 32768}"))
    with pytest.raises(UserError, match=r"8 histories of 220 tokens, which take 32 pages, and the KV cache has 28 at"):
        command.main(command.Args(scenario=str(tmp_path / "tight.toml")))


def test_what_was_measured_is_shown_where_a_later_part_fails(
    small: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def measured(args: Any, scenario: Any, report: command.Report, advance: Any) -> None:
        report.figures["live.overhead"] = Figure(0.0123, "", "lower", 0.03)

    def failed(*_: Any) -> None:
        raise UserError("the machine is busy")

    monkeypatch.setattr(command, "_overhead", measured)
    monkeypatch.setattr(command, "_reuse", failed)
    with pytest.raises(UserError, match="the machine is busy"):
        command.main(command.Args(scenario=small, parts=("overhead", "reuse")))
    assert ".0123" in capsys.readouterr().out


def test_a_full_disk_leaves_the_figures_of_a_calibration_on_the_screen(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    profile = HARDWARE["cpu-thread"]
    batch = Batch(1, 100, 0, 1e9, 1e8, 20.0)
    found = hardware.Calibration([batch], profile, 1.25, None, 0.0)
    monkeypatch.setattr(hardware._Calibrating, "run", lambda self: found)

    def full(path: Path, profile: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(hardware, "save_hardware", full)
    assert cli.main(["calibrate", "hardware", "--scenario", small, "--output", str(tmp_path / "o.toml")]) == 1
    printed = capsys.readouterr()
    assert "calibrate.in_service" in printed.out
    assert "No space left on device" in printed.err


def test_without_a_gpu_nothing_is_measured_on_one(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def none() -> None:
        raise CudaUnavailableError("backend 'cuda' needs CuPy")

    monkeypatch.setattr("envs.serving.live.CupyDevice", none)
    asked = ["calibrate", "hardware", "--scenario", small, "--output", str(tmp_path / "o.toml"), "--backend", "cuda"]
    assert cli.main([*asked, "--table-rows", "64"]) == 2
    assert "needs CuPy" in capsys.readouterr().err
