"""The commands `helm-rl trace generate` and `inspect`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from helm_rl.errors import UserError
from helm_rl.files import check_outputs, write_text
from helm_rl.scenario import Load, load_scenario
from helm_rl.workloads.generate import generate as generate_trace
from helm_rl.workloads.inspect import Distribution, TraceSummary, summarise
from helm_rl.workloads.trace import Trace

_WIDTH = 118  # columns where stdout is no terminal

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_SAID = tyro.conf.arg(help_behavior_hint="")  # the help's text tells the default better than "None" does


@dataclass
class GenerateArgs:
    """Generate a request trace from a scenario: seeded, the same bytes of content for the same seed.

    A trace is a Parquet file that evaluations and training replay; `helm-rl trace inspect` says what is in it.

    Example: helm-rl trace generate burst --output burst.parquet
    """

    scenario: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCENARIO")]
    """The load: the name of a shipped scenario (burst, conversation, laptop, steady, trend), or a TOML file."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE.parquet")]
    """Write the trace here."""
    load: Load = "limit"
    """The scenario's rates as they stand (near what a node bears), or moderate: 70 % of each."""
    seed: Annotated[int | None, _SAID] = None
    """Seed of the draw; another seed gives other arrivals of the same load (default: the scenario's)."""
    overwrite: Switch = False
    """Replace an output that exists."""


@dataclass
class InspectArgs:
    """Say what is in a trace: rates, users and how soon they return, histories, items, phases, what was done to it.

    Example: helm-rl trace inspect burst.parquet
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.parquet")]
    """The trace, as `helm-rl trace generate` or `helm-rl trace convert` writes it."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the numbers here, for machines."""
    overwrite: Switch = False
    """Replace a --json file that exists."""


def generate(args: GenerateArgs) -> None:
    """Run `helm-rl trace generate`."""
    check_outputs(args.overwrite, output=args.output)
    scenario = load_scenario(args.scenario, args.load)
    with _working(f"generating {scenario.name}"):
        trace = generate_trace(scenario, args.seed)
    _save(trace, args.output, args.overwrite)


def inspect(args: InspectArgs) -> None:
    """Run `helm-rl trace inspect`."""
    if args.json is not None:
        check_outputs(args.overwrite, output=args.json)
        if args.json.exists() and args.file.exists() and args.json.samefile(args.file):
            raise UserError(f"{args.json} is the trace itself; name another file for --json")
    with _working(f"reading {args.file.name}"):
        summary = summarise(Trace.load(args.file))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, emoji=False)
    for table in tables(summary):
        console.print(table)
    if args.json is not None:
        write_text(args.json, json.dumps(asdict(summary), indent=2, allow_nan=False) + "\n")


def tables(summary: TraceSummary) -> list[Table]:
    """Lay out a summary: what the trace is, its distributions, its phases, its history."""
    what = Table(title=f"trace {escape(summary.name)}", title_justify="left", show_header=False)
    what.add_column("what", no_wrap=True)
    what.add_column("value", overflow="fold")
    for name, value in _rows(summary):
        what.add_row(name, escape(value))
    found = [what, _distributions(summary)]
    if len(summary.phases) > 1 or summary.phases[0].asked_rate_per_s is not None:
        found.append(_phases(summary))
    return found


def _rows(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    yield "source", summary.source + ("" if summary.seed is None else f", seed {summary.seed}")
    span = summary.end_s - summary.start_s
    yield "span", f"{span:,.3f} s, from {summary.start_s:,.3f} to {summary.end_s:,.3f}; origin {summary.origin_ns} ns"
    yield "measured from", f"{summary.measure_from_s:,.3f} s: {summary.measured_requests:,} requests"
    yield "segments", f"{summary.segments:,}"
    yield "requests", f"{summary.requests:,}"
    yield (
        "rate",
        f"mean {summary.rate_mean:,.2f}/s; peak {summary.rate_peak_1s:,.1f}/s over 1 s, "
        f"{summary.rate_peak_10s:,.1f}/s over 10 s",
    )
    yield "users", f"{summary.users:,} of {summary.user_codes:,} codes; tenants: {summary.tenants:,}"
    content = {
        "law": f"histories by the Zipf law (exponent {summary.zipf_items})",
        "items": "histories are the items recorded",
        "blocks": f"histories are content blocks of {summary.block_tokens} tokens",
    }
    yield "content", content[summary.content]
    yield (
        "items",
        f"{summary.items:,} of {summary.item_codes:,} codes, named {summary.item_references:,} times; "
        f"the top 1 % are {summary.top_items_share:.1%} of it",
    )
    yield "returning", f"{summary.returning:.2%} of requests are by a user seen before"
    yield "hot-user ratio", f"{summary.hot_user_ratio:.2%} of measured requests are by a user seen in the last 60 s"
    for step in summary.steps:
        yield "done", step
    for reason, count in summary.dropped.items():
        yield "left out", f"{reason}: {count:,}"
    yield "sha256", summary.hash


def _distributions(summary: TraceSummary) -> Table:
    table = Table()
    for column in ("", "mean", "min", "p10", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right" if column else "left")
    rows: list[tuple[str, Distribution, int]] = [
        ("time until a user returns, s", summary.return_gap_s, 3),
        ("requests per user", summary.requests_per_user, 2),
        ("history, tokens", summary.history_tokens, 1),
        ("new tokens per request", summary.new_tokens, 2),
    ]
    for name, distribution, digits in rows:
        values = asdict(distribution).values()
        table.add_row(name, *("-" if value is None else f"{value:,.{digits}f}" for value in values))
    return table


def _phases(summary: TraceSummary) -> Table:
    table = Table()
    for column in ("load", "from s", "to s", "requests", "rate /s", "asked /s", "factor", "hot share", "hot items"):
        table.add_column(column, justify="left" if column == "load" else "right")
    for phase in summary.phases:
        asked = "-" if phase.asked_rate_per_s is None else f"{phase.asked_rate_per_s:g}"
        if phase.asked_rate_end_per_s is not None:
            asked += f" to {phase.asked_rate_end_per_s:g}"
        if phase.ramp_s > 0:
            asked += f", ramps of {phase.ramp_s:g} s"
        table.add_row(
            escape(phase.label),
            f"{phase.start_s:,.1f}",
            f"{phase.end_s:,.1f}",
            f"{phase.requests:,}",
            f"{phase.rate_per_s:,.2f}",
            asked,
            "-" if phase.factor is None else f"{phase.factor:.2f}",
            f"{phase.hot_fraction:g}",
            f"{phase.hot_items:,}",
        )
    return table


def _save(trace: Trace, path: Path, overwrite: bool) -> None:
    with _working(f"writing {path.name}"):
        trace.save(path, overwrite)
    seconds = (trace.end_ns - trace.meta.phases[0].start_ns) / 1e9
    print(
        f"{path}: {len(trace):,} requests in {seconds:,.1f} s, {len(trace) / seconds:,.2f}/s; "
        f"{path.stat().st_size / 2**20:,.1f} MiB"
    )


@contextmanager
def _working(what: str) -> Iterator[None]:
    """Show a spinner on stderr where it is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(escape(what)):
        yield
