"""What a policy is held to, cell by cell, beside what the paper reports (arXiv:2605.04450); nothing here is tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from eval.comparison import DEPLOYABLE, HINDSIGHT, POLICY, Estimate, estimate
from eval.routing import NAIVE
from eval.suite.cells import RECORDED
from eval.suite.entries import HOST_GIB, SINGLE
from eval.suite.summary import CellSummary, Summary

MOVING = ("trend", "burst")
"""Patterns under which the best split moves, in the first part of their names."""
SURE = 3.0
"""Standard errors from which headroom is taken to be there."""


@dataclass(frozen=True)
class Check:
    """One measure in one place.

    where: family and pattern, or a family; text: value and interval, as shown; reached: whether the goal is met, None
    where there is none; known: what the best schedule known comes to by the same measure, or how sure that is.
    """

    where: str
    text: str
    reached: bool | None
    value: float
    known: str = ""


@dataclass(frozen=True)
class Goal:
    """One line of the table: a measure, what the paper has, what is asked for, and what was found everywhere."""

    title: str
    paper: str
    asked: str
    checks: tuple[Check, ...]

    @property
    def reached(self) -> bool | None:
        """Whether it is met wherever it is asked for; None where it is only shown."""
        found = [check.reached for check in self.checks if check.reached is not None]
        return all(found) if found else None


def goals(summary: Summary) -> list[Goal]:
    """Return the goals and how far each is met; none without a policy."""
    if not summary.has_policy:
        return []
    cells = [cell for cell in summary.cells if cell.cell.family != RECORDED]
    moving = [cell for cell in cells if cell.cell.pattern in MOVING]
    return [
        Goal(
            "P99 against the best single static ratio over the three patterns",
            "-24 to -38 %",
            "at least -24 % on Trend and Burst",
            tuple(_p99(cell, SINGLE, 0.76 if cell in moving else None) for cell in cells),
        ),
        Goal(
            "P99 against the deployable static",
            "not given",
            "better on Trend and Burst, never 2 % worse",
            tuple(_p99(cell, DEPLOYABLE, 1.0 if cell in moving else 1.02, below=cell in moving) for cell in cells),
        ),
        Goal(
            "P99 against the best static in hindsight of each trace",
            "not given",
            f"at least 80 % of the headroom, where it exceeds {SURE:g} standard errors",
            tuple(map(_captured, cells)),
        ),
        Goal(
            "load borne within the SLO, against the deployable static",
            "not given",
            "at least +10 % on Trend and Burst",
            tuple(_capacity(cell, DEPLOYABLE, 1.10 if cell in moving else None) for cell in cells),
        ),
        Goal(
            "load borne within the SLO, against the hindsight static",
            "not given",
            "not below by 1 % on Trend and Burst",
            tuple(_capacity(cell, HINDSIGHT, 0.99 if cell in moving else None) for cell in cells),
        ),
        Goal(
            "requests within the SLO",
            "93.5 to 99.6 %",
            "at least 99 % where the reference reaches it",
            tuple(map(_slo, cells)),
        ),
        Goal(
            "distance from the best ratio, settled",
            ".024 to .029",
            "at most .024, or 1.5 times the noise floor",
            tuple(map(_gap, cells)),
        ),
        Goal("shift of the best ratio between regimes", "up to .35", "shown", tuple(_shifts(cells))),
        Goal(
            "bursts with a P99 violation: naive reallocation / HELM",
            "over 40 % / removed",
            "shown / at most 5 %",
            (_violations(summary, NAIVE, "naive", None), _violations(summary, POLICY, "HELM", 0.05)),
        ),
        Goal("throughput, against the best static", "kept", "within 1 %", tuple(map(_throughput, cells))),
        Goal(
            "P99 against the best of marginal hits, Cliffhanger, miss-ratio curves, hill climbing and the rest",
            "not given",
            "better on each pattern",
            tuple(_best_rule(summary, cell) for cell in cells),
        ),
        *(
            Goal(
                f"P99 against a KV host tier of {gib:g} GiB with a static split",
                "not given",
                "shown",
                tuple(_p99(cell, f"host_tier_{gib:g}", None) for cell in cells),
            )
            for gib in HOST_GIB
        ),
    ]


def fell_short(found: list[Goal]) -> list[str]:
    """Return a sentence for each goal that was missed: where, by how much, and what the best schedule known came to."""
    sentences = []
    for goal in found:
        missed = [check for check in goal.checks if check.reached is False]
        if missed:
            places = "; ".join(
                f"{check.where} {check.text}" + (f" ({check.known})" if check.known else "") for check in missed
            )
            sentences.append(f"{goal.title[0].upper()}{goal.title[1:]}: the goal is {goal.asked}; missed by {places}.")
    return sentences


def place(cell: CellSummary) -> str:
    """Name a cell for people."""
    return f"{cell.cell.family}, {cell.cell.title}"


def change(ratio: float) -> str:
    """Show a ratio as a change: `-12.3 %`; from twice on as a multiple."""
    if ratio >= 10:
        return f"{ratio:,.0f} times"
    if ratio >= 2:
        return f"{ratio:.1f} times"
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f} %"  # -0.0 + 0.0 is 0.0


def _between(found: Estimate, show: Callable[[float], str]) -> str:
    value = show(found.value)
    if found.interval is None:
        return value
    low, high = (show(end) for end in found.interval)
    return value if low == high else f"{value} ({low} to {high})"


def _p99(cell: CellSummary, key: str, most: float | None, below: bool = False) -> Check:
    """P99 of the policy over that of another; most: the ratio that is asked for, or that it must stay below."""
    found = cell.comparison.ratio(POLICY, key)
    reached = None if most is None else bool(found.value < most if below else found.value <= most)
    return Check(place(cell), _between(found, change), reached, found.value, _known(cell, key))


def _known(cell: CellSummary, key: str) -> str:
    """What the best schedule known makes of the same ratio."""
    ratios = [result.reference.p99_ms / result.runs[key].p99_ms for result in cell.comparison.results]
    return f"the best schedule known: {change(estimate(ratios).value)}"


def _captured(cell: CellSummary) -> Check:
    room, error = cell.comparison.headroom()
    found = cell.comparison.ratio(POLICY, HINDSIGHT)
    share, sure = cell.captured, bool(room > SURE * error)  # NaN, of one draw, is not
    headroom = f"headroom {100 * room:.1f} %" + (f" +- {100 * error:.1f}" if np.isfinite(error) else "")
    text = _between(found, change) + (f", {max(0, round(100 * share))} % of the headroom" if sure else "")
    return Check(place(cell), text, share >= 0.8 if sure else None, share, headroom)


def _capacity(cell: CellSummary, to: str, least: float | None) -> Check:
    found = cell.capacity_ratio(to)
    if found is None:
        bears = cell.capacities.get(to, ())
        text = "it bears no load at all" if bears and min(bears) == 0 else "not measured"
        return Check(place(cell), text, None, float("nan"))
    reached = None if least is None else bool(found.value >= least)
    return Check(place(cell), _between(found, change), reached, found.value)


def _slo(cell: CellSummary) -> Check:
    found = cell.comparison.estimate(POLICY, "slo")
    reference = float(np.mean([result.reference.run.slo for result in cell.comparison.results]))
    reached = bool(found.value >= 0.99) if reference >= 0.99 else None
    known = f"the best schedule known: {100 * reference:.2f} %"
    return Check(place(cell), _between(found, lambda share: f"{100 * share:.2f} %"), reached, found.value, known)


def _gap(cell: CellSummary) -> Check:
    found = cell.comparison.estimate(POLICY, "ratio_gap")
    noise = float(np.mean(cell.comparison.noise_floor()))
    most = max(0.024, 1.5 * noise) if np.isfinite(noise) else 0.024
    known = f"noise floor {noise:.3f}" if np.isfinite(noise) else ""
    return Check(place(cell), _between(found, "{:.3f}".format), bool(found.value <= most), found.value, known)


def _shifts(cells: list[CellSummary]) -> Iterator[Check]:
    for family in dict.fromkeys(cell.cell.family for cell in cells):
        stars = [cell.comparison.best_alphas().mean(axis=0) for cell in cells if cell.cell.family == family]
        shift = float(max(star.max() for star in stars) - min(star.min() for star in stars))
        yield Check(family, f"{shift:.2f}", None, shift)


def _violations(summary: Summary, key: str, where: str, most: float | None) -> Check:
    share = summary.violations(key)
    bursts = sum(cell.violations(key)[1] for cell in summary.cells if cell.cell.pattern == "burst")
    reached = None if most is None or not np.isfinite(share) else bool(share <= most)
    return Check(where, f"{100 * share:.0f} % of {bursts}", reached, share)


def _throughput(cell: CellSummary) -> Check:
    results = cell.comparison.results
    ratios = [result.metric(POLICY, "throughput") / result.metric(HINDSIGHT, "throughput") for result in results]
    found = estimate(ratios)
    return Check(place(cell), _between(found, change), bool(found.value >= 0.99), found.value)


def _best_rule(summary: Summary, cell: CellSummary) -> Check:
    rules = [row for row in summary.rules if getattr(row, "kind", "") == "rule"]
    best = min(rules, key=lambda row: cell.comparison.estimate(row.key, "p99_ms").value)
    found = _p99(cell, best.key, 1.0, below=True)
    return Check(found.where, f"{found.text} to {best.title}", found.reached, found.value, found.known)
