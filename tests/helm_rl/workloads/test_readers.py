"""Readers of public logs: what they keep exactly, what they state, what they refuse and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helm_rl.errors import UserError
from helm_rl.workloads.readers import detect_format, read_trace, source
from helm_rl.workloads.readers.arrivals import step_of
from helm_rl.workloads.trace import Trace

SHARED = Path(__file__).parents[4] / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/traces, the public samples, is absent")

MS = 1_000_000
HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
T0 = 1_649_675_512_388


def row(user: Any, video: Any, time_ms: Any, tab: Any = 1) -> str:
    return f"{user},{video},20220411,1900,{time_ms},0,0,0,0,0,0,0,1385,209900,0,0,0,0,{tab}"


def log(folder: Path, *rows: str, header: str = HEADER, end: str = "\n", name: str = "log.csv") -> Path:
    path = folder / name
    path.write_bytes((end.join([header, *rows]) + end).encode())
    return path


def request(time: Any = 0, tokens: Any = 513, hashes: Any = (0, 7), **more: Any) -> str:
    return json.dumps({"timestamp": time, "input_length": tokens, "output_length": 9, "hash_ids": hashes} | more)


def jsonl(folder: Path, *lines: str, end: str = "\n", name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_bytes((end.join(lines) + end).encode())
    return path


def items_of(trace: Trace, index: int) -> list[int]:
    """The ids in the source of the items of one request."""
    assert trace.item_ids is not None
    codes = trace.item_values[trace.item_offsets[index] : trace.item_offsets[index + 1]]
    return trace.item_ids[codes].tolist()


def users_of(trace: Trace) -> list[int]:
    assert trace.user_ids is not None
    return trace.user_ids[trace.user].tolist()


# KuaiRand


def test_kuairand_rows_become_requests_in_order_of_time(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        row(9, 30, T0 + 5000, tab=4),
        row(3, 20, T0 + 1000, tab=2),
        row(3, 10, T0 + 1000, tab=0),
        row(3, 40, T0 + 5000),
        row(3, 20, T0),
        row(9, 20, T0 + 6000),
    )
    trace = read_trace(path)
    assert trace.meta.source == "kuairand"
    assert trace.meta.content == "items"
    assert trace.meta.origin_ns == T0 * MS
    assert trace.arrival_ns.tolist() == [0, 1000 * MS, 5000 * MS, 5000 * MS, 6000 * MS]
    assert users_of(trace) == [3, 3, 3, 9, 9]
    assert [items_of(trace, i) for i in range(5)] == [[20], [20, 10], [40], [30], [20]]
    assert trace.history_tokens.tolist() == [1, 3, 4, 1, 2]
    assert trace.new_tokens.tolist() == [1, 2, 1, 1, 1]
    assert trace.tenant.tolist() == [1, 2, 1, 4, 1]
    assert (trace.meta.users, trace.meta.items) == (2, 4)
    assert "6 rows in 5 requests: rows that share user_id and time_ms" in trace.meta.steps
    assert "sorted by time: 2 of 6 rows came before the one above them" in trace.meta.steps
    assert trace.meta.dropped == {}


def test_repeated_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    path = log(
        tmp_path, row(1, 10, T0), row(1, 20, T0), row(1, 10, T0), row(2, 10, T0), row(1, 10, T0 + 1), row(1, 10, T0)
    )
    trace = read_trace(path)
    assert trace.meta.dropped == {"rows that repeat user_id, video_id and time_ms": 2}
    assert [items_of(trace, i) for i in range(len(trace))] == [[10, 20], [10], [10]]
    assert trace.history_tokens.tolist() == [2, 1, 3]


def test_files_of_one_log_are_merged_in_order_of_time(tmp_path: Path) -> None:
    """Files of one log concatenated out of time order (recsys-examples #140)."""
    late = log(tmp_path, row(1, 30, T0 + 2000), row(2, 40, T0 + 3000), name="late.csv")
    early = log(tmp_path, row(1, 10, T0), row(2, 20, T0 + 1000), name="early.csv")
    trace = read_trace([late, early])
    assert [items_of(trace, i) for i in range(4)] == [[10], [20], [30], [40]]
    assert trace.history_tokens.tolist() == [1, 1, 2, 2]
    twice = read_trace([late, early, late])
    assert twice.meta.dropped == {"rows that repeat user_id, video_id and time_ms": 2}
    np.testing.assert_array_equal(twice.arrival_ns, trace.arrival_ns)


def test_neighbouring_times_stay_distinct(tmp_path: Path) -> None:
    """Times held in float32 merge 881250949, ...50 and ...51 (RecBole #1653)."""
    path = log(tmp_path, *(row(1, i, time) for i, time in enumerate((881250949, 881250950, 881250951, 1649675512388))))
    with pytest.raises(UserError, match="its names are kuairand's, but time_ms looks like s, not ms; pass --format"):
        read_trace(path)
    trace = read_trace(path, "kuairand")
    assert "time_ms looks like s, and was read as ms" in trace.meta.steps
    assert trace.arrival_ns.tolist() == [0, MS, 2 * MS, (1649675512388 - 881250949) * MS]
    assert trace.meta.origin_ns == 881250949 * MS


def test_large_ids_are_exact_and_times_before_1970_are_dropped(tmp_path: Path) -> None:
    path = log(tmp_path, row(2**63 - 1, -(2**63), 5), row(1, 1, -5), row(1, 4294967297, 7), row(1, 1, 8))
    trace = read_trace(path)
    assert users_of(trace) == [2**63 - 1, 1, 1]
    assert items_of(trace, 0) == [-(2**63)]
    assert (items_of(trace, 1), items_of(trace, 2)) == ([4294967297], [1])
    assert trace.meta.origin_ns == 5 * MS
    assert trace.meta.dropped == {"time_ms before 1970 (first: log.csv, line 3)": 1}
    assert "time_ms lies before 1990 or after 2100: is it in ms?" in trace.meta.steps


def test_a_straggler_months_away_is_named_and_can_be_cut(tmp_path: Path) -> None:
    rows = [row(1, 1, T0 - 90 * 86_400_000)] + [row(2, i, T0 + i * 1000) for i in range(200)]
    path = log(tmp_path, *rows)
    trace = read_trace(path)
    (said,) = [step for step in trace.meta.steps if "days off" in step]
    assert said == "the first 1 of 201 lie 90.0 days off (--start-s 3888000 cuts them)"
    cut = read_trace(path, start_s=3_888_000.0)
    assert len(cut) == 200
    assert cut.meta.dropped == {"rows outside the window": 1}
    assert cut.meta.origin_ns == T0 * MS
    late = log(tmp_path, *rows[1:], row(3, 3, T0 + 10**10))
    (said,) = [step for step in read_trace(late).meta.steps if "days off" in step]
    assert said.startswith("the last 1 of 201 lie 115.7 days off (--end-s ")
    assert len(read_trace(late, end_s=float(said.split("--end-s ")[1].split()[0]))) == 200


def test_histories_count_from_the_window_kept(tmp_path: Path) -> None:
    path = log(tmp_path, *(row(1, i, T0 + i * 1000) for i in range(10)))
    trace = read_trace(path, start_s=3, end_s=7)
    assert [items_of(trace, i) for i in range(len(trace))] == [[3], [4], [5], [6]]
    assert trace.history_tokens.tolist() == [1, 2, 3, 4]
    with pytest.raises(UserError, match="no row lies in the window asked for; the log's 10 rows span 9 s"):
        read_trace(path, start_s=20)


def test_text_as_editors_and_systems_write_it(tmp_path: Path) -> None:
    rows = [row(1, 10, T0), row(2, 20, T0 + 1)]
    expected = read_trace(log(tmp_path, *rows)).hash()
    text = "\n".join([HEADER, *rows])
    variants = {
        "byte order mark": "\ufeff" + text + "\n",
        "CRLF": text.replace("\n", "\r\n") + "\r\n",
        "no newline at the end": text,
        "blank lines at the end": text + "\n\n\r\n\n",
        "quoted": text.replace("user_id", '"user_id"').replace("\n1,10,", '\n"1","10",') + "\n",
    }
    for name, variant in variants.items():
        path = tmp_path / "log.csv"
        path.write_bytes(variant.encode())
        assert read_trace(path).hash() == expected, name
    path.write_text(text.replace("\n", "\n\n"))
    assert read_trace(path).meta.dropped == {"blank lines (first: log.csv, line 2)": 2}
    with pytest.raises(UserError, match=r"log.csv, line 2: a blank line"):
        read_trace(path, strict=True)


def test_a_log_without_tab_has_one_tenant(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("video_id,time_ms,user_id\n5,2000,1\n6,1000,1\n")
    trace = read_trace(path)
    assert trace.tenant.tolist() == [0, 0]
    assert [items_of(trace, i) for i in range(2)] == [[6], [5]]


GOOD = [row(1, 10, T0), row(2, 20, T0 + 1), row(3, 30, T0 + 2)]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (row(2, 20, "abc"), "line 3, field time_ms: 'abc' is not a number of milliseconds"),
        (row(2, 20, ""), "line 3, field time_ms: an empty cell is not a number of milliseconds"),
        (row(2, 20, "-"), "line 3, field time_ms: '-' is not a number"),
        (row(2, 20, "NA"), "line 3, field time_ms: 'NA' is not a number"),
        (row(2, 20, "inf"), "line 3, field time_ms: 'inf' is not a number"),
        (row(2, 20, 10**13), "line 3, field time_ms: '10000000000000' is outside"),
        (row(2, 20, 10**18), "line 3, field time_ms: '1000000000000000000' is outside"),
        (row(2, 20, "9" * 30), "line 3, field time_ms: '" + "9" * 30 + "' is outside"),
        (row("u2", 20, T0), "line 3, field user_id: 'u2' is not a whole number"),
        (row(2, 2**64, T0), f"line 3, field video_id: '{2**64}' is outside"),
        (row(2, 20, T0, tab=-1), "line 3, field tab: '-1' is outside 0..2147483647"),
        (row(2, 20, T0, tab=""), "line 3, field tab: an empty cell"),
        (row(2, 20, T0) + ",5", "line 3: 20 columns, where the header has 19"),
        (row(2, 20, T0, tab="1\x1c"), "line 3, field tab: '1\\x1c' is not a whole number"),
        (row(2, "2\r0", T0), "line 3, field video_id: '2\\r0' is not a whole number"),
        ("2,20,20220411", "line 3: 3 columns, where the header has 19"),
        ("2;20", "line 3: 1 columns, where the header has 19"),
    ],
)
def test_the_bad_cell_is_named(tmp_path: Path, bad: str, said: str) -> None:
    for end in ("\n", "\r\n"):
        path = log(tmp_path, GOOD[0], bad, GOOD[2], end=end)
        with pytest.raises(UserError) as caught:
            read_trace(path, strict=True)
        assert str(caught.value).startswith(f"{path}, {said}")
        assert "\n" not in str(caught.value)
        trace = read_trace(path)
        assert len(trace) == 2
        ((cause, count),) = trace.meta.dropped.items()
        assert count == 1
        assert cause.endswith("(first: log.csv, line 3)")


