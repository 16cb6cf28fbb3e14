"""Blocks through the embedding cache, by hand and against libCacheSim."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eval.model.blocks import hit_ratio, measure_blocks, read_blocks


def write_log(path: Path, requests: list[list[int]]) -> Path:
    lines = [
        json.dumps({"timestamp": i, "input_length": 512 * len(blocks), "output_length": 1, "hash_ids": blocks})
        for i, blocks in enumerate(requests)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_hits_by_hand(tmp_path: Path) -> None:
    trace = read_blocks(write_log(tmp_path / "log.jsonl", [[7, 1, 2], [7, 1, 3], [7, 7, 9]]))
    # 7 and 1, then 7; the second 7 of the last request comes in its own batch with the first.
    assert hit_ratio(trace, 50, one_by_one=True) == pytest.approx(4 / 9)
    assert hit_ratio(trace, 50, one_by_one=False) == pytest.approx(4 / 9)
    twice = read_blocks(write_log(tmp_path / "twice.jsonl", [[7, 5, 5]]))
    assert hit_ratio(twice, 50, one_by_one=True) == pytest.approx(1 / 3)
    assert hit_ratio(twice, 50, one_by_one=False) == 0.0  # both copies miss, and are one fetch


def test_hit_ratios_are_those_of_libcachesim(tmp_path: Path) -> None:
    pytest.importorskip("libcachesim")
    rng = np.random.default_rng(3)
    requests = [rng.zipf(1.3, 10).clip(max=3_000).tolist() for _ in range(1_500)]
    trace = read_blocks(write_log(tmp_path / "log.jsonl", requests))
    figures = measure_blocks(trace, (500,), lambda text: None)
    exact = figures["model.blocks_hit_ratio.500.libcachesim_lru"].value
    assert 0.3 < exact < figures["model.blocks_hit_ratio.unbounded.libcachesim_lru"].value
    one_by_one = figures["model.blocks_hit_ratio.500.one_by_one"].value
    assert one_by_one == pytest.approx(exact, abs=0.01)
    assert figures["model.blocks_lru_error.500.one_by_one"].value == pytest.approx(abs(one_by_one - exact))
    assert figures["model.blocks_lru_error.unbounded.one_by_one"].value < 1e-9
    assert figures["model.blocks_lru_error.500"].goal == 0.005
