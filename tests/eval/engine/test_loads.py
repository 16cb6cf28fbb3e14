"""Streams of keys: their laws, and recorded samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eval.engine.loads import ORACLE_GENERAL, drifting, recorded_loads, scanned, scatter, zipf_ranks


@pytest.mark.parametrize(("keys", "exponent"), [(1_000, 1.0), (1 << 22, 1.0), (1 << 22, 0.8), (1 << 22, 1.2)])
def test_ranks_follow_the_law_in_the_head_and_in_the_tail(keys: int, exponent: float) -> None:
    n = 400_000
    ranks = zipf_ranks(np.random.default_rng(0), n, keys, exponent)
    assert ranks.min() >= 0
    assert ranks.max() < keys
    weights = np.arange(1, keys + 1) ** -exponent
    law = np.cumsum(weights) / weights.sum()
    for rank in {0, 9, keys // 100, keys // 2, min(keys - 1, (1 << 20) + 5)}:
        share = law[rank]
        assert (ranks <= rank).mean() == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / n) + 1e-9)


@pytest.mark.parametrize("keys", [1_000, 1_024, 1 << 17])
def test_scattering_is_one_to_one_and_parts_neighbours(keys: int) -> None:
    ids = scatter(np.arange(keys), keys)
    assert np.array_equal(np.sort(ids), np.arange(keys))
    assert np.abs(np.corrcoef(ids, np.arange(keys))[0, 1]) < 0.2


def test_a_drift_brings_new_keys_to_the_top() -> None:
    keys = 1_000
    ids = drifting(np.random.default_rng(0), 100_000, keys, 1.2, 0.1)
    first, last = (np.bincount(part, minlength=keys).argmax() for part in (ids[:1_000], ids[-1_000:]))
    top = scatter(np.array([0, keys - 100]), keys)  # a hundred keys have come in front of what was first
    assert (first, last) == tuple(top) or (first, last) == (top[0], scatter(np.array([keys - 99]), keys)[0])


def test_scans_have_their_share_and_never_come_back() -> None:
    keys, n = 1_000, 400_000
    ids = scanned(np.random.default_rng(0), n, keys, 1.0, 0.2, mean=500)
    scan = ids[ids >= keys]
    assert scan.size / n == pytest.approx(0.2, abs=0.03)
    assert np.array_equal(scan, np.arange(keys, keys + scan.size))


def test_recorded_samples_are_read_as_far_as_they_are_there(tmp_path: Path) -> None:
    assert recorded_loads(tmp_path) == []
    for folder in ("libcachesim", "twitter_cluster52", "mooncake"):
        (tmp_path / folder).mkdir()
    records = np.zeros(3, ORACLE_GENERAL)
    records["id"] = [7, 2**64 - 1, 7]
    records.tofile(tmp_path / "libcachesim" / "cloudPhysicsIO.oracleGeneral.bin")
    (tmp_path / "twitter_cluster52" / "twitter_cluster52_head.csv").write_text(
        "# time, object, size, next_access_vtime\n0, 13053225291711363978, 737, 13\n1, 5, 1, 2\n"
    )
    lines = [{"hash_ids": [1, 2]}, {"hash_ids": [1, 4294967297]}]
    (tmp_path / "mooncake" / "conversation_trace.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    loads = {load.name: load.make(1_000).tolist() for load in recorded_loads(tmp_path)}
    assert loads == {
        "cloudphysics": [7, -1, 7],
        "twitter52": [13053225291711363978 - 2**64, 5],
        "mooncake": [1, 2, 1, 4294967297],
    }
    assert recorded_loads(tmp_path)[0].make(2).size == 2