def test_the_bad_line_is_counted_over_chunks_and_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "CHUNK_BYTES", 500)
    rows = [row(1, i, T0 + i) for i in range(100)]
    path = log(tmp_path, *rows)
    assert len(read_trace(path)) == 100
    rows[40] = "\n" + rows[40]
    path = log(tmp_path, *rows, row(1, 1, "x"))
    trace = read_trace(path)
    assert trace.meta.dropped == {
        "time_ms not a number of milliseconds (first: log.csv, line 103)": 1,
        "blank lines (first: log.csv, line 42)": 1,
    }
    assert len(trace) == 100


def test_a_file_cut_off_within_a_row_says_so(tmp_path: Path) -> None:
    path = log(tmp_path, *GOOD)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"line 4: \d+ columns, where the header has 19 \(is the file cut off here\?\)"):
        read_trace(path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            HEADER.replace("time_ms,", "", 1),
            "line 1: column time_ms is missing from the header found (user_id,video_id,",
        ),
        (HEADER.replace("time_ms", "timestamp", 1), "line 1: column watch_ratio is missing"),
        (HEADER.replace(",", ";"), "line 1: columns are separated by ';'; a kuairand log has ','"),
        (HEADER.replace(",", "\t"), "line 1: columns are separated by a tab"),
        (HEADER.replace(",", "|"), "line 1: columns are separated by '|'"),
        (HEADER + ",user_id", "line 1: column user_id is there 2 times"),
        (row(0, 1, T0), "line 1: a header is missing, the first line is data (0,1,"),
    ],
)
def test_headers_that_are_none(tmp_path: Path, header: str, said: str) -> None:
    path = log(tmp_path, *GOOD, header=header)
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, {said}")


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    for junk, line in ((b"\xff\xfe", 3), (b"\x00", 3)):
        path = log(tmp_path, GOOD[0], "JUNK", GOOD[2])
        path.write_bytes(path.read_bytes().replace(b"JUNK", junk))
        with pytest.raises(UserError, match=f"line {line}: not (UTF-8 )?text"):
            read_trace(path)
    path = log(tmp_path, GOOD[0], GOOD[1].replace("1385", "\u00e9"), GOOD[2])
    assert len(read_trace(path)) == 3  # text beyond ASCII in a column that is not read is no fault


