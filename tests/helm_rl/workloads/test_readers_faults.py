"""Faults that other readers shipped (numbers as in their list), and the kind of each: none passes in silence."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from helm_rl.errors import UserError
from helm_rl.workloads.readers import parse_mapping, read_trace, runs, source
from tests.helm_rl.workloads.test_readers import (
    GOOD,
    MS,
    SHARED,
    T0,
    items_of,
    jsonl,
    log,
    needs_shared,
    quantised,
    request,
    row,
    users_of,
)


def write(folder: Path, text: str, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_1_files_and_rows_out_of_order_are_sorted_and_it_is_said(tmp_path: Path) -> None:
    """Rows by user, not by time, as in Taobao's and MovieLens' files (recsys-examples #140)."""
    lines = [f"{user},{item},1,pv,{1511544070 + t}" for user in range(3) for item, t in ((7, 9000), (8, 0))]
    trace = read_trace(write(tmp_path, "\n".join(lines) + "\n"))
    assert trace.meta.source == "taobao"
    assert np.all(np.diff(trace.arrival_ns) >= 0)
    assert [items_of(trace, i) for i in range(6)] == [[8]] * 3 + [[7]] * 3
    assert trace.history_tokens.tolist() == [1, 1, 1, 2, 2, 2]
    assert "sorted by time: 3 of 6 rows came before the one above them" in trace.meta.steps


def test_2_duplicate_rows_have_a_policy_and_a_count(tmp_path: Path) -> None:
    path = log(tmp_path, row(1, 10, T0), row(1, 10, T0), row(1, 11, T0))
    assert read_trace(path).meta.dropped == {"rows that repeat user_id, video_id and time_ms": 1}
    with pytest.raises(
        UserError, match=f"1 rows repeat user_id, video_id and time_ms; the first: 1, 10 at {T0}000000 ns"
    ):
        read_trace(path, strict=True)
    accesses = read_trace(write(tmp_path, "# time, object, size, next_access_vtime\n0, 5, 1, 2\n0, 5, 1, -1\n"))
    assert len(accesses) == 2  # of a cache: two accesses
    assert accesses.meta.dropped == {}


def test_2_a_request_of_many_rows_is_searched_for_repeats(tmp_path: Path) -> None:
    rows = [row(1, i % 70, T0) for i in range(100)]
    trace = read_trace(log(tmp_path, *rows))
    assert items_of(trace, 0) == list(range(70))
    assert list(trace.meta.dropped.values()) == [30]


@pytest.mark.parametrize("packed", [False, True])
def test_3_times_keep_every_digit(tmp_path: Path, packed: bool) -> None:
    """RecBole #1653."""
    times = [881250949, 881250950, 881250951, 1649675512.388, 1700000000.123456789]
    texts = ["881250949", "881250950", "881250951", "1649675512.388", "1700000000.123456789"]
    text = "user_id:token\titem_id:token\ttimestamp:float\n" + "".join(f"u\t{i}\t{t}\n" for i, t in enumerate(texts))
    path = tmp_path / "ml.inter"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    trace = read_trace(path, requests="row")
    base = 881250949 * 10**9
    assert trace.arrival_ns.tolist() == [0, 10**9, 2 * 10**9, 1649675512388000000 - base, 1700000000123456789 - base]
    assert len(times) == len(trace)


def test_4_ids_of_64_bits_and_text_are_exact(tmp_path: Path) -> None:
    """dynamo #12046, LMCache #2932."""
    trace = read_trace(jsonl(tmp_path, request(0, 1025, [1, 4294967297, 13053225291711363978])))
    assert items_of(trace, 0) == [1, 4294967297, 13053225291711363978]
    text = "time,user,item\n0,a,1\n1,A,01\n2,13053225291711363978,1.0\n3,á,x\n"
    mapped = read_trace(write(tmp_path, text), mapping=parse_mapping("time=time:s,user=user,item=item"))
    assert users_of(mapped) == ["a", "A", "13053225291711363978", "á"]
    assert [items_of(mapped, i)[0] for i in range(4)] == ["1", "01", "1.0", "x"]


def test_5_negative_times_and_a_row_months_away(tmp_path: Path) -> None:
    """AmazonReviews2023 #29."""
    rows = "".join(f"U{i},B{i},5.0,{1_600_000_000_000 + i * 1000}\n" for i in range(200))
    text = f"user_id,parent_asin,rating,timestamp\nX,B,1.0,-62135596800\n{rows}Y,B,1.0,{1_600_000_000_000 + 10**10}\n"
    trace = read_trace(write(tmp_path, text))
    assert trace.meta.source == "amazon-2023"
    assert trace.meta.dropped == {"timestamp before 1970 (first: log.csv, line 2)": 1}
    (said,) = [step for step in trace.meta.steps if "days off" in step]
    assert said.startswith("the last 1 of 201 lie 115.7 days off (--end-s")
    with pytest.raises(UserError, match="line 2, field timestamp: '-62135596800' lies before 1970"):
        read_trace(tmp_path / "log.csv", strict=True)


def test_6_a_header_is_no_row_and_a_first_row_no_header(tmp_path: Path) -> None:
    """Surprise #41, CacheLib #55."""
    with pytest.raises(UserError, match="line 1: a header is missing, the first line is data"):
        read_trace(log(tmp_path, *GOOD, header=row(0, 0, T0)))
    rows = [f"{i}\t{i}\t5\t{881250949 + i}" for i in range(20)]
    assert len(read_trace(write(tmp_path, "\n".join(rows), "u.data"))) == 20
    path = write(tmp_path, "\n".join(["user\titem\trating\ttime", *rows]), "u.data")
    with pytest.raises(UserError, match=r"line 1: a header \(user.*\), where a movielens-100k log has none"):
        read_trace(path)


@pytest.mark.parametrize("separator", [";", "\t", "|", "::"])
def test_7_another_separator_is_named(tmp_path: Path, separator: str) -> None:
    """RecBole #2000."""
    path = write(tmp_path, log(tmp_path, *GOOD).read_text().replace(",", separator))
    with pytest.raises(UserError, match=r"line 1: columns are separated by .*; a kuairand log has ','"):
        read_trace(path)
    with pytest.raises(UserError, match="line 1: columns are separated by"):
        read_trace(path, "kuairand")
    with pytest.raises(UserError, match=r"line 1: columns are separated by .*, not ','"):
        read_trace(write(tmp_path, separator.join("12345") + "\n"), "taobao")


def test_8_a_missing_time_column_or_time_is_never_zero(tmp_path: Path) -> None:
    """RecBole #1134."""
    path = write(tmp_path, "user_id:token\titem_id:token\nu\ti\n", "x.inter")
    with pytest.raises(UserError, match=r"line 1: column timestamp:float is missing .*"):
        read_trace(path)
    trace = read_trace(log(tmp_path, *GOOD, row(4, 40, "")))
    assert trace.meta.origin_ns == T0 * MS
    assert trace.meta.dropped == {"time_ms empty (first: log.csv, line 5)": 1}
    with pytest.raises(UserError, match="needs --arrivals RATE"):
        read_trace(write(tmp_path, "key,op,size,op_count,key_size\n5,GET,1,1,1\n"))


@pytest.mark.parametrize(("cell", "cause"), [("-", "not a whole number"), ("NA", "not a whole number"), ("", "empty")])
def test_9_cells_that_are_no_numbers_are_counted_by_cause(tmp_path: Path, cell: str, cause: str) -> None:
    """RecBole #2125."""
    path = log(tmp_path, *GOOD, row(cell, 1, T0), row(4, cell, T0), row(5, cell, T0), row(6, 1, T0))
    trace = read_trace(path)
    assert trace.meta.dropped == {
        f"user_id {cause} (first: log.csv, line 5)": 1,
        f"video_id {cause} (first: log.csv, line 6)": 2,
    }
    assert len(trace) == 4
    with pytest.raises(UserError, match="line 5, field user_id: "):
        read_trace(path, strict=True)


def test_9_more_than_half_of_the_rows_bad_is_no_log(tmp_path: Path) -> None:
    path = log(tmp_path, *GOOD, *(row("x", 1, T0) for _ in range(4)))
    with pytest.raises(
        UserError, match=r"line 5, field user_id: 'x' is not a whole number; 4 of its 7 rows cannot be read"
    ):
        read_trace(path)


def test_10_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dlrm #38: what is in memory at once, beside dictionaries, is one run and a few pieces."""
    monkeypatch.setattr(runs, "RUN_ROWS", 2000)
    monkeypatch.setattr(runs, "PIECE_ROWS", 500)
    monkeypatch.setattr(runs, "_MARK", 100)
    monkeypatch.setattr(source, "CHUNK_BYTES", 1 << 14)
    largest = []
    joined = runs._joined
    monkeypatch.setattr(
        runs, "_joined", lambda parts: (largest.append(sum(part.time_ns.size for part in parts)), joined(parts))[1]
    )
    rng = np.random.default_rng(3)
    path = log(tmp_path, *(row(i % 50, i % 90, T0 + int(t)) for i, t in enumerate(rng.integers(0, 10**9, 30_000))))
    trace = read_trace(path)
    assert trace.item_values.size == 30_000
    assert max(largest) < 3000


def test_11_quantised_arrivals_are_named_and_spread_on_demand(tmp_path: Path) -> None:
    path = quantised(tmp_path)
    assert any(step.startswith("arrivals come in steps of") for step in read_trace(path).meta.steps)
    spread = read_trace(path, spread=True)
    assert any(step.startswith("arrivals spread evenly over") for step in spread.meta.steps)
    assert np.unique(spread.arrival_ns).size == len(spread)
    even = [f"{i},ChatGPT,10,5,15,Conversation log" for i in range(150)]
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    made_up = read_trace(write(tmp_path, "\n".join([header, *even])))
    assert "all arrivals are 1 s apart: are these times recorded, or made up?" in made_up.meta.steps


def test_12_ranges_are_checked_not_names(tmp_path: Path) -> None:
    """A headline header over another data set: its times are seconds where the real one's are milliseconds."""
    path = log(tmp_path, row(1, 10, 1649675512), row(2, 20, 1649675513))
    with pytest.raises(UserError, match="its names are kuairand's, but time_ms looks like s, not ms"):
        read_trace(path)
    text = "userId,movieId,rating,timestamp\n1,2,3.5,1112486027000\n"
    with pytest.raises(
        UserError, match=r"field timestamp: .* is outside 146 years, if it is in seconds; 1 of its 1 rows"
    ):
        read_trace(write(tmp_path, text))
    chinese = "用户,商品,类目,行为,时间,a,b,c,d,e\n" + "1,2,3,pv,1511544070,1,1,1,1,1\n" * 3
    with pytest.raises(UserError, match="is the start of no format known"):
        read_trace(write(tmp_path, chinese, "UserBehavior.csv"))


# Packed files


def pack(data: bytes, kind: str) -> bytes:
    found: bytes = gzip.compress(data) if kind == "gzip" else pa.Codec("zstd").compress(data, asbytes=True)
    return found


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_packed_files_of_several_frames_are_read_and_cut_off_ones_named(tmp_path: Path, kind: str) -> None:
    path = log(tmp_path, *(row(i, i, T0 + i) for i in range(500)))
    expected = read_trace(path).hash()
    data = path.read_bytes()
    path.write_bytes(pack(data[:9000], kind) + pack(data[9000:], kind))
    assert read_trace(path).hash() == expected
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(UserError, match=rf"log.csv is cut off: its {kind} data cannot be unpacked to their end"):
        read_trace(path)
    path.write_bytes(whole + b"junk that is no frame")
    with pytest.raises(UserError, match=r"log\.csv is (damaged|cut off)"):
        read_trace(path)
    middle = bytearray(whole)
    middle[len(whole) // 4] ^= 0xFF
    path.write_bytes(middle)
    with pytest.raises(UserError, match=r"log\.csv"):
        read_trace(path)


def test_archives_are_named(tmp_path: Path) -> None:
    tar = bytearray(1024)
    tar[257:262] = b"ustar"
    tar[:8] = b"log.csv\0"
    for content, said in ((gzip.compress(bytes(tar)), "is a tar archive"), (b"PK\x03\x04xx", "is a zip archive")):
        path = tmp_path / "log"
        path.write_bytes(content)
        with pytest.raises(UserError, match=said):
            read_trace(path)


@needs_shared
def test_the_samples_pass_strictly() -> None:
    for name in (
        "azure_llm_2023/AzureLLMInferenceTrace_conv.csv",
        "ragpulse/0_trace.jsonl",
        "libcachesim/cloudPhysicsIO.oracleGeneral.bin",
        "twitter_cluster52/twitter_cluster52_head.csv",
    ):
        assert read_trace(SHARED / name, strict=True).meta.dropped == {}
