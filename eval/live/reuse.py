"""What a cached prefix saves of a prefill, by its share of the history, beside what was published of an HSTU's."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from envs.serving.live import LiveNode
from eval.live.ladder import Visit, batches_of, silence, visits_trace
from helm_rl.profiles.published import POINTS
from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import Trace

LENGTHS = (512, 1024, 2048, 4096)
SHARES = (0.0, 0.5, 0.75, 0.875, 0.9375)

Savings = dict[int, dict[float, float]]
"""tokens -> cached share -> share of the prefill's time that it saves."""


def reuse_trace(scenario: Scenario, rounds: int) -> Trace:
    """Return `rounds` times each length and cached share, by a user of his own: first the prefix alone, then all."""
    visits = []
    user = 0
    for _ in range(rounds):
        for tokens in LENGTHS:
            for share in SHARES:
                cached = round(tokens * share)
                if cached:
                    visits.append([Visit(user, cached, cached)])
                visits.append([Visit(user, tokens, tokens - cached)])
                user += 1
    return visits_trace(scenario, visits)


def measure(node: LiveNode) -> Savings:
    """Serve a node's `reuse_trace`, one request after the other; return the savings, of medians."""
    silence(node)
    trace = node.trace
    took: dict[tuple[int, float], list[float]] = defaultdict(list)
    with node.compute.session():
        for numbers in batches_of(trace):
            node.serve_at_once(numbers.tolist())
            i = int(numbers[0])
            tokens, share = int(trace.history_tokens[i]), float(node.times.prefix[i] / trace.history_tokens[i])
            if tokens in LENGTHS:
                took[tokens, share].append(float(node.times.compute_ns[i]))
    return _savings({key: float(np.median(times)) for key, times in took.items()})


def published(hardware: str) -> Savings:
    """Return the savings in the published charts of an HSTU of 8 layers in batches of 8, by the profile's name."""
    points = [point for point in POINTS if point.hardware == hardware and point.fits == "compute" and point.batch == 8]
    return _savings({(point.tokens, point.cached / point.tokens): point.ms for point in points})


def _savings(ms: dict[tuple[int, float], float]) -> Savings:
    found: Savings = defaultdict(dict)
    for (tokens, share), took in sorted(ms.items()):
        if (tokens, 0.0) in ms and share > 0:
            found[tokens][share] = 1.0 - took / ms[tokens, 0.0]
    return dict(found)
