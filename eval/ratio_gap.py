"""`helm-rl eval ratio-gap`: how far a policy's alpha is from the best one of each segment, settled and in
transition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.table import Table

from eval.command import EvalArgs, console, evaluate
from eval.comparison import POLICY, Comparison
from eval.summary import footnotes, headline, segments
from eval.wording import alpha, flat_set, milliseconds


@dataclass
class Args(EvalArgs):
    """Measure how far a policy's split of the memory is from the best split of each segment.

    The best split, alpha*, of a segment is the minimum of the smoothed P99 over replayed statics; its flat set
    is every alpha within 2 % of that minimum. The second half of a segment is called settled, the first the
    transition.

    Figures (--json): those of `helm-rl eval p99`; here the ones that matter are
    default.<pattern>.single.<controller>.{ratio_gap, ratio_gap_transition, flat_gap, flat_gap_transition} and
    default.<pattern>.noise_floor, the standard deviation of alpha* over the draws.
    """


def main(args: Args) -> None:
    """Run the evaluation, print its tables, write the files asked for."""
    comparison = evaluate(args)
    out = console()
    out.print(headline(comparison))
    out.print(gap_table(comparison))
    out.print(segment_table(comparison))
    for line in footnotes(comparison):
        out.print(line, style="dim")


def gap_table(comparison: Comparison) -> Table:
    """One line per controller: mean distance of alpha to alpha* and to the flat set, by half."""
    table = Table(title=f"{comparison.pattern}: mean distance of alpha to the best one")
    table.add_column("controller")
    for heading in ("|alpha - alpha*| settled", "in transition", "to the flat set, settled", "in transition"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        keys = ("ratio_gap", "ratio_gap_transition", "flat_gap", "flat_gap_transition")
        table.add_row(row.title, *(f"{comparison.estimate(row.key, key).value:.3f}" for key in keys))
    return table


def segment_table(comparison: Comparison) -> Table:
    """One line per segment: alpha*, its noise floor, the flat set, and the policy's distance where there is
    one.
    """
    table = Table(title="the best alpha of each segment")
    for heading, justify in (("segment", "left"), ("from s", "right"), ("to s", "right"), ("alpha*", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for heading in ("noise floor", "flat set", "P99 at alpha*, ms"):
        table.add_column(heading, justify="right")
    policy = any(row.key == POLICY for row in comparison.rows)
    if policy:
        table.add_column("policy, settled", justify="right")
    for segment in segments(comparison):
        cells = [
            segment.label,
            f"{segment.start_s:.0f}",
            f"{segment.end_s:.0f}",
            alpha(segment.best),
            f"{segment.noise_floor:.3f}" if np.isfinite(segment.noise_floor) else "-",
            flat_set(segment.flat),
            milliseconds(segment.p99_ms),
        ]
        table.add_row(*cells, *([f"{segment.policy_gap:.3f}"] if policy else []))
    return table
