"""`helm-rl bench trace`: how fast logs are read and traces are drawn, and how true traces, curves and fits are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eval.command import console, figure_table, number
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs, ended_by_signals

Part = Literal["reading", "generate", "curves", "fit"]
PARTS: tuple[Part, ...] = ("reading", "generate", "curves", "fit")
TRACES = Path("../shared/traces")
QUICK_ROWS = 300_000
QUICK_IDS = 500_000
QUICK_ACCESSES = 500_000


@dataclass
class Args:
    """Measure the workloads on one core, beside polars and libCacheSim in the same run.

    Figures written by --json:
    reading: trace.rows_per_s.kuairand[.polars] (a log in KuaiRand's columns, made here, to Parquet; polars only reads
    it), trace.ratio_vs_polars, trace.peak_gib.kuairand[.polars], trace.cpu_s_per_million.kuairand[.polars];
    generate: trace.ids_per_s.generate (ids of items per CPU second, the whole of generating a trace, best of 5),
    trace.generate_error.<statistic> (relative, of the mean of 4 traces, against the law that was asked for);
    curves: trace.mrc_error[.<size>|.worst] (miss ratio from 1 % of the keys less libCacheSim's LRU, mean over sizes of
    1 to 50 % of the keys and 5 samples), trace.mrc_within_two_errors (share of sizes), trace.mrc_speedup (one replay by
    libCacheSim over a whole curve, CPU seconds), trace.mrc_s[.libcachesim_replay];
    fit: trace.fit.<log>.<statistic>[.{measured,generated}] (relative difference; logs: azure, mooncake, ragpulse,
    twitter).
    """

    parts: tuple[Part, ...] = PARTS
    """What to measure."""
    quick: bool = False
    """Less of everything, in under a minute: that it works, not how well, so no figure has a goal."""
    rows: int | None = None
    """Rows of the log that is read (default: 20,000,000, for which 3 GB of disk must be free; 300,000 with --quick)."""
    traces: Path | None = None
    """Folder of real samples that are fitted, as far as there (default: ../shared/traces)."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --json if it exists."""


def main(args: Args) -> None:
    """Print the tables and write the figures."""
    _check(args)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("parts"))
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    with ended_by_signals(), bar as progress:  # the log that is made for it takes gigabytes
        figures, notes = measure(args, progress)
    out = console()
    for table in tables(figures):
        out.print(table)
    for note in notes:
        out.print(note)
    if args.json is not None:
        write_figures(args.json, figures)


def measure(args: Args, progress: Progress) -> tuple[dict[str, Figure], list[str]]:
    """Measure the parts asked for; return the figures, and sentences about what was left out or not matched."""
    from eval.engine import peers

    task = progress.add_task("", total=len(args.parts))
    notes: list[str] = []

    def advance(text: str) -> None:
        progress.update(task, description=text)

    def reading() -> dict[str, Figure]:
        from eval.workload import reading

        if not peers.installed("polars"):
            notes.append("polars is not installed, so reading is left out; pip install 'helm-rl[bench]' brings it.")
            return {}
        return reading.measure(args.rows or (QUICK_ROWS if args.quick else reading.ROWS), advance=advance)

    def generating() -> dict[str, Figure]:
        from eval.workload import generator

        return generator.measure(QUICK_IDS if args.quick else generator.IDS, advance)

    def curves() -> dict[str, Figure]:
        from eval.workload import curves

        if not peers.installed(peers.LIBCACHESIM):
            notes.append(
                "libcachesim is not installed, so curves are left out; pip install 'helm-rl[bench]' brings it."
            )
            return {}
        return curves.measure(QUICK_ACCESSES if args.quick else curves.ACCESSES, advance)

    def fits() -> dict[str, Figure]:
        from eval.workload import fit

        folder = args.traces or TRACES
        found, missed = fit.measure(folder, advance)
        absent = [log for log in fit.LOGS if log not in missed]
        if absent:
            notes.append(f"{folder} has no sample of {', '.join(absent)}; --traces names another folder.")
        notes.extend(f"{log}: {note}." for log, some in missed.items() for note in some)
        return found

    work: dict[Part, Callable[[], dict[str, Figure]]] = {
        "reading": reading,
        "generate": generating,
        "curves": curves,
        "fit": fits,
    }
    figures: dict[str, Figure] = {}
    for part in args.parts:
        figures |= work[part]()
        progress.advance(task)
    if args.quick:  # goals are for the sizes of a whole run
        figures = {name: replace(figure, goal=None) for name, figure in figures.items()}
    return figures, notes


def tables(figures: dict[str, Figure]) -> list[Table]:
    """Return the tables of what there are figures for: fits side by side, and the others, those with goals first."""
    plain = {name: figure for name, figure in figures.items() if not name.startswith("trace.fit.")}
    goals = {name: figure for name, figure in plain.items() if figure.goal is not None}
    rest = {name: figure for name, figure in plain.items() if figure.goal is None}
    found = []
    if goals:
        found.append(figure_table("Goals", goals))
    if rest:
        found.append(figure_table("Other figures" if goals else "Figures", rest))
    fitted = [name for name in figures if name.startswith("trace.fit.") and f"{name}.measured" in figures]
    if fitted:
        table = Table(title="Fitted scenarios", title_justify="left")
        for column in ("log", "statistic", "measured", "generated", "difference"):
            table.add_column(column, justify="left" if column in ("log", "statistic") else "right")
        for name in fitted:
            _, _, log, statistic = name.split(".", 3)
            sides = (figures[f"{name}.{side}"].value for side in ("measured", "generated"))
            table.add_row(log, statistic, *map(number, sides), f"{figures[name].value:.1%}")
        found.append(table)
    return found


def _check(args: Args) -> None:
    check_outputs(args.overwrite, json=args.json)
    if not args.parts:
        raise UserError(f"--parts must name at least one of {', '.join(PARTS)}")
    if len(set(args.parts)) < len(args.parts):
        raise UserError(f"--parts names a part twice: {' '.join(args.parts)}")
    if args.rows is not None and args.rows < 1000:
        raise UserError(f"--rows must be at least 1,000, got {args.rows}")
    if args.traces is not None and not args.traces.is_dir():
        raise UserError(f"--traces {args.traces} is not a folder")
