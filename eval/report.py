"""The report: one self-contained HTML page about one comparison, for a person, on a desk, a phone or paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eval import plots
from eval.comparison import DEPLOYABLE, HINDSIGHT, OPTIMUM, POLICY, Comparison, provenance
from eval.page import Plot, Tile, data_uri, keep_units, made_by, template
from eval.summary import footnotes, headline, segments
from eval.wording import alpha, flat_set, interval_ms, milliseconds, percent, times
from helm_rl import __version__
from helm_rl.figures import command
from helm_rl.files import write_text


def write_report(path: Path, comparison: Comparison, extra: dict[str, str] | None = None) -> None:
    """Render `comparison` and write the page to `path`; extra: more rows for "What was run"."""
    write_text(path, render(comparison, extra))


def render(comparison: Comparison, extra: dict[str, str] | None = None) -> str:
    """Return the page: HTML without script, without anything to fetch."""
    policy = any(row.key == POLICY for row in comparison.rows)
    return template("report.html.j2").render(
        title=f"{comparison.pattern}: {'a policy beside ' if policy else ''}static splits",
        scenario=comparison.scenario,
        headline=keep_units(headline(comparison)),
        tiles=_tiles(comparison),
        rows=_rows(comparison),
        draws=len(comparison.results),
        segments=_segments(comparison),
        policy=policy,
        plots=_plots(comparison),
        footnotes=footnotes(comparison),
        limits=_limits(comparison),
        run=_run(comparison) | (extra or {}),
        version=__version__,
    )


def _tiles(comparison: Comparison) -> list[Tile]:
    headroom, error = comparison.headroom()
    room = f"{100 * headroom:.1f}" + (f" ± {100 * error:.1f}" if np.isfinite(error) else "") + " %"
    if not any(row.key == POLICY for row in comparison.rows):
        return [
            Tile(_p99(comparison, OPTIMUM), "P99 of the per-segment optimum"),
            Tile(_p99(comparison, HINDSIGHT), "P99 of the best static in hindsight"),
            Tile(_p99(comparison, DEPLOYABLE), "P99 of the deployable static"),
            Tile(room, "headroom: what the reference gains on the best static in hindsight"),
        ]
    regret = comparison.estimate(POLICY, "regret").value
    return [
        Tile(_p99(comparison, POLICY), "P99 of the policy"),
        Tile(times(comparison.ratio(POLICY, DEPLOYABLE).value), "the deployable static's P99"),
        Tile(times(comparison.ratio(POLICY, HINDSIGHT).value), "the P99 of the best static in hindsight"),
        Tile(f"{'+' if regret >= 0 else '−'}{percent(abs(regret))}", "regret: P99 against the reference"),
        Tile(f"{comparison.estimate(POLICY, 'ratio_gap').value:.3f}", "mean |α − α*| in settled halves"),
        Tile(room, "headroom: what the reference gains on the best static in hindsight"),
    ]


def _p99(comparison: Comparison, key: str) -> str:
    return f"{milliseconds(comparison.estimate(key, 'p99_ms').value)} ms"


def _rows(comparison: Comparison) -> list[dict[str, str]]:
    found = []
    for row in comparison.rows:
        values = {
            key: comparison.estimate(row.key, key)
            for key in ("p99_ms", "p50_ms", "windowed_p99_ms", "slo", "throughput", "regret", "ratio_gap", "flat_gap")
        }
        found.append(
            {
                "key": row.key,
                "title": row.title,
                "meaning": row.meaning,
                "p99": milliseconds(values["p99_ms"].value),
                "interval": interval_ms(values["p99_ms"]),
                "p50": milliseconds(values["p50_ms"].value),
                "windowed": milliseconds(values["windowed_p99_ms"].value),
                "slo": f"{100 * values['slo'].value:.2f} %",
                "throughput": f"{values['throughput'].value:.1f}",
                "regret": percent(values["regret"].value).replace("-", "−"),
                "gap": f"{values['ratio_gap'].value:.3f}",
                "flat": f"{values['flat_gap'].value:.3f}",
            }
        )
    return found


def _segments(comparison: Comparison) -> list[dict[str, str]]:
    return [
        {
            "label": segment.label,
            "time": f"{segment.start_s:.0f} to {segment.end_s:.0f} s",
            "best": alpha(segment.best),
            "noise": f"{segment.noise_floor:.3f}" if np.isfinite(segment.noise_floor) else "unknown",
            "flat": flat_set(segment.flat),
            "p99": milliseconds(segment.p99_ms),
            "gap": f"{segment.policy_gap:.3f}",
        }
        for segment in segments(comparison)
    ]


def _plots(comparison: Comparison) -> list[Plot]:
    first = comparison.results[0]
    several = len(comparison.results) > 1
    stars = ", ".join(
        f"{span.label} {curve.best:.2f}"
        for span, curve in zip(first.sweep.part.spans, first.sweep.settled, strict=True)
    )
    tails = ", ".join(f"{row.title} {_p99(comparison, row.key)}" for row in comparison.rows)
    count = len(first.sweep.part.spans)
    some = f" {plots.MOST_PANELS} of {count} segments are shown." if count > plots.MOST_PANELS else ""
    thin = " Thin lines: the other draws." if several else ""
    return [
        _plot(
            "tails",
            "Tail latency, controller by controller",
            plots.tail_by_controller,
            comparison,
            f"P99 latency per controller: {tails}.",
            "One dot per draw of arrivals; the bar is the interquartile mean"
            + (", the band its 95 % bootstrap interval." if several else "."),
        ),
        _plot(
            "time",
            "What the split did over time, and what it cost",
            plots.alpha_over_time,
            comparison,
            f"Alpha over time beside the best alpha of each segment ({stars}), and the P99 of 10 s windows.",
            "Above: α as applied and as asked for, beside α*, the best α of each segment, and its flat set (within 2 % "
            "of the least P99). Below: P99 of the requests that arrive in each 10 s. A shaded stretch is a phase that "
            f"adds load.{thin}",
        ),
        _plot(
            "curves",
            "P99 against α, regime by regime",
            plots.curves_by_regime,
            comparison,
            f"P99 against alpha for the whole run and each segment; minima at {stars}.",
            "Dots: replayed statics; line: smoothed (a local quadratic in ln P99); triangle: the minimum; green: the "
            f"flat set. A segment is judged by its second half.{some}{thin}",
        ),
        _plot(
            "distribution",
            "How slow the slow requests are",
            plots.latency_distribution,
            comparison,
            f"Share of requests slower than a given latency, per controller; at 1 %: {tails}.",
            "Where a curve crosses the line at 1 % is its P99. Shed requests stand at 100 times the SLO."
            + (" The first draw of arrivals." if several else ""),
        ),
    ]


def _plot(name: str, title: str, draw: plots.Draw[Comparison], comparison: Comparison, alt: str, caption: str) -> Plot:
    wide, narrow = (data_uri(plots.svg(draw, comparison, narrow)) for narrow in (False, True))
    return Plot(name, title, wide, narrow, alt, caption)


def _limits(comparison: Comparison) -> list[str]:
    scenario = comparison.scenario
    lines = [
        f"Latencies are simulated on a model clock: model {scenario.model.profile} on {scenario.hardware.profile}, one "
        "node. Costs derive from the architecture and published figures, not from a measurement on this machine.",
        "The reference is not a bound. It is the best schedule known here; a controller may beat it.",
        "α* of a segment knows nothing of what moving there costs, so the per-segment optimum can lose to a static.",
    ]
    if comparison.results[0].seed is None:
        lines.append(
            "The deployable static was chosen on the first quarter of the same recorded arrivals that it is judged on."
        )
    return lines


def _run(comparison: Comparison) -> dict[str, str]:
    found = {"command": command(), **provenance(comparison)}
    timed = [result.runs[POLICY].decide_us for result in comparison.results if POLICY in result.runs]
    if timed:
        found["one decision"] = f"{np.median(timed):.0f} µs (median, here; not part of the latency)"
    return found | made_by()
