"""`helm-rl bench env`: what is refused, and loads that lack a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.bench_env import Args, main
from helm_rl.errors import UserError

SCENARIO = """
name = "[/b] phases"
slo_ms = 100
seconds = 4
warm_s = 1
[hardware]
pool_gib = 4
[load]
rate = 0
users = 100
items = 1e5
[[load.phase]]
start_s = 0
seconds = 4
rate = 50
requests_per_visit = 1
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": float("nan")}, "--seconds must lie in 1 to 86,400, got nan"),
        ({"seconds": float("inf")}, "--seconds must lie in 1 to 86,400, got inf"),
        ({"seconds": 0.5}, "--seconds must lie in 1 to 86,400, got 0.5"),
        ({"repeats": 0}, "--repeats must be at least 1, got 0"),
        ({"json": Path(), "overwrite": True}, "is a folder; name a file"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(Args(**change))


def test_a_scenario_of_phases_alone_has_no_cold_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "[" / "b].toml"  # named in the title, where it is no markup
    path.parent.mkdir()
    path.write_text(SCENARIO)
    main(Args(scenario=str(path), seconds=4, repeats=1, json=tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["env.requests_per_s"]["value"] > 0
    assert "env.requests_per_s.hot" in figures
    assert "env.requests_per_s.cold" not in figures
    assert "env.requests_per_s.hot" in capsys.readouterr().out


def test_phases_that_the_load_served_does_not_reach_have_no_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "late.toml"
    late = SCENARIO.replace("seconds = 4\nwarm", "seconds = 40\nwarm").replace("start_s = 0", "start_s = 30")
    path.write_text(late.replace("rate = 0", "rate = 20"))
    main(Args(scenario=str(path), seconds=4, repeats=1, json=tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert "env.requests_per_s.cold" in figures
    assert "env.requests_per_s.hot" not in figures
    out = capsys.readouterr().out.replace("\n", " ")
    assert "env.requests_per_s.hot is left out: the first 4 s have no request of a phase; raise --seconds." in out
