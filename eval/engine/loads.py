"""Streams of keys that caches are measured on: generated ones, and what is at hand of real ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]

_HEAD = 1 << 20  # ranks whose probabilities are summed one by one; beyond, the sum is an integral to 1e-7


def zipf_ranks(rng: np.random.Generator, n: int, keys: int, exponent: float) -> Keys:
    """Draw n ranks, 0 the most popular of `keys`, with probability as (rank + 1)**-exponent."""
    head = np.cumsum(np.arange(1.0, min(keys, _HEAD) + 1) ** -exponent)

    def integral(x: float) -> float:
        return float(np.log(x)) if exponent == 1 else x ** (1 - exponent) / (1 - exponent)

    start = head.size + 0.5
    total = head[-1] + integral(keys + 0.5) - integral(start)
    drawn = rng.random(n) * total
    ranks = np.searchsorted(head, drawn, side="right")
    beyond = ranks == head.size
    if beyond.any():
        x = drawn[beyond] - head[-1] + integral(start)
        tail = np.exp(x) if exponent == 1 else (x * (1 - exponent)) ** (1 / (1 - exponent))
        ranks[beyond] = np.clip(np.round(tail).astype(np.int64) - 1, 0, keys - 1)
    return ranks.astype(np.int64, copy=False)


def scatter(ranks: Keys, keys: int) -> Keys:
    """Give each rank an id of its own in [0, keys), so that popular keys do not lie together.

    Args:
        ranks: in [0, keys).
        keys: a power of two (a bijection in place of a permutation that fills memory), or few.
    """
    if keys & (keys - 1):
        return _permutation(keys)[ranks]
    bits = keys.bit_length() - 1
    x = ranks.astype(np.uint64)
    for odd in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9):
        x = (x * np.uint64(odd)) & np.uint64(keys - 1)
        x ^= x >> np.uint64(bits // 2 + 1)
    return x.astype(np.int64)


@functools.lru_cache(2)
def _permutation(keys: int) -> Keys:
    return np.random.default_rng(0).permutation(keys)


def zipf(rng: np.random.Generator, n: int, keys: int, exponent: float) -> Keys:
    """Draw n ids of `keys` by Zipf's law."""
    return scatter(zipf_ranks(rng, n, keys, exponent), keys)


def drifting(rng: np.random.Generator, n: int, keys: int, exponent: float, turnover: float) -> Keys:
    """Zipf's law whose ranking shifts evenly: in the end, `turnover * keys` new keys have come in at the top."""
    shift = (np.arange(n) * (turnover * keys) / n).astype(np.int64)
    return scatter((zipf_ranks(rng, n, keys, exponent) - shift) % keys, keys)


def scanned(rng: np.random.Generator, n: int, keys: int, exponent: float, share: float, mean: float = 5_000) -> Keys:
    """Zipf's law, broken by scans of keys never seen again: `share` of the requests, scans `mean` long on the average.

    Lengths and gaps are exponential: scans that came at equal distances would put steps into the hit curve.
    """
    ids = zipf(rng, n, keys, exponent)
    at = 0.0
    seen = keys
    while (at := at + rng.exponential(mean * (1 - share) / share)) < n:
        start = int(at)
        length = min(int(np.ceil(rng.exponential(mean))), n - start)
        ids[start : start + length] = np.arange(seen, seen + length)
        seen += length
        at += length
    return ids


@dataclass(frozen=True)
class Load:
    """One stream to compare on."""

    name: str
    make: Callable[[int], Keys]  # of about that many requests; a recorded one has what it has


def policy_loads() -> list[Load]:
    """Generated streams of several skews, drifts and scans, on which policies are compared; 1M keys each."""
    million = 1_000_000

    def rng() -> np.random.Generator:
        return np.random.default_rng(11)

    return [
        Load("zipf_0.7", lambda n: zipf(rng(), n, million, 0.7)),
        Load("zipf_1.0", lambda n: zipf(rng(), n, million, 1.0)),
        Load("zipf_1.2", lambda n: zipf(rng(), n, million, 1.2)),
        Load("drift_0.9_slow", lambda n: drifting(rng(), n, million, 0.9, 0.001)),
        Load("drift_0.9_fast", lambda n: drifting(rng(), n, million, 0.9, 0.01)),
        Load("scans_1.0", lambda n: scanned(rng(), n, million, 1.0, 0.2)),
    ]


def ghost_loads() -> list[Load]:
    """The three streams on which ghosts are held against caches of the sizes that they speak of."""
    return [
        Load("zipf_1.0", lambda n: zipf(np.random.default_rng(5), n, 1_000_000, 1.0)),
        Load("drift_0.8", lambda n: drifting(np.random.default_rng(6), n, 2_000_000, 0.8, 0.05)),
        Load("scans_1.1", lambda n: scanned(np.random.default_rng(7), n, 2_000_000, 1.1, 0.2)),
    ]


def recorded_loads(folder: Path) -> list[Load]:
    """Real samples, as far as they are in `folder`: block I/O, a key-value cache, blocks of conversations."""
    readers = {
        "cloudphysics": (folder / "libcachesim" / "cloudPhysicsIO.oracleGeneral.bin", _oracle_general),
        "twitter52": (folder / "twitter_cluster52" / "twitter_cluster52_head.csv", _twitter),
        "mooncake": (folder / "mooncake" / "conversation_trace.jsonl", _mooncake),
    }

    def load(path: Path, read: Callable[[Path], Keys]) -> Callable[[int], Keys]:
        return lambda n: read(path)[:n]

    return [Load(name, load(path, read)) for name, (path, read) in readers.items() if path.exists()]


ORACLE_GENERAL = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])


def _oracle_general(path: Path) -> Keys:
    return np.fromfile(path, ORACLE_GENERAL)["id"].astype(np.int64)


def _twitter(path: Path) -> Keys:
    with path.open() as file:
        header = next(file).rstrip("\n").lstrip("# ").replace(" ", "").split(",")
        column = header.index("object")
        return np.array([int(line.split(",")[column]) for line in file], np.uint64).astype(np.int64)


def _mooncake(path: Path) -> Keys:
    with path.open() as file:
        return np.array([block for line in file for block in json.loads(line)["hash_ids"]], np.int64)
