"""The quick reference: schedules that shift once to another alpha and, maybe, back, tried in few replays.

Where the full search (`eval.reference`) takes a hundred replays, this one takes about fifteen and looks only at shifts
around the one burst of the map's load: early or late, sudden or gradual, whole or part of the way, with or without a
return, or slowly through the burst. On five cells beside the full one it fell short of it by .7 % of P99 in the mean,
by 2.4 % at the most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from eval.map.grid import ALPHA_MAX, ALPHA_MIN, BURST_S, BURST_START_S, RAMP_S, SECONDS
from eval.map.player import Player, Schedule
from helm_rl.metrics import p99_ms

PLAYS = 28
KNOWN_PLAYS = 16
"""Schedules that a search tries at most, without and with one known to start from."""
SLACK = 1.05
"""The search may start from a schedule that is this much worse than the best static."""
RAMP_STEP_S = 4.0
MOVE = 0.06
"""By how much an alpha is changed at a time."""


@dataclass(frozen=True)
class Shift:
    """Alpha `before`, then `during` and, after the burst, `after`.

    go_s, return_s: when the changes begin, in seconds after the burst's start and its end (negative: before it);
    go_ramp_s, return_ramp_s: how long they take.
    """

    before: float
    during: float
    after: float
    go_s: float = 0.0
    go_ramp_s: float = RAMP_S
    return_s: float = 0.0
    return_ramp_s: float = 0.0

    def schedule(self, start_ns: int, pace: float) -> Schedule:
        """Return the steps, from `start_ns` of the trace's clock, on whole seconds after it as decisions are.

        pace: length of the pattern over that of the full one; the times are those of the full one.
        """
        steps = {start_ns: self.before}
        legs = (
            (BURST_START_S + self.go_s, self.go_ramp_s, self.before, self.during),
            (BURST_START_S + BURST_S + self.return_s, self.return_ramp_s, self.during, self.after),
        )
        for begin_s, ramp_s, source, target in legs:
            if source == target:
                continue
            count = max(1, round(ramp_s / RAMP_STEP_S))
            for step in range(count):
                time_ns = round(pace * (begin_s + step * RAMP_STEP_S) * 1e9)
                on_grid = start_ns + -(-(time_ns - start_ns) // 1_000_000_000) * 1_000_000_000
                steps[on_grid] = round(source + (target - source) * (step + 1) / count, 6)
        return tuple(sorted(steps.items()))

    def fields(self) -> dict[str, Any]:
        """As plain numbers."""
        return asdict(self)


def kept_times(start_ns: int, pace: float) -> list[int]:
    """Return the times before which many shifts are the same: 20 s before the burst's start, and its end."""
    first = Shift(0.5, 0.4, 0.5, go_s=-RAMP_S, go_ramp_s=0.0).schedule(start_ns, pace)
    return [time_ns for time_ns, _ in first[1:]]


def search(
    player: Player, best: float, best_ms: float, before: float, during: float, known: Shift | None = None
) -> tuple[Shift | None, float]:
    """Return the shift of least P99 and that P99; None and `best_ms` where none beats the best static.

    best, best_ms: the best static and its P99; before, during: the best alphas of base and burst; known: a shift that
    was best on other arrivals.
    """
    starts = list(_starts(best, before, during))
    if known is not None:
        starts = [known, starts[1], *starts[-3:]]
    most = PLAYS if known is None else KNOWN_PLAYS
    pace = player.part.seconds / SECONDS
    tried: dict[Schedule, float] = {player.static(best): best_ms}
    plays = 0

    def p99(shift: Shift, limit_ms: float) -> float:
        nonlocal plays
        schedule = shift.schedule(player.start_ns, pace)
        if schedule not in tried:
            plays += 1
            latency_ms = player.play(schedule, limit_ms)
            tried[schedule] = np.inf if latency_ms is None else p99_ms(latency_ms[player.part.first :])
        return tried[schedule]

    centre, centre_ms = None, np.inf
    for shift in starts:
        ms = p99(shift, min(SLACK * best_ms, centre_ms))
        if ms < centre_ms:
            centre, centre_ms = shift, ms
    if centre is None:
        centre, centre_ms = Shift(best, best, best), best_ms
    improved = True
    while improved and plays < most:
        improved = False
        for move in _moves(best, before):
            if plays >= most:
                break
            for shift in move(centre):
                ms = p99(shift, centre_ms)
                if ms < centre_ms:
                    centre, centre_ms, improved = shift, ms, True
    return (centre, centre_ms) if centre_ms < best_ms else (None, best_ms)


def _starts(best: float, before: float, during: float) -> Iterator[Shift]:
    """Shifts to begin with: to the burst's best alpha or the best static's, early, with and after the load; around the
    best static, slowly up or down through the burst; the per-segment optimum.
    """
    for to in dict.fromkeys((during, best)):
        for go_s in (-RAMP_S, 0.0, RAMP_S):
            yield Shift(before, to, to, go_s)
    down, up = _beside(best)
    for early, late in ((down, up), (up, down)):
        yield Shift(early, early, late, return_s=RAMP_S - BURST_S, return_ramp_s=BURST_S - RAMP_S)
    yield Shift(before, during, before, 0.0, 0.0)


def _moves(best: float, before: float) -> tuple[Callable[[Shift], Iterator[Shift]], ...]:
    """Ways to change a shift, one thing at a time."""

    def goes_elsewhere(shift: Shift) -> Iterator[Shift]:
        stays = shift.after == shift.during
        for during in _beside(shift.during):
            yield replace(shift, during=during, after=during if stays else shift.after)

    def starts_elsewhere(shift: Shift) -> Iterator[Shift]:
        for start in (*_beside(shift.before), _middle(shift.before, before)):
            yield replace(shift, before=start)

    def ends_elsewhere(shift: Shift) -> Iterator[Shift]:
        if shift.after == shift.during:
            target = before if before != shift.during else best
            yield replace(shift, after=target, return_s=0.0, return_ramp_s=2 * RAMP_S)
            yield replace(shift, after=_middle(target, shift.during), return_s=-RAMP_S, return_ramp_s=RAMP_S)
        else:
            yield replace(shift, after=shift.during)
        for after in _beside(shift.after):
            yield replace(shift, after=after)

    def goes_otherwise(shift: Shift) -> Iterator[Shift]:
        yield replace(shift, go_ramp_s=2 * RAMP_S if shift.go_ramp_s != 2 * RAMP_S else 0.0)
        yield replace(shift, go_s=shift.go_s - RAMP_S / 2)
        yield replace(shift, go_s=shift.go_s + RAMP_S / 2)
        yield replace(shift, return_s=shift.return_s - RAMP_S)
        yield replace(shift, return_s=shift.return_s + RAMP_S)

    return goes_elsewhere, starts_elsewhere, ends_elsewhere, goes_otherwise


def _beside(alpha: float) -> tuple[float, float]:
    """One move to either side, within the bounds."""
    return max(round(alpha - MOVE, 6), ALPHA_MIN), min(round(alpha + MOVE, 6), ALPHA_MAX)


def _middle(one: float, other: float) -> float:
    return round((one + other) / 2, 6)
