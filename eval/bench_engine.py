"""`helm-rl bench engine`: the cache engine beside other caches, its ghosts, its resizes, and the memory's own limit."""

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
from helm_rl.files import check_outputs

Part = Literal["speed", "misses", "policies", "resize", "ghosts", "memory", "payload"]
PARTS: tuple[Part, ...] = ("speed", "misses", "policies", "resize", "ghosts", "memory", "payload")
TRACES = Path("../shared/traces")
MOST_OPERATIONS = 10**9


@dataclass
class Args:
    """Measure the cache engine on the CPU, one thread, beside libCacheSim and cachetools in the same run.

    Figures written by --json, <slots> a number of slots:
    speed: engine.lookups_per_s.<slots>[.{compiled,libcachesim_lru,cachetools}] (lookups with insertion, Zipf 1.0,
    batches of 1k, through the public call, and in a compiled loop over the kernel; libCacheSim at its best hashpower,
    engine.libcachesim_hashpower.<slots>, its time includes reading the keys from a mapped file),
    engine.ratio_vs_libcachesim_lru.<slots>[.compiled], engine.ratio_vs_cachetools.<slots>[.compiled],
    engine.metadata_bytes_per_slot;
    misses: engine.miss_ratio_error.<slots>[.batch_1_<k>] (batch LRU less exact LRU, batches of 1/k of the slots; the
    figure itself is the worst of those of at most 1/32), engine.miss_ratio.<slots>.libcachesim_lru;
    policies: engine.policy.<stream>.<slots>.<policy> (fetches per request), engine.policy.mean.<policy>,
    engine.sieve_error[.one_by_one] (from libCacheSim's Sieve, the largest; batches of one key);
    resize: engine.resize_hit_drop_{10k,50k}[.{shrink,growth}], engine.resize_p99_ratio[.with_step] (of batches while
    pages move, and of batches that wait for all of a step as well), engine.resize_p50_ratio[.with_step],
    engine.resize_p99_us[.{with_step,still}];
    ghosts: engine.ghost_gain_error[.<stream>.<pages>][.<truth>] (relative, the largest where not of one stream; truths
    are the engine's policies and exact_lru), engine.ghost_within_two_errors.<truth> (share of truths),
    engine.ghost_gain.<stream>.<pages>.<policy>, engine.ghost_standard_error.<stream>.<pages>.<policy>,
    engine.ghost_cost[.standard_error] (share of a lookup's time);
    memory: engine.ns_per_lookup.<slots>[.{pointer_chase,gather}], engine.share_of_latency_limit.<slots>,
    engine.share_of_gather_limit.<slots> (time of one dependent load, and of one of many under way, over a lookup's);
    payload: engine.payload_{operations,rows,kv_pages,pages_moved,wrong_bytes}.
    """

    parts: tuple[Part, ...] = PARTS
    """What to measure."""
    quick: bool = False
    """Less of everything, in under a minute: that it works, not how well, so no figure has a goal."""
    policy: Literal["sieve", "lru"] | None = None
    """Eviction policy of speed, resize, memory, payload and the cost of ghosts (default: the engine's own default)."""
    verify: int | None = None
    """Random operations whose every byte is compared with its source (default: 1,000,000; 5,000 with --quick)."""
    traces: Path | None = None
    """Folder of real samples on which policies are compared as well, as far as there (default: ../shared/traces)."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png|svg")] = None
    """Draw ns per lookup beside the memory's limit here."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --json and --plot files that exist."""


