"""What is measured of a setting and of a cell: the load it bears, its statics, and what a shift of alpha gains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from eval.map.grid import (
    ALPHA_MAX,
    ALPHA_MIN,
    LOADS,
    PREPARING_SEED,
    SECONDS,
    SEEDS_FROM,
    WARM_S,
    Cell,
    Grid,
    Setting,
    requests,
)
from eval.map.player import Player, Schedule
from eval.map.shift import Shift, kept_times, search
from eval.results import Row
from eval.segments import LEAST_REQUESTS, Span
from eval.statistics import Floats
from eval.sweep import COARSE_STEP, STEP, Curve, alpha_grid, curve
from helm_rl.metrics import p99_ms

LIMIT_ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Statics of which one must hold the SLO."""
LIMIT_RATIO = 1.03
"""The largest load is found to this ratio."""
FIRST_RATE = 200.0
MOST_RATE = 12_800.0
LEAST_BASE_RATE = 5.0
"""Requests/s of the base below which its P99 would be a handful of requests."""
SURE = 1.3
"""Requests in the mean, over those that a P99 needs: no draw falls so far short of its mean."""
STEADY_S = 300.0
MOST_STEADY_REQUESTS = 40_000
REACH_STEPS = 2
"""Fine steps replayed on either side of a minimum."""
FLAT_BOUND = 0.02
"""Where twice the memory gains less than this there is nothing to win: no fine grid is replayed, no shift sought."""
HOPELESS = 3.0
"""A static whose P99, and that of the burst, must exceed this multiple of the least one so far, or of the SLO, is given
up; it counts as just that slow."""
NEAR = 0.1
"""How far from the best alphas of seed 1 the other seeds play the coarse grid."""


def prepare(grid: Grid, setting: Setting) -> Row:
    """Find the largest rate at which a static holds the SLO, and the deployable static at each load.

    The deployable static is the best one on the base alone, on other arrivals: what an operator could have set.
    A rate of null: not even the least load is served within the SLO.
    """
    rate = largest_rate(grid, setting)
    row: Row = {"key": setting.key, "rate": rate, "slo_ms": grid.scenario(setting, 100.0).slo_ms, "deployable": {}}
    if rate is not None:
        for load in grid.loads:
            found = _steady(grid, setting, rate * LOADS[load])
            row["deployable"][load] = {"alpha": found.best, "flat": found.flat, "p99_ms": float(found.p99_ms.min())}
    return row


def largest_rate(grid: Grid, setting: Setting) -> float | None:
    """Return the largest rate (requests/s at the burst's height) at which one of LIMIT_ALPHAS holds the SLO.

    By bisection, on arrivals of their own; None if it is below the least load, or so low that the lowest of the grid's
    loads would have too few requests for a P99.
    """
    from helm_rl.workloads.generate import generate

    alphas = list(LIMIT_ALPHAS)

    def holds(rate: float) -> bool:
        scenario = grid.scenario(setting, rate)
        return a_static_holds(Player(scenario, generate(scenario, seed=PREPARING_SEED)), scenario.slo_ms, alphas)

    least = max(LEAST_BASE_RATE / (1 - setting.hot_share), _least_rate(setting))
    low = largest_that_holds(holds, least)
    if low is None or low >= MOST_RATE:
        return low
    share = min(LOADS[load] for load in grid.loads)
    least_base = SURE * LEAST_REQUESTS / STEADY_S / (1 - setting.hot_share)
    return low if share * low >= max(_least_rate(setting), least_base) else None


def a_static_holds(player: Player, limit_ms: float, alphas: list[float], segment: Span | None = None) -> bool:
    """Whether the P99 under one of `alphas` is within the limit; that one comes first from then on.

    segment: what counts; None: all that is measured.
    """
    part = player.part
    first, last = (part.first, len(player.trace)) if segment is None else (segment.first, segment.last)
    for alpha in list(alphas):
        latency_ms = player.play(player.static(alpha), limit_ms, segment)
        if latency_ms is not None and p99_ms(latency_ms[first:last]) <= limit_ms:
            alphas.remove(alpha)
            alphas.insert(0, alpha)  # it is likely to hold at the next rate, too
            return True
    return False


