"""Logs that once made a crash, an unsound trace or a wrong one: wide rows, missing ids, changing units, odd types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helm_rl.errors import UserError
from helm_rl.workloads.readers import jsonl, parquet, parse_mapping, read_trace, runs
from helm_rl.workloads.trace import StringIds, Trace, UnsoundTraceError
from tests.helm_rl.workloads.test_readers import T0, log, row

PLAIN = "time=t:s,user=u,item=i"


def lines(folder: Path, *objects: object, name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in objects))
    return path


def table(folder: Path, columns: dict[str, Any], name: str = "log.parquet") -> Path:
    path = folder / name
    pq.write_table(pa.table(columns), path)
    return path


def read(path: Path | list[Path], mapping: str = PLAIN, **options: Any) -> Trace:
    return read_trace(path, mapping=parse_mapping(mapping), **options)


def dropped(trace: Trace) -> dict[str, int]:
    return {cause.split(" (first")[0]: count for cause, count in trace.meta.dropped.items()}


def users(trace: Trace) -> list[str]:
    assert isinstance(trace.user_ids, StringIds)
    return trace.user_ids.tolist()


def test_a_batch_of_lines_is_cut_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    pack = jsonl._pack
    monkeypatch.setattr(jsonl, "_pack", lambda texts: packed.append(sum(map(len, texts))) or pack(texts))
    path = lines(tmp_path, *({"t": i, "u": f"{i:06}" * 50_000, "i": 1} for i in range(120)))
    trace = read(path)
    assert len(trace) == trace.meta.users == 120
    assert max(packed) < 20 << 20


def test_texts_that_many_rows_share_are_held_once(tmp_path: Path) -> None:
    texts = pa.DictionaryArray.from_arrays(np.zeros(20_000, np.int32), ["x" * 40_000]).cast(pa.string())
    path = table(tmp_path, {"t": np.arange(20_000), "u": texts, "i": np.arange(20_000)})
    trace = read(path)
    assert users(trace) == ["x" * 40_000]


def test_lists_are_read_by_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_VALUES_AT_A_TIME", 1000)
    path = table(tmp_path, {"t": np.arange(50), "u": np.arange(50), "i": [[0] * 400] * 50})
    with pq.ParquetFile(path) as file:
        assert parquet._batch_rows(file, ["t", "u", "i"]) == 2
    assert int(read(path).history_tokens.sum()) == 50 * 400


@pytest.mark.parametrize("text", ["user=@item", "user=@second", "user=@foo,item=x", "item=@i", "tokens=@item"])
def test_marks_of_ours_are_no_columns(text: str) -> None:
    with pytest.raises(UserError, match="cannot begin with @"):
        parse_mapping(f"time=t,{text}")


def test_rows_without_items_are_dropped_where_items_make_the_history(tmp_path: Path) -> None:
    rows = [{"t": 0, "u": 1, "i": []}, {"t": 1, "u": 1, "i": [5]}, {"t": 2, "u": 1, "i": [6, 7]}]
    made = [read(lines(tmp_path, *rows)), read(table(tmp_path, {k: [r[k] for r in rows] for k in "tui"}))]
    for trace in made:
        assert dropped(trace) == {"no items": 1}
        assert trace.history_tokens.tolist() == [1, 3]


def test_lone_surrogates_are_no_ids(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        '{"t": 0, "u": "\\ud800", "i": "a", "c": "x"}',
        '{"t": 1, "u": "v", "i": "\\udfff", "c": "x"}',
        '{"t": 2, "u": "v", "i": "a", "c": "\\ud800"}',
        *({"t": 3 + k, "u": "\U0001f600", "i": "a", "c": "x"} for k in range(4)),
    )
    trace = read(path, PLAIN + ",tenant=c")
    assert dropped(trace) == {"u is not text": 1, "i is not text": 1, "c is not text": 1}
    trace.save(tmp_path / "t.parquet")
    assert users(Trace.load(tmp_path / "t.parquet")) == ["\U0001f600"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_blocks_are_checked_in_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    columns = {"t": [0, 1, 2], "u": [1, 1, 1], "i": [5, 6, 7], "n": [16, 17, 3]}
    path = table(tmp_path, columns)
    if kind == "csv":
        path = tmp_path / "log.csv"
        path.write_text("t,u,i,n\n" + "".join(f"{t},1,{i},{n}\n" for t, _, i, n in zip(*columns.values(), strict=True)))
    trace = read(path, PLAIN + ",tokens=n,blocks=16", requests="row")
    assert dropped(trace) == {"i does not fit n": 1}
    assert trace.history_tokens.tolist() == [16, 3]


def test_the_unit_is_checked_in_every_file_and_piece(tmp_path: Path) -> None:
    first = log(tmp_path, *(row(1, i, T0 + i) for i in range(9)), name="log_standard_1.csv")
    second = log(tmp_path, *(row(1, i, T0 // 1000 + i) for i in range(9)), name="log_standard_2.csv")
    for paths in ([first, second], [second, first]):
        with pytest.raises(UserError, match="looks like s"):
            read_trace(paths)
    mixed = log(tmp_path, *(row(1, i, T0 + i) for i in range(9)), row(2, 1, T0 // 1000))
    trace = read_trace(mixed)
    assert dropped(trace) == {"time_ms in another unit": 1}
    assert trace.meta.origin_ns == T0 * 10**6


def test_a_unit_told_by_the_first_piece_holds_for_all(tmp_path: Path) -> None:
    first = lines(tmp_path, *({"t": T0 + i, "u": 1, "i": i} for i in range(5)), name="a.jsonl")
    second = lines(tmp_path, *({"t": T0 // 1000 + i, "u": 1, "i": i} for i in range(5)), name="b.jsonl")
    with pytest.raises(UserError, match="t is in ms at first, and looks like s further on"):
        read([first, second], "time=t,user=u,item=i")


def test_a_column_of_timestamps_says_nothing_of_the_next_file(tmp_path: Path) -> None:
    stamps = pa.array([T0 * 1000], pa.timestamp("us"))
    first = table(tmp_path, {"t": stamps, "u": [1], "i": [1]}, "a.parquet")
    second = table(tmp_path, {"t": [T0 // 1000 + 5], "u": [1], "i": [2]}, "b.parquet")
    trace = read([first, second])
    assert trace.arrival_ns.tolist() == [0, (T0 // 1000 + 5) * 10**9 - T0 * 10**6]


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(
        pa.Table.from_arrays([pa.array([0]), pa.array([1]), pa.array([2]), pa.array([3])], list("tuui")), path
    )
    with pytest.raises(UserError, match="column u is there 2 times"):
        read(path)


def test_floats_in_parquet_are_exact(tmp_path: Path) -> None:
    times = np.array([1649675512.388, 1649675999.0, 1649676999.0], np.float32)
    path = table(tmp_path, {"t": times, "u": [7.0, float("nan"), 2.5], "i": [1.0, 2.0, 2.0**60]})
    trace = read(path)
    assert dropped(trace) == {"u empty": 1}
    assert users(trace) == ["2.5", "7"]
    assert np.asarray(trace.item_ids).tolist() == [1, 2**60]
    assert trace.meta.origin_ns == int(times[0]) * 10**9
    assert any("float32" in step for step in trace.meta.steps)


def test_ids_of_text_keep_their_blanks(tmp_path: Path) -> None:
    path = lines(tmp_path, *({"t": i, "u": u, "i": 1} for i, u in enumerate((" 7", "7 ", "7", 7, "x"))))
    trace = read(path)
    assert users(trace) == [" 7", "7", "7 ", "x"]
    assert "u has numbers and text; a number and the text of its digits are one id" in trace.meta.steps


def test_a_key_that_is_there_twice_is_no_request(tmp_path: Path) -> None:
    path = lines(tmp_path, '{"t": 0, "u": 1, "u": 2, "i": 1}', *({"t": i, "u": 1, "i": 1} for i in range(3)))
    assert dropped(read(path)) == {"a key given twice": 1}
    with pytest.raises(UserError, match="line 1: key 'u' is given twice"):
        read(path, strict=True)


@pytest.mark.parametrize("word", ["NA", "NULL", "null", "NaN", "None", "\\N", ""])
@pytest.mark.parametrize("kind", ["", ":text"])
def test_a_user_that_is_missing_is_dropped(tmp_path: Path, word: str, kind: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"t,u,i\n0,{word},1\n1,5,2\n2,6,NAN\n")
    trace = read(path, f"time=t:s,user=u{kind},item=i")
    assert dropped(trace) == {"u empty": 1}
    assert [str(one) for one in np.asarray(trace.user_ids.tolist() if trace.user_ids is not None else [])] == ["5", "6"]


def test_what_is_written_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a reader had let an empty list through: a request with a history of nothing."""
    monkeypatch.setattr("helm_rl.workloads.readers.tables._NO_ITEMS", 0)
    path = lines(tmp_path, {"t": 0, "u": 1, "i": []}, {"t": 1, "u": 1, "i": [5]})
    with pytest.raises(UnsoundTraceError, match=r"history_tokens\[0\] = 0 is outside"):
        read(path)


