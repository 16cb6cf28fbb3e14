"""From a log's times to a trace's arrivals: order, window, steps of the clock, speed; each said in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.workloads.trace import BASE, TracePhase

Int64Array = npt.NDArray[np.int64]

_DAY_NS = 86_400_000_000_000
_MAX_NS = 2**62
_MIN_SPEED, _MAX_SPEED = 1e-6, 1e6


@dataclass(frozen=True)
class ReadOptions:
    """What a reader is asked to do beside reading."""

    speed_up: float = 1.0  # times are divided by it
    spread: bool = False  # arrivals quantised by the recorder are spread within their step
    seed: int = 1  # of the spreading
    warm_s: float | None = None  # start of the measured part on the trace's clock; None: min(60 s, a tenth of it)
    start_s: float | None = None  # keep requests from here on: seconds of the source after its first request
    end_s: float | None = None  # keep requests before this
    block_tokens: int = 512  # tokens per content block (Mooncake)
    progress: Callable[[int], None] | None = None  # told the bytes read since it was last told

    def check(self) -> None:
        """Raise UserError for an option out of range."""
        if not (math.isfinite(self.speed_up) and _MIN_SPEED <= self.speed_up <= _MAX_SPEED):
            raise UserError(f"speed-up = {self.speed_up:g} must be from {_MIN_SPEED:g} to {_MAX_SPEED:g}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed = {self.seed} must be a whole number of at least 0")
        for name in ("warm_s", "start_s", "end_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and 0 <= value <= 1e9):
                raise UserError(f"{name.replace('_', '-')} = {value:g} must be from 0 to 1e9 seconds")
        if self.start_s is not None and self.end_s is not None and self.start_s >= self.end_s:
            raise UserError(f"start-s = {self.start_s:g} must be below end-s = {self.end_s:g}")
        if not 1 <= self.block_tokens <= 1 << 20:
            raise UserError(f"block-tokens = {self.block_tokens} must be from 1 to {1 << 20}")


@dataclass(frozen=True)
class Arrivals:
    """Requests placed on the trace's clock."""

    order: Int64Array  # (k,) the request of the log that each request of the trace is
    arrival_ns: Int64Array  # (k,) not decreasing, the first is 0 unless spread
    origin_ns: int  # time of the first request on the source's clock
    measure_from_ns: int
    phase: TracePhase  # the whole as one base load
    steps: tuple[str, ...]
    dropped: dict[str, int]


