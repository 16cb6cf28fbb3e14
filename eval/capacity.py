"""Capacity: the largest multiple of a load at which P99 stays within the SLO under a given controller."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from eval.sweep import Work
from helm_rl.control.protocol import Controller
from helm_rl.errors import UserError
from helm_rl.metrics import p99_ms
from helm_rl.scenario import at_load

if TYPE_CHECKING:
    from helm_rl.scenario import Scenario
    from helm_rl.workloads.trace import Trace

TOLERANCE = 0.02
"""Ratio, less 1, of the least load known to break the SLO to the largest known to keep it, when the search ends."""
STRIDE = 1.5
"""Factor from one load to the next while the capacity is not yet enclosed."""
LEAST, MOST = 1 / 16, 16.0
"""Multiples between which the capacity is sought."""

Load = Callable[[float], "tuple[Scenario, Trace]"]
"""A multiple of the load to what serves it and its arrivals."""


@dataclass(frozen=True)
class Capacity:
    """What a bisection found.

    multiple: the largest load replayed whose P99 is within the SLO, as a multiple of the given one; 0 where even LEAST
    times it breaks the SLO; above: the least load replayed that breaks it, infinite where MOST times it does not;
    tried: (multiple, P99 in ms), in the order of the replays.
    """

    multiple: float
    above: float
    tried: tuple[tuple[float, float], ...]


def capacity(
    load: Load,
    make: Callable[[float], Controller],
    alpha0: float,
    work: Work,
    *,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> Capacity:
    """Bisect for the largest load at which the controller keeps P99 within the SLO.

    P99 need not grow steadily with the load; what is found is a load that keeps the SLO with one at most `tolerance`
    above it that does not.

    Arguments:
        load: `scaled_load` or `compressed_trace`, bound to a scenario.
        make: returns a new controller for a multiple of the load; alpha0, seed: as for a replay.
        work: what replays, one load after the other in the calling thread: `work.map` runs several controllers at once.
    """
    tried: list[tuple[float, float]] = []

    def keeps(multiple: float) -> bool:
        scenario, trace = load(multiple)
        reached_ms = p99_ms(work.measured_ms(scenario, trace, make(multiple), alpha0, seed))
        tried.append((multiple, reached_ms))
        return reached_ms <= scenario.slo_ms  # NaN, of a load without requests, is not

    low, high = 0.0, np.inf
    multiple = 1.0
    while low == 0.0 or high == np.inf:
        if keeps(multiple):
            low = multiple
        else:
            high = multiple
        if high <= LEAST or low >= MOST:
            return Capacity(low, high, tuple(tried))
        multiple = min(low * STRIDE, MOST) if high == np.inf else max(high / STRIDE, LEAST)
    while high / low > 1.0 + tolerance:
        middle = float(np.sqrt(low * high))
        if keeps(middle):
            low = middle
        else:
            high = middle
    return Capacity(low, high, tuple(tried))


def scaled_load(scenario: Scenario, seed: int, multiple: float) -> tuple[Scenario, Trace]:
    """Return the scenario with every rate of its load multiplied, and arrivals drawn for it."""
    from helm_rl.workloads.generate import generate

    heavier = at_load(scenario, multiple)
    return heavier, generate(heavier, seed=seed)


def compressed_trace(scenario: Scenario, trace: Trace, multiple: float) -> tuple[Scenario, Trace]:
    """Return the scenario as it is and the trace with all its times, pauses of users included, divided by `multiple`.

    Raises UserError where that would carry times out of range.
    """
    if max(abs(int(trace.arrival_ns[0])), abs(trace.end_ns)) / multiple >= 2.0**62:
        raise UserError(f"trace {trace.meta.name}: times divided by {multiple:g} are out of range")
    phases = tuple(
        phase.model_copy(
            update={
                "start_ns": math.floor(phase.start_ns / multiple),
                "end_ns": math.ceil(phase.end_ns / multiple),
                "ramp_s": phase.ramp_s / multiple,
            }
        )
        for phase in trace.meta.phases
    )
    update = {
        "phases": phases,
        "measure_from_ns": math.floor(trace.meta.measure_from_ns / multiple),
        "steps": (*trace.meta.steps, f"times divided by {multiple:g}"),
    }
    arrival_ns = np.floor(trace.arrival_ns / multiple).astype(np.int64)
    return scenario, replace(trace, arrival_ns=arrival_ns, meta=trace.meta.model_copy(update=update))