def main(args: Args) -> None:
    """Print the tables and write the figures and the plot."""
    policy = _check(args)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("parts"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        figures, notes = measure(args, policy, progress)
    out = console()
    for table in tables(figures):
        out.print(table)
    for note in notes:
        out.print(note)
    if args.json is not None:
        write_figures(args.json, figures)


def measure(args: Args, policy: str, progress: Progress) -> tuple[dict[str, Figure], list[str]]:
    """Measure the parts asked for; return the figures, and a sentence for each that was left out."""
    from eval.engine import peers

    quick = args.quick
    task = progress.add_task("", total=len(args.parts))

    def advance(text: str) -> None:
        progress.update(task, description=text)

    figures: dict[str, Figure] = {}
    notes: list[str] = []
    for name in (peers.LIBCACHESIM, peers.CACHETOOLS):
        if not peers.installed(name):
            notes.append(
                f"{name} is not installed, so its figures are left out; pip install 'helm-rl[bench]' brings it."
            )
    parts: dict[Part, Callable[[], dict[str, Figure]]] = {
        "speed": lambda: _speed(quick, policy, advance),
        "misses": lambda: _misses(quick, advance),
        "policies": lambda: _policies(quick, args.traces or TRACES, advance),
        "resize": lambda: _resize(quick, policy, advance),
        "ghosts": lambda: _ghosts(quick, policy, advance),
        "memory": lambda: _memory(quick, policy, args.plot, notes, advance),
        "payload": lambda: _payload(args.verify or (5_000 if quick else 1_000_000), policy, advance),
    }
    for part in args.parts:
        figures |= parts[part]()
        progress.advance(task)
    if quick:  # goals are for the sizes and lengths of a whole run
        figures = {name: replace(figure, goal=None) for name, figure in figures.items()}
    return figures, notes


def tables(figures: dict[str, Figure]) -> list[Table]:
    """Return the tables of what there are figures for: goals first, then policies by stream, memory, all others."""
    policy = {name: figure for name, figure in figures.items() if name.startswith("engine.policy.")}
    memory = {name: figure for name, figure in figures.items() if name.startswith("engine.ns_per_lookup.")}
    goals = {name: figure for name, figure in figures.items() if figure.goal is not None}
    shown = policy.keys() | memory.keys() | goals.keys()
    rest = {name: figure for name, figure in figures.items() if name not in shown}
    found = []
    if goals:
        found.append(figure_table("Goals", goals))
    if policy:
        found.append(_matrix("Fetches per request by policy", policy, "engine.policy."))
    if memory:
        found.append(_matrix("ns per lookup, and per load", memory, "engine.ns_per_lookup."))
    if rest:
        found.append(figure_table("Other figures", rest))
    return found


def _check(args: Args) -> str:
    from eval.engine.caches import DEFAULT_POLICY

    check_outputs(args.overwrite, json=args.json, plot=args.plot)
    if args.plot is not None and "memory" not in args.parts:
        raise UserError("--plot draws the part memory, which --parts leaves out")
    if not args.parts:
        raise UserError(f"--parts needs at least one of {', '.join(PARTS)}")
    if len(set(args.parts)) < len(args.parts):
        raise UserError(f"--parts names a part twice: {' '.join(args.parts)}")
    if args.verify is not None and not 1 <= args.verify <= MOST_OPERATIONS:
        raise UserError(f"--verify must lie in 1 to {MOST_OPERATIONS:,}, got {args.verify}")
    if args.traces is not None and not args.traces.is_dir():
        raise UserError(f"--traces: there is no folder {args.traces}")
    return args.policy or DEFAULT_POLICY


def _speed(quick: bool, policy: str, advance: Callable[[str], None]) -> dict[str, Figure]:
    from eval.engine.speed import CASES, QUICK_CASES, measure_speed

    figures: dict[str, Figure] = {}
    for case in QUICK_CASES if quick else CASES:
        figures |= measure_speed(case, policy, 3 if quick else 9, 50_000 if quick else 500_000, advance)
    return figures


def _misses(quick: bool, advance: Callable[[str], None]) -> dict[str, Figure]:
    from eval.engine import peers
    from eval.engine.misses import measure_batches

    figures: dict[str, Figure] = {}
    if peers.installed(peers.LIBCACHESIM):
        for slots in (8_192,) if quick else (8_192, 131_072):
            figures |= measure_batches(slots, 200_000 if quick else 4_000_000, advance)
    return figures


def _policies(quick: bool, traces: Path, advance: Callable[[str], None]) -> dict[str, Figure]:
    from eval.engine.loads import policy_loads, recorded_loads
    from eval.engine.misses import measure_policies

    if quick:
        return measure_policies(policy_loads()[1:2], (8_192,), 200_000, advance)
    loads = policy_loads() + recorded_loads(traces)
    return measure_policies(loads, (8_192, 131_072), 2_000_000, advance)


def _resize(quick: bool, policy: str, advance: Callable[[str], None]) -> dict[str, Figure]:
    from eval.engine.resize import measure_resize

    return measure_resize(16_384 if quick else 131_072, policy, 1 if quick else 30, advance)


def _ghosts(quick: bool, policy: str, advance: Callable[[str], None]) -> dict[str, Figure]:
    from eval.engine.ghosts import measure_cost, measure_gains
    from eval.engine.loads import ghost_loads

    loads = ghost_loads()[: 1 if quick else 3]
    figures = measure_gains(loads, 600_000 if quick else 6_000_000, 2 if quick else 20, advance)
    keys = loads[0].make(500_000 if quick else 10_000_000)
    return figures | measure_cost(keys, policy, 50 if quick else 1_000, advance)


def _memory(
    quick: bool, policy: str, plot: Path | None, notes: list[str], advance: Callable[[str], None]
) -> dict[str, Figure]:
    from eval.engine.memory import fitting_slots, measure_memory, memory_figures, plot_memory

    fit, too_large = fitting_slots((12, 14, 16) if quick else range(12, 27, 2))
    if too_large:
        sizes = ", ".join(f"{slots:,}" for slots in too_large)
        notes.append(f"ns per lookup at {sizes} slots is left out: its arrays would take over half of the free memory.")
    points = [measure_memory(slots, policy, 3, advance) for slots in fit]
    if plot is not None:
        plot_memory(points, plot)
    return memory_figures(points)


def _payload(operations: int, policy: str, advance: Callable[[str], None]) -> dict[str, Figure]:
    from eval.engine.payload import measure_payload

    done = 0

    def advance_by(n: int) -> None:
        nonlocal done
        done += n
        advance(f"payload: {done:,} of {operations:,} operations")

    return measure_payload(operations, policy, 1, advance_by)


def _matrix(title: str, figures: dict[str, Figure], prefix: str) -> Table:
    """Return a table whose rows are the middle of the figures' names and whose columns are their ends."""
    cells: dict[str, dict[str, str]] = {}
    for name, figure in figures.items():
        row, _, column = name.removeprefix(prefix).rpartition(".")
        if not row:
            row, column = column, "lookup"
        cells.setdefault(row, {})[column] = number(figure.value)
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column.replace("libcachesim_", "libCacheSim "), justify="right")
    for row, values in cells.items():
        table.add_row(row, *(values.get(column, "") for column in columns))
    return table
