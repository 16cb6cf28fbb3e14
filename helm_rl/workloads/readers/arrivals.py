"""From a log's times to a trace's arrivals: order, window, steps of the clock, speed; each said in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.workloads.readers.mapping import Mapping
from helm_rl.workloads.readers.mapping import Requests as Mode
from helm_rl.workloads.readers.requests import Requests
from helm_rl.workloads.trace import BASE, TracePhase, gather

Int64Array = npt.NDArray[np.int64]

_DAY_NS = 86_400_000_000_000
MAX_NS = 2**62
_MIN_SPEED, _MAX_SPEED = 1e-6, 1e6
_MOST_INSTANTS = 1 << 22  # among which a step is looked for
_MOST_CANDIDATES = 1 << 14
_LEAST_INSTANTS = 3  # that tell a step
_COARSE_NS = 100_000_000  # a clock whose own unit is no finer comes in steps where requests share its instants


@dataclass(frozen=True)
class ReadOptions:
    """What a reader is asked to do beside reading."""

    speed_up: float = 1.0  # times are divided by it
    spread: bool = False  # arrivals quantised by the recorder are spread within their step
    seed: int = 1  # of the spreading, of drawn arrivals and of candidates
    warm_s: float | None = None  # start of the measured part on the trace's clock; None: min(60 s, a tenth of it)
    start_s: float | None = None  # keep rows from here on: seconds of the source after its first row
    end_s: float | None = None  # keep rows before this
    block_tokens: int | None = None  # tokens per content block; None: what the format has
    strict: bool = False  # any row left out is an error
    requests: Mode | None = None  # which rows make a request; None: what the format has
    session_s: float | None = None  # pause that ends a session; None: what the format has
    order_only: bool = False  # the order of requests is all that counts: the log may lack times
    arrivals: float | None = None  # requests/s: arrivals are drawn (Poisson) in place of the log's times
    candidates: int = 0  # items drawn for each request to score
    candidate_window_s: float = 3600.0  # from what was asked for in so many seconds before it
    zipf_items: float = 1.05  # of the law that stands in for items where a log has none
    law_items: int = 300_000_000  # under that law
    mapping: Mapping | None = None  # of format "generic"
    progress: Callable[[int], None] | None = None  # told the bytes read since it was last told

    def check(self) -> None:
        """Raise UserError for an option out of range."""
        if not (math.isfinite(self.speed_up) and _MIN_SPEED <= self.speed_up <= _MAX_SPEED):
            raise UserError(f"speed-up = {self.speed_up:g} must be from {_MIN_SPEED:g} to {_MAX_SPEED:g}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed = {self.seed} must be a whole number of at least 0")
        for name in ("warm_s", "start_s", "end_s", "session_s", "candidate_window_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and 0 <= value <= 1e9):
                raise UserError(f"{name.replace('_', '-')} = {value:g} must be from 0 to 1e9 seconds")
        if self.start_s is not None and self.end_s is not None and self.start_s >= self.end_s:
            raise UserError(f"start-s = {self.start_s:g} must be below end-s = {self.end_s:g}")
        if self.block_tokens is not None and not 1 <= self.block_tokens <= 1 << 20:
            raise UserError(f"block-tokens = {self.block_tokens} must be from 1 to {1 << 20}")
        if self.arrivals is not None and not (math.isfinite(self.arrivals) and 1e-6 <= self.arrivals <= 1e9):
            raise UserError(f"arrivals = {self.arrivals:g} must be from 1e-6 to 1e9 requests/s")
        if self.arrivals is not None and self.spread:
            raise UserError("arrivals and spread: arrivals that are drawn need no spreading; choose one")
        if not 0 <= self.candidates <= _MOST_CANDIDATES:
            raise UserError(f"candidates = {self.candidates} must be from 0 to {_MOST_CANDIDATES}")
        if not (math.isfinite(self.zipf_items) and 0 <= self.zipf_items <= 10):
            raise UserError(f"zipf-items = {self.zipf_items:g} must be from 0 to 10")
        if not 1 <= self.law_items <= 1 << 40:
            raise UserError(f"law-items = {self.law_items} must be from 1 to {1 << 40}")


class Placer:
    """Puts requests, in order of time, on the trace's clock, and says what it found."""

    def __init__(self, origin_ns: int, unit_ns: int, options: ReadOptions) -> None:
        """origin_ns: the source's time of arrival 0; unit_ns: one step of the last digit of its times."""
        self.origin_ns = origin_ns
        self._unit_ns = unit_ns
        self._options = options
        self._count = 0
        self._latest = 0
        self._widest = (0, 0, 0)  # gap, requests before it, time before it
        self._instants: list[Int64Array] = []
        self._kept = 0  # instants
        self._seen = 0  # requests at them
        self._end_ns = 0

    def place(self, parts: Iterator[Requests], step_ns: int) -> Iterator[Requests]:
        """Yield the parts with times on the trace's clock. step_ns: spread over it; 0: not at all."""
        rng = np.random.default_rng(self._options.seed)
        drawn_ns = 0
        held: Requests | None = None
        for part in parts:
            if not len(part):
                if part.rows:
                    yield part
                continue
            time_ns = part.time_ns - self.origin_ns
            self._watch(time_ns)
            if self._options.arrivals is not None:
                gaps = np.maximum(1, np.rint(rng.exponential(1e9 / self._options.arrivals, size=len(part))))
                time_ns = drawn_ns + np.cumsum(gaps.astype(np.int64))
                drawn_ns = int(time_ns[-1])
            latest = int(time_ns[-1])
            if step_ns:
                time_ns = time_ns + rng.integers(0, step_ns, size=time_ns.size, dtype=np.int64)
                part = _chain(held, replace(part, time_ns=time_ns))
                order = np.argsort(part.time_ns, kind="stable")
                ready = int(np.searchsorted(part.time_ns[order], latest, side="left"))  # what comes is not before it
                held, part = _take(part, order[ready:], 0), _take(part, order[:ready], part.rows)
            else:
                part = replace(part, time_ns=time_ns)
            yield self._sped(part)
        if held is not None and len(held):
            yield self._sped(held)

    def watch(self, parts: Iterator[Requests]) -> None:
        """Only look at the times of the parts."""
        for part in parts:
            if len(part):
                self._watch(part.time_ns - self.origin_ns)

    def step_ns(self) -> int:
        """Return the step in which the times seen come, 0 if they come in none."""
        if not self._instants:
            return 0
        return step_of(np.concatenate(self._instants), self._unit_ns, self._seen)

    def steps(self, spread_ns: int) -> list[str]:
        """Say what was found and done, in words."""
        found = self._stragglers()
        options = self._options
        instants = np.concatenate(self._instants) if self._instants else np.zeros(0, dtype=np.int64)
        step_ns = self.step_ns()
        if step_ns and options.arrivals is None:
            found.append(
                f"arrivals come in steps of {step_ns / 1e9:g} s ({self._seen} requests at {instants.size} instants): "
                "rates over shorter times say nothing"
            )
        pauses = np.diff(instants)
        regular = pauses.size >= 100 and pauses.min() == pauses.max() and not step_ns
        if regular and options.arrivals is None and not options.order_only:
            found.append(f"all arrivals are {int(pauses[0]) / 1e9:g} s apart: are these times recorded, or made up?")
        if options.spread:
            if spread_ns:
                found.append(f"arrivals spread evenly over {spread_ns / 1e9:g} s each (seed {options.seed})")
            else:
                found.append("arrivals were not spread: they do not come in steps")
        if options.arrivals is not None:
            found.append(f"arrivals drawn, in the log's order: Poisson, {options.arrivals:g}/s (seed {options.seed})")
        if options.speed_up != 1.0:
            found.append(f"times divided by {options.speed_up:g}")
        return found

    def measured(self) -> tuple[int, TracePhase]:
        """Return where the measured part begins, and the whole as one base load."""
        end_ns = self._end_ns + 1
        if self._options.warm_s is None:
            from_ns = min(60_000_000_000, end_ns // 10)
        else:
            from_ns = round(self._options.warm_s * 1e9)
            if from_ns >= end_ns:
                raise UserError(
                    f"warm-s = {self._options.warm_s:g} leaves nothing to measure of a trace of {end_ns / 1e9:g} s"
                )
        return from_ns, TracePhase(label=BASE, start_ns=0, end_ns=end_ns)

    def _watch(self, time_ns: Int64Array) -> None:
        opens = np.ones(time_ns.size, dtype=bool)
        opens[1:] = time_ns[1:] != time_ns[:-1]
        if self._count:
            opens[0] = int(time_ns[0]) != self._latest
        gaps = np.diff(time_ns, prepend=self._latest if self._count else time_ns[0])
        at = int(np.argmax(gaps))
        if int(gaps[at]) > self._widest[0]:
            self._widest = (int(gaps[at]), self._count + at, int(time_ns[at]) - int(gaps[at]))
        if self._kept < _MOST_INSTANTS:
            instants = time_ns[opens]
            self._instants.append(instants)
            self._kept += instants.size
            self._seen += time_ns.size
        self._count += time_ns.size
        self._latest = int(time_ns[-1])

    def _sped(self, part: Requests) -> Requests:
        if self._options.speed_up != 1.0 and len(part):
            part = replace(part, time_ns=_divide(part.time_ns, self._options.speed_up))
        if len(part):
            self._end_ns = int(part.time_ns[-1])
        return part

    def _stragglers(self) -> list[str]:
        """Name a few requests that lie far outside the time of all others."""
        gap_ns, before, at_ns = self._widest
        after = self._count - before
        few = max(1, self._count // 100)
        if self._count < 3 or self._latest < _DAY_NS or gap_ns < self._latest // 2 or min(before, after) > few:
            return []
        where, count, cut = ("first", before, "start-s") if before <= after else ("last", after, "end-s")
        middle_s = (at_ns + gap_ns // 2) / 1e9
        days = gap_ns / _DAY_NS
        return [f"the {where} {count} of {self._count} lie {days:.1f} days off (--{cut} {middle_s:.0f} cuts them)"]


def step_of(arrival_ns: Int64Array, unit_ns: int, count: int | None = None) -> int:
    """Return the step in which sorted arrivals come, in ns; 0 where they come in none.

    They come in steps of 10 units and more if at least two requests share an instant in the mean, and 9 in 10 pauses
    between instants are a multiple of the median pause, within a hundredth of it (recorders that sleep between batches
    drift by that much). They come in steps of one unit if instants are shared so and the unit is coarse, .1 s or more
    (clocks of whole seconds).
    count: of the requests, where arrival_ns are only their instants.
    """
    instants = arrival_ns[np.flatnonzero(np.diff(arrival_ns, prepend=arrival_ns[:1] - 1))]
    if instants.size < _LEAST_INSTANTS or (arrival_ns.size if count is None else count) < 2 * instants.size:
        return 0
    pauses = np.diff(instants)
    step = int(np.median(pauses))
    if step < 10 * unit_ns:
        return unit_ns if unit_ns >= _COARSE_NS else 0
    times = np.maximum(np.rint(pauses / step), 1)
    regular = np.abs(pauses - times * step) <= 0.01 * step
    return step if np.count_nonzero(regular) >= 0.9 * pauses.size else 0


def _divide(arrival_ns: Int64Array, speed_up: float) -> Int64Array:
    """Divide times, exactly to the nanosecond where the speed is a whole number."""
    if speed_up == int(speed_up):
        return arrival_ns // int(speed_up)
    result = arrival_ns.astype(np.longdouble) / np.longdouble(speed_up)
    if float(result[-1]) >= MAX_NS:
        raise UserError(f"speed-up = {speed_up:g} stretches the trace beyond what it can hold (146 years)")
    return np.rint(result).astype(np.int64)


def _chain(first: Requests | None, second: Requests) -> Requests:
    if first is None:
        return second
    columns: dict[str, Any] = {}
    for name in ("time_ns", "user", "tenant", "tokens", "items"):
        pair = (getattr(first, name), getattr(second, name))
        columns[name] = None if pair[0] is None else np.concatenate(pair)
    offsets = np.concatenate([first.offsets, second.offsets[1:] + first.offsets[-1]])
    return Requests(**columns, offsets=offsets, rows=second.rows)


def _take(part: Requests, order: Int64Array, rows: int) -> Requests:
    offsets, items = gather(part.offsets, part.items, order)
    return Requests(
        time_ns=part.time_ns[order],
        user=None if part.user is None else part.user[order],
        tenant=None if part.tenant is None else part.tenant[order],
        tokens=None if part.tokens is None else part.tokens[order],
        offsets=offsets,
        items=items,
        rows=rows,
    )
