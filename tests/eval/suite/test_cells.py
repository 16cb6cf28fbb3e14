from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval.suite.cells import RECORDED, _sha256, cells, on_arrivals, recorded_cells
from eval.suite.families import FAMILIES
from helm_rl.errors import UserError
from helm_rl.workloads.generate import generate
from tests.eval.suite.worlds import small_scenario


def test_the_kth_request_comes_at_the_kth_arrival() -> None:
    content = generate(small_scenario("burst"), seed=1)
    log_ns = np.array([0, 10, 11, 12, 40, 100], dtype=np.int64) * 1_000_000_000
    found = on_arrivals(content, log_ns)
    assert len(found) == len(content)
    np.testing.assert_array_equal(found.user, content.user)
    np.testing.assert_array_equal(found.history_tokens, content.history_tokens)
    assert (np.diff(found.arrival_ns) >= 0).all()
    assert content.meta.phases[0].start_ns == found.arrival_ns[0]
    assert found.arrival_ns[-1] < content.end_ns
    # Within a lap the pauses are the log's, all compressed alike; between laps there is the mean one.
    pauses = np.diff(found.arrival_ns[: 2 * log_ns.size]).astype(float)
    expected = np.array([10, 1, 1, 28, 60, 20, 10, 1, 1, 28, 60])
    np.testing.assert_allclose(pauses / pauses[0] * 10, expected, rtol=1e-3)
    assert "at the arrivals of a log" in found.meta.steps[-1]


def azure(path: Path, seconds: list[float]) -> None:
    rows = [f"2023-11-16 18:{int(s // 60):02d}:{s % 60:010.7f},400,20" for s in seconds]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))


def test_logs_of_services_make_cells(tmp_path: Path) -> None:
    azure(tmp_path / "azure.csv", list(np.linspace(0.0, 50.0, 40)))
    row = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}
    (tmp_path / "deeper").mkdir()
    lines = [json.dumps(row | {"timestamp": 3000 * k}) for k in range(30)]
    (tmp_path / "deeper" / "mooncake.jsonl").write_text("\n".join(lines))
    (tmp_path / "SOURCE.txt").write_text("where it is from")
    found = recorded_cells(tmp_path)
    assert [cell.name for cell in found] == [f"{RECORDED}.azure", f"{RECORDED}.mooncake"]
    assert [cell.title for cell in found] == ["Azure", "Mooncake"]
    assert replace(found[0], pattern="ragpulse").title == "RAGPulse"
    first, second = found[0].load(7)[1], found[0].load(8)[1]
    assert first.hash() != second.hash()  # other users
    assert len(first) > 50_000
    scenario, heavier = found[0].load(7, 1.5)
    assert scenario.load.rate == pytest.approx(1.5 * found[0].scenario.load.rate)
    assert len(heavier) == pytest.approx(1.5 * len(first), rel=0.02)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no log of Azure, Mooncake, RAGPulse or Twitter"),
        ({"a.csv": [0, 1], "b.csv": [0, 2]}, r"a.csv and .*b.csv are both logs of azure"),
    ],
)
def test_folders_that_do_not_fit_are_refused(tmp_path: Path, files: dict[str, list[float]], said: str) -> None:
    for name, seconds in files.items():
        azure(tmp_path / name, seconds)
    with pytest.raises(UserError, match=said):
        recorded_cells(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        recorded_cells(tmp_path / "none")


def test_a_log_without_time_is_refused(tmp_path: Path) -> None:
    azure(tmp_path / "azure.csv", [3.0, 3.0])
    (cell,) = recorded_cells(tmp_path)
    with pytest.raises(UserError, match=r"azure\.csv: its requests all come at once"):
        cell.load(1)


def test_a_log_that_is_another_where_it_is_read_is_refused(tmp_path: Path) -> None:
    azure(tmp_path / "azure.csv", [0.0, 1.0, 3.0])
    (cell,) = recorded_cells(tmp_path)
    azure(tmp_path / "azure.csv", [0.0, 2.0, 3.0])
    _sha256.cache_clear()  # as in another process
    with pytest.raises(UserError, match=r"azure\.csv: is not the log here that the suite was planned with"):
        cell.load(1)
    (tmp_path / "azure.csv").unlink()
    with pytest.raises(UserError, match="is not the log here"):
        cell.load(2)


def test_unknown_families_are_refused() -> None:
    assert len(cells(tuple(FAMILIES))) == 9
    with pytest.raises(UserError, match="'seven' is unknown; known: decoder, hstu, large"):
        cells(("seven",))
    with pytest.raises(UserError, match="names one twice"):
        cells(("hstu", "hstu"))
