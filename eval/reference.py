"""The reference schedule: the best alpha over time that an offline search finds, all arrivals known.

P99 is not additive over time, but the number of requests slower than a threshold is. So for a threshold T the
schedule is sought that minimises

    sum over measured requests of [latency > T] + EPSILON * min(latency / T, CLIP)

by dynamic programming over (piece of time, alpha), and T is narrowed until 1 % of the requests exceed it. No cost
is looked up: each is simulated from the caches and queues that the alphas before have left, so transitions count in
full. Of each (piece, alpha) one state is kept, the one of least cost so far. That makes the search a beam, and what
it finds a reference, not a bound. It is replayed from the start and stands only if it beats the per-segment optimum
and every static.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from eval.segments import Measured, Run
from eval.statistics import Floats
from eval.sweep import Sweep, Work, alpha_grid, sweep_adaptively
from helm_rl.control.schedule import ScheduledAlpha
from helm_rl.metrics import p99_ms

if TYPE_CHECKING:
    from envs.serving.node import NodeSim, NodeSnapshot
    from helm_rl.scenario import Scenario
    from helm_rl.workloads.trace import Trace

Ints = npt.NDArray[np.int64]

EPSILON = 1e-3
"""Weight of the latencies themselves: of schedules with as many slow requests, the faster one is kept."""
CLIP = 10.0
"""Multiple of the threshold beyond which a latency weighs no more in that."""
THRESHOLDS = 4
"""Thresholds that one pass tries. The states they keep are mostly the same, so four cost little more than one."""
WIDEST = 0.75
"""The pass over all alphas looks for P99s down to this share of the best one known,"""
WORSE = 1.03
"""and keeps paths up to this multiple of it: finer alphas may carry them below it."""
NEAR = 0.94
"""Fine passes first look for P99s down to this share of the best one known,"""
SLACK = 0.97
"""then, with finer alphas, down to this share of the highest one that they did not reach."""
GAIN = 0.003
"""The passes at one spacing end when one lowers P99 by less than this share of it."""

PROGRAMMED = "dynamic_programming"
SEGMENTS = "segment_optimum"


@dataclass(frozen=True)
class Effort:
    """How finely a schedule is sought, and what that may cost.

    step: spacing of the alphas of the pass that tries all of them in every piece; finer: spacings of the passes that
    try around a path; piece_s: longest piece of time with one alpha, in seconds; piece_requests: requests in a piece,
    in the mean, below which pieces get longer, for saving and restoring would cost more than serving; replays: no pass
    begins once so many replays' worth of requests have been simulated.
    """

    step: float = 0.2
    finer: tuple[float, ...] = (0.04, 0.02)
    piece_s: float = 30.0
    piece_requests: int = 2_000
    replays: float = 50.0


EFFORT = Effort()


@dataclass(frozen=True)
class Trial:
    """One threshold of one pass: how many measured requests exceeded it, of how many that may; None: no path left."""

    threshold_ms: float
    slower: int | None
    allowed: int


@dataclass(frozen=True)
class Reference:
    """The best schedule known for one trace.

    schedule, alpha0, run: what won, from which alpha it starts, and its replay; winner: PROGRAMMED, SEGMENTS or
    static_<alpha>; programmed: the replay of the schedule that the search found, None where it found none that beats
    the others; trials: the thresholds it tried; replays: what the search cost, in whole replays of the trace; piece_s:
    mean length of its pieces.
    """

    schedule: ScheduledAlpha
    alpha0: float
    run: Run
    winner: str
    programmed: Run | None
    trials: tuple[Trial, ...]
    replays: float
    piece_s: float

    @property
    def p99_ms(self) -> float:
        """P99 of the measured requests."""
        return self.run.p99_ms


def segment_optimum(trace: Trace, swept: Sweep) -> ScheduledAlpha:
    """Return the schedule that goes to each segment's best alpha the moment the segment begins."""
    begins = np.array([span.start_ns for span in swept.part.spans], dtype=np.int64)
    begins[0] = min(int(begins[0]), int(trace.arrival_ns[0]))  # the first one also rules the warm-up
    return ScheduledAlpha(begins, [curve.best for curve in swept.settled])


def best_known(trace: Trace, swept: Sweep, optimum: Run) -> Reference:
    """Return the best of every static and the per-segment optimum, without a search."""
    hindsight = swept.hindsight
    best = swept.runs[hindsight]
    if optimum.p99_ms < best.p99_ms:
        schedule = segment_optimum(trace, swept)
        return Reference(schedule, float(schedule.alphas[0]), optimum, SEGMENTS, None, (), 0.0, 0.0)
    start_ns = min(int(trace.arrival_ns[0]), swept.part.start_ns)
    schedule = ScheduledAlpha([start_ns], [hindsight])
    return Reference(schedule, hindsight, best, f"static_{hindsight:g}", None, (), 0.0, 0.0)


