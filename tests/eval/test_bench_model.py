"""`helm-rl bench model`: what is refused, what is left out, and what is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eval import bench_model
from eval.bench_model import Args, main
from eval.engine import peers
from helm_rl import memory
from helm_rl.errors import UserError
from helm_rl.figures import Figure


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": ()}, "--parts needs at least one of queues, blocks, sampling"),
        ({"parts": ("queues", "queues")}, "--parts names a part twice: queues queues"),
        ({"seeds": 0}, "--seeds must lie in 1 to 100, got 0"),
        ({"mooncake": Path("absent")}, "--mooncake: there is no file absent"),
        ({"mooncake": Path(__file__), "parts": ("queues",)}, "--mooncake is read by the part blocks"),
        ({"json": Path(), "overwrite": True}, "is a folder; name a file"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(Args(**change))


def test_a_log_that_is_none_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("libcachesim")
    log = tmp_path / "log.jsonl"
    log.write_text("{}\n")
    with pytest.raises(UserError, match=r"log\.jsonl, line 1: field timestamp is missing"):
        main(Args(parts=("blocks",), mooncake=log))


def test_what_cannot_be_measured_is_left_out_with_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 20)
    monkeypatch.setattr(peers, "installed", lambda name: True)
    monkeypatch.setattr(bench_model, "MOONCAKE", tmp_path / "absent.jsonl")
    main(Args(parts=("blocks", "sampling")))
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "blocks is left out: there is no " in out
    assert "absent.jsonl; --mooncake names another place." in out
    assert "sampling is left out: it needs 3.0 GiB of free memory." in out
    monkeypatch.setattr(peers, "installed", lambda name: False)
    main(Args(parts=("blocks",)))
    assert "libcachesim is not installed" in capsys.readouterr().out


def test_a_quick_run_writes_figures_without_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    main(Args(parts=("queues",), quick=True, json=file))
    figures = json.loads(file.read_text())["figures"]
    assert 900 < figures["model.stall_p99_ms.link"]["value"] < 910
    assert {"model.md1_error.50", "model.mm1_error.80", "model.little_error.queues"} < figures.keys()
    assert all(figure["goal"] is None for figure in figures.values())
    assert "reached" not in capsys.readouterr().out


def test_figures_with_goals_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {
        "model.blocks_hit_ratio.1000": Figure(0.5, "", "higher"),
        "model.mm1_error.50": Figure(0.03, "", "lower", 0.02),
    }
    for table in bench_model.tables(figures):
        bench_model.console().print(table)
    out = capsys.readouterr().out
    assert re.search(r"mm1_error\.50 +│ +0\.03 │ +at most 0\.02 │ NO", out)
    assert out.index("mm1_error") < out.index("blocks_hit_ratio")
