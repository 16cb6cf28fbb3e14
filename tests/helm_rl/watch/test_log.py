"""The view of a control process's log: what it says has happened, whatever else stands in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helm_rl.watch.frame import Frame, clock
from helm_rl.watch.log import LogSource


def line(event: str, second: int = 0, level: str = "info", **fields: Any) -> str:
    time = f"2026-03-01T10:00:{second:02}.000+00:00"
    return json.dumps({"time": time, "level": level, "event": event, **fields}) + "\n"


START = line(
    "start",
    url="http://h:9000",
    metrics="http://127.0.0.1:9464/metrics",
    interval_s=1.0,
    policy_sha256="ab" * 32,
    layers="base",
)


def row(frame: Frame, name: str) -> str:
    (found,) = [each.text for each in frame.rows if each.name == name]
    return found


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_the_life_of_a_control_process(tmp_path: Path) -> None:
    path = tmp_path / "control.log"
    source = LogSource(path)
    assert (source.look().state, source.look().warn) == ("no such file yet", True)
    path.write_text(START)
    frame = source.look()
    assert frame.state.startswith("controls since ")
    assert (row(frame, "server"), row(frame, "bundle")) == ("http://h:9000", "abababababab, base")
    assert row(frame, "live figures") == "helm-rl watch http://127.0.0.1:9464/metrics"

    append(path, line("masked", 1, features=["emb_hit_rate", "backlog"]))
    append(path, line("fallback", 2, "warning", cause="late", detail="not in 1 s", alpha=0.42))
    frame = source.look()
    assert frame.warn
    assert frame.state.endswith(": late")
    assert row(frame, "alpha, as last said") == "0.42"
    assert row(frame, "intervals held") == f"all from {clock(frame.events[2].time_s)} on"
    assert row(frame, "masked signals") == "emb_hit_rate, backlog"
    append(path, line("recovered", 9, intervals=7, alpha=0.44) + line("missed", 10, "warning", intervals=2))
    append(path, line("unapplied", 11, "warning", targets=3, detail="refused"))
    append(path, line("fallback", 12, "warning", cause="late", alpha=None))
    append(path, line("fallback", 13, "warning", cause="stale", alpha=None))  # of another cause, from the first one on
    frame = source.look()
    assert row(frame, "intervals held") == f"7 before, all from {clock(1_772_359_212.0)} on"
    append(path, line("recovered", 13, intervals=1, alpha=0.5))
    append(path, line("reload", 14, "error", result="bad", detail="sha256"))
    append(path, line("reload", 15, result="ok", policy_sha256="cd" * 32, layers="base+burst"))
    append(path, line("dropped", 16, "warning", lines=5))
    frame = source.look()
    assert (frame.state[:20], frame.warn) == ("decides again since ", False)
    assert row(frame, "fallbacks by cause") == "late 2, stale 1"
    assert [row(frame, f"intervals {what}") for what in ("held", "missed")] == ["8", "2"]
    assert row(frame, "targets not taken") == "3"
    assert row(frame, "bundles loaded anew") == "1 good, 1 bad"
    assert row(frame, "bundle") == "cdcdcdcdcdcd, base+burst"
    assert row(frame, "lines dropped") == "5"
    assert next(each.curve for each in frame.rows if each.name.startswith("alpha")) == (0.42, 0.44, 0.5)
    assert len(frame.events) == 12
    assert frame.events[1].text == "masked  features emb_hit_rate, backlog"
    assert [event.warn for event in frame.events[:4]] == [False, False, True, False]
    assert frame.events[2].time_s == 1_772_359_202.0
    append(path, line("stop", 59, alpha=0.5, intervals=100))
    assert source.look().state.startswith("stopped at ")
    append(path, line("fallback", 59, "warning", cause="late") + START)
    assert row(source.look(), "intervals held") == "0"


def test_half_a_line_waits_for_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(START + line("missed", intervals=2)[:30])
    source = LogSource(path)
    assert row(source.look(), "intervals missed") == "0"
    append(path, line("missed", intervals=2)[30:])
    frame = source.look()
    assert row(frame, "intervals missed") == "2"
    assert not [each for each in frame.rows if each.name == "lines not of ours"]


def test_what_is_no_line_of_ours_is_counted_and_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "log"
    hostile = [
        "Traceback (most recent call last):",
        "[" * 100_000,
        "9" * 10_000,
        '{"event": 5}',
        '{"event": "fallback", "cause": {"a": [1]}, "alpha": 1e999, "time": "2026-99-01"}',
        '{"event": "missed", "intervals": ' + "9" * 4_000 + "}",
        '{"event": "missed", "intervals": -5}',
        '{"event": "masked", "features": ' + json.dumps(["\x1b[2J" * 5] * 500) + "}",
        '{"event": "reload", "result": "\\u001b[31m", "level": ["x"]}',
        '{"event": "' + "e" * 60_000 + '"}',
        '{"event": "' + "e" * 70_000 + '"}',
        "\x00\xff",
    ]
    path.write_bytes("\n".join(hostile).encode("latin-1") + b"\n")
    append(path, "".join(line("fallback", cause=f"c{k}") for k in range(500)))
    source = LogSource(path)
    frame = source.look()
    assert row(frame, "lines not of ours") == "6"
    assert row(frame, "intervals missed") == "0"
    assert row(frame, "fallbacks by cause").startswith("others 43")
    assert all(event.text.isprintable() and len(event.text) < 2_000 for event in frame.events)
    assert len(frame.events) == 200


def test_a_log_that_begins_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(START + line("missed", intervals=2))
    source = LogSource(path)
    source.look()
    path.write_text(line("missed", intervals=1))  # cut off, as logrotate's copytruncate does
    assert row(source.look(), "intervals missed") == "1"
    path.rename(tmp_path / "log.1")
    assert source.look().state == "the file has gone"
    path.write_text(START + line("missed", intervals=7) * 2)
    frame = source.look()
    assert row(frame, "intervals missed") == "14"
    assert frame.events[0].text == "the log begins anew"


def test_of_a_large_log_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    filler = line("unapplied", targets=1, detail="x" * 4_000)
    path.write_text(line("missed", intervals=50) + filler * 2_500 + line("missed", intervals=3))
    frame = LogSource(path).look()
    assert row(frame, "intervals missed") == "3"
    assert row(frame, "not read") == "the first 1 MiB"


def test_a_file_without_lines_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000)
    source = LogSource(path)
    assert row(source.look(), "lines not of ours") == "1"
    append(path, "\n" + START)
    assert source.look().state.startswith("controls")
