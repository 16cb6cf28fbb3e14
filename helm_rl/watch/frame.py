"""What a view shows at one time, and how it becomes lines of a terminal, however narrow."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rich.text import Text

from helm_rl.errors import printable

HISTORY = 512
"""Values of a row that are kept for its curve."""
_MOST_EVENTS = 200
_MOST_TEXT = 300  # characters of anything that comes from outside
_MOST_CURVE = 60  # columns
_LEAST_CURVE = 8
_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS = "_.-~=+*#"  # for terminals without Unicode


@dataclass(frozen=True)
class Row:
    """A figure: its name, what it is now, and its curve, NaN where nothing was known.

    low, high: the curve's scale; None: its own least and most. brief: it stands in a plain line, too.
    """

    name: str
    text: str
    curve: tuple[float, ...] = ()
    low: float | None = None
    high: float | None = None
    warn: bool = False
    brief: bool = False


@dataclass(frozen=True)
class Event:
    """Something that happened; time_s since 1970, None where it is not known; number: 1, 2, ... in their order."""

    number: int
    time_s: float | None
    text: str
    warn: bool = False


@dataclass(frozen=True)
class Frame:
    """All that there is to see.

    whole: False while another look will tell more, such as what needs two readings; behind: the next look goes on with
    what is there already, so that sooner or later one is whole.
    """

    title: str
    state: str
    warn: bool = False
    rows: tuple[Row, ...] = ()
    events: tuple[Event, ...] = ()
    whole: bool = True
    behind: bool = False


class Source(Protocol):
    """Something to watch."""

    def look(self) -> Frame:
        """Look, which may take a while, and return what there is to see; UserError if nothing ever will be."""
        ...


class Events:
    """The last things that happened."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self._count = 0

    def add(self, text: str, time_s: float | None = None, warn: bool = False) -> None:
        """Note one more, now if no time is given; NaN: at a time that is not known."""
        self._count += 1
        at_s = time.time() if time_s is None else time_s if math.isfinite(time_s) else None
        self._kept.append(Event(self._count, at_s, safe(text), warn))

    def all(self) -> tuple[Event, ...]:
        """Return those that are kept, the oldest first."""
        return tuple(self._kept)


def safe(text: str) -> str:
    """Return text from outside as a terminal may be shown it: printable, and not without end."""
    return printable(text[:_MOST_TEXT])[:_MOST_TEXT]


def clock(time_s: float | None) -> str:
    """Return a time of day, local; dashes where it is not known."""
    try:
        return "--:--:--" if time_s is None else time.strftime("%H:%M:%S", time.localtime(time_s))
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


def duration(seconds: float) -> str:
    """Return a length of time in two units at the most."""
    if not 0 <= seconds < 1e9:
        return "?"
    whole = round(seconds)
    for name, length, below, unit in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length} {name} {whole % length // unit} {below}"
    return f"{whole} s"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with so many significant digits; a dash for none."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}g}"


def share(value: float | None) -> str:
    """Return a share in per cent; a dash for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{100 * value:.1f} %" if abs(value) < 1e4 else f"{value:.3g}"


def count(value: float | None) -> str:
    """Return a number of things; a dash for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"


def by_cause(counted: dict[str, float], most: int = 6) -> str:
    """Return the largest of several counts with their names."""
    found = sorted(((n, name) for name, n in counted.items() if n > 0), key=lambda each: (-each[0], each[1]))
    rest = len(found) - most
    shown = [f"{safe(name)[:40]} {count(n)}" for n, name in found[:most]]
    return ", ".join(shown + ([f"{rest} more"] if rest > 0 else []))


def curve(values: Sequence[float], width: int, low: float | None, high: float | None, blocks: str = _BLOCKS) -> str:
    """Return the last `width` values as blocks between `low` and `high`, by default their least and most."""
    shown = list(values)[-width:]
    known = [value for value in shown if math.isfinite(value)]
    if not known:
        return ""
    least = min(known) if low is None else low
    most = max(known) if high is None else high
    span = most - least

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        at = (value - least) / span if 0 < span < math.inf else 0.5
        return blocks[int(min(max(at, 0.0), 1.0) * (len(blocks) - 1) + 0.5)]

    return "".join(block(value) for value in shown)


def lines(frame: Frame, width: int, height: int | None, note: str = "", unicode: bool = True) -> list[Text]:
    """Return a frame as lines of at most `width` columns, `height` of them at the most; None: as many as there are.

    Where there is too little room the oldest events go first. note: on what was seen when.
    """
    title = Text(safe(frame.title), "bold")
    if note:
        title.append(f"  {note}", "dim")
    result = [title, Text(safe(frame.state), "yellow" if frame.warn else "green"), Text()]
    rows = [replace(row, name=safe(row.name), text=safe(row.text)) for row in frame.rows]
    names = max((len(row.name) for row in rows), default=0)
    texts = max((len(row.text) for row in rows if row.curve), default=0)
    for row in rows:
        line = Text(f"{row.name:<{names}}  ", "dim")
        line.append(row.text, "yellow" if row.warn else "default")
        room = min(width - names - texts - 4, _MOST_CURVE)
        if row.curve and room >= _LEAST_CURVE:
            drawn = curve(row.curve, room, row.low, row.high, _BLOCKS if unicode else _PLAIN_BLOCKS)
            line.append(" " * (texts - len(row.text) + 2) + drawn, "cyan")
        result.append(line)
    room = len(frame.events) if height is None else min(len(frame.events), height - len(result) - 1)
    if room > 0:
        result.append(Text())
        result += [Text(event_line(event), "yellow" if event.warn else "default") for event in frame.events[-room:]]
    for line in result:
        line.truncate(max(width, 1), overflow="crop")
        line.no_wrap = True
    return result if height is None else result[: max(height, 1)]


def event_line(event: Event) -> str:
    """Return an event as a line."""
    return f"{clock(event.time_s)}  {event.text}"


def plain_line(frame: Frame) -> str:
    """Return a frame in one line, for logs and pipes."""
    figures = [f"{safe(row.name)} {safe(row.text)}" for row in frame.rows if row.brief]
    return "  ".join([clock(time.time()), safe(frame.state), *figures])
