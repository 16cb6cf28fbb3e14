"""Requests of known lengths and cached shares: what a live node takes to compute them fits its profile."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.serving.live import LiveNode
from helm_rl.profiles.model import ModelProfile, resolve_model
from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import BASE, Trace, TraceMeta, TracePhase

LENGTHS = 6
CROWD = 4
"""Users who come at once, in every other round."""
REST_S = 0.02
_VISITS = ((2, 2), (1, 2), (1, 16))  # a user's requests: history and new tokens, as parts of the length

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Visit:
    """A request of a user, the last `new` tokens of whose history have never been computed."""

    user: int
    history: int
    new: int


@dataclass(frozen=True)
class Batch:
    """Batches of the same requests: FLOPs of the work per token and of attention, and the median time."""

    users: int
    tokens: int  # of each history
    cached: int
    linear_flop: float
    pair_flop: float
    ms: float


def lengths(most_tokens: int) -> list[int]:
    """Return LENGTHS lengths of a history, each twice the one before, the last `most_tokens`."""
    return [max(16, most_tokens >> k) for k in range(LENGTHS - 1, -1, -1)]


def ladder(scenario: Scenario, most_tokens: int, rounds: int) -> Trace:
    """Return `rounds` times all lengths in any order, each by users of its own who come three times.

    Half of the history is new the first time, the other half the second, a sixteenth the third. In every other round
    CROWD users come at once, so that there are batches of several.
    """
    rng = np.random.default_rng(1)
    batches: list[list[Visit]] = []
    user = 0
    for k in range(rounds):
        crowd = CROWD if k % 2 else 1
        for length in rng.permutation(lengths(most_tokens)).tolist():
            for part, fresh in _VISITS:
                batches.append([Visit(user + one, length // part, length // fresh) for one in range(crowd)])
            user += crowd
    return visits_trace(scenario, batches)


def visits_trace(scenario: Scenario, batches: Sequence[Sequence[Visit]]) -> Trace:
    """Return the trace of visits of which each batch has one arrival time; rows follow the scenario's law."""
    visits = [visit for batch in batches for visit in batch]
    arrival = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches]) * 1_000_000
    new = np.array([visit.new for visit in visits])
    load = scenario.load
    return Trace(
        arrival_ns=arrival.astype(np.int64),
        user=np.array([visit.user for visit in visits], np.int64),
        tenant=np.zeros(arrival.size, np.int32),
        phase=np.zeros(arrival.size, np.int32),
        history_tokens=np.array([visit.history for visit in visits], np.int32),
        new_tokens=new.astype(np.int32),
        item_offsets=np.concatenate([[0], np.cumsum(new)]).astype(np.int64),
        item_values=np.zeros(int(new.sum()), np.int64),
        meta=TraceMeta(
            name="visits",
            source="calibration",
            origin_ns=0,
            measure_from_ns=0,
            users=max(visit.user for visit in visits) + 1,
            items=load.items,
            content="law",
            zipf_items=load.zipf_items,
            law_items=load.items,
            phases=(TracePhase(label=BASE, start_ns=0, end_ns=len(batches) * 1_000_000),),
        ),
    )


def batches_of(trace: Trace) -> list[npt.NDArray[np.int64]]:
    """Return the numbers of the requests that arrive together, batch by batch."""
    return np.split(np.arange(len(trace)), np.flatnonzero(np.diff(trace.arrival_ns)) + 1)


def silence(node: LiveNode) -> None:
    """Start the node after its last arrival, so that nothing comes by itself, with most of the pool for histories."""
    node.reset(node.scenario.control.alpha_min, int(node.trace.arrival_ns[-1]) + 1)


def climb(node: LiveNode) -> list[Batch]:
    """Let a node, made for a ladder, compute all of it, one batch after the other.

    Between two batches the processor rests, as it does in service: what finds its caches as the last batch left them
    is faster.
    """
    trace, model = node.trace, resolve_model(node.scenario.model)
    silence(node)
    took: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    with node.compute.session():
        for numbers in batches_of(trace):
            time.sleep(REST_S)
            node.serve_at_once(numbers.tolist())
            found = node.times.prefix[numbers]
            if (found == found[0]).all():  # the pool had room for all of them
                ms = float(node.times.compute_ns[numbers[0]]) * 1e-6
                took[numbers.size, int(trace.history_tokens[numbers[0]]), int(found[0])].append(ms)
    batches = []
    for (users, tokens, cached), times in sorted(took.items()):
        linear, pair = flop(model, np.array([cached]), np.array([tokens]))
        batches.append(
            Batch(users, tokens, cached, users * float(linear[0]), users * float(pair[0]), float(np.median(times)))
        )
    return batches


def flop(
    model: ModelProfile, prefix: npt.NDArray[np.int64], history: npt.NDArray[np.int64]
) -> tuple[FloatArray, FloatArray]:
    """Return the FLOPs of the work per token, and of attention, of requests that found `prefix` tokens; [n] each."""
    new = (history - prefix).astype(np.float64)
    pairs = new * (prefix + 0.5 * new) + model.candidates * history
    return (new + model.candidates) * model.flops_per_token, pairs * model.flops_per_pair
