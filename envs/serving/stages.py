"""The stages of a node's loop one at a time, on the same requests, to see where its time goes."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding, kv
from cache_engine.jit import kernel
from envs.serving.loop import CANDIDATES, Node
from envs.serving.node import NodeSim
from envs.serving.rows import candidate_rows, history_rows


def stage_seconds(node: NodeSim, requests: int, repeats: int = 1, alpha: float = 0.5) -> dict[str, float]:
    """Return the seconds of CPU time that the first `requests` requests spend in each stage; `node` is reset.

    Each stage is run alone, once to compile it and then `repeats` times, of which the fastest counts.

    Stages: `rows` draws the sampled rows, `lookups` looks them up and admits them, `kv` looks up and extends histories.
    What the whole loop takes beyond them goes to ghosts, queues, migration and counters. Run alone, a stage has the
    processor's caches to itself, so the sum may fall short of its share in the loop.
    """
    prefix = np.zeros(min(requests, len(node.trace)), np.int64)
    kv_s, rows_s, both_s = [], [], []
    for _ in range(repeats + 1):
        node.reset(alpha)
        begun = time.thread_time()
        _kv_stage(node.state, prefix)
        kv_s.append(time.thread_time() - begun)
        begun = time.thread_time()
        _rows_stage(node.state, prefix)
        rows_s.append(time.thread_time() - begun)
        begun = time.thread_time()
        _lookup_stage(node.state, prefix)
        both_s.append(time.thread_time() - begun)
    # Lookups are what a draw with them takes longer: of the fastest of either, for a difference of two disturbed
    # measurements may be anything.
    rows = min(rows_s[1:])
    return {"rows": rows, "lookups": max(min(both_s[1:]) - rows, 1e-9), "kv": min(kv_s[1:])}


@kernel
def _kv_stage(node: Node, prefix: npt.NDArray[np.int64]) -> None:
    requests = node.requests
    for i in range(prefix.size):
        history = np.int64(requests.history[i])
        prefix[i] = kv.lookup(node.kv, requests.user[i], 0, history - np.int64(requests.new[i]))
        kv.extend(node.kv, node.pool, requests.user[i], 0, history)


@kernel
def _rows_stage(node: Node, prefix: npt.NDArray[np.int64]) -> int:
    total = 0
    for i in range(prefix.size):
        total += _draw(node, i, prefix[i])
    return total


@kernel
def _lookup_stage(node: Node, prefix: npt.NDArray[np.int64]) -> int:
    total = 0
    for i in range(prefix.size):
        n = _draw(node, i, prefix[i])
        embedding.lookup(node.emb, node.pool, node.scratch, node.tables, node.keys, n)
        total += n
    return total


@kernel
def _draw(node: Node, i: int, prefix: int) -> int:
    phase = np.int64(node.requests.phase[i])
    history = np.int64(node.requests.history[i])
    tail, hot = history_rows(node.rows, node.keys, 0, i, node.requests.user[i], phase, prefix, history)
    candidates = np.int64(node.params[CANDIDATES])
    n = candidate_rows(node.rows, node.keys, tail + hot, i, phase, candidates, 1)
    return candidate_rows(node.rows, node.keys, n, i, phase, candidates, 0)
