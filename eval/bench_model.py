"""`helm-rl bench model`: the serving model against queueing theory, replays by others, and a run without sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eval.command import console, figure_table
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs
from helm_rl.scenario import Scenario, load_scenario

Part = Literal["queues", "blocks", "sampling"]
PARTS: tuple[Part, ...] = ("queues", "blocks", "sampling")
MOONCAKE = Path("../shared/traces/mooncake/conversation_trace.jsonl")
SCENARIO = "burst"
REQUESTS = 4_000_000
SAMPLES = 200_000
SECONDS = 120.0
MOST_SEEDS = 100


@dataclass
class Args:
    """Hold the simulated node against what is known: M/D/1 and M/M/1, libCacheSim, and a run that samples nothing.

    Figures written by --json; errors are relative but those of ratios and rates, and absolute values:
    queues: model.md1_error.<load>, model.mm1_error.<load> (of the mean wait at loads of 50 and 80 %, the larger of
    accelerator and link as the server), the same .{accelerator,link}[.standard_error], model.stall_p99_error (10 s at
    100 requests/s with a stall of 1 s, from 900 ms), model.stall_p99_ms.{accelerator,link},
    model.little_error.{queues,stall} (L against lambda W, the largest of all runs);
    blocks: model.blocks_lru_error.<slots> (Mooncake's conversation blocks as keys of the embedding cache, LRU, a batch
    a request, from libCacheSim's hit ratio; 1000 to 100000 and unbounded), the same .one_by_one,
    model.blocks_hit_ratio.<slots>[.{one_by_one,libcachesim_lru}];
    sampling: from a run with every row looked up and each request charged its own misses, the largest of all seeds, for
    the base load alone (cold), the phase's users alone (hot), and the same while they come up (onset, no goals):
    model.sampling.{kv,emb}_hit_error.<regime>, model.sampling.link_error.<regime> (of the link's bytes),
    model.sampling.p99_error.<regime>.{limit,moderate,saturated} (a link with which the true P99 is the SLO, one 1.5
    times as fast, and one that is busy .9 of the time, which has no goal: there 1 % more bytes are 10 % more wait),
    the same .<slots> for other numbers of sampled slots than the node's own,
    model.sampling.<regime>.<load>.<seed>.{p99_ms,link_busy,p99_gain_per_percent} (of the true run; the last is what its
    P99 gains by 1 % more bytes), model.little_error.sampling.
    """

    parts: tuple[Part, ...] = PARTS
    """What to measure."""
    quick: bool = False
    """Less of everything, in under a minute: that it works, not how well, so no figure has a goal."""
    mooncake: Annotated[Path | None, tyro.conf.arg(metavar="FILE.jsonl")] = None
    """Mooncake's conversation log (default: ../shared/traces/mooncake/conversation_trace.jsonl, if it is there)."""
    seeds: int = 3
    """Draws of arrivals that sampling is measured on; each takes about 4 minutes."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --json if it exists."""


def main(args: Args) -> None:
    """Print the tables and write the figures."""
    _check(args)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("parts"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        figures, notes = measure(args, progress)
    out = console()
    for table in tables(figures):
        out.print(table)
    for note in notes:
        out.print(note)
    if args.json is not None:
        write_figures(args.json, figures)


def measure(args: Args, progress: Progress) -> tuple[dict[str, Figure], list[str]]:
    """Measure the parts asked for; return the figures, and sentences on what was left out or found."""
    task = progress.add_task("", total=len(args.parts))

    def advance(text: str) -> None:
        progress.update(task, description=text)

    figures: dict[str, Figure] = {}
    notes: list[str] = []
    parts: dict[Part, Callable[[], dict[str, Figure]]] = {
        "queues": lambda: _queues(args.quick, advance),
        "blocks": lambda: _blocks(args.quick, args.mooncake, notes, advance),
        "sampling": lambda: _sampling(args.quick, args.seeds, notes, advance),
    }
    for part in args.parts:
        figures |= parts[part]()
        progress.advance(task)
    if args.quick:  # goals are for the sizes and lengths of a whole run
        figures = {name: replace(figure, goal=None) for name, figure in figures.items()}
    return figures, notes


def tables(figures: dict[str, Figure]) -> list[Table]:
    """Return the table of the figures with goals, and that of all others."""
    goals = {name: figure for name, figure in figures.items() if figure.goal is not None}
    rest = {name: figure for name, figure in figures.items() if figure.goal is None}
    titled = (("The serving model: goals", goals), ("Other figures", rest))
    return [figure_table(title, part) for title, part in titled if part]


def _check(args: Args) -> None:
    check_outputs(args.overwrite, json=args.json)
    if not args.parts:
        raise UserError(f"--parts needs at least one of {', '.join(PARTS)}")
    if len(set(args.parts)) < len(args.parts):
        raise UserError(f"--parts names a part twice: {' '.join(args.parts)}")
    if not 1 <= args.seeds <= MOST_SEEDS:
        raise UserError(f"--seeds must lie in 1 to {MOST_SEEDS}, got {args.seeds}")
    if args.mooncake is not None:
        if "blocks" not in args.parts:
            raise UserError("--mooncake is read by the part blocks, which --parts leaves out")
        if not args.mooncake.is_file():
            raise UserError(f"--mooncake: there is no file {args.mooncake}")


def _queues(quick: bool, advance: Callable[[str], None]) -> dict[str, Figure]:
    from eval.model.queues import measure_stall, measure_waits

    stall = measure_stall(advance)
    return measure_waits(*(20_000, 1_000) if quick else (REQUESTS, SAMPLES), advance) | stall


def _blocks(quick: bool, log: Path | None, notes: list[str], advance: Callable[[str], None]) -> dict[str, Figure]:
    from eval.engine import peers
    from eval.model.blocks import SIZES, measure_blocks, read_blocks

    if not peers.installed(peers.LIBCACHESIM):
        notes.append("blocks is left out: libcachesim is not installed; pip install 'helm-rl[bench]' brings it.")
    elif log is None and not MOONCAKE.is_file():
        notes.append(f"blocks is left out: there is no {MOONCAKE}; --mooncake names another place.")
    else:
        advance("reading blocks")
        return measure_blocks(read_blocks(log or MOONCAKE), SIZES[:1] if quick else SIZES, advance)
    return {}


def _sampling(quick: bool, seeds: int, notes: list[str], advance: Callable[[str], None]) -> dict[str, Figure]:
    from eval.model.sampling import SLOTS, measure_sampling, needed_bytes
    from helm_rl.memory import free_bytes

    scenario = _small(load_scenario(SCENARIO)) if quick else load_scenario(SCENARIO)
    needed = needed_bytes(scenario)
    if needed > free_bytes():
        notes.append(f"sampling is left out: it needs {needed / 2**30:.1f} GiB of free memory.")
        return {}
    if quick:
        return measure_sampling(scenario, 5.0, 1, SLOTS[-1:], advance)[0]
    figures, verdict = measure_sampling(scenario, SECONDS, seeds, SLOTS, advance)
    notes.append(verdict)
    return figures


def _small(scenario: Scenario) -> Scenario:
    """Return the scenario with a pool of 1 GiB, histories an eighth as long, and a short way to its phase's plateau."""
    fields = scenario.model_dump()
    fields["warm_s"] = 2.0
    fields["hardware"]["pool_gib"] = 1.0
    fields["load"]["history_mean"] /= 8
    fields["load"]["phase"][0]["ramp_s"] = 2.0
    return Scenario.model_validate(fields)
