"""`helm-rl watch`: a live view of a training run, a control process or a server, or plain lines without a terminal."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console, Group
from rich.live import Live

from helm_rl.errors import UserError
from helm_rl.runtime.background import Background
from helm_rl.runtime.signals import Signals
from helm_rl.watch.frame import Frame, Source, clock, event_line, lines, plain_line
from helm_rl.watch.source import source_of

_TICK_S = 0.2  # between drawings: a terminal that has become narrower is drawn anew
_PLAIN_S = 10.0
_LOOKS = 5  # of --once at the most, for what needs more than one
_WIDTH = 118  # columns where stdout is no terminal
_SAID = tyro.conf.arg(help_behavior_hint="")  # the help's text tells the default better than "None" does


@dataclass
class Args:
    """Watch a training run, a control process or a server in the terminal, until Ctrl-C.

    Where stdout is no terminal it prints a line at every interval, and one for each thing that happens. What is watched
    may begin later, go away and come back.

    Example: helm-rl watch runs
    """

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|URL")]
    """A training run's folder, or the folder that runs and populations are in for the newest run; the log of
    `helm-rl control`; or http://HOST:PORT, the metrics of a control process or of a server that a mapping describes."""
    once: bool = False
    """Print what there is to see now, and end."""
    interval_s: Annotated[float | None, _SAID] = None
    """Seconds between looks (default: 1 in a terminal, else 10)."""
    mapping: Annotated[str | None, _SAID] = None
    """Which metric of a server each signal is: helm-rl, vllm, triton, or a TOML file (default: told by what it
    exports)."""
    slo_ms: Annotated[float | None, _SAID] = None
    """The latency that a server's requests are to stay under (default: a control process says it)."""


def main(args: Args) -> None:
    """Watch until a signal says otherwise.

    Raises:
        UserError: there is nothing at the target that could be watched, or an option is wrong.
    """
    if args.interval_s is not None and not 0.1 <= args.interval_s <= 3600.0:  # NaN is not
        raise UserError(f"--interval-s must be from .1 to 3600, not {args.interval_s:g}")
    if args.slo_ms is not None and not 0.0 < args.slo_ms < math.inf:
        raise UserError(f"--slo-ms must be a number above 0, not {args.slo_ms:g}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no reason to end
    console = Console(highlight=False, markup=False, emoji=False)
    live = sys.stdout.isatty() and not console.is_dumb_terminal and not args.once
    interval_s = args.interval_s or (1.0 if live or args.once else _PLAIN_S)
    source = source_of(args.target, interval_s, args.mapping, args.slo_ms, wait=not args.once)
    with Signals() as signals, _looks(source) as looks:
        if args.once:
            _print_once(looks, signals, interval_s)
        elif live:
            _show(console, looks, signals, interval_s)
        else:
            _print_lines(looks, signals, interval_s)


Looks = Background[None, Frame]


@contextmanager
def _looks(source: Source) -> Iterator[Looks]:
    """Yield what looks on a thread of its own: neither a name server nor a slow disk holds up Ctrl-C."""
    with closing(Background[None, Frame]("helm-watch", lambda _: source.look(), time.monotonic_ns)) as looks:
        yield looks


def _frames(looks: Looks, signals: Signals, interval_s: float) -> Iterator[Frame | None]:
    """Yield each frame when it comes, and None at each tick without one; end when a signal comes."""
    due_s = -math.inf
    while True:
        if time.monotonic() >= due_s and looks.idle:
            looks.ask(None)
            due_s = time.monotonic() + interval_s
        outcome = looks.take()
        yield None if outcome is None else outcome.result()
        if signals.wait(min(_TICK_S, interval_s / 2)):
            return


def _show(console: Console, looks: Looks, signals: Signals, interval_s: float) -> None:
    frame, seen_s = Frame("helm-rl watch", "looking"), time.time()
    unicode = (console.encoding or "").lower().startswith("utf")

    def drawn(height: int | None) -> Group:
        late = time.time() - seen_s > 2 * interval_s + 2
        note = f"{'last ' if late else ''}seen {clock(seen_s)}"
        return Group(*lines(frame, console.width, height, note, unicode))

    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as view:
        for found in _frames(looks, signals, interval_s):
            if found is not None:
                frame, seen_s = found, time.time()
            view.update(drawn(console.height), refresh=True)
    console.print(drawn(None if len(frame.events) < 10 else console.height))  # what was seen last stays


def _print_once(looks: Looks, signals: Signals, interval_s: float) -> None:
    looked = 0
    for frame in _frames(looks, signals, interval_s):
        if frame is None:
            continue
        looked += 1
        if not frame.rows and not frame.whole:
            raise UserError(frame.state)
        if frame.whole or (looked >= _LOOKS and not frame.behind):
            # By hand: rich would wrap, and put colours into pipes where the environment asks for them.
            for line in lines(frame, _columns(), None, clock(time.time()), _has_blocks()):
                print(line.plain.rstrip())
            return


def _print_lines(looks: Looks, signals: Signals, interval_s: float) -> None:
    told = 0
    for frame in _frames(looks, signals, interval_s):
        if frame is None:
            continue
        for event in frame.events:
            if event.number > told:
                print(event_line(event), flush=True)
                told = event.number
        print(plain_line(frame), flush=True)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _WIDTH
    except (OSError, ValueError):
        return _WIDTH


def _has_blocks() -> bool:
    return (sys.stdout.encoding or "").lower().startswith("utf")
