"""The command `helm-rl trace convert`: a recorded log becomes a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from helm_rl.errors import UserError
from helm_rl.files import check_outputs
from helm_rl.workloads.readers import Format, read_trace

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_SAID = tyro.conf.arg(help_behavior_hint="")  # the help's text tells the default better than "None" does
_LOG = tyro.conf.arg(metavar="LOG [LOG ...]", help_behavior_hint="(required)")


@dataclass
class ConvertArgs:
    """Convert a recorded log to a trace: Mooncake JSON Lines or KuaiRand CSV.

    The files of one KuaiRand log may be given together, in any order. What was added to the log, left out of it or
    done to it is printed, and kept in the trace.

    Example: helm-rl trace convert conversation_trace.jsonl --output mooncake.parquet --spread --speed-up 10
    """

    input: Annotated[tuple[Path, ...], tyro.conf.Positional, _LOG]
    """The log."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE.parquet")]
    """Write the trace here."""
    format: Annotated[Format | None, _SAID] = None
    """Format of the log (default: told by its content)."""
    speed_up: float = 1.0
    """Divide all times by this: 2 makes twice the load, .5 half of it."""
    spread: Switch = False
    """Spread arrivals that were recorded in coarse steps evenly over their step."""
    seed: int = 1
    """Seed of --spread."""
    warm_s: Annotated[float | None, _SAID] = None
    """Seconds at the start that only warm the caches and are not measured (default: 60, at most a tenth)."""
    start_s: Annotated[float | None, _SAID] = None
    """Leave out what the log has before this many seconds after its first request."""
    end_s: Annotated[float | None, _SAID] = None
    """Leave out what the log has from this many seconds after its first request on."""
    block_tokens: int = 512
    """Tokens of a content block in a Mooncake log."""
    overwrite: Switch = False
    """Replace an output that exists."""


def convert(args: ConvertArgs) -> None:
    """Run `helm-rl trace convert`."""
    if not args.input:
        raise UserError("name the log to convert: helm-rl trace convert LOG --output FILE.parquet")
    check_outputs(args.overwrite, output=args.output)
    for path in args.input:
        if path.exists() and args.output.exists() and path.samefile(args.output):
            raise UserError(f"{args.output} is the log itself; name another output")
    total = sum(path.stat().st_size for path in args.input if path.is_file())
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=total)
        trace = read_trace(
            args.input,
            args.format,
            speed_up=args.speed_up,
            spread=args.spread,
            seed=args.seed,
            warm_s=args.warm_s,
            start_s=args.start_s,
            end_s=args.end_s,
            block_tokens=args.block_tokens,
            progress=lambda size: progress.advance(task, size),
        )
    trace.save(args.output, args.overwrite)
    seconds = (trace.end_ns - trace.meta.phases[0].start_ns) / 1e9
    print(
        f"{args.output}: {len(trace):,} requests in {seconds:,.1f} s, {len(trace) / seconds:,.2f}/s; "
        f"{args.output.stat().st_size / 2**20:,.1f} MiB"
    )
    for step in trace.meta.steps:
        print(f"  {step}")
    for reason, count in trace.meta.dropped.items():
        print(f"  left out, {reason}: {count}")
