"""The log: lines of JSON, and nobody held up by whoever does not read them."""

from __future__ import annotations

import errno
import io
import json
import math
import threading
import time

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

    def write(self, text: str) -> int:
        self.go.wait(20)
        return super().write(text)


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_what_is_dropped_is_counted() -> None:
    stream = Stuck()
    begun = time.monotonic()
    with journal(stream) as log:
        for k in range(3_000):
            log.info("line", extra={"fields": {"k": k}})
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


def test_what_cannot_be_written_is_lost_and_nothing_else_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    for stream in (Full(), None):
        with journal(stream) as log:
            log.info("line")
    assert capfd.readouterr() == ("", "")
