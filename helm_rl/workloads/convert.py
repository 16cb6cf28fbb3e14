"""The command `helm-rl trace convert`: a recorded log becomes a trace."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from helm_rl.errors import UserError, printable
from helm_rl.files import atomic_file, check_outputs, ended_by_signals
from helm_rl.workloads.commands import FitArgs, fit
from helm_rl.workloads.readers import ReadOptions, convert_log, parse_mapping
from helm_rl.workloads.readers.joined import join
from helm_rl.workloads.readers.mapping import Requests
from helm_rl.workloads.trace import Ids, TraceMeta, TraceWriter
from helm_rl.workloads.wording import written

_SAID = tyro.conf.arg(help_behavior_hint="")  # the help's text tells the default better than "None" does
_LOG = tyro.conf.arg(metavar="LOG [LOG ...]", help_behavior_hint="(required)")


@dataclass
class ConvertArgs:
    """Convert a recorded log to a trace.

    Known formats are told by their content: KuaiRand, KuaiRec, KuaiSAR, Taobao, MovieLens, Amazon, Yambda, RecBole,
    RecFlow, TenRec, Mooncake, RAGPulse, Qwen-Bailian, Azure, BurstGPT, Twitter, Meta kvcache, libCacheSim. Any other
    CSV, JSON Lines or Parquet file is read with --map. Files may be packed by gzip or zstd. The files of one log may be
    given together, in any order. What was added to the log, left out of it or done to it is printed, and kept in the
    trace.

    Example: helm-rl trace convert conversation_trace.jsonl --output mooncake.parquet --spread --speed-up 10
    """

    input: Annotated[tuple[Path, ...], tyro.conf.Positional, _LOG]
    """The log."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE.parquet")]
    """Write the trace here."""
    format: Annotated[str | None, _SAID] = None
    """Format of the log (default: told by its content; an unknown name lists all)."""
    map: Annotated[str | None, _SAID] = None
    """What the columns of an unknown log mean: time=ts:ms,user=uid,item=vid and, where there are such, tenant=,
    request= and tokens=, the length of the history; blocks=N: items are content blocks of N tokens. Units of time: s,
    ms, us, ns, iso, auto. user=uid:text takes ids as text, :whole as whole numbers; item= likewise. separator=comma,
    tab, semicolon, pipe, space or colons. header=no (then by place: time=4)."""
    with_log: Annotated[
        tuple[Path, ...] | None, tyro.conf.arg(name="with", metavar="LOG [LOG ...]", help_behavior_hint="")
    ] = None
    """Take users and items, in order, from this other log, and from the first its arrivals alone."""
    with_map: Annotated[str | None, _SAID] = None
    """What the columns of the other log mean, if it is unknown."""
    requests: Annotated[Requests | None, _SAID] = None
    """Which rows make a request: those of one user and time, of one session, or each (default: as the format says)."""
    session_s: Annotated[float | None, _SAID] = None
    """Pause that ends a session (default: 1800)."""
    arrivals: Annotated[float | None, _SAID] = None
    """Draw arrivals at this rate (requests/s, Poisson) in place of the log's times, or where it has none."""
    candidates: int = 0
    """Draw this many items for each request to score, from what was asked for shortly before."""
    candidate_window_s: float = 3600.0
    """Seconds before a request from which its candidates are drawn."""
    zipf_items: float = 1.05
    """Exponent of the popularity of items where a log has none."""
    law_items: int = 300_000_000
    """Items there are where a log has none."""
    speed_up: float = 1.0
    """Divide all times by this: 2 makes twice the load, .5 half of it."""
    spread: bool = False
    """Spread arrivals that were recorded in coarse steps evenly over their step."""
    seed: int = 1
    """Seed of all that is drawn."""
    warm_s: Annotated[float | None, _SAID] = None
    """Seconds at the start that only warm the caches and are not measured (default: 60, at most a tenth)."""
    start_s: Annotated[float | None, _SAID] = None
    """Leave out what the log has before this many seconds after its first row."""
    end_s: Annotated[float | None, _SAID] = None
    """Leave out what the log has from this many seconds after its first row on."""
    block_tokens: Annotated[int | None, _SAID] = None
    """Tokens of a content block (default: 512 in a Mooncake log, 16 in a Qwen-Bailian log)."""
    strict: bool = False
    """Take any row that would be left out as an error."""
    fit: Annotated[Path | None, tyro.conf.arg(metavar="SCENARIO.toml", help_behavior_hint="")] = None
    """Also write a scenario fitted to the trace here, as `helm-rl trace fit` does."""
    overwrite: bool = False
    """Replace an output that exists."""


