"""What runs come to, by hand: from a part to the whole, the parts of a run, tables, picture."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from eval.scaling import summary
from eval.scaling.cost import Cost
from eval.scaling.plot import draw_scaling
from eval.scaling.summary import Scaling, Whole, caches

NAN = math.nan


def cost(nodes: int, share: float, placed_s: float = NAN, alone_s: float = NAN, peak_bytes: int = 10**9) -> Cost:
    """A run of 2 s of set-up and, for each node, 10 s times the share: 1 of arrivals, 7 of serving, 2 of Python."""
    scale = nodes * share
    return Cost(
        nodes=nodes,
        share=share,
        requests=round(1_000_000 * scale),
        arrivals_s=scale,
        setup_s=2.0,
        loop_s=7 * scale,
        python_s=2 * scale,
        placed_s=placed_s,
        alone_s=alone_s,
        load_ns=100.0 + nodes,
        node_bytes=3 << 20,
        peak_bytes=peak_bytes,
    )


def scaling() -> Scaling:
    whole = cost(2, 1.0, peak_bytes=3_000_000_000)
    short = cost(2, 0.1, peak_bytes=1_200_000_000)  # 1,800,000 requests fewer: 1,000 bytes each
    costs = [cost(4, 0.1, placed_s=2.4, alone_s=1.6, peak_bytes=1_500_000_000), cost(1, 1.0, 5.0, 4.0), whole]
    return Scaling(costs, (whole, short), (0.8, 0.9), 1.25)


def test_what_grows_with_the_length_is_scaled_and_the_nodes_are_made_once() -> None:
    whole = Whole(cost(4, 0.1))
    assert whole.requests == 4_000_000
    assert whole.cpu_s == pytest.approx(2 + 4 * 10)
    assert whole.us_per_request == pytest.approx(10.5)
    assert whole.runs_per_hour == pytest.approx(3600 / 42)


def test_the_parts_of_a_run() -> None:
    parts_s = Whole(cost(4, 0.1, placed_s=2.4, alone_s=1.6)).parts_s()  # serving takes 2.8 s of a tenth
    expected = {"work": 16, "misses": 8, "router": 4, "python": 8, "arrivals": 4, "setup": 2}
    assert parts_s == pytest.approx(expected)
    assert sum(parts_s.values()) == pytest.approx(42)


@pytest.mark.parametrize(
    ("placed_s", "alone_s", "expected"),
    [
        (30.0, 20.0, (20, 8, 0)),  # without a router slower than with one, which takes 28 s
        (15.0, 16.0, (16, 0, 12)),
        (40.0, 30.0, (28, 0, 0)),
    ],
)
def test_disturbed_measurements_make_no_part_negative(
    placed_s: float, alone_s: float, expected: tuple[float, float, float]
) -> None:
    parts_s = Whole(cost(4, 1.0, placed_s, alone_s)).parts_s()
    assert (parts_s["work"], parts_s["misses"], parts_s["router"]) == expected
    assert sum(parts_s.values()) == pytest.approx(42)


def test_figures_by_hand() -> None:
    found = scaling()
    assert found.linearity == pytest.approx(1.0)
    figures = {name: figure.value for name, figure in found.figures().items()}
    assert figures["scaling.run_cpu_s.1_nodes"] == pytest.approx(12)
    assert figures["scaling.runs_per_hour.1_nodes"] == pytest.approx(300)
    assert figures["scaling.suite_core_h.1_nodes"] == pytest.approx(84 * 12 / 3600)
    assert figures["scaling.cost_us.4_nodes"] == pytest.approx(10.5)
    assert figures["scaling.bytes_per_request"] == pytest.approx(1_000)
    assert figures["scaling.gb.2_nodes"] == pytest.approx(3.0)
    assert figures["scaling.gb.4_nodes"] == pytest.approx(1.5 + 3_600_000 * 1_000 * 1e-9)
    assert figures["scaling.share.misses.4_nodes"] == pytest.approx(8 / 42)
    assert figures["scaling.share.router.1_nodes"] == pytest.approx(2 / 12)
    assert "scaling.share.router.2_nodes" not in figures  # was not served without one
    assert figures["scaling.node_mib"] == 3.0
    assert figures["scaling.two_processes"] == pytest.approx(1.6)
    assert figures["scaling.two_processes.arithmetic"] == pytest.approx(1.8)
    assert figures["scaling.policy_ratio.2_nodes"] == 1.25
    assert figures["scaling.load_ns.4_nodes"] == 104.0


def test_a_whole_run_that_takes_longer_than_foretold_shows() -> None:
    found = scaling()
    slow = Cost(**{**vars(found.checked[0]), "loop_s": 25.0})  # 11 s more than 22
    slower = Scaling(found.costs, (slow, found.checked[1]), (1, 1), None)
    assert slower.linearity == pytest.approx(1.5)
    assert slower.suite_runs == 81  # without a policy


def test_a_longer_run_takes_no_less_memory_than_a_short_one() -> None:
    costs = [cost(2, 1.0, peak_bytes=1_000_000_000)]
    found = Scaling(costs, (costs[0], cost(2, 0.1, peak_bytes=1_000_500_000)), (1, 1), None)
    assert found.bytes_per_request == 0.0
    assert found.gb(Whole(costs[0])) == 1.0


def test_the_tables_are_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "CACHES", Path("/nonexistent"))
    found = scaling()
    text = io.StringIO()
    for table in found.tables():
        Console(file=text, width=118).print(table)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.getvalue().splitlines() if line.strip()]
    assert rows[0][:3] == ["nodes", "requests of a run", "served"]
    assert set("".join(rows[1])) == {"-"}
    assert rows[0][7] == "core h of 84 runs"  # 3 draws x (7 routers, 11 and 6 statics, the policy and 3 others)
    assert rows[2] == ["1", "1,000,000", "all", "12.0", "12.0", "300", "1.00", "0.28"]
    assert rows[4] == ["4", "4,000,000", "10 %", "42.0", "10.5", "86", "5.10", "0.98"]
    assert rows[5] == ["nodes", "node by node", "taking turns", "router", "Python", "arrivals", "set-up"]
    assert rows[8] == ["4", "38 %", "19 %", "9.5 %", "19 %", "9.5 %", "4.8 %"]
    notes = " ".join(found.notes())
    assert "the whole run of 2 nodes took 1.00 times what 10 % of it foretold" in notes
    assert "caches: unknown" in notes
    assert "took 101 to 104 ns" in notes


def test_the_processors_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(summary, "CACHES", tmp_path)
    for index, texts in enumerate([("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), None]):
        (tmp_path / f"index{index}").mkdir()
        for name, text in zip(("level", "type", "size"), texts or (), strict=False):
            (tmp_path / f"index{index}" / name).write_text(f"{text}\n")
    assert caches() == ["L1 48K", "L2 2048K"]


@pytest.mark.parametrize("name", ["scaling.png", "scaling.svg"])
def test_the_picture(tmp_path: Path, name: str) -> None:
    draw_scaling(tmp_path / name, scaling())
    assert (tmp_path / name).read_bytes()[:4] in (b"\x89PNG", b"<?xm")
