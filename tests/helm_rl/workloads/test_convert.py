"""`helm-rl trace convert`: what it writes and says, what it refuses, and that nothing is left of a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from helm_rl import cli
from helm_rl.workloads.trace import CANDIDATES, StringIds, Trace
from tests.helm_rl.workloads.test_readers import GOOD, T0, log, row

SECOND = 10**9
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:{second:02d}.0000000,{100 + second},5\n" for second in (0, 3, 4, 9)
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> int:
    return cli.main(["trace", "convert", *words])


def test_what_was_dropped_is_said_and_strict_refuses_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(folder, *GOOD, row("NA", 1, T0), row(5, "", T0), GOOD[0])
    assert run("log.csv", "--output", "t.parquet") == 0
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert said[-3:] == [
        "left out, user_id not a whole number (first: log.csv, line 5): 1",
        "left out, video_id empty (first: log.csv, line 6): 1",
        "left out, rows that repeat user_id, video_id and time_ms: 1",
    ]
    assert sum(Trace.load("t.parquet").meta.dropped.values()) == 3
    assert run("log.csv", "--output", "u.parquet", "--strict") == 2
    assert "log.csv, line 5, field user_id: 'NA' is not a whole number" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["log.csv", "t.parquet"]


def test_a_mapping_on_the_command_line(folder: Path) -> None:
    (folder / "mine.tsv").write_text("when\twho\twhat\n2024-01-01T00:00:00Z\ta\tx\n2024-01-01T00:00:02Z\tb\ty\n")
    assert run("mine.tsv", "--map", "time=when,user=who,item=what", "--output", "t.parquet", "--candidates", "2") == 0
    trace = Trace.load("t.parquet")
    assert trace.arrival_ns.tolist() == [0, 2 * SECOND]
    assert isinstance(trace.user_ids, StringIds)
    assert trace.user_ids.tolist() == ["a", "b"]
    assert trace.feature_tables[CANDIDATES].shape == (2, 2)


def test_a_scenario_is_fitted_to_the_trace_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that `trace fit` writes."""
    rows = [f"{100 * k},{k % 60},{k % 7}" for k in range(400)]
    (folder / "mine.csv").write_text("\n".join(["ts,uid,vid", *rows]) + "\n")
    said = ("mine.csv", "--map", "time=ts:ms,user=uid,item=vid", "--output", "t.parquet")
    assert run(*said, "--fit", "t.parquet") == 2
    assert "--output and --fit name the same file" in capsys.readouterr().err
    assert not (folder / "t.parquet").exists()
    assert run(*said, "--fit", "mine.toml") == 0
    assert "mine.toml: scenario mine" in capsys.readouterr().out
    assert cli.main(["trace", "fit", "t.parquet", "--output", "again.toml", "--name", "mine"]) == 0
    assert (folder / "again.toml").read_bytes() == (folder / "mine.toml").read_bytes()