def convert(args: ConvertArgs) -> None:
    """Run `helm-rl trace convert`."""
    with ended_by_signals():
        _convert(args)


def _convert(args: ConvertArgs) -> None:
    with_log = args.with_log or ()
    if args.with_log == ():
        raise UserError("--with needs the log that users and items are taken from")
    if args.with_map is not None and not with_log:
        raise UserError("--with-map says what the columns of the log of --with mean, and there is no --with")
    if not args.input:
        raise UserError("name the log to convert: helm-rl trace convert LOG --output FILE.parquet")
    check_outputs(args.overwrite, (*args.input, *with_log), output=args.output, fit=args.fit)
    if with_log and args.candidates:
        raise UserError("candidates cannot be drawn while two logs are joined; draw them from one log")
    with _reading((*args.input, *with_log)) as told:
        options = ReadOptions(
            speed_up=args.speed_up,
            spread=args.spread,
            seed=args.seed,
            warm_s=args.warm_s,
            start_s=args.start_s,
            end_s=args.end_s,
            block_tokens=args.block_tokens,
            strict=args.strict,
            requests=args.requests,
            session_s=args.session_s,
            arrivals=args.arrivals,
            candidates=args.candidates,
            candidate_window_s=args.candidate_window_s,
            zipf_items=args.zipf_items,
            law_items=args.law_items,
            mapping=None if args.map is None else parse_mapping(args.map),
            progress=told,
        )
        if with_log:
            other = ReadOptions(
                requests=args.requests,
                session_s=args.session_s,
                block_tokens=args.block_tokens,
                strict=args.strict,
                order_only=True,
                mapping=None if args.with_map is None else parse_mapping(args.with_map),
                progress=told,
            )
            alone = replace(options, requests=None, session_s=None, block_tokens=None)
            meta, requests = write_joined(args.input, args.format, alone, with_log, other, args.output)
        else:
            meta, requests = write_trace(args.input, args.format, options, args.output)
    print(written(args.output, requests, meta.phases[0].end_ns - meta.phases[0].start_ns))
    for step in meta.steps:
        print(f"  {printable(step)}")
    for reason, count in meta.dropped.items():
        print(f"  left out, {printable(reason)}: {count}")
    if args.fit is not None:
        fit(FitArgs(args.output, args.fit, overwrite=args.overwrite))


def write_trace(
    paths: tuple[Path, ...], format: str | None, options: ReadOptions, output: Path
) -> tuple[TraceMeta, int]:
    """Convert a log to the file `output`, aside and then renamed; return the meta data and how many requests."""
    writers: list[TraceWriter] = []
    with atomic_file(output) as aside, ExitStack() as stack:

        def open_writer(tables: dict[str, Ids], candidates: int) -> TraceWriter:
            writers.append(stack.enter_context(TraceWriter(aside, tables, candidates)))
            return writers[0]

        meta = convert_log(list(paths), format, options, open_writer, folder=output.parent)
    return meta, writers[0].requests


def write_joined(
    paths: tuple[Path, ...],
    format: str | None,
    options: ReadOptions,
    with_log: tuple[Path, ...],
    with_options: ReadOptions,
    output: Path,
) -> tuple[TraceMeta, int]:
    """Convert two logs, and write the requests of the second at the arrivals of the first; as write_trace otherwise."""
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        arrivals, contents = Path(folder) / "arrivals.parquet", Path(folder) / "contents.parquet"
        write_trace(paths, format, options, arrivals)
        write_trace(with_log, None, with_options, contents)
        with atomic_file(output) as aside:
            return join(arrivals, contents, aside, options.warm_s, options.strict)


@contextmanager
def _reading(paths: tuple[Path, ...]) -> Iterator[Callable[[int], None]]:
    """Show on stderr, where it is a terminal, how much of the files was read; then that the trace is written."""
    total = sum(path.stat().st_size for path in paths if path.is_file())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=total)

        def told(size: int) -> None:
            progress.advance(task, size)
            if progress.tasks[0].completed >= total:
                progress.update(task, description="sorting and writing", total=None)

        yield told
