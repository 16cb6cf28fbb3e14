"""`helm-rl bench engine`: what is refused, what is written, and peers that are not there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from eval import bench_engine
from eval.bench_engine import PARTS, Args, main, tables
from eval.engine import peers
from eval.engine.caches import POLICIES
from helm_rl.errors import UserError
from helm_rl.figures import Figure


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify": 0}, "--verify must lie in 1 to 1,000,000,000, got 0"),
        ({"traces": Path("absent")}, "--traces: there is no folder absent"),
        ({"parts": ()}, "--parts needs at least one of speed, misses"),
        ({"parts": ("speed", "speed")}, "--parts names a part twice: speed speed"),
        ({"plot": Path("x.jpg")}, r"--plot must end in .png or .svg, got x.jpg"),
        ({"plot": Path("x.svg"), "parts": ("speed",)}, "--plot draws the part memory, which --parts leaves out"),
        ({"plot": Path("x.svg"), "json": Path("x.svg")}, "--json and --plot name the same file"),
        ({"json": Path(), "overwrite": True}, "is a folder; name a file"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(Args(**change))


def test_parts_write_their_figures_and_the_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "installed", lambda name: False)
    plot, figures_file = tmp_path / "memory.svg", tmp_path / "figures.json"
    main(Args(parts=("misses", "memory", "payload"), quick=True, verify=300, plot=plot, json=figures_file))
    figures = json.loads(figures_file.read_text())["figures"]
    assert figures["engine.payload_operations"]["value"] == 300
    assert figures["engine.payload_wrong_bytes"]["value"] == 0
    assert all(figure["goal"] is None for figure in figures.values()), "--quick"
    for slots in (4_096, 16_384, 65_536):
        point = {end: figures[f"engine.ns_per_lookup.{slots}{end}"]["value"] for end in ("", ".pointer_chase")}
        share = figures[f"engine.share_of_latency_limit.{slots}"]["value"]
        assert share == pytest.approx(point[".pointer_chase"] / point[""])
    assert not any("miss_ratio" in name for name in figures)
    assert plot.read_text().count("<svg") == 1
    out = capsys.readouterr().out
    assert "libcachesim is not installed, so its figures are left out" in out
    assert re.search(r"engine\.payload_wrong_bytes +│ +0 B │\n", out)
    assert "reached" not in out
    assert re.search(r"│ 65536 +│ +[\d.]+ │ +[\d.]+ │ +[\d.]+ │", out)


def test_the_table_says_which_goals_are_reached(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {
        "engine.ratio_vs_cachetools.8": Figure(19.99, "", "higher", 20.0),
        "engine.payload_wrong_bytes": Figure(0, "B", "lower", 0.0),
        "engine.ghost_cost": Figure(0.03, "", "lower", 0.03),
        "engine.policy.zipf.8.lru": Figure(0.5, "", "lower"),
        "engine.policy.zipf.8.libcachesim_lru": Figure(0.25, "", "lower"),
        "engine.policy.mean.lru": Figure(0.125, "", "lower"),
    }
    for table in tables(figures):
        bench_engine.console().print(table)
    out = capsys.readouterr().out
    assert re.search(r"cachetools\.8 +│ +19\.99 │ +at least 20 │ NO", out)
    assert re.search(r"payload_wrong_bytes +│ +0 B │ +at most 0 │ yes", out)
    assert re.search(r"ghost_cost +│ +0\.03 │ +at most 0\.03 │ yes", out)
    assert re.search(r"│ +│ +lru ┃|┃ +┃ +lru ┃ libCacheSim lru ┃", out)
    assert re.search(r"│ zipf\.8 │ +0\.5 │ +0\.25 │", out)
    assert re.search(r"│ mean +│ 0\.125 │ +│", out)


def test_policies_are_the_engines() -> None:
    offered = get_args(get_args(get_type_hints(Args)["policy"])[0])
    assert sorted(offered) == sorted(POLICIES)


def test_every_figure_is_named_in_the_help() -> None:
    """A figure's stem, up to what varies, is in the text that `--help` shows."""
    text = Args.__doc__
    assert text is not None
    sources = Path(bench_engine.__file__).parent.joinpath("engine").glob("*.py")
    stems = {stem for path in sources for stem in re.findall(r'f?"(engine\.[a-z_]+)', path.read_text())}
    assert len(stems) > 15
    named = re.findall(r"engine\.[a-z0-9_]+", re.sub(r"engine\.payload_\{([a-z_,]+)\}", _payload_names, text))
    assert not {stem for stem in stems if not any(name.startswith(stem) for name in named)}
    assert all(f"{part}: " in text for part in PARTS)


def _payload_names(match: re.Match[str]) -> str:
    return " ".join(f"engine.payload_{name}" for name in match[1].split(","))
