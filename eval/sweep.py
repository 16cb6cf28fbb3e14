"""Statics over a grid of alphas on the same arrivals, their smoothed P99 curves, and the best alpha of each
segment.

alpha*: ln P99 over alpha is smoothed by a
local quadratic; its minimum is alpha*, and the alphas within 2 % of it are the flat set. Every alpha is
replayed from the start of the warm-up, so each segment is met with caches that this alpha has filled. A segment
is judged by its settled half: what an overload of the segment before left in the queue is not this segment's
doing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from eval.segments import FlatSet, Measured, Run, measured_part, reduce_replay
from eval.statistics import Floats
from helm_rl.control.protocol import Controller
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError

if TYPE_CHECKING:
    from envs.serving.replay import Replay
    from helm_rl.scenario import Scenario
    from helm_rl.workloads.trace import Trace

Item = TypeVar("Item")
Result = TypeVar("Result")

STEP = 0.02
"""Spacing of the alphas around a minimum."""
COARSE_STEP = 0.1
"""Spacing of the first look at the whole range."""
REACH = 0.1
"""Half the width of the smoothing window, and how far around a minimum the fine grid reaches."""
LEAST_STEPS = 3
"""Fine steps within that reach, at the least, whatever the step."""
FLAT = 1.02
"""P99s up to this multiple of the least one belong to the flat set."""
MOST_JOBS = 1024
"""Jobs at a time, at the most: the system has no threads, processes or semaphores for any number of them."""


def check_jobs(jobs: int) -> None:
    """Raise UserError unless so many threads or processes can be meant."""
    if not 1 <= jobs <= MOST_JOBS:
        raise UserError(f"--jobs must be at least 1 and at most {MOST_JOBS}, got {jobs}")


class ReplayFunction(Protocol):
    """`envs.serving.replay.replay`, or what stands in for it in a test."""

    def __call__(self, scenario: Scenario, trace: Trace, controller: Controller, *, alpha0: float, seed: int) -> Replay:
        """Replay `trace` from `alpha0` under `controller`."""
        ...


@dataclass(frozen=True)
class Curve:
    """P99 against alpha.

    alphas: float64[k], ascending; p99_ms: float64[k], as measured; smooth_ms: float64[k], smoothed where the
    grid is fine and as measured elsewhere; best: the alpha at the least smoothed P99 (of several, the middle one);
    flat: where the smoothed curve, linear in ln P99 between its points, is within FLAT of its least.
    """

    alphas: Floats
    p99_ms: Floats
    smooth_ms: Floats
    best: float
    flat: FlatSet


@dataclass(frozen=True)
class Sweep:
    """Every static of one trace.

    runs: alpha -> its replay, ascending; whole: over the whole run; opening: over the first quarter; settled:
    one curve per span of `part`, over its settled half.
    """

    part: Measured
    runs: dict[float, Run]
    whole: Curve
    opening: Curve
    settled: tuple[Curve, ...]

    @property
    def hindsight(self) -> float:
        """The alpha with the least P99 of the whole run, as measured: the strongest static there is."""
        least = min(run.p99_ms for run in self.runs.values())
        tied = [alpha for alpha, run in self.runs.items() if run.p99_ms == least]
        return tied[len(tied) // 2]


class Work:
    """Replays on threads (the simulator releases the GIL), counted on one progress bar.

    jobs: replays at a time, 1 to MOST_JOBS; replay: the function that replays; None takes the simulator's.
    """

    def __init__(self, jobs: int = 2, progress: Progress | None = None, replay: ReplayFunction | None = None) -> None:
        check_jobs(jobs)
        if replay is None:
            from envs.serving.replay import replay as simulator

            replay = partial(simulator, keep_windows=False)  # nothing here reads them
        self._replay: ReplayFunction = replay
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="replay")
        self._compiled = False
        self._progress = progress
        self._task = progress.add_task("replays", total=None) if progress is not None else None
        self._planned = 0.0

    def close(self) -> None:
        """Drop what has not begun and wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)

    def describe(self, text: str) -> None:
        """Say on the bar what runs now."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=text)

    def plan(self, replays: float) -> None:
        """Say on the bar that so many more replays (or fewer, if negative) are to come."""
        self._planned += replays
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=self._planned)

    def advance(self, replays: float = 1.0) -> None:
        """Say on the bar that so many of them are done; parts of one count as such."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, replays)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Call `function` with each item, on the threads; return the results in the order of the items.

        The very first is called here, before all others, and so compiles what it runs: Ctrl-C reaches the main thread,
        and would have to wait for another that compiles.
        """
        rest = iter(items)
        first = [] if self._compiled else [function(item) for item in itertools.islice(rest, 1)]
        self._compiled = True
        return first + list(self._pool.map(function, rest))

    def measured_ms(
        self, scenario: Scenario, trace: Trace, controller: Controller, alpha0: float, seed: int = 0
    ) -> npt.NDArray[np.float32]:
        """Replay here, not on the threads, and return the latencies of the measured requests in order of arrival."""
        replayed = self.replay(scenario, trace, controller, alpha0, seed)
        return replayed.latency_ms[replayed.measured]

    def replay(self, scenario: Scenario, trace: Trace, controller: Controller, alpha0: float, seed: int = 0) -> Replay:
        """Replay here, not on the threads."""
        self.plan(1)
        replayed = self._replay(scenario, trace, controller, alpha0=alpha0, seed=seed)
        self.advance()
        return replayed

    def run(
        self,
        scenario: Scenario,
        trace: Trace,
        part: Measured,
        starts: Sequence[tuple[Controller, float, int]],
    ) -> list[Run]:
        """Replay `trace` once per (controller, alpha0, seed); return the runs in that order."""
        self.plan(len(starts))

        def one(start: tuple[Controller, float, int]) -> Run:
            controller, alpha0, seed = start
            replayed = self._replay(scenario, trace, controller, alpha0=alpha0, seed=seed)
            run = reduce_replay(replayed, trace, part, scenario.slo_ms)
            self.advance()
            return run

        return self.map(one, starts)


@contextmanager
def working(jobs: int, replay: ReplayFunction | None = None) -> Iterator[Work]:
    """Yield a `Work` with a progress bar on stderr; an exception drops what is queued."""
    from rich.console import Console

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("replays"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        work = Work(jobs, progress, replay)
        try:
            yield work
        finally:
            work.close()


def sweep(
    scenario: Scenario,
    trace: Trace,
    alphas: Iterable[float],
    jobs: int = 2,
    progress: Progress | None = None,
    replay: ReplayFunction | None = None,
) -> Sweep:
    """Replay `trace` at each of `alphas` (any order, duplicates once) and return the curves over them."""
    work = Work(jobs, progress, replay)
    try:
        part = measured_part(trace)
        runs = _replay_statics(scenario, trace, part, alphas, {}, work)
        return curves_of(part, runs, STEP)
    finally:
        work.close()


def sweep_adaptively(
    scenario: Scenario,
    trace: Trace,
    work: Work,
    step: float = STEP,
    also: Iterable[float] = (),
    opening: bool = False,
    coarse_step: float = COARSE_STEP,
    segments: bool = True,
) -> Sweep:
    """Replay a coarse grid, then `step` around the minima of the whole run and of every segment, until each is
    enclosed.

    A minimum is enclosed when every alpha of the fine grid within REACH of it has been replayed. also: alphas to replay
    besides, such as .5; opening: enclose the minimum of the first quarter too; segments: enclose those of the segments.
    """
    part = measured_part(trace)
    grid = alpha_grid(scenario.control.alpha_min, scenario.control.alpha_max, step)
    every = max(1, round(coarse_step / step))
    coarse = sorted({*grid[::every], grid[-1], *(round(alpha, 6) for alpha in also)})
    runs = _replay_statics(scenario, trace, part, coarse, {}, work)
    while True:
        found = curves_of(part, runs, step)
        curves = [found.whole, *(found.settled if segments else ()), *([found.opening] if opening else [])]
        wanted = {alpha for each in curves for alpha in _around(grid, each.best, _steps(step))}
        missing = wanted - runs.keys()
        if not missing:
            return found
        runs = _replay_statics(scenario, trace, part, missing, runs, work)


def half_of(scenario: Scenario) -> float:
    """Return an alpha of .5, or as near to it as the scenario's bounds allow."""
    return min(max(0.5, scenario.control.alpha_min), scenario.control.alpha_max)


