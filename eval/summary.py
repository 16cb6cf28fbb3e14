"""What an evaluation comes to: its headline, its footnotes, its segments; the same in tables and in the report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eval.comparison import DEPLOYABLE, HALF, HINDSIGHT, OPTIMUM, POLICY, REFERENCE, Comparison
from eval.segments import FlatSet
from eval.wording import milliseconds, percent
from helm_rl.metrics import shed_ms


def headline(comparison: Comparison) -> str:
    """The result in a sentence or two, with the measured numbers and nothing else."""

    def p99(key: str) -> str:
        value = comparison.estimate(key, "p99_ms").value
        shed = value == shed_ms(comparison.scenario.slo_ms)
        return f"{milliseconds(value)} ms" + (" (more than 1 % were shed)" if shed else "")

    draws = len(comparison.results)
    where = "on the recorded arrivals" if comparison.results[0].seed is None else f"over {draws} draws of arrivals"
    if draws == 1 and comparison.results[0].seed is not None:
        where = "on one draw of arrivals"
    statics = (
        f"The static that could have been deployed (alpha {comparison.deployable:.2f}) took {p99(DEPLOYABLE)}, the "
        f"best static in hindsight {p99(HINDSIGHT)}, the per-segment optimum {p99(OPTIMUM)}"
    )
    if not any(row.key == POLICY for row in comparison.rows):
        room, _ = comparison.headroom()
        return (
            f"Scenario {comparison.pattern}, {where}: how long 99 % of requests took at most. {statics}. What the "
            f"reference gains on the best static in hindsight is {percent(room)}.{_fastest(comparison)}"
        )
    regret = comparison.estimate(POLICY, "regret").value
    best = "the best of these" if comparison.effort is None else f"the offline reference ({p99(REFERENCE)})"
    return (
        f"In scenario {comparison.pattern}, {where}, the policy answered 99 % of requests within {p99(POLICY)}. "
        f"{statics}; the policy is {percent(abs(regret))} {'above' if regret >= 0 else 'below'} {best}."
        f"{_fastest(comparison)}"
    )


def _fastest(comparison: Comparison) -> str:
    """Name the fastest of the other controllers, where there are any."""
    fixed = (POLICY, HALF, DEPLOYABLE, HINDSIGHT, OPTIMUM, REFERENCE)
    others = {
        row.title: comparison.estimate(row.key, "p99_ms").value for row in comparison.rows if row.key not in fixed
    }
    if not others:
        return ""
    title = min(others, key=others.__getitem__)
    return f" Of the other {len(others)} controllers, {title} was fastest: {milliseconds(others[title])} ms."


def footnotes(comparison: Comparison) -> list[str]:
    """What a reader must know to read the numbers rightly."""
    effort = comparison.effort
    if effort is None:
        basis = (
            "the best of every static and the per-segment optimum, replayed; `helm-rl eval p99 --reference full` "
            "searches for a better schedule, in about three times the time"
        )
    else:
        spent = max(result.reference.replays for result in comparison.results)
        basis = (
            "the best of every static, the per-segment optimum and a schedule found by dynamic programming over pieces "
            f"of at most {effort.piece_s:g} s (alphas {effort.step:g} apart, then {effort.finer[-1]:g}), replayed; the "
            f"search took as long as {spent:.0f} replays"
        )
    lines = [
        f"Reference = {basis}. It is no bound.",
        "The per-segment optimum takes each segment's best static alpha the moment it begins; moving there "
        "costs, so it may lose to a static: it is no bound.",
        "Latency runs from the scheduled arrival; a shed request counts as 100 x the SLO and as a violation.",
    ]
    if len(comparison.results) > 1:
        lines.append(
            f"Values are interquartile means over {len(comparison.results)} draws, with 95 % bootstrap "
            "intervals, which are too narrow where draws are few; a regret is taken draw by draw, then averaged."
        )
    else:
        lines.append("One set of arrivals: nothing is known about the spread.")
    return [*lines, *(note[0].upper() + note[1:] + "." for note in comparison.notes)]


@dataclass(frozen=True)
class SegmentSummary:
    """One segment over all draws: mean alpha*, its noise floor; flat set and P99 of the first draw; the
    policy's gap.
    """

    label: str
    start_s: float
    end_s: float
    best: float
    noise_floor: float
    flat: FlatSet
    p99_ms: float
    policy_gap: float


def segments(comparison: Comparison) -> list[SegmentSummary]:
    """Summarise each segment; policy_gap is NaN where no policy was evaluated."""
    first = comparison.results[0]
    stars, noise = comparison.best_alphas().mean(axis=0), comparison.noise_floor()
    policy = any(row.key == POLICY for row in comparison.rows)
    found = []
    for index, (span, curve) in enumerate(zip(first.sweep.part.spans, first.sweep.settled, strict=True)):
        gaps = [result.gaps(POLICY, "settled", index).ratio for result in comparison.results] if policy else []
        found.append(
            SegmentSummary(
                label=span.label,
                start_s=span.start_ns / 1e9,
                end_s=span.end_ns / 1e9,
                best=float(stars[index]),
                noise_floor=float(noise[index]),
                flat=curve.flat,
                p99_ms=float(curve.smooth_ms.min()),
                policy_gap=float(np.mean(gaps)) if gaps else float("nan"),
            )
        )
    return found
