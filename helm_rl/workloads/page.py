"""A trace as one self-contained HTML page, for a person, on a desk, a phone or paper, light or dark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2

from helm_rl import __version__
from helm_rl.files import write_text
from helm_rl.workloads import plots
from helm_rl.workloads.inspect import Curve, TraceSummary
from helm_rl.workloads.popularity import LEAST_COUNT
from helm_rl.workloads.wording import curves_in_words, rate_in_words, rows, tables, things


@dataclass(frozen=True)
class Plot:
    """One plot of the page: its two drawings as <svg> elements, what it shows in words, its caption."""

    name: str
    title: str
    wide: str
    narrow: str
    alt: str
    caption: str


def write_page(path: Path, summary: TraceSummary) -> None:
    """Render `summary` and write the page to `path`."""
    write_text(path, render(summary))


def render(summary: TraceSummary) -> str:
    """Return the page: HTML without script, without anything to fetch."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("helm_rl.workloads"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("trace.html.j2").render(
        summary=summary,
        headline=_headline(summary),
        tiles=list(_tiles(summary)),
        plots=_plots(summary),
        rows=list(rows(summary)),
        tables=tables(summary),
        version=__version__,
    )


def _headline(summary: TraceSummary) -> str:
    span = _duration(summary.end_s - summary.start_s)
    if summary.users == summary.requests:
        who = "each by another user"
    else:
        who = f"by {summary.users:,} users; {summary.hot_user_ratio:.0%} are by a user seen within the last minute"
    source = "generated" if summary.source == "generator" else f"recorded ({summary.source})"
    return f"{summary.requests:,} requests in {span}, {source}, {who}."


def _duration(seconds: float) -> str:
    for unit_s, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {name}"
    return f"{seconds:.1f} seconds"


def _tiles(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    if summary.rate_mean is None:
        yield "–", "rate: all requests come within a millisecond"
    else:
        yield (
            rate_in_words(summary.rate_mean),
            f"requests, mean; busiest 10 s: {summary.rate_peak_10s:,.1f}/s",
        )
    yield f"{summary.users:,}", f"users; {summary.returning:.0%} of requests are by one seen before"
    if summary.items:
        yield f"{summary.items:,}", f"{things(summary)}, named {summary.item_references:,} times"
    else:
        yield "–", "no request names an item"
    yield (
        f"{summary.history_tokens.mean or 0:,.0f}",
        f"tokens of history, mean; P99: {summary.history_tokens.p99 or 0:,.0f}",
    )
    if summary.popularity is None:
        yield "–", "Zipf exponent: too few are named often enough" if summary.items else "Zipf exponent: no items"
    else:
        fits = "fits" if summary.popularity.fits else "does not fit"
        yield f"{summary.popularity.exponent:.2f}", f"Zipf exponent of the {things(summary)}; the law {fits}"
    window, value = max(summary.dispersion.items(), key=lambda found: float(found[0]), default=("", None))
    if value is None:
        yield "–", "index of dispersion: the trace is too short, or its clock too coarse"
    else:
        yield f"{value:,.1f}", f"index of dispersion in windows of {window} s (Poisson: 1)"


def _plots(summary: TraceSummary) -> list[Plot]:
    over = summary.over_time
    shaded = " Shaded: a phase that adds load." if len(summary.phases) > 1 else ""
    window = f"{over.window_s:g} s"
    fit = summary.popularity
    blocks = summary.content == "blocks"
    unit = (
        f"content blocks of {summary.block_tokens} tokens"
        if blocks
        else "items (an item is several embedding rows, as the model has it)"
    )
    return [
        _plot(
            "rate",
            "Load over time",
            plots.over_time,
            summary,
            f"Requests per second in windows of {window}: {rate_in_words(min(over.rate_per_s))} to "
            f"{rate_in_words(max(over.rate_per_s))}; "
            f"and the hot-user ratio, {summary.hot_user_ratio:.1%} on the whole.",
            f"Above: requests per second, in windows of {window}. Below: the hot-user ratio, the share of requests "
            f"whose user came within the 60 s before.{shaded}",
        ),
        _plot(
            "working-sets",
            "Working sets of both caches",
            plots.working_sets,
            summary,
            f"Distinct {things(summary)} per window of {window}: {min(over.items):,} to {max(over.items):,}; tokens "
            f"of the histories of its users: {min(over.history_tokens):,} to {max(over.history_tokens):,}.",
            f"What each window of {window} touches. Above: distinct {unit}. Below: tokens of the histories "
            f"of its distinct users, which the KV cache would hold.{shaded}",
        ),
        _plot(
            "misses",
            "What a cache would miss",
            plots.miss_ratios,
            summary,
            f"Miss ratio over size. Embedding cache: {_ends(summary.embedding_curve)}. "
            f"KV cache: {_ends(summary.kv_curve)}.",
            f"LRU caches from empty: references to {things(summary)} that are not found, and tokens of histories that "
            f"are not found, first uses and new tokens included.{_band(summary)} {curves_in_words(summary)}",
        ),
        _plot(
            "popularity",
            f"Popularity of {things(summary)}",
            plots.popularity,
            summary,
            "Times named over rank" + ("." if fit is None else f", beside a Zipf law of exponent {fit.exponent:.2f}."),
            f"The law was fitted by maximum likelihood to the {things(summary)} named at least {LEAST_COUNT} times; "
            "ranks beyond are chance."
            if fit is not None
            else f"Too few are named at least {LEAST_COUNT} times to fit a law."
            if summary.items
            else "No request names an item.",
        ),
        _plot(
            "returns",
            "How soon users return, and how long their histories are",
            plots.pauses_and_histories,
            summary,
            "Share of pauses between a user's requests up to a length, and of requests by the length of the history.",
            f"Left: pauses between two requests of one user{_unresolved(summary)}. "
            "Right: tokens of the user's history, per request.",
        ),
    ]


def _ends(curve: Curve | None) -> str:
    if curve is None:
        return "none"
    return f"{curve.miss_ratio[0]:.2f} at the smallest size to {curve.miss_ratio[-1]:.2f} at {curve.size[-1]:,.0f}"


def _band(summary: TraceSummary) -> str:
    curves = [curve for curve in (summary.embedding_curve, summary.kv_curve) if curve is not None]
    return " The band is two standard errors on each side." if any(curve.rate < 1 for curve in curves) else ""


def _unresolved(summary: TraceSummary) -> str:
    """Say where pauses of nothing stand, which a logarithmic axis has no place for."""
    none = sum(x == 0 for x in summary.gap_points.x)
    if none < 2:
        return ""
    step = f", less than the clock's step of {summary.clock_step_s:g} s," if summary.clock_step_s else ""
    return f"; those of 0{step} stand at the left end"


def _plot(name: str, title: str, draw: plots.Draw, summary: TraceSummary, alt: str, caption: str) -> Plot:
    wide, narrow = (plots.svg(draw, summary, small, f"{name}-{int(small)}") for small in (False, True))
    return Plot(name, title, wide, narrow, alt, caption)