@needs_shared
def test_the_kuairand_sample() -> None:
    trace = read_trace(SHARED / "kuairand_fixture" / "log_standard_format.csv")
    assert (len(trace), trace.meta.users, trace.meta.items) == (6, 3, 4)
    assert trace.meta.origin_ns == 1_649_645_295_928 * MS
    assert users_of(trace) == [1, 1, 0, 0, 0, 17387]
    assert trace.arrival_ns[2] == (1_649_675_512_388 - 1_649_645_295_928) * MS
    assert items_of(trace, 2) == [10, 20]
    assert trace.tenant.tolist() == [8, 1, 1, 0, 1, 1]


# Mooncake


def test_mooncake_blocks_users_and_times(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        request(0, 1025, [0, 7, 13053225291711363978]),
        request(3000, 600, [0, 8]),
        request(3000, 1537, [0, 7, 13053225291711363978, 9]),
        request(4000, 100, [0]),
        request(5000, 1030, [0, 7, 5]),
    )
    trace = read_trace(path)
    assert (trace.meta.source, trace.meta.content, trace.meta.block_tokens) == ("mooncake", "blocks", 512)
    assert trace.arrival_ns.tolist() == [0, 3000 * MS, 3000 * MS, 4000 * MS, 5000 * MS]
    assert users_of(trace) == [7, 8, 7, 0, 7]
    assert items_of(trace, 2) == [0, 7, 13053225291711363978, 9]
    assert trace.history_tokens.tolist() == [1025, 600, 1537, 100, 1030]
    # After the common blocks of the user's previous request: 3, 0 at a first request, 2.
    assert trace.new_tokens.tolist() == [1025, 600, 1537 - 3 * 512, 100, 1030 - 2 * 512]
    assert "user = the only block in requests of one block: 1" in trace.meta.steps