def place(time_ns: Int64Array, unit_ns: int, options: ReadOptions) -> Arrivals:
    """Sort requests by time and put them on the trace's clock.

    time_ns: (n,) on the source's clock, in any order; requests of equal time keep the log's order. unit_ns: one step of
    the last digit of the source's times. Raises UserError if nothing is left or an option does not fit the log.
    """
    steps: list[str] = []
    dropped: dict[str, int] = {}
    early = int(np.count_nonzero(time_ns[1:] < time_ns[:-1]))
    order = np.argsort(time_ns, kind="stable").astype(np.int64)
    if early:
        steps.append(f"sorted by time: {early} of {time_ns.size} requests came before the one above them")
    time_ns = time_ns[order]
    low_ns, high_ns = int(time_ns[0]), int(time_ns[-1])
    if high_ns - low_ns >= _MAX_NS:
        raise UserError(f"times span from {low_ns} to {high_ns} ns, more than a trace can hold (146 years)")

    if options.start_s is not None or options.end_s is not None:
        from_ns = low_ns + round((options.start_s or 0.0) * 1e9)
        to_ns = high_ns + 1 if options.end_s is None else low_ns + round(options.end_s * 1e9)
        kept = (time_ns >= from_ns) & (time_ns < to_ns)
        if not kept.any():
            raise UserError(
                f"no request lies in the window asked for; the log's {time_ns.size} requests span "
                f"{(high_ns - low_ns) / 1e9:g} s"
            )
        left_out = int(kept.size - np.count_nonzero(kept))
        if left_out:
            dropped["requests outside the window"] = left_out
        time_ns, order = time_ns[kept], order[kept]
        steps.append(f"kept [{(from_ns - low_ns) / 1e9:g}, {(to_ns - low_ns) / 1e9:g}) s of the log")
    steps += _stragglers(time_ns)

    origin_ns = int(time_ns[0])
    arrival_ns = time_ns - origin_ns
    quantum_ns = step_of(arrival_ns, unit_ns)
    if quantum_ns:
        instants = 1 + int(np.count_nonzero(np.diff(arrival_ns)))
        steps.append(
            f"arrivals come in steps of {quantum_ns / 1e9:g} s ({arrival_ns.size} requests at {instants} instants): "
            "rates over shorter times say nothing"
        )
    if options.spread:
        if quantum_ns:
            rng = np.random.default_rng(options.seed)
            arrival_ns = arrival_ns + rng.integers(0, quantum_ns, size=arrival_ns.size, dtype=np.int64)
            again = np.argsort(arrival_ns, kind="stable")
            arrival_ns, order = arrival_ns[again], order[again]
            steps.append(f"arrivals spread evenly over {quantum_ns / 1e9:g} s each (seed {options.seed})")
        else:
            steps.append("arrivals were not spread: they do not come in steps")
    if options.speed_up != 1.0:
        arrival_ns = _divide(arrival_ns, options.speed_up)
        steps.append(f"times divided by {options.speed_up:g}")

    end_ns = int(arrival_ns[-1]) + 1
    if options.warm_s is None:
        measure_from_ns = min(60_000_000_000, end_ns // 10)
    else:
        measure_from_ns = round(options.warm_s * 1e9)
        if measure_from_ns >= end_ns:
            raise UserError(f"warm-s = {options.warm_s:g} leaves nothing to measure of a trace of {end_ns / 1e9:g} s")
    phase = TracePhase(label=BASE, start_ns=0, end_ns=end_ns)
    return Arrivals(order, arrival_ns, origin_ns, measure_from_ns, phase, tuple(steps), dropped)


def step_of(arrival_ns: Int64Array, unit_ns: int) -> int:
    """Return the step in which sorted arrivals come, in ns; 0 where they come in none coarser than 10 units.

    They do if at least two requests share an instant in the mean, and 9 in 10 pauses between instants are a multiple of
    the median pause, within a hundredth of it (recorders that sleep between batches drift by that much).
    """
    instants = arrival_ns[np.flatnonzero(np.diff(arrival_ns, prepend=arrival_ns[:1] - 1))]
    if instants.size < 10 or arrival_ns.size < 2 * instants.size:
        return 0
    pauses = np.diff(instants)
    step = int(np.median(pauses))
    if step < 10 * unit_ns:
        return 0
    times = np.maximum(np.rint(pauses / step), 1)
    regular = np.abs(pauses - times * step) <= 0.01 * step
    return step if np.count_nonzero(regular) >= 0.9 * pauses.size else 0


def _divide(arrival_ns: Int64Array, speed_up: float) -> Int64Array:
    """Divide times, exactly to the nanosecond where the speed is a whole number."""
    if speed_up == int(speed_up):
        return arrival_ns // int(speed_up)
    result = arrival_ns.astype(np.longdouble) / np.longdouble(speed_up)
    if float(result[-1]) >= _MAX_NS:
        raise UserError(f"speed-up = {speed_up:g} stretches the trace beyond what it can hold (146 years)")
    return np.rint(result).astype(np.int64)


def _stragglers(time_ns: Int64Array) -> list[str]:
    """Name a few requests that lie far outside the time of all others."""
    span_ns = int(time_ns[-1] - time_ns[0])
    if time_ns.size < 3 or span_ns < _DAY_NS:
        return []
    gaps = np.diff(time_ns)
    widest = int(np.argmax(gaps))
    before, after = widest + 1, time_ns.size - widest - 1
    few = max(1, time_ns.size // 100)
    if gaps[widest] < span_ns // 2 or min(before, after) > few:
        return []
    days = gaps[widest] / _DAY_NS
    where, count, cut = ("first", before, "start-s") if before <= after else ("last", after, "end-s")
    middle_s = (int(time_ns[widest]) + int(gaps[widest]) // 2 - int(time_ns[0])) / 1e9
    return [f"the {where} {count} of {time_ns.size} lie {days:.1f} days off (--{cut} {middle_s:.0f} cuts them)"]
