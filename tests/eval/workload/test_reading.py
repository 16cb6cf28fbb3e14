"""The measurement of reading: the log it makes is a KuaiRand log, and its figures are those of a real run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eval.engine.peers import installed
from eval.workload.reading import measure, write_log
from helm_rl.errors import UserError
from helm_rl.workloads.readers import detect_format, read_trace


def test_the_log_made_is_like_the_real_one(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    write_log(path, 60_000)
    assert detect_format(path) == "kuairand"
    trace = read_trace(path)
    (repeats,) = trace.meta.dropped.values()
    assert 0.003 < repeats / 60_000 < 0.012
    assert trace.item_values.size == 60_000 - repeats
    assert 4 < trace.item_values.size / len(trace) < 6
    assert any(step.startswith("sorted by time") for step in trace.meta.steps)  # it is by user
    assert np.unique(trace.user).size == 10
    other = tmp_path / "again.csv"
    write_log(other, 60_000)
    assert other.read_bytes() == path.read_bytes()


@pytest.mark.skipif(not installed("polars"), reason="polars, of the extra bench, is not installed")
def test_the_figures(tmp_path: Path) -> None:
    told: list[str] = []
    figures = measure(20_000, tmp_path, told.append)
    assert len(told) == 3
    assert list(tmp_path.iterdir()) == []
    assert figures["trace.rows_per_s.kuairand"].value > 1000
    assert figures["trace.ratio_vs_polars"].value > 0
    assert 0.05 < figures["trace.peak_gib.kuairand"].value < 1.5


def test_a_disk_without_the_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a log of 1,000,000,000,000 rows .* are free there; measure fewer --rows"):
        measure(10**12, tmp_path)
    assert list(tmp_path.iterdir()) == []
