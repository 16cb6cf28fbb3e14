"""`helm-rl watch` as a process: in a terminal, in a pipe, and how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helm_rl import cli
from tests.helm_rl.watch.test_log import START, append, line

COMMAND = [sys.executable, "-m", "helm_rl.cli", "watch"]
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"  # of the alternate screen
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"  # the cursor


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **environment: str) -> None:
        self.controller, terminal = pty.openpty()
        self.resize(columns, rows)
        self.settings = termios.tcgetattr(terminal)
        self.said = b""
        # A size in the environment, which other tests set, goes before the terminal's own.
        own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env=own | {"TERM": "xterm", **environment},
        )
        os.close(terminal)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.controller, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, wait_s: float = 0.1) -> bool:
        """Read what has been said; False once nothing more can be."""
        if select.select([self.controller], [], [], wait_s)[0]:
            try:
                data = os.read(self.controller, 1 << 16)
            except OSError:  # the process has ended
                return False
            self.said += data
            return bool(data)
        return True

    def until(self, text: str) -> None:
        end_s = time.monotonic() + 60
        while text.encode() not in self.said:
            assert self.read(), f"it ended: {self.said!r}"
            assert time.monotonic() < end_s, f"it has never said {text!r}: {self.said[-2_000:]!r}"

    def end(self) -> int:
        end_s = time.monotonic() + 30
        while self.read() and time.monotonic() < end_s:
            pass
        return self.process.wait(10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.controller)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def one(*arguments: str, **options: int) -> Terminal:
        made.append(Terminal(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for each in made:
        with contextlib.suppress(OSError):
            each.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_live_view_follows_its_terminal_and_leaves_it_as_it_was(
    number: signal.Signals, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    log = tmp_path / "control.log"
    shown = terminal(str(log))
    shown.until("no such file yet")
    assert shown.said.index(ENTER) < shown.said.index(HIDE) or HIDE in shown.said
    log.write_text(START)
    shown.until("controls since")
    append(log, line("fallback", 2, "warning", cause="stale", alpha=0.375))
    shown.until("0.375")

    shown.resize(20, 7)
    shown.said = b""
    shown.until("control log")
    time.sleep(0.5)
    shown.read()
    screens = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown.said.rpartition(b"\x1b[H")[2]).decode()
    assert max(len(each.rstrip()) for each in screens.splitlines()) <= 20

    shown.said = b""
    shown.process.send_signal(number)
    assert shown.end() == 0
    assert b"Traceback" not in shown.said
    assert LEAVE in shown.said
    assert shown.said.rindex(SHOW) > shown.said.rfind(HIDE)
    after = shown.said.rpartition(LEAVE)[2].decode()
    assert "control log" in after  # what was seen last stays
    assert shown.settings == termios.tcgetattr(shown.controller)


def test_a_dumb_terminal_gets_plain_lines(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    log = tmp_path / "control.log"
    log.write_text(START)
    shown = terminal(str(log), "--interval-s", ".2", TERM="dumb")
    shown.until("controls since")
    shown.process.send_signal(signal.SIGINT)
    assert shown.end() == 0
    assert b"\x1b" not in shown.said


def test_without_a_terminal_lines_come_at_an_interval(tmp_path: Path) -> None:
    log = tmp_path / "control.log"
    process = subprocess.Popen(
        [*COMMAND, str(log), "--interval-s", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().endswith(
            "no such file yet  alpha, as last said -  fallbacks by cause none  intervals missed 0\n"
        )
        log.write_text(START + line("fallback", 2, "warning", cause="late", alpha=0.5))
        lines: list[str] = []
        while len(lines) < 8:
            said = process.stdout.readline()
            assert said
            lines += [] if "no such file" in said else [said]
        assert lines[0].split("  ", 1)[1] == "start  url http://h:9000  interval_s 1\n"
        assert lines[1].split("  ", 1)[1] == "fallback  cause late  alpha 0.5\n"
        assert all(": late  alpha, as last said 0.5  fallbacks by cause late 1  " in each for each in lines[2:])
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_once_prints_one_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "control.log"
    log.write_text(START)
    assert cli.main(["watch", str(log), "--once"]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    lines = said.splitlines()
    assert lines[1].startswith("controls since ")
    assert sum(each.startswith("bundle ") for each in lines) == 1
    assert lines[-1].endswith("start  url http://h:9000  interval_s 1")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["no-such-run", "--once"], "no-such-run: no such run folder or log, and no URL"),
        (["no/such/run"], "no/such/run: no such run folder or log"),
        (["/dev/null"], "/dev/null is neither a folder nor a file"),
        (["https://h:1", "--once"], "TLS is a proxy's task"),
        (["http://127.0.0.1:1", "--once"], "Connection refused"),
        (["http://127.0.0.1:1", "--mapping", "vlm"], "vlm is neither a shipped mapping"),
        ([".", "--mapping", "vllm"], "--mapping and --slo-ms are for a URL"),
        ([".", "--interval-s", "nan"], "--interval-s must be from .1 to 3600"),
        (["http://127.0.0.1:1", "--slo-ms", "0"], "--slo-ms must be a number above 0"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert what in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_reader_that_has_gone_ends_it(tmp_path: Path) -> None:
    log = tmp_path / "control.log"
    log.write_text(START)
    process = subprocess.Popen(
        [*COMMAND, str(log), "--interval-s", ".1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
