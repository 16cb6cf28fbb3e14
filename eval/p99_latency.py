"""`helm-rl eval p99`: tail latency of a policy beside the statics and the per-segment optimum, on the same
arrivals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.table import Table

from eval.command import EvalArgs, console, evaluate
from eval.comparison import Comparison
from eval.summary import footnotes, headline
from eval.wording import interval_ms, milliseconds, percent
from helm_rl.metrics import shed_ms


@dataclass
class Args(EvalArgs):
    """Measure P99 latency of a policy beside static splits of the memory, on the same arrivals.

    Figures (--json): default.<pattern>.single.<controller>.<figure>, where <pattern> is the name of the scenario or of
    the recorded trace, <controller> is policy (the first one; the others have their folders' names, those of
    --controller their classes', in lower case), half_static, deployable_static, hindsight_static, segment_optimum,
    (with --reference full) reference or (with --peers) marginal_hits, cliffhanger, miss_ratio_curves, kv_first,
    emb_first, hill_climbing or weighted_margins, and <figure> is p99_ms, p50_ms, windowed_p99_ms (mean over 10 s
    windows), onset_p99_ms (first 10 s of bursts; not where there are none), slo, throughput, ratio_gap,
    ratio_gap_transition, flat_gap, flat_gap_transition or regret; and default.<pattern>.{headroom, headroom_error,
    noise_floor, p99_vs_deployable_static, p99_vs_hindsight_static}.
    """


def main(args: Args) -> None:
    """Run the evaluation, print its table, write the files asked for."""
    comparison = evaluate(args)
    out = console()
    out.print(headline(comparison))
    out.print(latency_table(comparison))
    for line in footnotes(comparison):
        out.print(line, style="dim")


def latency_table(comparison: Comparison) -> Table:
    """One line per controller: tail, median, windowed tail, SLO, throughput, regret."""
    table = Table(title=f"{comparison.pattern}: latency of measured requests, SLO {comparison.scenario.slo_ms:g} ms")
    table.add_column("controller")
    bursts = np.isfinite(comparison.estimate(comparison.rows[0].key, "onset_p99_ms").value)
    onset = ("P99 of bursts' first 10 s, ms",) if bursts else ()
    for heading in ("P99 ms", "P50 ms", "mean P99 of 10 s, ms", *onset, "within SLO", "served/s", "regret"):
        table.add_column(heading, justify="right")
    shed = shed_ms(comparison.scenario.slo_ms)
    for row in comparison.rows:
        found = {
            key: comparison.estimate(row.key, key)
            for key in ("p99_ms", "p50_ms", "windowed_p99_ms", "onset_p99_ms", "slo", "throughput", "regret")
        }
        interval = interval_ms(found["p99_ms"])
        table.add_row(
            row.title,
            milliseconds(found["p99_ms"].value) + (f" ({interval})" if interval else ""),
            milliseconds(found["p50_ms"].value),
            milliseconds(found["windowed_p99_ms"].value),
            *([milliseconds(found["onset_p99_ms"].value)] if bursts else []),
            f"{100 * found['slo'].value:.2f} %",
            f"{found['throughput'].value:.1f}",
            "shed" if found["p99_ms"].value == shed else percent(found["regret"].value),
        )
    return table