def test_a_history_that_shrinks_has_nothing_new(tmp_path: Path) -> None:
    trace = read_trace(jsonl(tmp_path, request(0, 1030, [0, 7, 5]), request(1, 1000, [0, 7])))
    assert trace.new_tokens.tolist() == [1030, 0]


def test_two_hash_ids_that_agree_in_32_bits_are_two_blocks(tmp_path: Path) -> None:
    """hash ids [1, 4294967297] (dynamo #12046)."""
    trace = read_trace(jsonl(tmp_path, request(0, 513, [1, 4294967297]), request(1, 1, [2**64 - 1])))
    assert trace.meta.items == 3
    assert items_of(trace, 0) == [1, 4294967297]
    assert items_of(trace, 1) == [2**64 - 1]


def test_decimal_times_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    times = ["1649675512388.000001", "1649675512388.000003", "1.6496755123881e12", "-2.5", "1649675512389"]
    path.write_text("".join(request("T").replace('"T"', time) + "\n" for time in times))
    trace = read_trace(path)
    assert trace.meta.origin_ns == -2_500_000
    base = 1_649_675_512_388_000_000 + 2_500_000
    assert trace.arrival_ns.tolist() == [0, base + 1, base + 3, base + 100_000, base + MS]


def test_mooncake_lines_out_of_order_and_repeated(tmp_path: Path) -> None:
    lines = [request(500, 513, [0, 1]), request(100, 513, [0, 2]), request(100, 513, [0, 2]), request(300, 513, [0, 3])]
    trace = read_trace(jsonl(tmp_path, *lines))
    assert users_of(trace) == [2, 2, 3, 1]
    assert "sorted by time: 1 of 4 requests came before the one above them" in trace.meta.steps
    assert "lines that repeat an earlier one exactly, kept as requests: 1" in trace.meta.steps
    with pytest.raises(UserError, match="each start at time 0; convert one at a time"):
        read_trace([tmp_path / "log.jsonl"] * 2)


