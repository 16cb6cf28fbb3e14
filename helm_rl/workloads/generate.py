"""The seeded generator: a scenario's load, drawn as visits of users, as a trace.

Users come for visits. Visits start as a Poisson process; a visit has a geometric number of requests with
exponential pauses between them. Both are memoryless, so the visits that are under way at any instant of a
stationary load are a Poisson number, each with a fresh exponential pause before its next request and a
fresh geometric number of requests to come. A load therefore starts in its steady state exactly, without
simulating what came before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.memory import free_bytes
from helm_rl.scenario import LoadPhase, LoadSection, Scenario, scenario_hash
from helm_rl.workloads.trace import BASE, Trace, TraceMeta, TracePhase

MAX_REQUESTS = 50_000_000
MAX_ITEMS = 1_000_000_000
_REQUEST_BYTES, _ITEM_BYTES = 110, 17  # of memory at the peak, as measured
_FACTOR_WINDOW_S = 300.0
_PIECE = 1 << 20  # numbers that are drawn at a time
_TABLE = 2048  # ranks of a Zipf law that are looked up
_GUIDE = 1 << 15  # places at which to begin to look
_CUBICS = 1 << 14  # pieces of the rest of the law
_GRID = 4096  # pieces of constant rate that a drift is drawn with

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class _Rate:
    """A request rate over [start_s, end_s): constant until drift_s, then linear from `first` to `last`.

    Over the first and the last `ramp_s` it is scaled, linearly from and to nothing. With `day`, weights over a day of
    `day_s` that begins at 0, it follows them, linearly from the middle of each one's share of the day to the next.
    """

    start_s: float
    drift_s: float
    end_s: float
    first: float
    last: float
    ramp_s: float = 0.0
    day: tuple[float, ...] = ()
    day_s: float = 86_400.0

    def at(self, time_s: FloatArray) -> FloatArray:
        """Return the rate (requests/s) at instants within [start_s, end_s)."""
        rate = self.first + self.slope * np.maximum(time_s - self.drift_s, 0.0)
        if self.ramp_s > 0:
            rate = rate * np.clip(np.minimum(time_s - self.start_s, self.end_s - time_s) / self.ramp_s, 0.0, 1.0)
        if self.day:
            middle = (np.arange(len(self.day)) + 0.5) / len(self.day)
            rate = rate * np.interp(time_s / self.day_s % 1.0, middle, self.day, period=1.0) / np.mean(self.day)
        return rate

    def requests(self, from_s: float, to_s: float) -> float:
        """Return the requests asked for in [from_s, to_s)."""
        from_s, to_s = max(from_s, self.start_s), min(to_s, self.end_s)
        if to_s <= from_s:
            return 0.0
        edges = np.linspace(from_s, to_s, _GRID + 1)
        return float(self.at((edges[:-1] + edges[1:]) / 2).mean() * (to_s - from_s))

    @property
    def slope(self) -> float:
        """Requests/s gained per second once it drifts."""
        return (self.last - self.first) / (self.end_s - self.drift_s)


def generate(scenario: Scenario, seed: int | None = None) -> Trace:
    """Draw the scenario's load over [-warm_s, seconds); the part before 0 is warm-up.

    seed: overrides the scenario's. The base load of a seed is the same whether or not there are phases
    beside it. A load whose rate falls faster than its visits end (they last (requests_per_visit - 1) *
    think_s seconds in the mean) cannot follow: no new visits start, and it exceeds the rate asked by those
    under way.

    Items are drawn from the Zipf law, the most popular item being code 0. A hot set is a stretch of codes
    in the middle of the range, where no item was popular before, each of its items equally likely; phases
    have disjoint sets (meta.phases[i].hot_first, hot_items). A user's history before the trace depends on
    his code alone; one that has reached history_max slides on, its oldest events falling out. So does his tenant: each
    has its share of the users.

    Where the catalogue is renewed, an item new to all takes the place in the law of one that had it: each place changes
    hands at even times of its own, and the newcomers' codes are a hash's choice of the less popular half. That changes
    what the trace names, and so its statistics and miss-ratio curves, but no latency of a simulated node: it draws the
    rows that it reads from the law (content "law"), whatever items the trace names.

    Raises UserError if the trace would be too large for the memory that is free, or has no request.
    """
    seed = scenario.seed if seed is None else seed
    if not 0 <= seed < 2**63:
        raise UserError(f"seed = {seed} must be a whole number of at least 0")
    load = scenario.load
    base = _Rate(-scenario.warm_s, 0.0, scenario.seconds, load.rate, _last(load), day=load.day, day_s=load.day_s)
    rates = [base]
    for phase in load.phase:
        end_s = min(phase.start_s + phase.seconds, scenario.seconds)
        rates.append(_Rate(phase.start_s, phase.start_s, end_s, phase.rate, _last(phase), phase.ramp_s))
    expected = sum(rate.requests(rate.start_s, rate.end_s) for rate in rates)
    if expected > MAX_REQUESTS or expected * load.new_tokens_mean > MAX_ITEMS:
        raise UserError(
            f"scenario {scenario.name} asks for {expected:.3g} requests of {load.new_tokens_mean:g} items; "
            f"a trace holds at most {MAX_REQUESTS:.0e} requests and {MAX_ITEMS:.0e} items: lower seconds or the rates"
        )
    needed, free = expected * (_REQUEST_BYTES + load.new_tokens_mean * _ITEM_BYTES), free_bytes()
    if needed > free:
        raise UserError(
            f"scenario {scenario.name} asks for {expected:.3g} requests of {load.new_tokens_mean:g} items, which take "
            f"{needed / 2**30:.1f} GiB of memory to draw; {free / 2**30:.1f} GiB are free: lower seconds or the rates"
        )

    phases = _phases(scenario, rates)
    parts = [_requests(load, part, rates[i], phases, i, seed) for i, part in enumerate(load.parts)]
    arrival_ns = _joined([part.arrival_ns for part in parts])
    if arrival_ns.size == 0:
        raise UserError(f"scenario {scenario.name} with seed {seed} has no request: raise seconds or the rates")
    ends = np.cumsum([part.user.size for part in parts])
    user = _joined([part.user for part in parts])
    lengths = _joined([part.new_tokens for part in parts])
    items = _joined([part.items for part in parts])
    parts.clear()  # before the items are copied once more
    order, arrival_ns = _sorted(arrival_ns, phases[0])
    columns = _gather(order, ends, user, lengths, items)
    return Trace(
        arrival_ns=arrival_ns,
        user=columns.user,
        tenant=_tenants(scenario, columns.user),
        phase=columns.phase,
        history_tokens=_histories(load, columns.user, columns.new_tokens),
        new_tokens=columns.new_tokens,
        item_offsets=columns.offsets,
        item_values=columns.values,
        meta=TraceMeta(
            name=scenario.name,
            source="generator",
            origin_ns=0,
            measure_from_ns=0,
            users=load.users,
            items=load.items,
            content="law",
            zipf_items=load.zipf_items,
            law_items=load.items,
            phases=phases,
            seed=seed,
            scenario_hash=scenario_hash(scenario),
            steps=tuple(_steps(scenario)),
        ),
    )


def zipf_codes(rng: np.random.Generator, count: int, exponent: float, items: int) -> IntArray:
    """Draw `count` codes from 0..items-1 with P(code) proportional to (code + 1)^-exponent; int64 (count,).

    Rejection from the integral of the law (Hoermann and Derflinger, "Rejection-inversion to generate
    variates from monotone discrete distributions", ACM TOMACS 6(3), 1996): exact, and the cost hardly depends on
    `items`. The first ranks are looked up in a table.
    """
    from helm_rl.workloads.kernels import zipf  # numba takes half a second to import

    if exponent == 0:
        return rng.integers(0, items, size=count, dtype=np.int64)
    law = _law(exponent, items)
    codes = np.empty(count, dtype=np.int64)
    state = np.zeros(1, dtype=np.int64)
    while state[0] < count:
        # What is drawn depends on how many are wanted; in pieces it takes less memory, and the stream is the same.
        for piece in _pieces(int((count - int(state[0])) * 1.15) + 16):
            uniform = rng.random(piece.stop - piece.start)
            begin = 0
            while begin < uniform.size:
                begin = zipf(
                    uniform, begin, law.low, law.high, law.power, law.below, law.above, law.accept, law.guide,
                    law.cubics, codes, state,
                )  # fmt: skip
                if begin < uniform.size:
                    accepted = law.ranks(uniform[begin : begin + 1])
                    codes[state[0] : state[0] + accepted.size] = accepted - 1
                    state[0] += accepted.size
                    begin += 1
    return codes


@dataclass(frozen=True)
class _Law:
    """A Zipf law's integral, and a table of its first ranks for the kernel `zipf`, which says what they are."""

    items: int
    power: float
    low: float
    high: float
    below: FloatArray
    above: FloatArray
    accept: FloatArray
    guide: IntArray
    cubics: FloatArray

    def ranks(self, uniform: FloatArray) -> IntArray:
        """Return the ranks that are accepted, for numbers in [0, 1); int64, at most as many."""
        y = self.high + uniform * (self.low - self.high)
        rank = np.clip(np.rint(_inverse(y, self.power)), 1, self.items)
        least = _integral(rank + 0.5, self.power) - rank ** (self.power - 1.0)
        return rank[y >= least].astype(np.int64)


@lru_cache(maxsize=16)
def _law(exponent: float, items: int) -> _Law:
    from helm_rl.workloads.kernels import UNSURE

    power = 1.0 - exponent
    rank = np.arange(min(items, _TABLE) + 1.0)
    edge = _integral(rank + 0.5, power)
    unsure = UNSURE * (rank + 0.5) ** power + UNSURE * np.abs(edge)
    low = float(_integral(np.array(1.5), power)) - 1.0
    high = float(_integral(np.array(items + 0.5), power))
    with np.errstate(divide="ignore"):  # rank 0 is never drawn
        accept = edge - rank**-exponent
    above = edge + unsure
    # A piece earlier, for the kernel's product may be rounded up into the next.
    starts = low + np.arange(-1, _GUIDE - 1) / _GUIDE * (above[-1] - low)
    guide = np.maximum(np.searchsorted(above, starts, side="left"), 1)
    cubics = _cubics(float(above[-1]), high, power) if items > _TABLE else np.zeros((0, 4))
    return _Law(items, power, low, high, edge - unsure, above, accept, guide, cubics)


def _cubics(start: float, end: float, power: float) -> FloatArray:
    """Return cubics (c, 4) for `_inverse` over [start, end], as the kernel `zipf` takes them; c = 0: too inexact."""
    from helm_rl.workloads.kernels import UNSURE

    width = (end - start) / _CUBICS
    y = start + np.arange(_CUBICS + 1) * width
    x = _inverse(y, power)
    slope = x ** (1.0 - power) * width  # of x over the piece
    rise = np.diff(x)
    cubics = np.stack(
        [x[:-1], slope[:-1], 3 * rise - 2 * slope[:-1] - slope[1:], slope[:-1] + slope[1:] - 2 * rise], axis=1
    )
    t = np.array([[0.25], [0.5], [0.75]])
    found = ((cubics[:, 3] * t + cubics[:, 2]) * t + cubics[:, 1]) * t + cubics[:, 0]
    exact = _inverse(y[:-1] + t * width, power)
    return cubics if np.abs(found / exact - 1).max() < 0.4 * UNSURE else np.zeros((0, 4))


def _integral(x: FloatArray, power: float) -> FloatArray:
    """Integrate x^(power - 1) from 1."""
    log = np.log(x)
    return log if power == 0 else np.expm1(power * log) / power


def _inverse(y: npt.NDArray[Any], power: float) -> FloatArray:
    # Rounding may carry the argument of log1p past -1 at the far end of a steep law.
    return np.exp(y if power == 0 else np.log1p(np.maximum(power * y, -1 + 1e-16)) / power)


def _joined(arrays: list[IntArray]) -> IntArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _sorted(arrival_ns: IntArray, whole: TracePhase) -> tuple[IntArray, IntArray]:
    """Return the stable order of arrivals that lie within the whole, and them in that order; int64 (n,) each."""
    from helm_rl.workloads.kernels import order_by_time

    ordered = np.empty(2 * arrival_ns.size, dtype=np.int64)
    edges = np.zeros(arrival_ns.size // 2 + 2, dtype=np.int64)
    if order_by_time(arrival_ns, whole.start_ns, whole.end_ns, edges, ordered):
        return ordered[1::2].copy(), ordered[::2].copy()
    order = np.argsort(arrival_ns, kind="stable")
    return order, arrival_ns[order]


class _Columns(NamedTuple):
    """Columns of a trace, in order of time."""

    user: IntArray
    phase: Int32Array
    new_tokens: Int32Array
    offsets: IntArray
    values: IntArray


def _gather(order: IntArray, ends: IntArray, user: IntArray, lengths: IntArray, values: IntArray) -> _Columns:
    """Bring requests, with `lengths` (n,) of the values each, into order; ends: of the parts that stand one by one."""
    from helm_rl.workloads.kernels import gather_requests

    n = order.size
    offsets = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    columns = _Columns(
        user=np.empty(n, dtype=np.int64),
        phase=np.empty(n, dtype=np.int32),
        new_tokens=np.empty(n, dtype=np.int32),
        offsets=np.empty(n + 1, dtype=np.int64),
        values=np.empty(values.size, dtype=np.int64),
    )
    gather_requests(order, ends, user, offsets, values, *columns)
    return columns


def _histories(load: LoadSection, user: IntArray, new_tokens: Int32Array) -> Int32Array:
    """Return the history at each request in order of time, its new tokens included; int32 (n,)."""
    from helm_rl.workloads.kernels import histories

    if load.users <= 2 * user.size:
        history = _initial_history(load, np.arange(load.users, dtype=np.int64))
    else:
        codes, user = np.unique(user, return_inverse=True)
        history = _initial_history(load, codes)
    history_tokens = np.empty(user.size, dtype=np.int32)
    histories(user, new_tokens, history, load.history_max, history_tokens)
    return history_tokens


def _pieces(count: int) -> Iterator[slice]:
    """Cut `count` numbers into pieces that are worked on one by one."""
    return (slice(start, min(start + _PIECE, count)) for start in range(0, count, _PIECE))


@dataclass(frozen=True)
class _Part:
    arrival_ns: IntArray
    user: IntArray
    new_tokens: IntArray
    items: IntArray


def _requests(
    load: LoadSection,
    part: LoadSection | LoadPhase,
    rate: _Rate,
    phases: tuple[TracePhase, ...],
    index: int,
    seed: int,
) -> _Part:
    """Draw the requests of one load; it has random streams of its own, whatever other loads there are."""
    phase = phases[index]
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(index,)))
    varied = load.rate_cv if part is load else 0.0  # a phase is what it is asked to be
    arrival_ns, visit, visits = _arrivals(
        rng,
        rate,
        part.requests_per_visit,
        part.think_s or load.think_s,
        load.think_sigma,
        varied,
        load.rate_cv_s,
        phase,
    )
    user = zipf_codes(rng, visits, load.zipf_users, load.users)[visit]
    new_tokens = rng.geometric(1 / load.new_tokens_mean, size=user.size)
    np.minimum(new_tokens, load.history_max, out=new_tokens)
    items = zipf_codes(rng, int(new_tokens.sum()), load.zipf_items, load.items)
    if load.renewed_per_hour > 0:
        from helm_rl.workloads.kernels import renew

        new_from = max(load.items // 2, 1) + sum(one.hot_items for one in load.parts if one.hot_fraction > 0)
        per_ns = load.renewed_per_hour / 3.6e12
        renew(items, new_tokens, arrival_ns, phases[0].start_ns, per_ns, new_from, load.items - new_from)
    if phase.hot_fraction > 0:
        hot = np.empty(items.size, np.bool_)
        for piece in _pieces(items.size):
            hot[piece] = rng.random(piece.stop - piece.start) < phase.hot_fraction
        items[hot] = rng.integers(phase.hot_first, phase.hot_first + phase.hot_items, size=int(hot.sum()))
    return _Part(arrival_ns, user, new_tokens, items)


def _arrivals(
    rng: np.random.Generator,
    rate: _Rate,
    per_visit: float,
    think_s: float,
    think_sigma: float,
    rate_cv: float,
    rate_cv_s: float,
    phase: TracePhase,
) -> tuple[IntArray, IntArray, int]:
    """Return times (ns) of the requests within the phase, the visit of each, and the number of visits."""
    from helm_rl.workloads.kernels import interpolate, visit_requests

    ends = 1 / per_visit
    edges = np.linspace(rate.start_s, rate.end_s, _GRID + 1)
    starts, under_way = _visit_starts(rate, edges, per_visit, think_s)
    if rate_cv > 0:
        edges, starts = _varied(rng, edges, starts, rate_cv, rate_cv_s)
    cumulated = np.concatenate([[0.0], np.cumsum(starts * np.diff(edges))])

    # A visit is drawn to its end, wherever that is; most of a long one may lie past the load's.
    drawn = (under_way + cumulated[-1]) * per_visit
    if drawn > MAX_REQUESTS:
        raise UserError(
            f"requests_per_visit = {per_visit:g} with think_s = {think_s:g} makes visits so long that {drawn:.1e} "
            f"requests would be drawn, most of them past the end; at most {MAX_REQUESTS:.0e} can be: lower one of them"
        )
    begun = rng.random(rng.poisson(cumulated[-1])) * cumulated[-1]
    if begun.size:
        interpolate(begun, cumulated, edges, np.empty(4 * _GRID, dtype=np.int64))
    joined = rate.start_s + _pauses(rng, think_s, think_sigma, rng.poisson(under_way), under_way=True)
    first_s = np.concatenate([joined, begun])
    counts = rng.geometric(ends, size=first_s.size)
    pauses = _pauses(rng, think_s, think_sigma, int(counts.sum()))
    arrival_ns, visit = np.empty(pauses.size, dtype=np.int64), np.empty(pauses.size, dtype=np.int64)
    found = visit_requests(first_s, counts, pauses, phase.start_ns, phase.end_ns, arrival_ns, visit)
    return arrival_ns[:found], visit[:found], first_s.size


def _pauses(rng: np.random.Generator, think_s: float, sigma: float, count: int, under_way: bool = False) -> FloatArray:
    """Draw pauses (s) of mean think_s, or what is left of those under way at an instant."""
    if sigma == 0:
        return rng.exponential(think_s, size=count)
    # A pause is met under way the more likely the longer it is: lognormal too, its logarithm larger by sigma^2.
    shift = sigma**2 / 2 if under_way else -(sigma**2) / 2
    pauses = think_s * np.exp(shift + sigma * rng.standard_normal(count))
    return pauses * rng.random(count) if under_way else pauses


def _varied(
    rng: np.random.Generator, edges: FloatArray, starts: FloatArray, cv: float, hold_s: float
) -> tuple[FloatArray, FloatArray]:
    """Let a piecewise constant rate vary by factors from a gamma law of mean 1, each for an exponential time.

    Two instants t apart share their factor with probability exp(-t / hold_s), which is the factors' correlation.
    """
    span_s = float(edges[-1] - edges[0])
    if span_s / hold_s > MAX_REQUESTS:
        raise UserError(
            f"rate_cv_s = {hold_s:g} would change the rate {span_s / hold_s:.1e} times; at most {MAX_REQUESTS:.0e}: "
            "raise it, or leave rate_cv at 0"
        )
    # Changes at random: a Poisson number of them, anywhere.
    changes = np.sort(edges[0] + span_s * rng.random(rng.poisson(span_s / hold_s)))
    factors = rng.gamma(cv**-2, cv**2, size=changes.size + 1)
    finer = np.union1d(edges, changes)
    middle = (finer[:-1] + finer[1:]) / 2
    piece = np.clip(np.searchsorted(edges, middle) - 1, 0, starts.size - 1)
    return finer, starts[piece] * factors[np.searchsorted(changes, middle)]


def _visit_starts(rate: _Rate, edges: FloatArray, per_visit: float, think_s: float) -> tuple[FloatArray, float]:
    """Return the rate at which visits start in each piece of time, and the number under way at the start.

    The visits under way, n, gain a share q = 1 - 1 / per_visit of all requests and lose n / think_s a second; visits
    start at the rate that makes requests come at the rate asked, r(t) - n(t) / think_s, or not at all where that is
    negative.
    """
    continues = 1 - 1 / per_visit
    asked = rate.at((edges[:-1] + edges[1:]) / 2)
    # A drift that starts at the load's own start is joined in its own equilibrium, if there is one.
    lag = rate.slope * think_s if rate.drift_s <= rate.start_s else 0.0
    first = float(rate.at(edges[:1])[0]) if rate.ramp_s > 0 or rate.day else rate.first
    under_way = n = max(0.0, continues * think_s * (first - lag))
    step_s = float(edges[1] - edges[0])
    kept = math.exp(-step_s / think_s)
    idle = math.exp(-step_s / think_s * (1 - continues))  # nobody starts: only visits that go on
    starts = np.zeros(asked.size)
    for k, r in enumerate(asked.tolist()):
        after = n * kept + continues * think_s * r * (1 - kept)
        mean = continues * think_s * r + (n - after) * think_s / step_s  # of n over the piece: dn/dt integrated
        starts[k] = r - mean / think_s
        if starts[k] < 0:
            starts[k] = 0.0
            after = n * idle
        n = after
    return starts, under_way


def _phases(scenario: Scenario, rates: list[_Rate]) -> tuple[TracePhase, ...]:
    """Describe base load and phases, and place their hot sets."""
    load = scenario.load
    hot_sets = [part.hot_items if part.hot_fraction > 0 else 0 for part in load.parts]
    first = min(load.items // 2, load.items - sum(hot_sets))
    phases = []
    for index, (part, rate, hot_items) in enumerate(zip(load.parts, rates, hot_sets, strict=True)):
        label = BASE if isinstance(part, LoadSection) else part.label or f"phase {index}"
        phases.append(
            TracePhase(
                label=label,
                start_ns=round(rate.start_s * 1e9),
                end_ns=round(rate.end_s * 1e9),
                hot_fraction=part.hot_fraction,
                hot_items=hot_items,
                hot_first=first if hot_items else 0,
                rate=part.rate,
                rate_end=part.rate_end,
                ramp_s=rate.ramp_s,
                factor=_factor(rate, rates) if index else None,
            )
        )
        first += hot_items
    return tuple(phases)


def _factor(phase: _Rate, rates: list[_Rate]) -> float | None:
    """Return the mean rate of all loads while the phase lasts over that in the 5 minutes before it."""
    during = sum(rate.requests(phase.start_s, phase.end_s) for rate in rates) / (phase.end_s - phase.start_s)
    from_s = max(phase.start_s - _FACTOR_WINDOW_S, rates[0].start_s)
    before = sum(rate.requests(from_s, phase.start_s) for rate in rates)
    return during / (before / (phase.start_s - from_s)) if before > 0 else None


def _steps(scenario: Scenario) -> Iterator[str]:
    load = scenario.load
    yield f"generated from scenario {scenario.name}"
    if load.renewed_per_hour > 0:
        yield f"items renewed: {load.renewed_per_hour:g} of them an hour"


def _last(part: LoadSection | LoadPhase) -> float:
    return part.rate if part.rate_end is None else part.rate_end


def _initial_history(load: LoadSection, user: IntArray) -> IntArray:
    """Return the events each user had before the trace: lognormal or by quantiles, from his code's hash; int64 (n,)."""
    code = user.astype(np.uint64) * np.uint64(2)
    if load.history_quantiles:
        share = np.linspace(0, 1, len(load.history_quantiles))
        return np.rint(np.exp(np.interp(_uniform(code), share, np.log(load.history_quantiles)))).astype(np.int64)
    if load.history_sigma == 0:
        return np.full(user.size, round(load.history_mean), dtype=np.int64)
    first, second = _uniform(code), _uniform(code + np.uint64(1))
    normal = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)  # Box and Muller
    tokens = np.exp(_location(load) + load.history_sigma * normal)
    return np.rint(np.minimum(tokens, load.history_max)).astype(np.int64)


def _tenants(scenario: Scenario, user: IntArray) -> npt.NDArray[np.int32]:
    """Return the tenant that each user belongs to, from a hash of his code, by the tenants' shares; int32 (n,)."""
    if len(scenario.tenant) < 2:
        return np.zeros(user.size, dtype=np.int32)
    edges = np.cumsum([tenant.share for tenant in scenario.tenant])
    code = user.astype(np.uint64) + np.uint64(2**63)  # apart from those of the histories
    return np.searchsorted(edges[:-1] / edges[-1], _uniform(code)).astype(np.int32)


def _location(load: LoadSection) -> float:
    """Return the mean of the logarithm that gives min(lognormal, history_max) the mean asked, by bisection."""
    sigma, limit = load.history_sigma, load.history_max

    def below(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    def mean(mu: float) -> float:
        z = (math.log(limit) - mu) / sigma
        return math.exp(mu + sigma**2 / 2) * below(z - sigma) + limit * below(-z)

    low = math.log(load.history_mean) - sigma**2 / 2
    high = math.log(limit) + 10 * sigma
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < load.history_mean else (low, middle)
    return (low + high) / 2


def _uniform(code: npt.NDArray[np.uint64]) -> FloatArray:
    """Hash each code to (0, 1]: what a SplitMix64 stream (Steele, Lea and Flood 2014) has at that place."""
    from helm_rl.workloads.kernels import uniform_hashes

    uniform = np.empty(code.size)
    uniform_hashes(code, uniform)
    return uniform