def alpha_grid(alpha_min: float, alpha_max: float, step: float) -> list[float]:
    """Multiples of `step` from alpha_min up, and alpha_max; UserError if the step is not within .005 to .2."""
    if not 0.005 <= step <= 0.2:
        raise UserError(f"--step must lie in 0.005 to 0.2, got {step}")
    count = int(np.floor((alpha_max - alpha_min) / step + 1e-9)) + 1
    return sorted({*(round(alpha_min + index * step, 6) for index in range(count)), round(alpha_max, 6)})


def curve(alphas: npt.ArrayLike, p99_ms: npt.ArrayLike, step: float = STEP) -> Curve:
    """Smooth one P99 curve and find its best alpha and flat set. alphas ascending, p99_ms > 0, both [k], k >=
    1.
    """
    at = np.asarray(alphas, dtype=np.float64)
    measured = np.asarray(p99_ms, dtype=np.float64)
    log = smooth_log(at, np.log(measured), _steps(step) * step)
    least = float(log.min())
    tied = np.flatnonzero(log <= least + 1e-12)  # all of them, where every alpha sheds more than 1 %
    return Curve(at, measured, np.exp(log), float(at[tied[tied.size // 2]]), _flat_set(at, log - least - np.log(FLAT)))


def _flat_set(at: Floats, above: Floats) -> FlatSet:
    """Intervals of alpha in which `above`, given at the points `at` and linear between them, is not positive."""
    flat: list[tuple[float, float]] = []
    inside = above <= 0
    for index in np.flatnonzero(inside):
        low = high = float(at[index])
        if index > 0 and not inside[index - 1]:
            low -= float((at[index] - at[index - 1]) * above[index] / (above[index] - above[index - 1]))
        if index + 1 < at.size and not inside[index + 1]:
            high += float((at[index + 1] - at[index]) * above[index] / (above[index] - above[index + 1]))
        if index > 0 and inside[index - 1]:
            flat[-1] = (flat[-1][0], high)
        else:
            flat.append((low, high))
    return tuple(flat)


def pooled_curve(sweeps: Sequence[Sweep], step: float = STEP) -> Curve:
    """The whole-run curve over several traces: mean ln P99 at the alphas that all of them replayed."""
    shared = sorted(set.intersection(*(set(found.runs) for found in sweeps)))
    logs = [[np.log(found.runs[alpha].p99_ms) for alpha in shared] for found in sweeps]
    return curve(shared, np.exp(np.mean(logs, axis=0)), step)


def smooth_log(at: Floats, log_p99: Floats, reach: float) -> Floats:
    """Fit a quadratic around each alpha to the points within `reach` (tricube weights) and return its values,
    float64[k].

    A point with fewer than four in reach, itself included, keeps its own value: a quadratic through the far
    points of a coarse grid would dip below all of them beside a cliff.
    """
    smooth = log_p99.copy()
    for index, centre in enumerate(at):
        distance = np.abs(at - centre) / (1.1 * reach)  # so that the points at its ends still count
        near = distance < 1.0
        if near.sum() < 4:
            continue
        weight = np.sqrt((1.0 - distance[near] ** 3) ** 3)
        offset = at[near] - centre
        basis = np.stack([np.ones_like(offset), offset, offset**2], axis=1)
        fitted, *_ = np.linalg.lstsq(basis * weight[:, None], log_p99[near] * weight, rcond=None)
        smooth[index] = fitted[0]
    return smooth


def _replay_statics(
    scenario: Scenario,
    trace: Trace,
    part: Measured,
    alphas: Iterable[float],
    known: dict[float, Run],
    work: Work,
) -> dict[float, Run]:
    missing = sorted({float(alpha) for alpha in alphas} - known.keys())
    found = work.run(scenario, trace, part, [(StaticAlpha(alpha), alpha, 0) for alpha in missing])
    return dict(sorted({**known, **dict(zip(missing, found, strict=True))}.items()))


def curves_of(part: Measured, runs: dict[float, Run], step: float) -> Sweep:
    """Return the curves over statics that have been replayed (alpha -> its run, ascending), `step` apart at minima."""
    alphas = list(runs)
    whole = curve(alphas, [run.p99_ms for run in runs.values()], step)
    settled = np.array([run.settled_p99_ms for run in runs.values()])
    opening = curve(alphas, [run.opening_p99_ms for run in runs.values()], step)
    return Sweep(part, runs, whole, opening, tuple(curve(alphas, column, step) for column in settled.T))


def _steps(step: float) -> int:
    """Fine steps within the reach."""
    return max(LEAST_STEPS, round(REACH / step))


def _around(grid: list[float], centre: float, steps: int) -> list[float]:
    """The points of `grid` within `steps` places of the one nearest to `centre`."""
    index = int(np.argmin(np.abs(np.array(grid) - centre)))
    return grid[max(0, index - steps) : index + steps + 1]
