"""Every format by a small log of its own: told by its content, and its columns in their places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helm_rl.errors import UserError
from helm_rl.workloads.convert import write_trace
from helm_rl.workloads.readers import FORMATS, ReadOptions, detect_format, parse_mapping, read_trace
from helm_rl.workloads.readers.oracle import RECORD
from helm_rl.workloads.readers.presets import PRESETS
from helm_rl.workloads.trace import CANDIDATES, Ids, StringIds, Trace
from tests.helm_rl.workloads.test_readers import MS, T0, jsonl, log, request, row

S = 10**9
ASIN, REVIEWER = "B00005QJE6", "A1RI5RG70PBMP5"


def text(*lines: str) -> bytes:
    return ("\n".join(lines) + "\n").encode()


# Format, content, arrivals in ns, users and items by their ids.
LOGS: dict[str, tuple[bytes, list[int], list[Any], list[list[Any]]]] = {
    "kuairec": (
        text(
            "user_id,video_id,play_duration,video_duration,time,date,timestamp,watch_ratio",
            "0,5,1,2,2020-07-05 00:08:23,20200705,1593878903.438,0.5",
            "0,6,1,2,2020-07-05 00:08:24,20200705,1593878904.0,0.5",
        ),
        [0, 562_000_000],
        [0, 0],
        [[5], [6]],
    ),
    "kuaisar": (
        text("user_id,item_id,timestamp,follow", "1,5,1.684742e+12,0", "2,6,1684742000500,0"),
        [0, 500_000_000],
        [1, 2],
        [[5], [6]],
    ),
    "azure": (
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-05-10 00:00:00.009930+00:00,374,44\r\n"
        b"2024-05-10 00:00:01+00:00,3,1\r\n2024-05-10 00:00:01.5000001,3,1",
        [0, 990_070_000, 1_490_070_100],
        [0, 1, 2],
        [[], [], []],
    ),
    "burstgpt": (
        text(
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "19440110.0,7,0.5,ChatGPT,472,18,490,Conversation log",
            "19440111.25,,0.5,GPT-4,5,0,5,API log",
            "19440112.0,7,0.5,ChatGPT,9,18,27,Conversation log",
        ),
        [0, 1_250_000_000, 2 * S],
        ["7", "(row 2)", "7"],
        [[], [], []],
    ),
    "libcachesim-csv": (
        text("# time, object, size, next_access_vtime", "0, 13053225291711363978, 737, 3", "1, 5, 1, 99", "1, 7, 1, 9"),
        [0, S, S],
        [13053225291711363978, 5, 7],
        [[13053225291711363978], [5], [7]],
    ),
    "cloudphysics": (
        text("version,time,op,size,lbn", "1,5633898,2a,512,42932745", "1,5633899,28,512,9"),
        [0, S],
        [42932745, 9],
        [[42932745], [9]],
    ),
    "twitter": (
        text("0,ns:a,b,4,10,1,get,0", "0,ns:c,4,10,2,set,300", "1,ns:a,b,4,10,1,gets,0"),
        [0, 0, S],
        [1, 2, 1],
        [["ns:a,b"], ["ns:c"], ["ns:a,b"]],
    ),
    "meta-kvcache": (
        text("op_time,key,key_size,op,op_count,size,cache_hits,ttl", "5,a0ff,83,GET,1,62,1,0", "6,12,83,GET,1,62,1,0"),
        [0, S],
        ["a0ff", "12"],
        [["a0ff"], ["12"]],
    ),
    "taobao": (
        text("1,10,100,pv,1511544070", "1,11,100,buy,1511545070", "2,10,100,cart,1511544071", "1,12,1,pv,1511546871"),
        [0, 999 * S, 2800 * S],
        [2, 1, 1],
        [[10], [10, 11], [12]],
    ),
    "movielens-100k": (text("196\t242\t3\t881250949", "186\t302\t3\t881250950"), [0, S], [196, 186], [[242], [302]]),
    "movielens-1m": (text("1::1193::5::978300760", "1::661::3.5::978300761"), [0], [1], [[1193, 661]]),
    "movielens": (text("userId,movieId,rating,timestamp", "1,2,3.5,1112486027"), [0], [1], [[2]]),
    "amazon-2014": (text(f"{REVIEWER},{ASIN},5.0,1400457600"), [0], [REVIEWER], [[ASIN]]),
    "amazon-2018": (text(f"{ASIN},{REVIEWER},5.0,1004918400"), [0], [REVIEWER], [[ASIN]]),
    "amazon-2023": (
        text("user_id,parent_asin,rating,timestamp", f"{REVIEWER},{ASIN},5.0,1588687728923"),
        [0],
        [REVIEWER],
        [[ASIN]],
    ),
    "recbole": (
        text("user_id:token\titem_id:token\trating:float\ttimestamp:float", "196\tx\t3.0\t881250949.0"),
        [0],
        [196],
        [["x"]],
    ),
    "recflow": (
        text(
            "request_id,user_id,request_timestamp,device_id,video_id",
            "9,1,1704067200000,5,10",
            "8,1,1704067200000,5,12",
            "9,1,1704067200000,5,11",
        ),
        [0, 0],
        [1, 1],
        [[12], [10, 11]],
    ),
    "mooncake": (text(request(0, 513, [0, 7]), request(3000, 1, [5])), [0, 3 * S], [7, 5], [[0, 7], [5]]),
    "ragpulse": (
        text(
            json.dumps(
                {
                    "timestamp": "82",
                    "input_length": 3112,
                    "output_length": 1,
                    "hash_ids": {"sys_prompt": [1], "passages_ids": [7398, 7370], "history": []},
                    "session_id": "17-af",
                }
            ),
            json.dumps(
                {
                    "timestamp": "83",
                    "input_length": 5,
                    "output_length": 1,
                    "hash_ids": {"sys_prompt": [1], "passages_ids": []},
                    "session_id": "18-bq",
                }
            ),
        ),
        [0, S],
        ["17-af", "18-bq"],
        [[7398, 7370], []],
    ),
    "qwen-bailian": (
        text(
            *(
                json.dumps(
                    {
                        "chat_id": chat,
                        "parent_chat_id": parent,
                        "timestamp": time,
                        "input_length": 20,
                        "output_length": 1,
                        "type": "text",
                        "turn": 1,
                        "hash_ids": [1089, chat],
                    }
                )
                for chat, parent, time in ((159, -1, 61.114), (160, 159, 62.5), (161, 160, 63.0), (162, 99, 64.0))
            )
        ),
        [0, 1_386_000_000, 1_886_000_000, 2_886_000_000],
        [159, 159, 159, 99],
        [[1089, 159], [1089, 160], [1089, 161], [1089, 162]],
    ),
}


def ids(book: Ids | None, codes: Any) -> list[Any]:
    return list(codes.tolist()) if book is None else list(book[codes])


def seen(trace: Trace) -> tuple[list[int], list[Any], list[list[Any]]]:
    pieces = np.split(trace.item_values, trace.item_offsets[1:-1])
    return trace.arrival_ns.tolist(), ids(trace.user_ids, trace.user), [ids(trace.item_ids, piece) for piece in pieces]


@pytest.mark.parametrize("name", LOGS)
def test_a_log_of_each_format(tmp_path: Path, name: str) -> None:
    content, arrivals, users, items = LOGS[name]
    path = tmp_path / "some.log"  # the name tells nothing
    path.write_bytes(content)
    assert detect_format(path) == name
    trace = read_trace(path, strict=True)
    assert trace.meta.source == name
    assert seen(trace) == (arrivals, users, items)
    assert read_trace(path, name).hash() == trace.hash()


def yambda(folder: Path, **more: Any) -> Path:
    table = {
        "uid": np.array([100, 100, 200], np.uint32),
        "item_id": np.array([7, 8, 7], np.uint32),
        "timestamp": np.array([5, 5, 39420], np.uint32),
        "is_organic": np.array([1, 0, 1], np.uint8),
    }
    pq.write_table(pa.table(table | more), folder / "listens.parquet")
    return folder / "listens.parquet"


def test_yambda_is_parquet(tmp_path: Path) -> None:
    path = yambda(tmp_path)
    assert detect_format(path) == "yambda"
    trace = read_trace(path)
    assert seen(trace) == ([0, 39415 * S], [100, 200], [[7, 8], [7]])
    assert trace.tenant.tolist() == [1, 1]
    with pytest.raises(UserError, match=r"column uid holds double, not|field uid"):
        read_trace(yambda(tmp_path, uid=[1.5, 2.5, 3.5]), "yambda")
    (tmp_path / "cut.parquet").write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match="is damaged or not a whole Parquet file"):
        read_trace(tmp_path / "cut.parquet")


def test_oracle_general_plain_and_packed(tmp_path: Path) -> None:
    records = np.zeros(4, RECORD)
    records["time"] = [0, 0, 1, 4]
    records["object"] = [2**64 - 1, 5, 2**64 - 1, 9]
    records["next"] = [3, -1, -1, 2**63 - 1]
    path = tmp_path / "t.oracleGeneral.bin"
    path.write_bytes(records.tobytes())
    assert detect_format(path) == "oracle-general"
    trace = read_trace(path, strict=True)
    assert seen(trace) == ([0, 0, S, 4 * S], [2**64 - 1, 5, 2**64 - 1, 9], [[2**64 - 1], [5], [2**64 - 1], [9]])
    packed = tmp_path / "t.zst"
    codec = pa.Codec("zstd")
    data = records.tobytes()
    packed.write_bytes(codec.compress(data[:50], asbytes=True) + codec.compress(data[50:], asbytes=True))
    np.testing.assert_array_equal(read_trace(packed).item_values, trace.item_values)
    path.write_bytes(data[:-3])
    with pytest.raises(UserError, match="is cut off or no oracleGeneral trace: 21 bytes after 3 records"):
        read_trace(path)
    path.write_bytes(np.random.default_rng(0).bytes(2400))
    with pytest.raises(UserError, match="not text; a log is CSV, JSON Lines, Parquet or oracleGeneral"):
        read_trace(path)


def test_tenrec_has_no_times_and_needs_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "QB-video.csv"
    path.write_bytes(
        text(
            "user_id,item_id,click,follow,like,share,video_category,watching_times",
            *(f"{i % 2},{i},1,0,0,0,1,1" for i in range(2000)),
        )
    )
    with pytest.raises(UserError, match="a log without times needs --arrivals RATE"):
        read_trace(path)
    trace = read_trace(path, arrivals=50.0)
    assert trace.user.tolist() == [0, 1] * 1000
    gaps = np.diff(trace.arrival_ns) / S
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.15)
    assert "arrivals drawn, in the log's order: Poisson, 50/s (seed 1)" in trace.meta.steps
    assert read_trace(path, arrivals=50.0).hash() == trace.hash() != read_trace(path, arrivals=50.0, seed=2).hash()


def test_every_preset_has_a_log_here() -> None:
    assert set(PRESETS) == {*LOGS, "kuairand", "yambda", "tenrec"}
    assert set(FORMATS) == {*PRESETS, "oracle-general", "generic"}


# The generic reader


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ("time=ts:ms,user=uid,item=vid,tenant=cat", text("uid,vid,ts,cat", "u1,7,1000,b", "u2,8,3500,a")),
        ("time=ts:ms,user=uid,item=vid,tenant=cat", text("uid\tvid\tts\tcat", "u1\t7\t1000\tb", "u2\t8\t3500\ta")),
        ("time=3:ms,user=1,item=2,tenant=4,header=no,separator=space", text("u1 7 1000 b", "u2 8 3500 a")),
        (
            "time=t.ts:ms,user=uid,item=vid,tenant=cat",
            text('{"uid":"u1","vid":7,"t":{"ts":1000},"cat":"b"}', '{"uid":"u2","vid":8,"t":{"ts":3500},"cat":"a"}'),
        ),
    ],
)
def test_a_mapping_reads_what_has_no_preset(tmp_path: Path, given: str, content: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    trace = read_trace(path, mapping=parse_mapping(given))
    assert trace.meta.source == "generic"
    assert seen(trace) == ([0, 2_500_000_000], ["u1", "u2"], [[7], [8]])
    assert trace.tenant.tolist() == [1, 0]
    assert "tenant = cat: 0 = a, 1 = b" in trace.meta.steps or "tenant = 4: 0 = a, 1 = b" in trace.meta.steps


def test_a_mapping_reads_parquet_lists_and_timestamps(tmp_path: Path) -> None:
    table = pa.table(
        {
            "when": pa.array([1_700_000_000_123_457, 1_700_000_000_000_001], pa.timestamp("us")),
            "who": ["a", "b"],
            "what": pa.array([[2**63, 5], []], pa.list_(pa.uint64())),
            "len": [7, 9],
        }
    )
    pq.write_table(table, tmp_path / "m.parquet")
    trace = read_trace(tmp_path / "m.parquet", mapping=parse_mapping("time=when,user=who,item=what,tokens=len"))
    assert seen(trace) == ([0, 123_456_000], ["b", "a"], [[], [2**63, 5]])
    assert trace.history_tokens.tolist() == [9, 7]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("time", "'time' is not KEY=VALUE"),
        ("time=t,colour=red", "'colour=red' is not KEY=VALUE with one of the keys"),
        ("time=t,time=u", "time is given twice"),
        ("time=t,user=u", "a log needs items"),
        ("time=t,item=i,header=maybe", "must be yes or no"),
        ("time=t,item=i,header=no", "time=t: without a header a column is a place"),
        ("time=1,item=0,header=no", "item=0: without a header"),
        ("item=i,blocks=512", "need the length of the history"),
        ("item=i,tokens=n,blocks=x", "blocks=x must be a whole number"),
    ],
)
def test_mappings_that_are_none(given: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_mapping(given)


def test_the_unit_of_times_is_told_by_their_size(tmp_path: Path) -> None:
    for unit, scale in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        path = tmp_path / "log.csv"
        path.write_bytes(text("t,i", *(f"{(1_700_000_000 + i) * scale},{i}" for i in range(5))))
        trace = read_trace(path, mapping=parse_mapping("time=t,item=i"))
        assert trace.meta.origin_ns == 1_700_000_000 * S
        assert f"t read as {unit}, told by the size of its values" in trace.meta.steps


def test_two_formats_that_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "twin", PRESETS["movielens"])
    path = tmp_path / "x.csv"
    path.write_bytes(LOGS["movielens"][0])
    with pytest.raises(UserError, match="could be any of movielens, twin; say which with --format"):
        detect_format(path)


# What a log lacks


def test_a_session_ends_with_a_pause_and_comes_at_its_last_row(tmp_path: Path) -> None:
    times = [0, 1000, 2001, 2002, 5000]
    path = log(tmp_path, *(row(1, 10 + i, T0 + t) for i, t in enumerate(times)), row(2, 7, T0 + 1500))
    trace = read_trace(path, requests="session-gap", session_s=1.0)
    assert [piece.tolist() for piece in np.split(trace.item_values, trace.item_offsets[1:-1])] == [
        [1, 2],
        [0],
        [3, 4],
        [5],
    ]
    assert trace.meta.origin_ns == (T0 + 1000) * MS
    assert trace.arrival_ns.tolist() == [0, 500 * MS, 1002 * MS, 4000 * MS]
    assert trace.history_tokens.tolist() == [2, 1, 4, 5]
    assert "6 rows in 4 requests: rows of a user with pauses of up to 1 s, at the time of the last" in trace.meta.steps


def test_candidates_come_from_what_was_popular_shortly_before(tmp_path: Path) -> None:
    rows = [row(1, 1 if i < 300 else 2, T0 + i * 1000) for i in range(600)]
    trace = read_trace(log(tmp_path, *rows), candidates=50, candidate_window_s=100.0)
    drawn = trace.feature_tables[CANDIDATES]
    assert drawn.shape == (600, 50)
    assert trace.item_ids is not None
    named = trace.item_ids[drawn]
    assert (named[1:300] == 1).all()
    assert (named[401:] == 2).all()
    assert 0.4 < np.mean(named[350] == 2) < 0.6 or abs(np.mean(named[345:356] == 2) - 0.5) < 0.1
    assert set(named[0].tolist()) == {1, 2}  # nothing came before: uniform over all
    assert any("the simulator draws its own" in step for step in trace.meta.steps)
    cut = trace.between(0, 10 * S)
    assert cut.feature_tables[CANDIDATES].shape == (10, 50)
    (tmp_path / "azure").write_bytes(LOGS["azure"][0])
    with pytest.raises(UserError, match="has no items to draw them from"):
        read_trace(tmp_path / "azure", candidates=3)


def test_requests_need_users(tmp_path: Path) -> None:
    (tmp_path / "azure").write_bytes(LOGS["azure"][0])
    with pytest.raises(UserError, match="requests = session-gap needs users, and a azure log has none"):
        read_trace(tmp_path / "azure", requests="session-gap")


def test_a_log_without_items_follows_a_law_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "azure").write_bytes(LOGS["azure"][0])
    trace = read_trace(tmp_path / "azure", zipf_items=0.9, law_items=1000)
    assert (trace.meta.content, trace.meta.zipf_items, trace.meta.law_items, trace.meta.users) == ("law", 0.9, 1000, 3)
    assert trace.history_tokens.tolist() == [374, 3, 3]
    assert any("exponent 0.9 over 1,000 items (chosen, not measured)" in step for step in trace.meta.steps)


# Round trips


@pytest.mark.parametrize("name", LOGS)
def test_written_as_a_stream_it_is_the_trace_in_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "some.log"
    path.write_bytes(LOGS[name][0])
    whole = read_trace(path)
    write_trace((path,), None, ReadOptions(), tmp_path / "t.parquet")
    loaded = Trace.load(tmp_path / "t.parquet")
    assert loaded.hash() == whole.hash()
    loaded.save(tmp_path / "again.parquet")
    assert Trace.load(tmp_path / "again.parquet").hash() == whole.hash()


def test_a_stream_of_several_row_groups_is_the_trace_in_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    n = 150_000
    users = [f"user-{u}" for u in rng.integers(0, 5000, n)]
    items = rng.integers(0, 40_000, n)
    lines = [f"{t},{u},{i}" for t, u, i in zip(rng.integers(0, 10**6, n).tolist(), users, items.tolist(), strict=True)]
    path = tmp_path / "log.csv"
    path.write_bytes(text("t,u,i", *lines))
    options = ReadOptions(mapping=parse_mapping("time=t:ms,user=u,item=i"), candidates=2)
    meta, count = write_trace((path,), None, options, tmp_path / "t.parquet")
    assert pq.ParquetFile(tmp_path / "t.parquet").num_row_groups == -(-count // 65_536) == 3
    loaded = Trace.load(tmp_path / "t.parquet")
    whole = read_trace(path, mapping=options.mapping, candidates=2)
    assert loaded.hash() == whole.hash()
    assert loaded.meta == meta
    assert isinstance(loaded.user_ids, StringIds)
    groups = pq.ParquetFile(tmp_path / "t.parquet")
    sizes = [
        len(groups.read_row_group(k, columns=["item_ids"])["item_ids"].combine_chunks().flatten()) for k in range(3)
    ]
    assert sum(sizes) == meta.items
    assert max(sizes) < 0.6 * meta.items  # the tables are cut evenly over the rows


def test_failures_leave_nothing_behind(tmp_path: Path) -> None:
    path = jsonl(tmp_path, request(0), "{", "{")
    with pytest.raises(UserError):
        write_trace((path,), None, ReadOptions(), tmp_path / "t.parquet")
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]
