"""A trace's summary in words: the rows and tables that the terminal and the page show."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from helm_rl.errors import printable
from helm_rl.workloads.inspect import LEAST_SPAN_NS, Distribution, TraceSummary
from helm_rl.workloads.popularity import LEAST_COUNT, ZipfFit
from helm_rl.workloads.trace import MOST_SEGMENTS

CURVE_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Sizes, as shares of the working set, at which a miss-ratio curve is told in numbers."""


@dataclass(frozen=True)
class TextTable:
    """A table; the first column is text, the others are numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def rows(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    """Yield what the trace is, line by line: a name and what there is to say."""
    yield "source", summary.source + ("" if summary.seed is None else f", seed {summary.seed}")
    span = summary.end_s - summary.start_s
    days = f" ({span / 86_400:,.1f} days)" if span >= 2 * 86_400 else ""
    yield "span", f"{span:,.3f} s{days}, from {summary.start_s:,.3f} to {summary.end_s:,.3f}{_origin(summary)}"
    yield "measured from", f"{summary.measure_from_s:,.3f} s: {summary.measured_requests:,} requests"
    if summary.segments is None:
        yield "segments", f"more than {MOST_SEGMENTS:,}, too many to tell results for (trace convert --start-s --end-s)"
    else:
        empty = f", {summary.empty_segments:,} of them without a request" if summary.empty_segments else ""
        yield "segments", f"{summary.segments:,}{empty}: parts that results are told for, cut at phases or after 60 s"
    yield "requests", f"{summary.requests:,}"
    if summary.rate_mean is None:
        yield "rate", "none: all requests come within a millisecond"
    else:
        yield (
            "rate",
            f"mean {rate_in_words(summary.rate_mean)}; peak {summary.rate_peak_1s:,.1f}/s over 1 s, "
            f"{summary.rate_peak_10s:,.1f}/s over 10 s",
        )
    if summary.clock_step_s > 0:
        yield (
            "clock",
            f"steps of {summary.clock_step_s:g} s: windows and pauses that do not suit them are not told "
            "(trace convert --spread spreads the requests over their step)",
        )
    if summary.dispersion:
        windows = ", ".join(f"{value:,.2f} in {window} s" for window, value in summary.dispersion.items())
        yield "dispersion", f"{windows} (variance over mean of requests in a window; 1 for Poisson)"
    if summary.same_instant > 0:
        yield (
            "same instant",
            f"{summary.same_instant:.2%} of requests come at the instant of the one before; "
            f"{summary.repeated:,} of them by the same user",
        )
    yield "users", f"{summary.users:,} of {summary.user_codes:,} codes; tenants: {summary.tenants:,}"
    content = {
        "law": f"histories by the Zipf law (exponent {summary.zipf_items})",
        "items": "histories are the items recorded",
        "blocks": f"histories are content blocks of {summary.block_tokens} tokens",
    }
    yield "content", content[summary.content]
    if summary.items == 0:
        yield "items", "no request names one"
    else:
        yield (
            things(summary),
            f"{summary.items:,} of {summary.item_codes:,} codes, named {summary.item_references:,} times; "
            f"the top 1 % are {summary.top_items_share:.1%} of it",
        )
        yield "popularity", popularity_in_words(summary.popularity)
    yield "returning", f"{summary.returning:.2%} of requests are by a user seen before"
    yield "hot-user ratio", f"{summary.hot_user_ratio:.2%} of measured requests are by a user seen in the last 60 s"
    if summary.returning > 0:
        shares = "; ".join(f"{name}: {share:.1%}" for name, share in summary.return_gap_shares.items() if share > 0)
        yield "pauses", f"of one user's requests: {shares}"
    over = summary.over_time
    named = f"{min(over.items):,} to {max(over.items):,} {things(summary)}; " if summary.items else ""
    yield (
        "working sets",
        f"in windows of {over.window_s:g} s: {named}{min(over.users):,} to {max(over.users):,} users with "
        f"{min(over.history_tokens):,} to {max(over.history_tokens):,} tokens of history",
    )
    yield "miss ratios", curves_in_words(summary)
    yield "sha256", summary.hash


def history_rows(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    """Yield what was done to the source, and what was left out of it."""
    for step in summary.steps:
        yield "step", step
    for reason, count in summary.dropped.items():
        yield "left out", f"{reason}: {count:,}"


def things(summary: TraceSummary) -> str:
    """Say what the items of the trace are."""
    return "content blocks" if summary.content == "blocks" else "items"


def rate_in_words(per_s: float) -> str:
    """Write a rate of requests per second, minute or hour, whichever gives it digits."""
    for unit_s, unit in ((1, "s"), (60, "min")):
        if per_s * unit_s >= 1 or per_s == 0:
            return f"{per_s * unit_s:,.1f}/{unit}"
    return f"{per_s * 3600:,.2g}/h" if per_s * 3600 < 1 else f"{per_s * 3600:,.1f}/h"


def written(path: Path, requests: int, span_ns: int) -> str:
    """Say what was written to `path`: a trace of so many requests over that time."""
    seconds = span_ns / 1e9
    rate = f", {rate_in_words(requests / seconds)}" if span_ns >= LEAST_SPAN_NS else ""
    size_mib = path.stat().st_size / 2**20
    return f"{printable(str(path))}: {requests:,} requests in {seconds:,.1f} s{rate}; {size_mib:,.1f} MiB"


def curves_in_words(summary: TraceSummary) -> str:
    """Say what the miss-ratio curves count, how exact they are, and what they leave out."""
    curves = [curve for curve in (summary.embedding_curve, summary.kv_curve) if curve is not None]
    rate = min(curve.rate for curve in curves)
    said = []
    if rate < 1:
        said.append(
            f"{rate:.1%} of the keys or more were followed (SHARDS); the errors are standard errors of the choice."
        )
    elif not summary.shrinking:
        said.append("Every key was followed, so the curves are exact.")
    elif len(curves) > 1:
        said.append("Every key was followed, so the curve of the embedding cache is exact.")
    if summary.shrinking:
        returns = round(summary.returning * summary.requests)
        said.append(
            f"That of the KV cache may lie below the truth: {summary.shrinking:,} of {returns:,} returns find a "
            "shorter history than the user's last, and it takes the memory that this leaves free as filled at once."
        )
    if len(curves) > 1:
        said.append(
            f"The embedding cache's is of the {things(summary)} that requests name; a node also reads the rows of the "
            "whole history where it misses the KV cache, which no curve counts."
        )
    return " ".join(said)


def _origin(summary: TraceSummary) -> str:
    """Say what second 0 is on the source's clock: a date, where that counts from 1970 as far as can be told."""
    if summary.origin_ns == 0:
        return ""
    if 63 * 10**16 <= summary.origin_ns < 4 * 10**18:  # 1989 to 2096
        second, rest_ns = divmod(summary.origin_ns, 10**9)
        date = datetime.datetime.fromtimestamp(second, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        return f"; 0 is {date}{f'.{rest_ns:09d}'.rstrip('0').rstrip('.')} UTC"
    return f"; 0 is {summary.origin_ns / 1e9:,.9g} s on the source's clock"


def popularity_in_words(fit: ZipfFit | None) -> str:
    """Say which law the items' popularity follows, and whether it does."""
    if fit is None:
        return f"too few items are named at least {LEAST_COUNT} times to tell a law of popularity"
    law = f"Zipf exponent {fit.exponent:.3f} ± {fit.standard_error:.3f} over the {fit.ranks:,} most popular items"
    if fit.fits:
        return f"{law}; it fits (shares differ by at most {fit.distance:.3f})"
    return f"no Zipf law fits: the best, {law}, differs by {fit.distance:.3f} in the share of the first ranks"


def tables(summary: TraceSummary) -> list[TextTable]:
    """Lay out the distributions, the miss-ratio curves and, where there is more to them, the phases."""
    found = [_distributions(summary), _curves(summary)]
    if len(summary.phases) > 1 or summary.phases[0].asked_rate_per_s is not None:
        found.append(_phases(summary))
    return found


def _curves(summary: TraceSummary) -> TextTable:
    """Lay out the miss-ratio curves at a few shares of the working sets."""
    columns = ["", "working set", *(f"{share:.0%}" for share in CURVE_SHARES), "sampled"]
    table = TextTable("misses of an LRU cache, by its share of the working set", columns, [])
    unit = f"content blocks of {summary.block_tokens} tokens" if summary.content == "blocks" else "items"
    curves = [(f"embeddings, {unit}", summary.embedding_curve), ("KV, tokens of history", summary.kv_curve)]
    for name, curve in curves:
        if curve is None:
            continue
        cells = []
        for share in CURVE_SHARES:
            at = share * curve.working_set
            ratio = float(np.interp(np.log(max(1.0, at)), np.log(curve.size), curve.miss_ratio))
            error = float(np.interp(np.log(max(1.0, at)), np.log(curve.size), curve.standard_error))
            cells.append(f"{ratio:.3f}" + (f" ± {error:.3f}" if error > 0 else ""))
        table.rows.append([name, f"{curve.working_set:,.0f}", *cells, f"{curve.rate:.0%} of keys"])
    return table


def _distributions(summary: TraceSummary) -> TextTable:
    table = TextTable("distributions", ["", "mean", "min", "p10", "p50", "p90", "p99", "max"], [])
    quantities: list[tuple[str, Distribution, int]] = [
        ("time until a user returns, s", summary.return_gap_s, 3),
        ("requests per user", summary.requests_per_user, 2),
        ("history, tokens", summary.history_tokens, 1),
        ("new tokens per request", summary.new_tokens, 2),
    ]
    for name, distribution, digits in quantities:
        values = asdict(distribution).values()
        table.rows.append([name, *("-" if value is None else f"{value:,.{digits}f}" for value in values)])
    return table


def _phases(summary: TraceSummary) -> TextTable:
    columns = ["phase", "from s", "to s", "requests", "rate /s", "asked /s", "factor", "hot share", "hot items"]
    table = TextTable("phases of the load", columns, [])
    for phase in summary.phases:
        asked = "-" if phase.asked_rate_per_s is None else f"{phase.asked_rate_per_s:g}"
        if phase.asked_rate_end_per_s is not None:
            asked += f" to {phase.asked_rate_end_per_s:g}"
        if phase.ramp_s > 0:
            asked += f", ramps of {phase.ramp_s:g} s"
        table.rows.append(
            [
                phase.label,
                f"{phase.start_s:,.1f}",
                f"{phase.end_s:,.1f}",
                f"{phase.requests:,}",
                f"{phase.rate_per_s:,.2f}",
                asked,
                "-" if phase.factor is None else f"{phase.factor:.2f}",
                f"{phase.hot_fraction:g}",
                f"{phase.hot_items:,}",
            ]
        )
    return table
