"""`helm-rl trace generate`, `convert` and `inspect`: what they write and say, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helm_rl import cli
from helm_rl.scenario import load_scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.inspect import gaps_to_previous, summarise
from helm_rl.workloads.trace import Trace, TraceMeta, TracePhase
from tests.helm_rl.workloads.test_readers import SHARED, jsonl, log, needs_shared, request, row

SECOND = 1_000_000_000
TINY = 'name = "tiny"\nslo_ms = 100\nseconds = 20\nwarm_s = 5\n[load]\nrate = 50\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path


def run(command: str) -> int:
    """Run a command line, without the program's name, in this process."""
    return cli.main(command.split())


def refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail by the user's mistake; return its one sentence."""
    status = run(arguments)
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_generate_writes_the_trace_of_the_scenario(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trace generate burst --output burst.parquet") == 0
    said = capsys.readouterr().out
    trace = Trace.load(folder / "burst.parquet")
    assert trace.hash() == generate(load_scenario("burst")).hash()
    assert said.startswith(f"burst.parquet: {len(trace):,} requests in 660.0 s")


def test_what_does_not_fit_into_free_memory_is_not_begun(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("trace generate tiny.toml --output t.parquet") == 0
    capsys.readouterr()
    monkeypatch.setattr(sys.modules["helm_rl.workloads.generate"], "free_bytes", lambda: 100_000)
    said = refused("trace generate tiny.toml --output u.parquet", capsys)
    assert "0.0 GiB are free: lower seconds or the rates" in said
    monkeypatch.setattr("helm_rl.workloads.trace.free_bytes", lambda: 100_000)
    assert "0.0 GiB of memory are free; make a shorter trace" in refused("trace inspect t.parquet", capsys)


def test_what_a_log_says_never_moves_the_cursor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{t}.25,{t % 9},{t % 7},\x1b[31mred\x1b]0;title\x07\n" for t in range(300))
    (folder / "a\x1b[2J.csv").write_text("t,u,i,c\n" + rows)
    name = "a\x1b[2J"
    mapping = ["--map", "time=t:s,user=u,item=i,tenant=c"]
    for arguments in (
        ["convert", f"{name}.csv", *mapping, "--output", f"{name}.parquet"],
        ["inspect", f"{name}.parquet"],
        ["fit", f"{name}.parquet", "--output", f"{name}.toml"],
        ["generate", f"{name}.toml", "--output", f"{name}2.parquet"],
    ):
        assert cli.main(["trace", *arguments]) == 0
        said = capsys.readouterr().out
        assert "\\x1b[2J" in said
        assert not {"\x1b", "\x07"} & set(said)
    assert cli.main(["trace", "inspect", f"{name}.csv"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_generate_takes_files_and_seeds(folder: Path) -> None:
    for seed in ("1", "2"):
        assert run(f"trace generate tiny.toml --output {seed}.parquet --seed {seed}") == 0
    assert run("trace generate tiny.toml --output default.parquet") == 0
    first, second, default = (Trace.load(f"{name}.parquet") for name in ("1", "2", "default"))
    assert first.hash() == default.hash() != second.hash()
    assert second.meta.seed == 2


def test_convert_says_what_it_did_and_keeps_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(folder, row(1, 10, 7000), row(1, 10, 7000), row(2, 20, 3000), row(1, 30, 13000))
    assert run("trace convert log.csv --output out.parquet --speed-up 2 --warm-s 1.5") == 0
    said = capsys.readouterr().out.splitlines()
    trace = Trace.load("out.parquet")
    assert trace.arrival_ns.tolist() == [0, 2 * SECOND, 5 * SECOND]
    assert trace.meta.measure_from_ns == 1_500_000_000
    assert said[0].startswith("out.parquet: 3 requests in 5.0 s")
    assert [line.strip() for line in said[1 : 1 + len(trace.meta.steps)]] == list(trace.meta.steps)
    assert said[-1].strip() == "left out, rows that repeat user_id, video_id and time_ms: 1"


def test_convert_takes_several_files_of_one_log(folder: Path) -> None:
    log(folder, row(1, 10, 7000), name="b.csv")
    log(folder, row(1, 20, 3000), name="a.csv")
    assert run("trace convert b.csv a.csv --output out.parquet --format kuairand") == 0
    assert Trace.load("out.parquet").history_tokens.tolist() == [1, 2]


def test_outputs_are_kept_unless_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jsonl(folder, request(0), request(1000))
    (folder / "out.parquet").write_text("mine")
    (folder / "out.json").write_text("mine")
    assert run("trace generate tiny.toml --output good.parquet") == 0
    capsys.readouterr()
    for command in (
        "trace generate tiny.toml --output out.parquet",
        "trace convert log.jsonl --output out.parquet",
        "trace inspect good.parquet --json out.json",
    ):
        assert "exists already" in refused(command, capsys)
        assert (folder / "out.parquet").read_text() == (folder / "out.json").read_text() == "mine"
    assert run("trace convert log.jsonl --output out.parquet --overwrite") == 0
    assert run("trace inspect good.parquet --json out.json --overwrite") == 0
    assert len(Trace.load("out.parquet")) == 2
    assert json.loads((folder / "out.json").read_text())["name"] == "tiny"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("trace generate brust --output x", "brust is neither a shipped scenario"),
        ("trace generate tiny.toml --output no/x", "the folder no does not exist"),
        ("trace generate tiny.toml --output . --overwrite", "is a folder"),
        ("trace generate tiny.toml --output x --seed -3", "seed = -3 must be"),
        ("trace generate log.csv --output x", "log.csv is not valid TOML"),
        ("trace convert no.csv --output x", "no.csv does not exist"),
        ("trace convert --output x", "name the log to convert"),
        ("trace convert log.csv --output x --speed-up 0", "speed-up = 0 must be"),
        ("trace convert log.csv --output x --warm-s -1", "warm-s = -1 must be"),
        ("trace convert log.csv --output x --warm-s 1e8", "leaves nothing to measure"),
        ("trace convert log.csv --output log.csv --overwrite", "log.csv is what is read"),
        ("trace convert bad.csv --output x", "bad.csv, line 2, field time_ms: 'soon' is not a number"),
        ("trace convert log.csv --output x --format mooncake", "log.csv, line 1: not JSON"),
        ("trace inspect log.csv", "log.csv is not a Parquet file"),
        ("trace inspect no.parquet", "no.parquet does not exist"),
        ("trace inspect .", "is not a file"),
        ("trace inspect log.csv --json log.csv --overwrite", "log.csv is what is read"),
    ],
)
def test_mistakes_are_told_in_a_sentence_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    log(folder, row(1, 10, 7000), row(1, 20, 9000))
    log(folder, row(1, 10, "soon"), name="bad.csv")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert said in refused(command, capsys)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_inspect_prints_a_table_and_writes_the_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("trace generate burst --output burst.parquet")
    capsys.readouterr()
    assert run("trace inspect burst.parquet --json burst.json") == 0
    said = capsys.readouterr().out
    trace = Trace.load("burst.parquet")
    summary = json.loads((folder / "burst.json").read_text())
    assert summary["requests"] == len(trace)
    assert summary["hash"] == trace.hash()
    assert summary["segments"] == len(trace.segments())
    assert [phase["label"] for phase in summary["phases"]] == ["base", "burst"]
    assert f"{len(trace):,}" in said
    assert trace.hash() in said
    assert f"{load_scenario('burst').load.phase[0].rate:g}" in said
    assert max(map(len, said.splitlines())) <= 118


def test_markup_in_a_name_is_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "odd.toml").write_text(TINY.replace("tiny", "[bold]x[/]"))
    assert run("trace generate odd.toml --output odd.parquet") == 0
    assert run("trace inspect odd.parquet") == 0
    assert "[bold]x[/]" in capsys.readouterr().out


@needs_shared
def test_the_real_mooncake_trace_converts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = SHARED / "mooncake" / "conversation_trace.jsonl"
    assert cli.main(["trace", "convert", str(source), "--output", "m.parquet", "--spread", "--speed-up", "10"]) == 0
    said = capsys.readouterr().out
    assert "m.parquet: 12,031 requests in 354.0 s" in said
    assert "steps of 3 s" in said
    assert run("trace inspect m.parquet") == 0


def test_the_commands_do_not_load_what_they_do_not_need() -> None:
    code = (
        "import sys; import helm_rl.workloads.commands as c\n"
        "heavy = {'torch', 'numba', 'matplotlib', 'pyarrow', 'gymnasium', 'envs', 'train', 'eval'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# The statistics


def hand_made() -> Trace:
    """Seven requests of three users, measured from 10 s."""
    arrival = np.array([0, 1, 20, 20, 70, 71, 200], dtype=np.int64) * SECOND
    arrival[1] = 900_000_000
    return Trace(
        arrival_ns=arrival,
        user=np.array([0, 1, 0, 2, 1, 0, 1], dtype=np.int64),
        tenant=np.array([0, 0, 0, 3, 0, 0, 0], dtype=np.int32),
        phase=np.array([0, 0, 1, 1, 0, 0, 0], dtype=np.int32),
        history_tokens=np.array([10, 20, 30, 40, 50, 60, 70], dtype=np.int32),
        new_tokens=np.array([1, 0, 2, 0, 0, 0, 1], dtype=np.int32),
        item_offsets=np.array([0, 1, 1, 3, 3, 3, 3, 4], dtype=np.int64),
        item_values=np.array([4, 4, 0, 4], dtype=np.int64),
        meta=TraceMeta(
            name="hand",
            source="test",
            origin_ns=0,
            measure_from_ns=10 * SECOND,
            users=5,
            items=9,
            content="items",
            phases=(
                TracePhase(label="base", start_ns=0, end_ns=250 * SECOND),
                TracePhase(label="up", start_ns=20 * SECOND, end_ns=30 * SECOND),
            ),
            dropped={"junk": 3},
        ),
    )


def test_the_statistics_of_a_trace_made_by_hand() -> None:
    trace = hand_made()
    trace.validate()
    found = summarise(trace)
    assert (found.start_s, found.end_s, found.measure_from_s) == (0, 250, 10)
    assert (found.requests, found.measured_requests) == (7, 5)
    assert found.rate_mean == pytest.approx(7 / 250)
    assert found.rate_peak_1s == 2  # 0 and .9; 20 and 20; 70 and 71 are a second apart
    assert found.rate_peak_10s == 0.2
    assert (found.users, found.user_codes, found.tenants) == (3, 5, 2)
    assert (found.items, found.item_codes, found.item_references) == (2, 9, 4)
    assert found.top_items_share == 0.75
    assert found.returning == pytest.approx(4 / 7)
    # Measured: 20 (gap 20), 20 (first), 70 (gap 69.1), 71 (gap 51), 200 (gap 130).
    assert found.hot_user_ratio == pytest.approx(2 / 5)
    assert found.return_gap_s.min == 20
    assert found.return_gap_s.p50 == 51
    assert found.return_gap_s.max == 130
    assert found.return_gap_s.mean == pytest.approx((20 + 69.1 + 51 + 130) / 4)
    assert (found.requests_per_user.min, found.requests_per_user.max) == (1, 3)
    assert (found.history_tokens.p10, found.history_tokens.p50, found.history_tokens.p99) == (10, 40, 70)
    assert [(phase.label, phase.requests, phase.rate_per_s) for phase in found.phases] == [
        ("base", 5, 5 / 250),
        ("up", 2, 2 / 10),
    ]
    assert found.segments == 3
    assert found.dropped == {"junk": 3}


def test_a_minute_to_the_nanosecond_is_still_hot() -> None:
    arrival = np.array([0, 60 * SECOND, 120 * SECOND + 1], dtype=np.int64)
    gaps = gaps_to_previous(arrival, np.zeros(3, dtype=np.int64))
    assert gaps.tolist() == [-1, 60 * SECOND, 60 * SECOND + 1]


def test_a_trace_without_returns_has_statistics() -> None:
    trace = hand_made().between(0, SECOND // 2)
    found = summarise(trace)
    assert found.return_gap_s.mean is None
    assert found.returning == 0
    assert json.dumps(found.hot_user_ratio) == "0.0"
