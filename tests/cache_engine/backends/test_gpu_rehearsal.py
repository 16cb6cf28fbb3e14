"""What `make gpu-check` will run on a GPU, run on the host first: a GPU's time must not be lost to a slip in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_engine.backends.device import CupyDevice
from tests.cache_engine.backends import gpu_table, test_gpu_cache
from tests.cache_engine.backends.fake_cupy import FakeCupy, install_fake_cupy


@pytest.fixture
def cupy(library: Path, all_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    fake = install_fake_cupy(monkeypatch, library, all_kernels)
    monkeypatch.setattr(test_gpu_cache, "STEPS", 30)
    yield fake
    fake.world.check()


REHEARSED: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (
        test_gpu_cache.test_short_sequences_of_calls_leave_both_backends_the_same,
        {"gather": "zero-copy", "row_bytes": 7},
    ),
    (test_gpu_cache.test_short_sequences_of_calls_leave_both_backends_the_same, {"gather": "staging", "row_bytes": 16}),
    (test_gpu_cache.test_any_sequence_of_calls_leaves_both_backends_the_same, {"gather": "staging"}),
    (test_gpu_cache.test_rows_are_right_while_a_refill_and_resizes_go_on, {"gather": "staging"}),
    (test_gpu_cache.test_pages_are_copied_while_rows_are_looked_up, {}),
    (test_gpu_cache.test_tables_in_memory_that_is_page_locked_or_cannot_be, {}),
    (test_gpu_cache.test_closing_gives_the_memory_back, {}),
    (test_gpu_cache.test_two_threads, {}),
]


@pytest.mark.parametrize(("test", "arguments"), REHEARSED)
def test_rehearse(cupy: FakeCupy, test: Callable[..., Any], arguments: dict[str, Any]) -> None:
    test(CupyDevice(), **arguments)


def test_rehearse_the_table(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = gpu_table.Sizes(
        slots=(4096,),
        batches=(64,),
        find_batch=256,
        seconds=0.01,
        gather_rows=64,
        table_rows=512,
        rows_per_page=16,
        pages=4,
        foreground=32,
        foreground_batches=6,
    )
    monkeypatch.setattr(gpu_table, "Sizes", lambda: sizes)
    assert gpu_table.main(["--json", str(tmp_path / "figures.json")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "a stand-in, 1024 GB/s, CUDA 13000, CuPy 0"
    document = json.loads((tmp_path / "figures.json").read_text())
    assert document["machine"]["accelerator"] == "a stand-in"
    figures = document["figures"]
    assert {line.split()[0] for line in said[1:]} == set(figures) - {"gpu.memory_bytes_per_s"}
    assert figures["gpu.finds_per_s"]["goal"] == pytest.approx(2.25e9 / 4 * 1024 / 2039)
    assert all(np.isfinite(row["value"]) for row in figures.values())
    assert all(row["value"] > 0 for name, row in figures.items() if name != "gpu.foreground_delay_ms")
    best = max(figures[f"gpu.gather_bytes_per_s.{path}"]["value"] for path in ("zero_copy", "staging"))
    ratio = best / figures["gpu.pinned_copy_bytes_per_s"]["value"]
    assert figures["gpu.gather_ratio_vs_pinned_copy"]["value"] == pytest.approx(ratio)
    assert not cupy.registered