def test_mooncake_text_as_editors_and_systems_write_it(tmp_path: Path) -> None:
    lines = [request(0), request(5, 513, [0, 8])]
    expected = read_trace(jsonl(tmp_path, *lines))
    for variant in (
        "\ufeff" + "\n".join(lines),
        "\r\n".join(lines) + "\r\n",
        "\n".join(lines),
        "\n".join(lines) + "\n\n  \n",
        "\n".join(lines).replace('"output_length": 9, ', ""),
    ):
        path = tmp_path / "log.jsonl"
        path.write_bytes(variant.encode())
        assert read_trace(path).hash() == expected.hash()
    between = read_trace(jsonl(tmp_path, lines[0], "", lines[1], ""))
    assert between.meta.dropped == {"blank lines (first: log.jsonl, line 2)": 1}
    np.testing.assert_array_equal(between.arrival_ns, expected.arrival_ns)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (request("soon"), "field timestamp: 'soon' is not a number of milliseconds"),
        (request(None), "field timestamp: None is not a number"),
        (request(True), "field timestamp: True is not a number"),
        (request([1]), "field timestamp: [1] is not a number"),
        (request(float("nan")), "not JSON: NaN is not a number in JSON"),
        (request(10**15), "field timestamp: '1000000000000000' is outside 146 years"),
        (request("T").replace('"T"', "1e999999999"), "field timestamp: '1e999999999' is outside 146 years"),
        (request("T").replace('"T"', "9" * 5000), "not JSON: "),
        ('{"input_length": 1, "hash_ids": [0]}', "field timestamp is missing (found: 'input_length, hash_ids')"),
        ('{"timestamp": 1, "hash_ids": [0]}', "field input_length is missing"),
        ('{"timestamp": 1, "input_length": 3}', "field hash_ids is missing"),
        (request(1, 0, []), "field input_length: 0 is not a whole number from 1"),
        (request(1, 2**31, [0]), "field input_length: 2147483648 is not"),
        (request(1, 1.5, [0]), "field input_length: 1.5 is not a whole number"),
        (request(1, True, [0]), "field input_length: True is not a whole number"),
        (request(1, 513, {"a": [1]}), "field hash_ids: {'a': [1]} is not a list of block ids"),
        (request(1, 513, [0, -1]), "field hash_ids: -1 is not a whole number from 0 to 2^64 - 1"),
        (request(1, 513, [0, 2**64]), "field hash_ids: 18446744073709551616 is not"),
        (request(1, 513, [0, "1"]), "field hash_ids: '1' is not a whole number"),
        (request(1, 513, [0, True]), "field hash_ids: True is not a whole number"),
        (request(1, 1025, [0, 1]), "field hash_ids: 2 ids, where input_length 1025 makes 3 blocks of 512 tokens"),
        ("[1, 2]", "a request must be a JSON object"),
        ('{"timestamp": 1', "not JSON: "),
        ("timestamp,input_length", "not JSON: "),
        ("[" * 100_000, "not the JSON of a request: it is nested too deeply"),
    ],
)
def test_the_bad_field_is_named(tmp_path: Path, bad: str, said: str) -> None:
    path = jsonl(tmp_path, request(0), bad, request(2))
    trace = read_trace(path)
    assert len(trace) == 2
    assert list(trace.meta.dropped.values()) == [1]
    assert str(trace.meta.dropped).endswith("(first: log.jsonl, line 2)': 1}")
    with pytest.raises(UserError) as caught:
        read_trace(path, strict=True)
    assert str(caught.value).startswith(f"{path}, line 2{',' if said.startswith('field') else ':'} {said}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_mooncake_bytes_and_ends(tmp_path: Path) -> None:
    path = jsonl(tmp_path, request(0), request(1))
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(UserError, match=r"line 2: not JSON: .* \(is the file cut off here\?\)"):
        read_trace(path)
    path.write_bytes(data + b"\xff\n")
    with pytest.raises(UserError, match="line 3: not UTF-8 text"):
        read_trace(path)
    path.write_bytes(data.replace(b"512", b"\x00") + b"\x00\n")
    with pytest.raises(UserError, match="line 3: not text"):
        read_trace(path)


@needs_shared
def test_the_mooncake_conversation_trace() -> None:
    path = SHARED / "mooncake" / "conversation_trace.jsonl"
    trace = read_trace(path)
    raw = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(trace) == len(raw) == 12_031
    assert trace.meta.users == len({r["hash_ids"][1] for r in raw})
    assert trace.meta.items == len({h for r in raw for h in r["hash_ids"]})
    assert trace.history_tokens.sum() == sum(r["input_length"] for r in raw)
    assert trace.arrival_ns[-1] == raw[-1]["timestamp"] * MS
    assert items_of(trace, 5000) == raw[5000]["hash_ids"]
    assert any(
        step.startswith("arrivals come in steps of 3 s (12031 requests at 1180 instants)") for step in trace.meta.steps
    )

    spread = read_trace(path, spread=True, speed_up=2)
    empty = [
        np.mean(np.bincount(found.arrival_ns // 1_000_000_000) == 0) for found in (trace, read_trace(path, spread=True))
    ]
    assert empty[0] > 0.6
    assert empty[1] < 0.06  # 3.4 requests/s leave exp(-3.4) of the seconds empty
    assert spread.arrival_ns[-1] == pytest.approx(trace.arrival_ns[-1] / 2, abs=1.5e9)


# Arrivals


def quantised(folder: Path, step_ms: int = 3000, drift_ms: int = 1) -> Path:
    rng = np.random.default_rng(0)
    steps = np.arange(60) * step_ms + rng.integers(-drift_ms, drift_ms + 1, size=60) + 10
    return jsonl(folder, *(request(int(time), 513, [0, i]) for i, time in enumerate(np.repeat(steps, 8))))


def test_steps_are_detected_stated_and_spread_on_demand(tmp_path: Path) -> None:
    path = quantised(tmp_path)
    plain = read_trace(path)
    (said,) = [step for step in plain.meta.steps if step.startswith("arrivals come in steps of")]
    step_s = float(said.split()[5])
    assert step_s == pytest.approx(3, abs=0.01)
    assert plain.meta.seed is None
    spread = read_trace(path, spread=True)
    assert spread.meta.seed == 1
    assert np.unique(spread.arrival_ns).size == len(spread)
    gaps_ms = (np.sort(spread.arrival_ns) - np.sort(plain.arrival_ns)) / MS
    assert gaps_ms.min() >= 0
    phase = (spread.arrival_ns % (3000 * MS)) / (3000 * MS)
    assert np.histogram(phase, 4, (0, 1))[0].min() > 80  # of 120 each
    assert sorted(users_of(spread)) == sorted(users_of(plain))
    assert read_trace(path, spread=True).hash() == spread.hash()
    assert read_trace(path, spread=True, seed=2).hash() != spread.hash()


def test_arrivals_that_come_in_no_steps_are_left_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    times = np.sort(rng.integers(0, 60_000, size=500))
    path = jsonl(tmp_path, *(request(int(time), 513, [0, i]) for i, time in enumerate(times)))
    trace = read_trace(path, spread=True)
    assert "arrivals were not spread: they do not come in steps" in trace.meta.steps
    np.testing.assert_array_equal(trace.arrival_ns, (times - times[0]) * MS)
    pairs = np.sort(np.repeat(rng.integers(0, 10**9, size=500), 3)) * MS
    assert step_of(pairs, MS) == 0  # equal times, but irregular ones
    assert step_of(np.repeat(np.arange(500), 3) * MS, MS) == 0  # a step of one digit is the clock's own
    assert step_of(np.repeat(np.arange(500), 3) * 50 * MS, MS) == 50 * MS
    assert step_of(np.repeat(np.delete(np.arange(500), range(100, 200)), 3) * 50 * MS, MS) == 50 * MS


def test_speed_up_divides_times_exactly(tmp_path: Path) -> None:
    times = [0, 1000, 1001, 10**12 + 7]
    path = jsonl(tmp_path, *(request(time) for time in times))
    assert read_trace(path, speed_up=4).arrival_ns.tolist() == [0, 250 * MS, 250_250_000, (10**12 + 7) * MS // 4]
    slow = read_trace(path, speed_up=0.5)
    assert slow.arrival_ns.tolist() == [0, 2000 * MS, 2002 * MS, 2 * (10**12 + 7) * MS]
    assert "times divided by 0.5" in slow.meta.steps
    with pytest.raises(UserError, match="stretches the trace beyond"):
        read_trace(path, speed_up=1e-6)


def test_the_warm_up_is_a_minute_or_a_tenth(tmp_path: Path) -> None:
    path = jsonl(tmp_path, request(0), request(100_000))
    assert read_trace(path).meta.measure_from_ns == 10_000_000_000
    assert read_trace(path, warm_s=25.5).meta.measure_from_ns == 25_500_000_000
    assert read_trace(path, speed_up=2).meta.measure_from_ns == 5_000_000_000
    assert read_trace(jsonl(tmp_path, request(0), request(10**7))).meta.measure_from_ns == 60_000_000_000
    with pytest.raises(UserError, match="warm-s = 200 leaves nothing to measure of a trace of 100 s"):
        read_trace(jsonl(tmp_path, request(0), request(100_000)), warm_s=200)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speed_up": 0}, "speed-up = 0 must be from"),
        ({"speed_up": float("nan")}, "speed-up = nan"),
        ({"speed_up": -1}, "speed-up = -1"),
        ({"seed": -1}, "seed = -1"),
        ({"warm_s": -1.0}, "warm-s = -1"),
        ({"end_s": float("inf")}, "end-s = inf"),
        ({"start_s": 5.0, "end_s": 5.0}, "start-s = 5 must be below end-s = 5"),
        ({"block_tokens": 0}, "block-tokens = 0"),
        ({"format": "criteo"}, "format 'criteo' is not one of kuairand, "),
    ],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_trace(jsonl(tmp_path, request(0)), **options)


def test_blocks_of_another_size(tmp_path: Path) -> None:
    path = jsonl(tmp_path, request(0, 33, [1, 2, 3]))
    assert read_trace(path, block_tokens=16).meta.block_tokens == 16


# Which format, and files that have none


def test_the_format_is_told_by_the_content_not_the_name(tmp_path: Path) -> None:
    assert detect_format(jsonl(tmp_path, request(0), name="a.csv")) == "mooncake"
    assert detect_format(log(tmp_path, *GOOD, name="b.jsonl")) == "kuairand"
    with pytest.raises(UserError, match="line 1: not JSON"):
        read_trace(tmp_path / "b.jsonl", "mooncake")
    with pytest.raises(UserError, match="column time_ms is missing"):
        read_trace(tmp_path / "a.csv", "kuairand")
    with pytest.raises(UserError, match=r"is a kuairand log and .* a mooncake log; convert them one at a time"):
        read_trace([tmp_path / "a.csv", tmp_path / "b.jsonl"])
    with pytest.raises(UserError, match="at least one file"):
        read_trace([])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n \n", "holds nothing but blanks"),
        (b"\xef\xbb\xbf", "holds nothing but blanks"),
        (b"PAR1xxxx", "is damaged or not a whole Parquet file"),
        (b"\x1f\x8b\x08", "is cut off: its gzip data"),
        (b"hello\nworld\n\x00", "line 3: not text"),
        (bytes(range(1, 256)), "is the start of no format known"),
        (b"\x1f", r"'\x1f' is the start of no format known"),
        ("\u2028\n".encode(), "is the start of no format known"),
        (b"hello\n", "'hello' is the start of no format known"),
        (b"userId,movieId,stars,timestamp\n1,2,3,4\n", "column rating is missing from the header found"),
        (b"[{}]\n", "is the start of no format known"),
        ((HEADER + "\n").encode(), "has a header and no row below it"),
        (b"user_id,video_id", "column time_ms is missing"),
        (b"{\n", "line 1: not JSON"),
    ],
)
def test_files_without_a_format(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no.jsonl does not exist"):
        read_trace(tmp_path / "no.jsonl")
    with pytest.raises(UserError, match="is not a file"):
        read_trace(tmp_path)


def test_mutilated_logs_are_refused_in_a_sentence_or_make_a_sound_trace(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    sources = (
        log(tmp_path, *(row(i % 3, i, T0 + i * 7) for i in range(12))).read_bytes(),
        jsonl(tmp_path, *(request(i * 10, 513 + i, [0, i]) for i in range(12))).read_bytes(),
    )
    scraps = [
        b"\n",
        b"\r",
        b'"',
        b",",
        b"\0",
        b"\xff",
        b"-",
        b"9" * 25,
        b"{",
        b"[",
        b"null",
        b"NaN",
        b" ",
        b"\x1c",
        b"\xc2\x85",
    ]
    path = tmp_path / "mutilated"
    sound = 0
    for _ in range(300):
        for content in sources:
            data = bytearray(content)
            for _ in range(rng.integers(1, 4)):
                at = int(rng.integers(len(data)))
                end = at + int(rng.choice([0, 1, 20]))
                data[at:end] = scraps[rng.integers(len(scraps))]
            path.write_bytes(data)
            said = f"{path}, sound"
            try:
                read_trace(path).validate()
                sound += 1
            except UserError as error:
                said = str(error)
            assert said.startswith(str(path))
            assert "\n" not in said
    assert 0 < sound < 600
