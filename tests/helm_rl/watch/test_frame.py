"""Frames as lines: within any width and height, and nothing that comes from outside moves the cursor."""

from __future__ import annotations

import math

import pytest

from helm_rl.watch.frame import (
    Event,
    Events,
    Frame,
    Row,
    by_cause,
    clock,
    count,
    curve,
    duration,
    lines,
    number,
    plain_line,
    share,
)

FRAME = Frame(
    "run runs/a",
    "trains",
    rows=(
        Row("alpha", ".421", (0.0, 0.5, 1.0), 0.0, 1.0, brief=True),
        Row("P99 ms", "84.1, SLO 100", (90.0, 80.0), brief=True),
        Row("bundle", "0123456789ab"),
    ),
    events=tuple(Event(k, None, f"event {k}") for k in range(1, 31)),
)


def text(frame: Frame, width: int, height: int | None) -> list[str]:
    return [line.plain for line in lines(frame, width, height)]


def test_names_figures_and_curves_stand_in_columns() -> None:
    assert text(FRAME, 80, 6) == [
        "run runs/a",
        "trains",
        "",
        "alpha   .421           ▁▅█",
        "P99 ms  84.1, SLO 100  █▁",
        "bundle  0123456789ab",
    ]


@pytest.mark.parametrize("width", [1, 2, 7, 20, 24, 33, 80, 300])
@pytest.mark.parametrize("height", [1, 2, 3, 6, 9, 24, 100])
def test_it_fits_into_any_terminal(width: int, height: int) -> None:
    shown = text(FRAME, width, height)
    assert len(shown) <= height
    assert max(map(len, shown)) <= width
    assert shown[0] == "run runs/a"[:width]


def test_where_there_is_little_room_the_newest_events_are_shown() -> None:
    assert text(FRAME, 40, 10)[-3:] == ["--:--:--  event 28", "--:--:--  event 29", "--:--:--  event 30"]
    assert len(text(FRAME, 40, None)) == 3 + 3 + 1 + 30


def test_nothing_from_outside_moves_the_cursor_or_goes_on_without_end() -> None:
    evil = "\x1b[2J\r\n\x9b31m\u202e" + "x" * 10_000
    events = Events()
    events.add(evil)
    frame = Frame(evil, evil, rows=(Row(evil, evil, brief=True),), events=events.all())
    for line in [*text(frame, 5_000, None), plain_line(frame)]:
        assert line.isprintable()
        assert len(line) < 2_000
    assert "\\x1b[2J\\r\\n\\x9b31m\\u202exxx" in text(frame, 5_000, None)[0]


def test_wide_characters_take_two_columns() -> None:
    assert text(Frame("表" * 30, "s"), 11, 1) == ["表" * 5 + " "]


def test_a_curve_shows_the_last_values_and_leaves_gaps() -> None:
    assert curve([9.0, 0.0, math.nan, 1.0], 3, None, None) == "▁ █"
    assert curve([5.0, 5.0], 9, None, None) == "▅▅"  # of no span
    assert curve([-1.0, 3.0], 9, 0.0, 1.0) == "▁█"
    assert curve([math.nan, math.inf], 9, None, None) == ""
    assert curve([-1e308, 1e308], 9, None, None) == "▅▅"  # whose span is beyond numbers
    assert curve([0.0, 1.0], 9, None, None, "_#") == "_#"


def test_events_are_numbered_and_only_the_last_are_kept() -> None:
    events = Events()
    for k in range(300):
        events.add(f"event {k}", float(k))
    kept = events.all()
    assert (len(kept), kept[0].number, kept[-1].number, kept[-1].text) == (200, 101, 300, "event 299")
    events.add("when?", math.nan)
    assert events.all()[-1].time_s is None


def test_a_plain_line_has_the_figures_that_matter() -> None:
    assert plain_line(FRAME).split("  ")[1:] == ["trains", "alpha .421", "P99 ms 84.1, SLO 100"]


def test_figures_in_words() -> None:
    assert [number(0.42137), number(None), number(math.nan), number(12345.6, 3)] == ["0.4214", "-", "-", "1.23e+04"]
    assert [share(0.8413), share(None), share(math.inf)] == ["84.1 %", "-", "-"]
    assert [count(61_440), count(None), count(1e300)] == ["61,440", "-", "1e+300"]
    assert [duration(s) for s in (4.4, 59.6, 3_700, 90_000, -1, math.nan, 1e12)] == [
        "4 s",
        "1 min 0 s",
        "1 h 1 min",
        "1 d 1 h",
        "?",
        "?",
        "?",
    ]
    assert [clock(None), clock(1e300), clock(math.nan)] == ["--:--:--"] * 3
    causes = {"late": 3.0, "stale": 12.0, "none": 0.0, **{f"c{k}": 1.0 for k in range(6)}}
    assert by_cause(causes) == "stale 12, late 3, c0 1, c1 1, c2 1, c3 1, 2 more"
