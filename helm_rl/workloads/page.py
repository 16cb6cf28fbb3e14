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
from helm_rl.workloads.wording import rows, tables


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
    yield f"{summary.rate_mean:,.1f}/s", f"requests, mean; busiest 10 s: {summary.rate_peak_10s:,.1f}/s"
    yield f"{summary.users:,}", f"users; {summary.returning:.0%} of requests are by one seen before"
    yield f"{summary.items:,}", f"items, named {summary.item_references:,} times"
    yield (
        f"{summary.history_tokens.mean or 0:,.0f}",
        f"tokens of history, mean; P99: {summary.history_tokens.p99 or 0:,.0f}",
    )
    if summary.popularity is None:
        yield "–", "Zipf exponent: too few items are named often enough"
    else:
        fits = "fits" if summary.popularity.fits else "does not fit"
        yield f"{summary.popularity.exponent:.2f}", f"Zipf exponent of the items; the law {fits}"
    window, value = max(summary.dispersion.items(), key=lambda found: float(found[0]), default=("", None))
    if value is None:
        yield "–", "index of dispersion: the trace is too short"
    else:
        yield f"{value:,.1f}", f"index of dispersion in windows of {window} s (Poisson: 1)"


def _plots(summary: TraceSummary) -> list[Plot]:
    over = summary.over_time
    shaded = " Shaded: a phase that adds load." if len(summary.phases) > 1 else ""
    window = f"{over.window_s:g} s"
    fit = summary.popularity
    return [
        _plot(
            "rate",
            "Load over time",
            plots.over_time,
            summary,
            f"Requests per second in windows of {window}: {min(over.rate_per_s):,.1f} to {max(over.rate_per_s):,.1f}; "
            f"and the hot-user ratio, {summary.hot_user_ratio:.1%} on the whole.",
            f"Above: requests per second, in windows of {window}. Below: the hot-user ratio, the share of requests "
            f"whose user came within the 60 s before.{shaded}",
        ),
        _plot(
            "working-sets",
            "Working sets of both caches",
            plots.working_sets,
            summary,
            f"Distinct items per window of {window}: {min(over.items):,} to {max(over.items):,}; tokens of the "
            f"histories of its users: {min(over.history_tokens):,} to {max(over.history_tokens):,}.",
            f"What each window of {window} touches. Above: distinct items (an item is several embedding rows, "
            "as the model has it). Below: tokens of the histories of its distinct users, which the KV cache would "
            f"hold.{shaded}",
        ),
        _plot(
            "misses",
            "What a cache would miss",
            plots.miss_ratios,
            summary,
            f"Miss ratio over size. Embedding cache: {_ends(summary.embedding_curve)}. "
            f"KV cache: {_ends(summary.kv_curve)}.",
            "LRU caches from empty: references to items that are not found, and tokens of histories that are not "
            f"found, first uses and new tokens included. {_sampled(summary)}",
        ),
        _plot(
            "popularity",
            "Popularity of items",
            plots.popularity,
            summary,
            "Times named over rank" + ("." if fit is None else f", beside a Zipf law of exponent {fit.exponent:.2f}."),
            "The law was fitted by maximum likelihood to the items named at least 10 times; ranks beyond are chance."
            if fit is not None
            else "Too few items are named at least 10 times to fit a law.",
        ),
        _plot(
            "returns",
            "How soon users return, and how long their histories are",
            plots.pauses_and_histories,
            summary,
            "Share of pauses between a user's requests up to a length, and of requests by the length of the history.",
            "Left: pauses between two requests of one user. Right: tokens of the user's history, per request.",
        ),
    ]


def _ends(curve: Curve | None) -> str:
    if curve is None:
        return "none"
    return f"{curve.miss_ratio[0]:.2f} at the smallest size to {curve.miss_ratio[-1]:.2f} at {curve.size[-1]:,.0f}"


def _sampled(summary: TraceSummary) -> str:
    rates = [curve.rate for curve in (summary.embedding_curve, summary.kv_curve) if curve is not None]
    if min(rates) == 1:
        return "Every key was followed, so the curves are exact."
    return f"{min(rates):.1%} of the keys or more were followed (SHARDS); the band is two standard errors on each side."


def _plot(name: str, title: str, draw: plots.Draw, summary: TraceSummary, alt: str, caption: str) -> Plot:
    wide, narrow = (plots.svg(draw, summary, small, f"{name}-{int(small)}") for small in (False, True))
    return Plot(name, title, wide, narrow, alt, caption)