def test_wide_rows_are_cut_into_pieces_and_row_groups_by_their_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path, *({"t": 9 - i, "u": i % 3, "i": [i] * 400} for i in range(9)))
    whole = read(path)
    monkeypatch.setattr(runs, "_MARK", 128)
    monkeypatch.setattr(runs, "PIECE_ROWS", 256)
    monkeypatch.setattr(runs, "RUN_ROWS", 300)
    sizes = []
    pieces = runs.Runs.pieces
    monkeypatch.setattr(runs.Runs, "pieces", lambda *a: (sizes.append(part.item.size) or part for part in pieces(*a)))
    assert read(path).hash() == whole.hash()
    assert max(sizes) <= 1200
    monkeypatch.setattr("helm_rl.workloads.trace._GROUP_VALUES", 1000)
    whole.save(tmp_path / "t.parquet")
    assert pq.ParquetFile(tmp_path / "t.parquet").num_row_groups == 5
    assert Trace.load(tmp_path / "t.parquet").hash() == whole.hash()


def test_a_first_line_of_any_length_tells_the_format(tmp_path: Path) -> None:
    request = {"timestamp": 0, "input_length": 512 * 20_000, "output_length": 1, "hash_ids": list(range(20_000))}
    path = lines(tmp_path, request, request | {"timestamp": 5})
    assert path.stat().st_size > 2 * (1 << 16)
    assert read_trace(path).meta.source == "mooncake"