def best_schedule(scenario: Scenario, trace: Trace, work: Work, step: float, effort: Effort | None = None) -> Reference:
    """Sweep the statics, replay the per-segment optimum, and return the best of both, or of a search too.

    Arguments:
        step: spacing of alpha around the minima of the sweep.
        effort: of the search for a better schedule; None: there is no search.
    """
    swept = sweep_adaptively(scenario, trace, work, step)
    schedule = segment_optimum(trace, swept)
    (optimum,) = work.run(scenario, trace, swept.part, [(schedule, float(schedule.alphas[0]), 0)])
    if effort is None:
        return best_known(trace, swept, optimum)
    return reference(scenario, trace, swept, optimum, work, effort)


def reference(
    scenario: Scenario, trace: Trace, swept: Sweep, optimum: Run, work: Work, effort: Effort = EFFORT
) -> Reference:
    """Search for the schedule of least P99 and return the best of it, the per-segment optimum and every static.

    Arguments:
        swept: the statics of this trace; optimum: the replay of its `segment_optimum`.
        work: where it runs; its progress bar counts the pieces as parts of a replay.
        effort: how fine the grids of alpha and time are.

    Raises:
        RuntimeError: The schedule found, replayed from the start, gave another P99 than along the search.
    """
    known = best_known(trace, swept, optimum)
    search = _Search(scenario, trace, swept.part, cut_times(scenario, trace, swept.part, effort), work)
    work.plan(effort.replays)
    try:
        path, best_ms, trials = _narrow(scenario, search, known, swept, effort)
    finally:
        work.plan(search.replays - effort.replays)
    piece_s = float(np.diff([*search.times_ns[search.times_ns >= swept.part.start_ns], swept.part.end_ns]).mean()) / 1e9
    programmed = None
    if path is not None:
        schedule = ScheduledAlpha(search.times_ns, path)
        (programmed,) = work.run(scenario, trace, swept.part, [(schedule, path[0], 0)])
        if programmed.p99_ms != best_ms:
            raise RuntimeError(
                f"the schedule found had a P99 of {best_ms} ms along the search, and {programmed.p99_ms} ms replayed"
            )
        known = Reference(schedule, path[0], programmed, PROGRAMMED, None, (), 0.0, 0.0)
    return Reference(known.schedule, known.alpha0, known.run, known.winner, programmed, trials, search.replays, piece_s)


