"""The log: lines of JSON, and nobody held up by whoever does not read them."""

from __future__ import annotations

import errno
import io
import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helm_rl.runtime.journal import journal


def test_no_number_that_is_none_gets_into_the_json() -> None:
    stream = io.StringIO()
    fields = {"alpha": math.nan, "age": math.inf, "text": 'a"\n', "n": 1}
    with journal(stream) as log:
        log.info("test", extra={"fields": fields})
    assert json.loads(stream.getvalue()) | {"time": ""} == {
        "time": "",
        "level": "info",
        "event": "test",
        "alpha": None,
        "age": None,
        "text": 'a"\n',
        "n": 1,
    }
    assert stream.getvalue().count("\n") == 1


class Stuck(io.StringIO):
    """A pipe that nobody reads, until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.begun = threading.Event()

    def write(self, text: str) -> int:
        self.begun.set()
        self.go.wait(20)
        return super().write(text)


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_what_is_dropped_is_counted() -> None:
    stream = Stuck()
    begun = time.monotonic()
    with journal(stream) as log:
        for k in range(3_000):
            log.info("line", extra={"fields": {"k": k}})
            assert stream.begun.wait(5)  # else the first, once it is taken, makes room for one in the middle
        assert time.monotonic() - begun < 5
        stream.go.set()
        while stream.getvalue().count("\n") < 1_000:
            assert time.monotonic() - begun < 20
            time.sleep(0.01)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    written = [line["k"] for line in lines if line["event"] == "line"]
    dropped = [line for line in lines if line["event"] == "dropped"]
    assert written == list(range(len(written)))
    assert 1_000 <= len(written) == 3_000 - sum(line["lines"] for line in dropped)
    assert {line["level"] for line in dropped} == {"warning"}


def test_the_end_does_not_wait_for_a_pipe_that_nobody_reads() -> None:
    stream = Stuck()
    begun = time.monotonic()
    with journal(stream) as log:
        log.info("line")
    assert time.monotonic() - begun < 10
    stream.go.set()


def test_what_a_full_disk_has_cost_is_told_once_there_is_room_again() -> None:
    room = [True, False, False, True, False, True, True, True]  # for the "dropped" line, too

    class Filling(io.StringIO):
        def write(self, text: str) -> int:
            if not room.pop(0):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    stream = Filling()
    with journal(stream) as log:
        for k in range(5):
            log.info("line", extra={"fields": {"k": k}})
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("k", line.get("lines")) for line in lines] == [0, 3, 4, 2]
    assert lines[-1]["event"] == "dropped"


def test_half_a_line_that_a_full_disk_has_left_spoils_no_other(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: it takes a part of the line, too."""
    script = (
        "import resource\n"
        "from helm_rl.runtime.journal import journal, stderr\n"
        "unlimited = resource.RLIM_INFINITY\n"
        "stream = stderr()\n"
        "stream.write('first\\n')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited))\n"
        "try:\n"
        "    stream.write('x' * 200 + '\\n')\n"
        "except OSError:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))\n"
        "    stream.write('last\\n')\n"
        "    stream.write('really\\n')\n"
    )
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        subprocess.run([sys.executable, "-c", script], stderr=stderr, check=True, timeout=60)
    assert log.read_text().splitlines() == ["first", "x" * 94, "last", "really"]


def test_what_cannot_be_written_is_lost_and_nothing_else_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    for stream in (Full(), None):
        with journal(stream) as log:
            log.info("line")
    assert capfd.readouterr() == ("", "")
