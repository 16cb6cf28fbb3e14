"""The report of a suite: one self-contained HTML page, for a desk, a phone or paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval import plots
from eval.comparison import DEPLOYABLE, HINDSIGHT, OPTIMUM, POLICY, REFERENCE, Estimate, Row
from eval.page import Plot, Tile, data_uri, keep_units, made_by, template
from eval.routing import NAIVE
from eval.suite.cells import RECORDED
from eval.suite.cluster import ROUTED
from eval.suite.families import FAMILIES
from eval.suite.goals import MOVING, Goal, change, fell_short, goals, place
from eval.suite.plots import MapCell, against_hindsight, burst_cells, map_strips, through_a_burst
from eval.suite.summary import CellSummary, Summary
from eval.wording import counted, interval_ms, milliseconds
from helm_rl import __version__
from helm_rl.figures import command
from helm_rl.files import write_text
from helm_rl.metrics import shed_ms
from helm_rl.scenario import scenario_hash


def write_report(
    path: Path, summary: Summary, map_cells: Sequence[MapCell] = (), decision: dict[str, str] | None = None
) -> None:
    """Render a suite and write the page; map_cells, decision: what other commands measured, where it is given."""
    write_text(path, render(summary, map_cells, decision or {}))


def render(summary: Summary, map_cells: Sequence[MapCell], decision: dict[str, str]) -> str:
    """Return the page: HTML without script, without anything to fetch."""
    found = goals(summary)
    families = list(dict.fromkeys(cell.cell.family for cell in summary.cells))
    return template("suite.html.j2").render(
        headline=keep_units(headline(summary, found)),
        tiles=_tiles(summary, found),
        policy=summary.has_policy,
        goals=found,
        missed=[keep_units(line) for line in fell_short(found)],
        families=[_family(summary, family) for family in families],
        overall=_plot("against", "P99 by controller and pattern", against_hindsight, summary, _alt(summary), _CAPTION),
        bursts=[_burst(cell) for cell in burst_cells(summary)],
        aggregate=[_aggregate(summary, row) for row in summary.rows if _everywhere(summary, row)],
        ablations=[row for row in summary.rows if getattr(row, "kind", "") == "policy" and row.key != POLICY],
        capacities=[_capacity(cell) for cell in summary.cells],
        violations=_violations(summary),
        cluster=_cluster(summary),
        nodes=summary.nodes,
        clustered="" if summary.clustered is None else summary.clustered.family,
        map=_map(map_cells),
        decision=decision,
        limits=_limits(summary),
        run=_run(summary),
        version=__version__,
    )


def headline(summary: Summary, found: Sequence[Goal]) -> str:
    """The result in a sentence or two, with the measured numbers and nothing else."""
    families = len({cell.cell.family for cell in summary.cells})
    draws = len(summary.cells[0].comparison.results)
    where = (
        f"Over {len(summary.cells)} loads of {counted(families, 'family', 'families')}, {counted(draws, 'draw')} each"
    )
    deployable = summary.over_hindsight(DEPLOYABLE)
    if not summary.has_policy:
        best = min(summary.rules, key=lambda row: summary.over_hindsight(row.key).value)
        return (
            f"{where}, the P99 of the static that could have been deployed was {_than(deployable.value)} that of the "
            f"best static in hindsight, and that of the best rule, {best.title}, "
            f"{_than(summary.over_hindsight(best.key).value)}."
        )
    ours = summary.over_hindsight(POLICY)
    between = "" if ours.interval is None else f" (95 %: {' to '.join(change(end) for end in ours.interval)})"
    moving = [cell for cell in summary.cells if cell.cell.pattern in MOVING]
    better = sum(cell.comparison.ratio(POLICY, DEPLOYABLE).value < 1 for cell in moving)
    reached = [goal for goal in found if goal.reached is not None]
    met = sum(bool(goal.reached) for goal in reached)
    return (
        f"{where}, HELM's P99 was {_than(ours.value)}{between} that of the best static in hindsight, which nobody can "
        f"know beforehand; it was better than the static that could have been deployed on {better} of the "
        f"{len(moving)} loads that change, and met {met} of {len(reached)} goals."
    )


def _than(ratio: float) -> str:
    if ratio >= 2:  # from which on `change` shows a multiple
        return change(ratio)
    return f"{abs(100 * (ratio - 1)):.1f} % {'above' if ratio >= 1 else 'below'}"


def _tiles(summary: Summary, found: Sequence[Goal]) -> list[Tile]:
    if not summary.has_policy:
        return [
            Tile(
                change(summary.over_hindsight(row.key).value), f"{row.title}: P99 against the best static in hindsight"
            )
            for row in sorted(summary.rules, key=lambda row: summary.over_hindsight(row.key).value)[:4]
        ]
    reached = [goal.reached for goal in found if goal.reached is not None]
    best = min(summary.rules, key=lambda row: summary.over_hindsight(row.key).value)
    return [
        Tile(change(summary.over_hindsight(POLICY).value), "P99 against the best static in hindsight, over all loads"),
        Tile(change(summary.over_hindsight(best.key).value), f"the same of the best rule, {best.title}"),
        Tile(change(summary.over_hindsight(DEPLOYABLE).value), "the same of the static that could have been deployed"),
        Tile(
            f"{100 * summary.violations(POLICY):.0f} %",
            f"of bursts broke the SLO; {100 * summary.violations(NAIVE):.0f} % under naive reallocation",
        ),
        Tile(f"{summary.improvement(best.key).value:.2f}", f"probability of a lower P99 than {best.title}"),
        Tile(f"{sum(map(bool, reached))} of {len(reached)}", "goals met"),
    ]


def _family(summary: Summary, family: str) -> dict[str, Any]:
    """One table: a row for each controller, P99, SLO and distance to the best alpha under each pattern."""
    cells = [cell for cell in summary.cells if cell.cell.family == family]
    rows = []
    for row in cells[0].comparison.rows:
        found = [_values(cell, row.key) for cell in cells]
        rows.append({"key": row.key, "title": row.title, "meaning": row.meaning, "cells": found})
    return {
        "name": family,
        "about": FAMILIES.get(family, "real arrivals of logs, users and items drawn: half of them stay"),
        "slo": f"{cells[0].cell.scenario.slo_ms:g}",
        "patterns": [cell.cell.title for cell in cells],
        "rooms": [_room(cell) for cell in cells],
        "rows": rows,
    }


def _room(cell: CellSummary) -> str:
    room, error = cell.comparison.headroom()
    return f"{100 * room:.1f}" + (f" ± {100 * error:.1f}" if np.isfinite(error) else "") + " %"


def _values(cell: CellSummary, key: str) -> dict[str, str]:
    p99 = cell.comparison.estimate(key, "p99_ms")
    shed = p99.value >= shed_ms(cell.cell.scenario.slo_ms)
    return {
        "p99": "sheds" if shed else milliseconds(p99.value),
        "interval": "" if shed else interval_ms(p99),
        "slo": f"{100 * cell.comparison.estimate(key, 'slo').value:.2f} %",
        "gap": f"{cell.comparison.estimate(key, 'ratio_gap').value:.3f}",
    }


_CAPTION = (
    "A marker for each pattern: P99 over that of the best static in hindsight on the same arrivals, interquartile mean "
    "over the draws, with its 95 % bootstrap interval. Left of the line is faster. Beyond ten times, an arrow: it "
    "sheds."
)


def _alt(summary: Summary) -> str:
    told = ", ".join(f"{row.title} {change(summary.over_hindsight(row.key).value)}" for row in summary.rows[:8]
                     if _everywhere(summary, row))  # fmt: skip
    return f"P99 of each controller against the best static in hindsight; over all loads {told}."


def _everywhere(summary: Summary, row: Row) -> bool:
    return all(row.key in cell.comparison.results[0].runs for cell in summary.cells)


def _burst(cell: CellSummary) -> Plot:
    comparison = through_a_burst(cell.comparison)
    last = comparison.rows[-1].title
    p99 = ", ".join(
        f"{row.title} {milliseconds(comparison.estimate(row.key, 'p99_ms').value)} ms" for row in comparison.rows
    )
    return _plot(
        f"burst-{cell.cell.family}",
        f"{place(cell)}: alpha over time, beside the {last}",
        plots.alpha_over_time,
        comparison,
        f"Alpha over time through a burst, and the P99 of 10 s windows. P99 of the whole run: {p99}.",
        "Above: α as applied and as asked for, beside α*, the best α of each segment, and its flat set (within 2 % of "
        "the least P99). Below: P99 of the requests that arrive in each 10 s. The shaded stretch is the burst. Thin "
        "lines: the other draws.",
    )


def _aggregate(summary: Summary, row: Row) -> dict[str, str]:
    over = summary.over_hindsight(row.key)
    shown = {
        "key": row.key,
        "title": row.title,
        "over": change(over.value),
        "interval": _ends(over),
        "better": "",
        "ends": "",
    }
    if summary.has_policy and row.key not in (POLICY, REFERENCE, OPTIMUM):
        improved = summary.improvement(row.key)
        shown["better"] = f"{improved.value:.2f}"
        if improved.interval is not None:
            shown["ends"] = f"{improved.interval[0]:.2f} to {improved.interval[1]:.2f}"
    return shown


def _ends(found: Estimate) -> str:
    if found.interval is None or found.interval[0] == found.interval[1]:
        return ""
    return " to ".join(change(end) for end in found.interval)


def _capacity(cell: CellSummary) -> dict[str, str]:
    def shown(key: str) -> str:
        return f"{np.mean(cell.capacities[key]):.2f}" if key in cell.capacities else "-"

    ratios = {to: cell.capacity_ratio(to) for to in (DEPLOYABLE, HINDSIGHT)}
    return {
        "where": place(cell),
        "policy": shown(POLICY),
        "deployable": shown(DEPLOYABLE),
        "hindsight": shown(HINDSIGHT),
        **{f"over_{to}": "-" if ratio is None else change(ratio.value) for to, ratio in ratios.items()},
    }


def _violations(summary: Summary) -> list[dict[str, str]]:
    """Of each controller, the share of bursts on one node whose P99 breaks the SLO."""
    return [
        {"title": row.title, "share": f"{100 * summary.violations(row.key):.0f} %"}
        for row in summary.rows
        if np.isfinite(summary.violations(row.key))
    ]


def _cluster(summary: Summary) -> list[dict[str, str]]:
    found = []
    for (router, key), records in summary.served.items():
        title = "static of one node" if key == ROUTED else summary.row(key).title
        tails = [record.p99_ms for record in records]
        burst = [tail for record in records for tail in record.burst_p99_ms]
        slo_ms = summary.clustered.scenario.slo_ms if summary.clustered is not None else float("nan")
        found.append(
            {
                "router": router,
                "title": title,
                "p99": milliseconds(float(np.mean(tails))),
                "range": f"{milliseconds(min(tails))} to {milliseconds(max(tails))}" if len(set(tails)) > 1 else "",
                "slo": f"{100 * np.mean([record.slo for record in records]):.2f} %",
                "shed": f"{100 * np.mean([record.shed for record in records]):.1f} %",
                "bursts": f"{sum(tail > slo_ms for tail in burst)} of {len(burst)}",
            }
        )
    return found


def _map(cells: Sequence[MapCell]) -> Plot | None:
    if not cells:
        return None
    rooms = np.array([each.headroom for each in cells])
    losses = np.array([each.deployable_loss for each in cells])
    return _plot(
        "map",
        "Where adapting pays",
        map_strips,
        cells,
        f"Headroom of {len(cells)} cells: {100 * np.median(rooms):.1f} % in the median, {100 * rooms.max():.0f} % at "
        f"most. The deployable static is {100 * np.median(losses):.0f} % slower in the median.",
        f"A dot for each of {len(cells)} cells of helm-rl eval map, of models, links, host tiers, histories, hot "
        "shares and loads. The dotted line is 10 %; what is below .1 % stands at .1 %.",
    )


def _plot(name: str, title: str, draw: plots.Draw[Any], subject: Any, alt: str, caption: str) -> Plot:
    wide, narrow = (data_uri(plots.svg(draw, subject, narrow)) for narrow in (False, True))
    return Plot(name, title, wide, narrow, alt, caption)


def _limits(summary: Summary) -> list[str]:
    lines = [
        "Latencies are simulated on a model clock: costs derive from architectures and published figures, not from a "
        "measurement on this machine.",
        "Latency runs from the scheduled arrival; a shed request counts as 100 × the SLO and as a violation.",
        "The reference is the best schedule known, not a bound: a controller may beat it, and is then replayed twice.",
        "Intervals are 95 % bootstrap intervals of interquartile means over the draws: too narrow where draws are few.",
        "The loads were set by statics alone, before any controller was seen on them (python -m eval.suite.calibrate); "
        "nothing was trained, chosen or tuned on the draws that are evaluated, but for the static in hindsight, the "
        "best single static and the best rule, which makes these opponents stronger.",
        "A capacity is the largest multiple of the load at which P99 stays within the SLO, with the same static or "
        "policy.",
    ]
    if any(cell.cell.family == RECORDED for cell in summary.cells):
        lines.append(
            "Real arrivals are those of a log, repeated and compressed until they make the node's load; users and "
            "items are drawn, and differ from draw to draw."
        )
    return lines


def _run(summary: Summary) -> dict[str, str]:
    found = {"command": command()}
    for cell in summary.cells:
        results = cell.comparison.results
        found[f"{cell.name}"] = f"scenario sha256 {scenario_hash(cell.cell.scenario)}; draws " + ", ".join(
            f"{result.seed} ({result.requests:,} requests, trace sha256 {result.trace_hash[:12]}…)"
            for result in results
        )
    policy = next((row for row in summary.rows if row.key == POLICY), None)
    if policy is not None:
        found["policy"] = f"{policy.meaning}; {getattr(policy, 'identity', '')}"
        times = [result.runs[POLICY].decide_us for cell in summary.cells for result in cell.comparison.results]
        found["one decision"] = f"{np.nanmedian(times):.0f} µs here (median, observation included; not in the latency)"
    return found | made_by()