def test_zeros_and_records_of_another_size_are_no_oracle_general(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(2400))
    with pytest.raises(UserError):
        read_trace(path)
    with pytest.raises(UserError, match="every object is 0"):
        read_trace(path, "oracle-general")
    kinds = [("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("op", "<u2"), ("ns", "u1"), ("next", "<i8")]
    records = np.zeros(2400, np.dtype(kinds))
    records["time"], records["object"], records["next"] = np.arange(2400) // 9, np.arange(2400) * 77 + 9, 2**40
    path.write_bytes(records.tobytes())
    with pytest.raises(UserError, match="times decrease at"):
        read_trace(path, "oracle-general")


def test_names_above_numbers_are_a_header(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user_id,item_id\n1,10\n2,11\n")
    with pytest.raises(UserError, match="line 1: a header"):
        read(path, "header=no,user=1,item=2", arrivals=5.0)


def test_blank_first_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("\n  \nt,u,i\n0,1,1\nx,1,2\n1,2,3\n")
    trace = read(path)
    assert dropped(trace) == {"blank lines": 2, "t not a number of seconds": 1}
    assert any("line 5" in cause for cause in trace.meta.dropped)
    with pytest.raises(UserError, match="line 3: column zz is missing"):
        read(path, "time=zz,user=u,item=i")


def test_the_rest_of_a_quoted_cell_on_the_next_line_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text('t,u,i,note\n0,1,1,a\n1,2,2,"one\n2,3,3,two"\n3,4,4,b\n4,5,5,"c"\n')
    trace = read(path)
    assert dropped(trace) == {"a quoted cell that does not end on its line": 2}
    path.write_text('note,t,u,i\na,0,1,1\n"one\ntwo",1,2,2\n"x\n\ny",2,3,3\nb,3,4,4\nc,3,5,4\nd,3,6,4\ne,3,7,4\n')
    trace = read(path)
    assert np.asarray(trace.user_ids).tolist() == [1, 4, 5, 6, 7]


def test_zstd_may_begin_with_a_frame_to_skip(tmp_path: Path) -> None:
    packed = pa.compress(b"t,u,i\n0,1,1\n1,2,2\n", codec="zstd", asbytes=True)
    path = tmp_path / "log.csv.zst"
    path.write_bytes(b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello" + packed)
    assert len(read(path)) == 2


def test_a_clock_of_whole_seconds_is_a_step(tmp_path: Path) -> None:
    path = tmp_path / "cluster1.csv"
    path.write_text("".join(f"{i // 50},key{i},4,10,{i % 60},get,0\n" for i in range(1000)))
    trace = read_trace(path, "twitter", spread=True)
    assert "arrivals spread evenly over 1 s each (seed 1)" in trace.meta.steps
    assert np.unique(trace.arrival_ns).size > 900


def test_rows_of_content_blocks_are_not_joined(tmp_path: Path) -> None:
    path = lines(tmp_path, *({"t": 1, "u": 1, "i": [5, 6], "n": 20} for _ in range(3)))
    trace = read(path, PLAIN + ",tokens=n,blocks=16")
    assert np.diff(trace.item_offsets).tolist() == [2, 2, 2]
    with pytest.raises(UserError, match="requests = session-gap joins rows"):
        read(path, PLAIN + ",tokens=n,blocks=16", requests="session-gap")


MIXED = "t,u,i,n,c\n" + "1,a,5,3,x\n1,a,6,9,y\n1,a,7,1,x\n" + "2,b,6,1,z\n2,b,7,1,z\n"


@pytest.mark.parametrize("requests", ["same-time", "session-gap"])
def test_a_request_of_rows_that_differ_has_the_longest_history_and_says_so(tmp_path: Path, requests: str) -> None:
    (tmp_path / "log.csv").write_text(MIXED)
    trace = read(tmp_path / "log.csv", PLAIN + ",tokens=n,tenant=c", requests=requests)
    assert trace.history_tokens.tolist() == [9, 2]
    assert trace.tenant.tolist() == [0, 2]
    assert {
        "requests whose rows differ in n, the most taken: 1",
        "n below the items of the request, raised to them: 1",
        "requests whose rows differ in c, that of the first taken: 1",
    } <= set(trace.meta.steps)
    alike = read(tmp_path / "log.csv", PLAIN + ",tokens=n,tenant=c", requests="row")
    assert alike.history_tokens.tolist() == [3, 9, 1, 1, 1]
    assert not [step for step in alike.meta.steps if "differ" in step or "raised" in step]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_header_further_down_is_no_row(tmp_path: Path, mark: str, newline: str) -> None:
    """Files joined by cat; without times, nothing but the line itself tells that it is none."""
    once = "key,op,size,op_count,key_size\n11,GET,3,1,4\nkey,GET,3,1,4\n"
    text = (once + mark + once + mark + "key,op,size,op_count,key_size").replace("\n", newline)
    (tmp_path / "kvcache.csv").write_bytes(text.encode())
    trace = read_trace(tmp_path / "kvcache.csv", arrivals=5.0)
    assert isinstance(trace.item_ids, StringIds)
    assert (len(trace), trace.item_ids.tolist()) == (4, ["11", "key"])
    assert dropped(trace) == {"the header again": 2}
    with pytest.raises(UserError, match="line 4: the header again"):
        read_trace(tmp_path / "kvcache.csv", arrivals=5.0, strict=True)


def test_words_for_no_value_are_no_ids_of_items_or_users(tmp_path: Path) -> None:
    rows = "".join(f"{t},{t},{t + 100}\n" for t in range(20))
    (tmp_path / "log.csv").write_text("t,u,i\n" + rows + "20,20,NA\n21,21,-\n22,-,122\n23,null,123\n")
    trace = read(tmp_path / "log.csv")
    assert dropped(trace) == {"i empty": 2, "u empty": 2}
    assert trace.item_ids is not None
    assert trace.item_ids[:].tolist() == list(range(100, 120))
    kept = read(tmp_path / "log.csv", "time=t:s,user=u:text,item=i:text")
    assert isinstance(kept.item_ids, StringIds)
    assert {"NA", "-"} <= set(kept.item_ids.tolist())


def test_floats_of_parquet_have_all_their_digits(tmp_path: Path) -> None:
    times = [1684742123456.0, 1684742123457.0, 1684742123458.0]
    trace = read(table(tmp_path, {"t": times, "u": [1, 2, 3], "i": [1, 2, 3]}), "time=t:ms,user=u,item=i")
    assert (trace.arrival_ns + trace.meta.origin_ns).tolist() == [round(time) * 10**6 for time in times]
    assert not [step for step in trace.meta.steps if "exponent" in step]
    (tmp_path / "log.csv").write_text("t,u,i\n" + "".join(f"1.684742{k}e+12,{k},1\n" for k in range(3)))
    assert [step for step in read(tmp_path / "log.csv", "time=t:ms,user=u,item=i").meta.steps if "exponent" in step]


def test_an_exponent_tells_how_coarse_a_clock_is(tmp_path: Path) -> None:
    """Requests at irregular instants of a clock whose last digit is .1 s: two in a row share one."""
    rng = np.random.default_rng(1)
    ticks = np.repeat(np.cumsum(rng.integers(1, 9, 60)), 3)
    (tmp_path / "log.csv").write_text("t,u,i\n" + "".join(f"{t}e2,{k},1\n" for k, t in enumerate(ticks)))
    trace = read(tmp_path / "log.csv", "time=t:ms,user=u,item=i")
    assert any(step.startswith("arrivals come in steps of 0.1 s") for step in trace.meta.steps)


def test_lists_that_repeat_are_counted_and_have_no_empty_id(tmp_path: Path) -> None:
    rows = [{"t": 1, "u": "a", "i": [1, 2]}, {"t": 1, "u": "a", "i": [1, 2]}, {"t": 2, "u": "b", "i": [3]}]
    trace = read(lines(tmp_path, *rows))
    assert "lines that repeat an earlier one exactly, kept as rows: 1" in trace.meta.steps
    single = read(lines(tmp_path, *({"t": 1, "u": "a", "i": [1]} for _ in range(2))))
    assert dropped(single) == {"rows that repeat u, i and t": 1}
    assert not [step for step in single.meta.steps if "repeat" in step]
    with pytest.raises(UserError, match="column i has an empty text among its ids"):
        read(table(tmp_path, {"t": [1, 2], "u": [1, 2], "i": [["a", ""], ["b"]]}))


@pytest.mark.parametrize("mark", ["# ", "#", ""])
def test_a_header_may_lack_its_mark(tmp_path: Path, mark: str) -> None:
    (tmp_path / "log").write_text(f"{mark}time, object, size, next_access_vtime\n0, 5, 2, 3\n1, 6, 2, -1\n")
    trace = read_trace(tmp_path / "log")
    assert (trace.meta.source, len(trace)) == ("libcachesim-csv", 2)


def test_without_times_no_rows_are_joined_or_cut_by_them(tmp_path: Path) -> None:
    """RecBole's rows make sessions; their numbers, in place of times, would make one session of a user's whole log."""
    path = tmp_path / "log.inter"
    path.write_text("user_id:token\titem_id:token\trating:float\n1\t10\t5\n1\t11\t5\n2\t10\t3\n1\t12\t4\n")
    trace = read_trace(path, arrivals=5.0)
    assert len(trace) == 4
    assert trace.history_tokens.tolist() == [1, 2, 1, 3]
    assert "every row is a request: 4" in trace.meta.steps
    with pytest.raises(UserError, match="joins rows by their times, and the log has none"):
        read_trace(path, arrivals=5.0, requests="session-gap")
    with pytest.raises(UserError, match="start-s and end-s need times"):
        read_trace(path, arrivals=5.0, end_s=1.0)


def test_chains_of_chats_that_are_cut_are_counted(tmp_path: Path) -> None:
    def chat(number: object, parent: object, time: float) -> dict[str, object]:
        return {"chat_id": number, "parent_chat_id": parent, "timestamp": time, "input_length": 9, "hash_ids": [1]}

    rows = [chat(1, -1, 1.0), chat(2, 1, 2.0), chat("3", "2", 3.0)]
    trace = read_trace(lines(tmp_path, *rows), "qwen-bailian")
    assert trace.user.tolist() == [0, 0, 0]
    assert not [step for step in trace.meta.steps if "cut" in step]
    late = read_trace(lines(tmp_path, rows[2], *rows[:2]), "qwen-bailian")
    assert late.user.tolist() == [0, 0, 1]
    assert "chats that came after one which follows them, where its chain is cut: 1" in late.meta.steps