def largest_that_holds(holds: Callable[[float], bool], least: float) -> float | None:
    """Return the largest rate that holds, by bisection to LIMIT_RATIO; None: not even `least` does.

    From MOST_RATE on, the first that holds is returned.
    """
    low = high = max(FIRST_RATE, least)
    if holds(low):
        while high < MOST_RATE and holds(2 * high):
            high *= 2
        low, high = high, 2 * high
        if low >= MOST_RATE:
            return low
    else:
        while low > least:
            low = max(low / 2, least)
            if holds(low):
                break
            high = low
        else:
            return None
    while high / low > LIMIT_RATIO:
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _least_rate(setting: Setting) -> float:
    """Return the rate at which the pattern has SURE times the requests that a P99 needs, measured ones."""
    measured = requests(setting, 1.0, 1.0) - (1 - setting.hot_share) * WARM_S
    return SURE * LEAST_REQUESTS / measured


def _steady(grid: Grid, setting: Setting, rate: float) -> Curve:
    """Return the statics' P99 on the base alone."""
    from helm_rl.workloads.generate import generate

    base_rate = rate * (1 - setting.hot_share)
    scenario = grid.base(setting, rate, min(STEADY_S, MOST_STEADY_REQUESTS / base_rate))
    player = Player(scenario, generate(scenario, seed=PREPARING_SEED))
    found: dict[float, float] = {}

    def play(alpha: float) -> None:
        limit_ms = HOPELESS * min(found.values(), default=np.inf)
        latency_ms = player.play(player.static(alpha), limit_ms)
        found[alpha] = limit_ms if latency_ms is None else p99_ms(latency_ms[player.part.first :])

    return _sweep(play, found, lambda: [_curve(found)], _coarse())[0]


def measure(grid: Grid, cell: Cell, seed: int, prepared: Row, known: Row | None) -> Row:
    """Measure a cell on the arrivals of one seed (1, 2, ...).

    known: the row of seed 1, for the others: its shift is tried here too, and that and its static, unchanged on new
    arrivals, give the headroom of a plan made beforehand.
    """
    from helm_rl.workloads.generate import generate

    begun = time.process_time()
    rate = prepared["rate"] * LOADS[cell.load]
    scenario = grid.scenario(cell.setting, rate)
    trace = generate(scenario, seed=SEEDS_FROM + seed)
    player = Player(scenario, trace)
    pace = player.part.seconds / SECONDS
    whole: dict[float, float] = {}
    burst: dict[float, float] = {}
    span = next(span for span in player.part.spans if span.label == "burst")

    def play(alpha: float, give_up: bool = True) -> None:
        limit_ms = HOPELESS * min(scenario.slo_ms, *whole.values()) if give_up else np.inf
        latency_ms = player.play(player.static(alpha), limit_ms, span)
        if latency_ms is None:
            whole[alpha] = burst[alpha] = limit_ms
        else:
            whole[alpha] = p99_ms(latency_ms[player.part.first :])
            burst[alpha] = p99_ms(latency_ms[span.middle : span.last])

    def curves() -> list[Curve]:
        return [_curve(whole, smooth=False), _curve(burst)]

    deployable = prepared["deployable"][cell.load]["alpha"]
    play(deployable, give_up=False)
    coarse = _coarse()
    if known is not None:
        if known["hindsight"] not in whole:
            play(known["hindsight"], give_up=False)
        near = known["hindsight"], known["burst"]
        coarse = [alpha for alpha in coarse if min(abs(alpha - each) for each in near) <= NEAR + 1e-9]
    _sweep(play, whole, curves, coarse, fine=False)
    bound_ms = _with_twice_the_pool(grid, cell.setting, rate, seed)
    flat = 1 - bound_ms / min(whole.values()) < FLAT_BOUND
    _, in_burst = curves() if flat else _sweep(play, whole, curves, coarse)
    hindsight = _argmin(whole)
    row: Row = {
        "key": cell.key,
        "seed": seed,
        "rate": rate,
        "pace": pace,
        "requests": player.part.requests,
        "hindsight": hindsight,
        "hindsight_ms": whole[hindsight],
        "deployable": deployable,
        "deployable_ms": whole[deployable],
        "burst": in_burst.best,
        "burst_flat": in_burst.flat,
        "bound_ms": bound_ms,
    }
    mover = Player(scenario, trace, kept_times(player.start_ns, pace))
    planned: Shift | None = None
    if known is not None:
        row["known_static_ms"] = row["known_ms"] = whole[known["hindsight"]]
        if known["shift"] is not None:
            planned = Shift(**known["shift"])
            row["known_ms"] = _p99(mover, planned.schedule(mover.start_ns, pace))
    shift, reference_ms = None, whole[hindsight]
    if not flat:
        shift, reference_ms = search(mover, hindsight, whole[hindsight], deployable, in_burst.best, planned)
    if row.get("known_ms", np.inf) < reference_ms:  # flat here, but not on the arrivals of seed 1
        shift, reference_ms = planned, row["known_ms"]
    row |= {
        "reference_ms": reference_ms,
        "shift": None if shift is None else shift.fields(),
        "plays": round(player.played + mover.played, 1),
        "cpu_s": round(time.process_time() - begun, 2),
    }
    return row