def test_arrivals_of_one_log_and_requests_of_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "azure.csv").write_text(AZURE)
    log(folder, *(row(i % 2, 10 + i // 2, T0 + i * 7) for i in range(6)))
    assert run("azure.csv", "--with", "log.csv", "--output", "t.parquet", "--speed-up", "2") == 0
    trace = Trace.load("t.parquet")
    assert trace.arrival_ns.tolist() == [0, 1_500_000_000, 2 * SECOND, 4_500_000_000]
    assert trace.user.tolist() == [0, 1, 0, 1]
    assert trace.item_ids is not None
    assert trace.item_ids[trace.item_values].tolist() == [10, 10, 11, 11]
    assert trace.history_tokens.tolist() == [1, 1, 2, 2]
    assert (trace.meta.content, trace.meta.source) == ("items", "azure+kuairand")
    assert trace.meta.dropped == {"log: requests beyond the end of the other log": 2}
    assert "arrivals of azure (azure), users and items of log (kuairand), both in their order" in trace.meta.steps
    assert "arrivals of azure" in capsys.readouterr().out
    assert run("log.csv", "--with", "azure.csv", "--output", "u.parquet") == 0
    other = Trace.load("u.parquet")
    assert other.history_tokens.tolist() == [100, 103, 104, 109]
    assert other.meta.dropped == {"log: arrivals beyond the end of the other log": 2}
    assert sorted(path.name for path in folder.iterdir()) == ["azure.csv", "log.csv", "t.parquet", "u.parquet"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["log.csv", "--format", "criteo"], "format 'criteo' is not one of kuairand,"),
        (["log.csv", "--format", "generic"], "format generic needs --map"),
        (["log.csv", "--map", "time"], "--map: 'time' is not KEY=VALUE"),
        (["log.csv", "--map", "time=t,item=video_id"], "column t is missing from the header found"),
        (["log.csv", "--format", "kuairand", "--map", "item=i"], "--map goes with format generic, not with kuairand"),
        (["log.csv", "--arrivals", "0"], "arrivals = 0 must be"),
        (["log.csv", "--arrivals", "5", "--spread"], "choose one"),
        (["log.csv", "--candidates", "-1"], "candidates = -1 must be"),
        (["log.csv", "--with", "log.csv", "--candidates", "1"], "candidates cannot be drawn while two logs are joined"),
        (["log.csv", "--with", "none.csv"], "none.csv does not exist"),
    ],
)
def test_mistakes_are_told_in_a_sentence_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    log(folder, *GOOD)
    assert run(*words, "--output", "t.parquet") == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["log.csv"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_killed_conversion_leaves_no_spill_and_no_half_output(folder: Path, number: int) -> None:
    rng = np.random.default_rng(0)
    log(folder, *(row(i % 1000, i, T0 + int(t)) for i, t in enumerate(rng.integers(0, 10**9, 200_000))))
    code = (
        "import sys\nfrom helm_rl.workloads.readers import runs\nruns.RUN_ROWS = 10_000\nruns.PIECE_ROWS = 500\n"
        "from helm_rl import cli\nsys.exit(cli.main(['trace', 'convert', 'log.csv', '--output', 't.parquet']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if any(name.endswith(".tmp") for name in os.listdir(folder)):
            break
        time.sleep(0.01)
    process.send_signal(number)
    process.wait(60)
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
    assert set(os.listdir(folder)) <= {"log.csv", "t.parquet"}


def test_the_other_log_needs_no_times(folder: Path) -> None:
    (folder / "azure.csv").write_text(AZURE)
    names = "user_id,item_id,click,follow,like,share,video_category"
    (folder / "qb.csv").write_text(f"{names}\n" + "".join(f"{i % 2},{9 - i},1,0,0,0,1\n" for i in range(4)))
    assert run("azure.csv", "--with", "qb.csv", "--output", "t.parquet") == 0
    trace = Trace.load("t.parquet")
    assert trace.item_ids is not None
    assert trace.item_ids[trace.item_values].tolist() == [9, 8, 7, 6]
    assert trace.arrival_ns.tolist() == [0, 3 * SECOND, 4 * SECOND, 9 * SECOND]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--with-map", "item=i"], "there is no --with"),
        (["--with"], "--with needs the log"),
        (["--session-s", "5"], "pass --requests session-gap too"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    log(folder, *GOOD)
    assert run("log.csv", "--output", "t.parquet", *words) == 2
    assert said in capsys.readouterr().err


def test_control_characters_are_printed_as_escapes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "a\x1b[31m.jsonl"
    path.write_text('{"t": 0, "u": 1, "i": 1, "c": "x\\u001b[2J"}\n')
    words = ["--output", "t.parquet", "--map"]
    assert run(path.name, *words, "time=t,user=u,item=i,tenant=c") == 0
    assert run(path.name, *words, "time=t,user=u,item=zz", "--overwrite") == 2
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "x\\x1b[2J" in said.out
    assert "a\\x1b[31m.jsonl" in said.err


def test_no_memory_is_told_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    log(folder, *GOOD)
    monkeypatch.setattr("helm_rl.workloads.convert.write_trace", fail)
    assert run("log.csv", "--output", "t.parquet") == 1
    assert capsys.readouterr().err == "error: not enough memory for this; nothing was written\n"


def test_a_strict_join_leaves_nothing_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "azure.csv").write_text(AZURE)
    log(folder, *GOOD)
    assert run("azure.csv", "--with", "log.csv", "--output", "t.parquet") == 0
    left_out = sum(Trace.load("t.parquet").meta.dropped.values())
    assert left_out > 0
    capsys.readouterr()
    assert run("azure.csv", "--with", "log.csv", "--output", "s.parquet", "--strict") == 2
    assert "beyond the end of the other log" in capsys.readouterr().err
    assert not (folder / "s.parquet").exists()