def cut_times(scenario: Scenario, trace: Trace, part: Measured, effort: Effort) -> Ints:
    """Return when the pieces start, int64[k]: the warm-up is one; segments are cut evenly, into at most `piece_s` each.

    They are longer where they would hold too few requests. Starts fall on ends of decision intervals, as a replay has
    them, so a schedule found over pieces is what a controller can do.
    """
    start_ns = min(int(trace.arrival_ns[0]), part.start_ns)
    interval_ns = round(scenario.control.interval_s * 1e9)
    longest_ns = max(effort.piece_s, part.seconds * effort.piece_requests / part.requests) * 1e9
    times = {start_ns}
    for segment in trace.segments():
        length_ns = segment.end_ns - segment.start_ns
        pieces = max(1, int(np.ceil(length_ns / longest_ns)))
        times.update(segment.start_ns + length_ns * piece // pieces for piece in range(pieces))
    last_ns = int(trace.arrival_ns[-1])
    on_grid = {start_ns + -(-(time_ns - start_ns) // interval_ns) * interval_ns for time_ns in times}
    return np.array(sorted(time_ns for time_ns in on_grid if time_ns <= last_ns), dtype=np.int64)


def _narrow(
    scenario: Scenario, search: _Search, known: Reference, swept: Sweep, effort: Effort
) -> tuple[list[float] | None, float, tuple[Trial, ...]]:
    """Run the passes; return the alphas of the best path that beats `known` (None: there is none), its P99, the trials.

    First fine passes around the best schedule known: they are cheap, since most paths are soon given up, and what they
    gain makes the rest cheaper. Then a pass over the whole range of alphas, and fine ones around what it found.
    """
    control = scenario.control
    trials: list[Trial] = []
    best = [known.schedule.at(int(time_ns)) for time_ns in search.times_ns]
    best_ms = known.p99_ms
    improved = False

    def attempt(choices: Sequence[Sequence[float]], low: float, high: float) -> tuple[list[float] | None, float]:
        """Run one pass; return its best path and the highest threshold that no path reached, `low` if all were."""
        nonlocal best, best_ms, improved
        # The highest threshold lies just below the best P99 known, if not above: whatever is better reaches it.
        thresholds = np.geomspace(low, high, THRESHOLDS)
        found = search.run(choices, thresholds)
        missed = low
        for threshold, slower in zip(thresholds.tolist(), found.slower, strict=True):
            trials.append(Trial(threshold, slower, search.allowed))
            if slower is None or slower > search.allowed:
                missed = max(missed, threshold)
        if found.path is not None and found.p99_ms < best_ms:
            best, best_ms, improved = found.path, found.p99_ms, True
        return found.path, missed

    def refine(path: list[float]) -> None:
        """Run fine passes around a path, or around the best one once that is better."""
        low = NEAR * best_ms
        for step in effort.finer:
            gain = 1.0
            while gain >= GAIN and search.replays < effort.replays:
                before_ms = best_ms
                choices = _choices(path, best, step, control.alpha_min, control.alpha_max)
                _, missed = attempt(choices, low, float(np.nextafter(best_ms, 0.0)))
                gain = 1.0 - best_ms / before_ms
                low = SLACK * min(missed, best_ms)
                path = best if gain > 0 else path

    refine(best)
    grid = np.array(alpha_grid(control.alpha_min, control.alpha_max, effort.step))
    grid[np.argmin(np.abs(grid - swept.hindsight))] = swept.hindsight  # the best static is among them
    if search.replays < effort.replays:
        path, _ = attempt([grid.tolist()] * len(best), WIDEST * best_ms, WORSE * best_ms)
        if path is not None:
            refine(path)
    return (best if improved else None), best_ms, tuple(trials)


def _choices(
    path: Sequence[float], also: Sequence[float], step: float, alpha_min: float, alpha_max: float
) -> list[list[float]]:
    """Alphas to try around a path: its own, one step to either side, and those of the pieces before and after.

    With the latter a change may come a piece earlier or later. A second path may be taken up and left anywhere.
    """
    found = []
    for piece, alpha in enumerate(path):
        near = {min(max(round(alpha + move, 6), alpha_min), alpha_max) for move in (-step, 0.0, step)}
        found.append(sorted({*near, *path[max(0, piece - 1) : piece + 2], also[piece]}))
    return found


class _Link(NamedTuple):
    """A path of alphas, from its end backwards."""

    alpha: float
    before: _Link | None

    def alphas(self) -> list[float]:
        found = []
        link: _Link | None = self
        while link is not None:
            found.append(link.alpha)
            link = link.before
        return found[::-1]


@dataclass(frozen=True, eq=False)
class _Tally:
    """What a path has cost by the end of a piece, per threshold.

    ended: requests before this index have ended; cost: float64[THRESHOLDS]; slower: int64[THRESHOLDS], measured
    requests that ended slower; late: int64[THRESHOLDS], those that are still there and older already.
    """

    ended: int
    cost: Floats
    slower: Ints
    late: Ints


@dataclass(frozen=True, eq=False)
class _Kept:
    """A state kept at the end of a piece; `thresholds` (indices) are those for which it is the best."""

    link: _Link
    snapshot: NodeSnapshot
    tally: _Tally
    thresholds: list[int]


@dataclass(frozen=True)
class _Found:
    """What one pass found.

    path: alphas of the path of least P99, None where none is as low as the highest threshold; p99_ms: that P99;
    slower: per threshold the fewest requests that exceed it (None: no path came to the end).
    """

    path: list[float] | None
    p99_ms: float
    slower: tuple[int | None, ...]


class _Search:
    """Passes of dynamic programming over the pieces of one trace; each thread of `work` has a simulator of its own."""

    def __init__(self, scenario: Scenario, trace: Trace, part: Measured, times_ns: Ints, work: Work) -> None:
        self.times_ns = times_ns
        self._scenario, self._trace, self._part, self._work = scenario, trace, part, work
        self._ends_ns = [*times_ns[1:].tolist(), int(trace.arrival_ns[-1]) + 1]
        self._cuts = np.searchsorted(trace.arrival_ns, [times_ns[0], *self._ends_ns])  # arrived before each end
        # The nearest rank (helm_rl.metrics.quantile_ms) is below a threshold if no more than these are not.
        self.allowed = part.requests - max(1, int(np.ceil(np.round(0.99 * part.requests, 9))))
        self._local = threading.local()
        self._lock = threading.Lock()
        self._served = 0

    @property
    def replays(self) -> float:
        """Requests simulated so far, in replays of the whole trace."""
        return self._served / len(self._trace)

    def run(self, choices: Sequence[Sequence[float]], thresholds: Floats) -> _Found:
        """Seek, for each threshold (ms, ascending), the path through `choices` (alphas per piece) of least cost.

        Paths on which so many requests exceed the highest threshold that their P99 must, too, are given up.
        """
        kept: list[_Kept] = []
        last = len(self._ends_ns) - 1
        for piece, alphas in enumerate(choices[:last]):
            if piece and not kept:
                break
            found = self._work.map(partial(self._extend, piece, kept, thresholds), alphas)
            kept = [state for states in found for state in states]
        nothing = _Found(None, np.inf, (None,) * len(thresholds))
        if last and not kept:
            return nothing
        ends = self._work.map(partial(self._finish, last, kept, thresholds), choices[last])
        best = min(ends, key=lambda end: end.p99_ms)
        slower = tuple(min(int(end.slower[at] or 0) for end in ends) for at in range(len(thresholds)))
        return _Found(best.path if best.p99_ms <= thresholds[-1] else None, best.p99_ms, slower)

    def _extend(self, piece: int, states: list[_Kept], thresholds: Floats, alpha: float) -> list[_Kept]:
        """Serve a piece at `alpha` from each state; return the best result of each threshold, equal ones once."""
        node = self._node()
        best: list[_Kept | None] = [None] * len(thresholds)
        least = np.full(len(thresholds), np.inf)
        for state in _nearest_first(states, alpha):
            tally = self._serve(node, piece, alpha, state, thresholds)
            if tally.slower[-1] + tally.late[-1] > self.allowed:
                continue
            result: _Kept | None = None
            for at in state.thresholds if state is not None else range(len(thresholds)):
                value = tally.cost[at] + tally.late[at]
                if value < least[at]:
                    least[at] = value
                    if result is None:
                        link = _Link(alpha, state.link if state is not None else None)
                        result = _Kept(link, node.save(), tally, [])
                    best[at] = result
        for at, winner in enumerate(best):
            if winner is not None:
                winner.thresholds.append(at)
        return [each for each in dict.fromkeys(best) if each is not None]

    def _finish(self, piece: int, states: list[_Kept], thresholds: Floats, alpha: float) -> _Found:
        """Serve the last piece at `alpha` from each state, and all that is left; return the least P99."""
        node = self._node()
        best, least_ms = None, np.inf
        slower = np.full(len(thresholds), self._part.requests)
        for state in _nearest_first(states, alpha):
            tally = self._serve(node, piece, alpha, state, thresholds)
            slower = np.minimum(slower, tally.slower)
            reached_ms = p99_ms(node.latency_ms[self._part.first :])
            if reached_ms < least_ms:
                best, least_ms = _Link(alpha, state.link if state is not None else None), reached_ms
        return _Found(None if best is None else best.alphas(), least_ms, tuple(int(count) for count in slower))

    def _serve(self, node: NodeSim, piece: int, alpha: float, state: _Kept | None, thresholds: Floats) -> _Tally:
        """Serve one piece at `alpha` from a state, or from the start, and add up what it cost."""
        end_ns, before, after = self._ends_ns[piece], int(self._cuts[piece]), int(self._cuts[piece + 1])
        limits = thresholds[:, None]
        if state is None:
            node.reset(alpha)
            ended = 0
            cost, slower = np.zeros(len(thresholds)), np.zeros(len(thresholds), np.int64)
        else:
            node.restore(state.snapshot)
            node.set_target(alpha)
            ended, cost, slower = state.tally.ended, state.tally.cost, state.tally.slower
        waited = np.isnan(node.latency_ms[ended:before])  # those in between may end in any order
        node.run(end_ns)
        if piece == len(self._ends_ns) - 1:
            node.drain()
        latency_ms = node.latency_ms[ended:after]
        waits = np.isnan(latency_ms)
        new = ~waits
        new[: before - ended] &= waited
        new[: max(0, self._part.first - ended)] = False  # the warm-up is not measured
        fresh_ms = latency_ms[new].astype(np.float64)
        over = (fresh_ms > limits).sum(axis=1)
        still = ended + np.flatnonzero(waits)
        age_ms = (end_ns - self._trace.arrival_ns[still[still >= self._part.first]]) * 1e-6
        with self._lock:
            self._served += after - before
        self._work.advance((after - before) / len(self._trace))
        return _Tally(
            ended=int(still[0]) if still.size else after,
            cost=cost + over + EPSILON * np.minimum(fresh_ms / limits, CLIP).sum(axis=1),
            slower=slower + over,
            late=(age_ms > limits).sum(axis=1),
        )

    def _node(self) -> NodeSim:
        """This thread's simulator; a state saved in one may be restored in another."""
        if not hasattr(self._local, "node"):
            from envs.serving.node import NodeSim

            self._local.node = NodeSim(self._scenario, self._trace)
        node: NodeSim = self._local.node
        return node


def _nearest_first(states: list[_Kept], alpha: float) -> list[_Kept] | list[None]:
    """The states in the order of their distance from `alpha`; where there is none, the start.

    Of equal costs the first one stays, and so the one that moves least.
    """
    return sorted(states, key=lambda state: abs(state.link.alpha - alpha)) or [None]
