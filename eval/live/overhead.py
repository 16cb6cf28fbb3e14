"""What the engine adds to a request: the same network on the same rows, from the caches and from plain tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from envs.serving.live import LiveNode
from eval.live.ladder import Visit, silence, visits_trace
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import Trace

USERS = 8
NEW = 4  # tokens of each later request
GOAL = 0.03

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Overhead:
    """Seconds of each request [n] by the wall clock and of its thread's processor, from the engine and from tensors."""

    engine_s: FloatArray
    plain_s: FloatArray
    engine_cpu_s: FloatArray
    plain_cpu_s: FloatArray
    misses: int  # rows and old tokens that were not found: there must be none
    off: float  # largest difference of scores

    @property
    def wall(self) -> float:
        """Return the median over pairs of what the engine adds, as a share."""
        return float(np.median(self.engine_s / self.plain_s)) - 1.0

    @property
    def cpu(self) -> float:
        """Return the same in time of the processor, which other processes hardly touch."""
        return float(np.median(self.engine_cpu_s / self.plain_cpu_s)) - 1.0


def overhead_trace(scenario: Scenario, tokens: int, rounds: int) -> Trace:
    """Return USERS users with histories of `tokens` tokens who come `rounds` times more, each with NEW new ones."""
    visits = [[Visit(user, tokens, tokens)] for user in range(USERS)]
    visits += [[Visit(user, tokens + NEW * k, NEW)] for k in range(1, rounds + 1) for user in range(USERS)]
    return visits_trace(scenario, visits)


def measure(node: LiveNode) -> Overhead:
    """Serve each request of a node's `overhead_trace` from the engine and from plain tensors, in turns.

    Everything hits: histories were computed when their users first came, and each request was served once before it is
    timed, which brought its rows. The plain side keeps keys and values of a user in one tensor, and gathers rows from
    one table that holds all of them; neither counts, locks, leases nor evicts.
    """
    import torch

    from envs.serving.live_compute import Network
    from helm_rl.models.hstu import Request

    compute = node.compute
    assert isinstance(compute, Network)
    network, device = compute.hstu, compute.hstu.position.device
    silence(node)
    trace = node.trace
    candidates = resolve_model(node.scenario.model).candidates
    prefix = trace.history_tokens - trace.new_tokens
    with compute.session():
        table = torch.from_numpy(np.concatenate(node.tables)).to(device).view(compute.dtype)
        longest = int(trace.history_tokens.max())
        blocks = {user: network.new_blocks(1, longest) for user in range(USERS)}

        def plain(i: int) -> torch.Tensor:
            ids, tables = node.rows_of(i, int(prefix[i]))
            at = torch.from_numpy(ids + tables.astype(np.int64) * len(node.tables[0])).to(device)
            values = network.pool(table.index_select(0, at))
            history = int(trace.history_tokens[i])
            scores = network(values, [Request(int(prefix[i]), history, candidates, blocks[int(trace.user[i])])])
            compute.wait()  # as the engine does
            return scores

        def from_engine(i: int) -> torch.Tensor:
            return node.serve_at_once([i])[0].scores

        found = []
        off, misses = 0.0, 0
        for i in range(len(trace)):
            order = (plain, from_engine) if i % 2 else (from_engine, plain)
            scores = [side(i) for side in order]  # which brings the rows, and leaves both sides as warm
            took = {side: _timed(side, i) for side in order}
            if i >= USERS:
                off = max(off, float((scores[0] - scores[1]).abs().max()))
                misses += int(node.times.fetched[i]) + int(prefix[i] - node.times.prefix[i])
                found.append((*took[from_engine], *took[plain]))
    engine_s, engine_cpu_s, plain_s, plain_cpu_s = np.array(found).T
    return Overhead(engine_s, plain_s, engine_cpu_s, plain_cpu_s, misses, off)


def _timed(side: Callable[[int], Any], i: int) -> tuple[float, float]:
    """Return the seconds of a call by the wall clock, and of this thread's processor."""
    wall, cpu = time.perf_counter(), time.thread_time()
    side(i)
    return time.perf_counter() - wall, time.thread_time() - cpu
