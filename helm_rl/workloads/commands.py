"""The commands `helm-rl trace generate`, `inspect` and `fit`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from helm_rl.errors import UserError, printable
from helm_rl.files import check_outputs, write_text
from helm_rl.scenario import Load, load_scenario
from helm_rl.workloads.generate import generate as generate_trace
from helm_rl.workloads.inspect import TraceSummary, summarise
from helm_rl.workloads.trace import Trace
from helm_rl.workloads.wording import TextTable, history_rows, rows, tables, written

_WIDTH = 118  # columns where stdout is no terminal

_SAID = tyro.conf.arg(help_behavior_hint="")  # the help's text tells the default better than "None" does


@dataclass
class GenerateArgs:
    """Generate a request trace from a scenario: seeded, the same bytes of content for the same seed.

    A trace is a Parquet file that evaluations and training replay; `helm-rl trace inspect` says what is in it.

    Example: helm-rl trace generate burst --output burst.parquet
    """

    scenario: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCENARIO")]
    """The load: the name of a shipped scenario (books, burst, conversation, diurnal, hstu-burst, hstu-steady,
    hstu-trend, laptop, large-burst, large-steady, large-trend, shop, short-video, steady, trend), or a TOML file."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE.parquet")]
    """Write the trace here."""
    load: Load = "limit"
    """The scenario's rates as they stand (near what a node bears), or moderate: 70 % of each."""
    seed: Annotated[int | None, _SAID] = None
    """Seed of the draw; another seed gives other arrivals of the same load (default: the scenario's)."""
    overwrite: bool = False
    """Replace an output that exists."""


@dataclass
class InspectArgs:
    """Say what is in a trace: rates, users and how soon they return, histories, items, what was done to it.

    Miss-ratio curves are those of LRU caches: of the items that requests name, and of the histories of their users. Of
    many keys a hashed sample is followed, and the error that this brings is told (SHARDS).

    Example: helm-rl trace inspect burst.parquet --html burst.html
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.parquet")]
    """The trace, as `helm-rl trace generate` or `helm-rl trace convert` writes it."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the numbers here, for machines."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Write a page with plots here: one file that loads nothing, to forward or to keep."""
    overwrite: bool = False
    """Replace a --json or --html file that exists."""


@dataclass
class FitArgs:
    """Write a scenario whose traces come near a trace's rate, dispersion, popularity exponent, returns and pauses.

    Histories are a lognormal or, where that is far off, follow their percentiles. What was measured is printed beside
    what the scenario's own traces have, and stands in the scenario's comments, as does, with its cause, every statistic
    that is off by more than 10 %. The trace is taken as one constant load; its phases are not told apart.

    Example: helm-rl trace fit mooncake.parquet --output mooncake.toml
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.parquet")]
    """The trace, as `helm-rl trace convert` or `helm-rl trace generate` writes it."""
    output: Annotated[Path, tyro.conf.arg(metavar="SCENARIO.toml")]
    """Write the scenario here."""
    name: Annotated[str | None, _SAID] = None
    """Name of the scenario (default: the output's, without .toml)."""
    slo_ms: float = 100.0
    """SLO of the scenario, ms: a trace tells nothing about it."""
    overwrite: bool = False
    """Replace an output that exists."""


def generate(args: GenerateArgs) -> None:
    """Run `helm-rl trace generate`."""
    check_outputs(args.overwrite, (args.scenario,), output=args.output)
    scenario = load_scenario(args.scenario, args.load)
    with _working(f"generating {scenario.name}"):
        trace = generate_trace(scenario, args.seed)
    _save(trace, args.output, args.overwrite)


def inspect(args: InspectArgs) -> None:
    """Run `helm-rl trace inspect`."""
    check_outputs(args.overwrite, (args.file,), json=args.json, html=args.html)
    with _working(f"reading {args.file.name}") as doing:
        trace = Trace.load(args.file)
        summary = summarise(trace, lambda what: doing(f"{args.file.name}: {what}"))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, emoji=False)
    for table in _tables(summary):
        console.print(table)
    if args.json is not None:
        write_text(args.json, json.dumps(asdict(summary), indent=2, allow_nan=False) + "\n")
    if args.html is not None:
        from helm_rl.workloads.page import write_page  # draws with matplotlib

        with _working(f"drawing {args.html.name}"):
            write_page(args.html, summary)


def fit(args: FitArgs) -> None:
    """Run `helm-rl trace fit`."""
    check_outputs(args.overwrite, (args.file,), output=args.output)
    name = args.output.stem if args.name is None else args.name
    if not 1 <= len(name) <= 200:
        raise UserError(f"name = {name[:60]!r} must have 1 to 200 characters")
    if not 0 < args.slo_ms <= 1e6:
        raise UserError(f"slo-ms = {args.slo_ms:g} must be above 0, and at most 1e6")
    from helm_rl.workloads.fit import fit as fit_scenario
    from helm_rl.workloads.fitted import table, toml

    with _working(f"reading {args.file.name}") as doing:
        found = fit_scenario(Trace.load(args.file), name, args.slo_ms, lambda what: doing(f"{args.file.name}: {what}"))
    write_text(args.output, toml(found, args.file.name))
    Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, emoji=False).print(_laid_out(table(found)))
    for note in found.notes:
        print(f"  {printable(note)}")
    print(f"{printable(str(args.output))}: scenario {printable(name)}; users come as {found.kind}")


def _tables(summary: TraceSummary) -> Iterator[Table]:
    """Lay out a summary for the terminal: what the trace is and what was done to it, then its tables."""
    what = Table(title=f"trace {_shown(summary.name)}", title_justify="left", show_header=False)
    what.add_column("what", no_wrap=True)
    what.add_column("value", overflow="fold")
    for name, value in (*rows(summary), *history_rows(summary)):
        what.add_row(name, _shown(value))
    yield what
    for text in tables(summary):
        yield _laid_out(text)


def _shown(text: str) -> str:
    return escape(printable(text))


def _laid_out(text: TextTable) -> Table:
    table = Table(title=text.title, title_justify="left")
    for index, column in enumerate(text.columns):
        table.add_column(column, justify="right" if index else "left")
    for row in text.rows:
        table.add_row(*map(_shown, row))
    return table


def _save(trace: Trace, path: Path, overwrite: bool) -> None:
    with _working(f"writing {path.name}"):
        trace.save(path, overwrite)
    print(written(path, len(trace), trace.end_ns - trace.meta.phases[0].start_ns))


@contextmanager
def _working(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr where it is a terminal; yields what changes its text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(_shown(what)) as status:
        yield lambda text: status.update(_shown(text))