def _with_twice_the_pool(grid: Grid, setting: Setting, rate: float, seed: int) -> float:
    """Return the P99 of a node with twice the pool, half of it for each cache: more than any alpha gives to either.

    However alpha moves, P99 can hardly be lower, so this bounds the headroom from above (no theorem: queues are not
    monotone).
    """
    from helm_rl.workloads.generate import generate

    twice = Grid(**{**grid.__dict__, "pool_gib": 2 * grid.pool_gib})
    scenario = twice.scenario(setting, rate)
    player = Player(scenario, generate(scenario, seed=SEEDS_FROM + seed))
    return _p99(player, player.static(0.5))


def _p99(player: Player, schedule: Schedule) -> float:
    latency_ms = player.play(schedule)
    assert latency_ms is not None  # no limit was set
    return p99_ms(latency_ms[player.part.first :])


def _coarse() -> list[float]:
    return alpha_grid(ALPHA_MIN, ALPHA_MAX, COARSE_STEP)


def _sweep(
    play: Callable[[float], None],
    done: dict[float, float],
    curves: Callable[[], Sequence[Curve]],
    coarse: Sequence[float],
    fine: bool = True,
) -> Sequence[Curve]:
    """Play `coarse`, then what encloses each curve's minimum, until nothing is missing; return the curves.

    A minimum is enclosed by its neighbours on the whole coarse grid and, with `fine`, by the fine steps around it.
    """
    everywhere, steps = np.array(_coarse()), np.array(alpha_grid(ALPHA_MIN, ALPHA_MAX, STEP))
    wanted = set(coarse)
    while True:
        for alpha in sorted(wanted - done.keys()):
            play(alpha)
        found = curves()
        wanted = {alpha for each in found for alpha in _around(everywhere, each.best, 1)}
        if fine:
            wanted |= {alpha for each in found for alpha in _around(steps, each.best, REACH_STEPS)}
        if wanted <= done.keys():
            return found


def _around(grid: Floats, centre: float, steps: int) -> list[float]:
    at = int(np.argmin(np.abs(grid - centre)))
    return [float(alpha) for alpha in grid[max(0, at - steps) : at + steps + 1]]


def _curve(p99: dict[float, float], smooth: bool = True) -> Curve:
    """Return the curve over what was played; without `smooth`, its best alpha is that of the least P99 measured."""
    alphas = sorted(p99)
    found = curve(alphas, [p99[alpha] for alpha in alphas])
    return found if smooth else Curve(found.alphas, found.p99_ms, found.p99_ms, _argmin(p99), found.flat)


def _argmin(p99: dict[float, float]) -> float:
    """The alpha of the least P99; of several, the middle one."""
    least = min(p99.values())
    tied = sorted(alpha for alpha, ms in p99.items() if ms == least)
    return tied[len(tied) // 2]
