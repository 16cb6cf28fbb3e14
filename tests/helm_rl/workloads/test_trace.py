"""The trace: its form on disk, its invariants, its segments, and files that are none."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from helm_rl.errors import UserError
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Segment, Trace, TraceMeta, TracePhase, gather
from tests.helm_rl.workloads.loads import flash_sale, scenario

SECOND = 1_000_000_000


def small(**meta: Any) -> Trace:
    """Five requests of three users over 100 s, with dictionaries, written by hand."""
    fields: dict[str, Any] = {
        "name": "small",
        "source": "test",
        "origin_ns": 1_649_675_512_388_000_000,
        "measure_from_ns": 10 * SECOND,
        "users": 3,
        "items": 4,
        "content": "items",
        "phases": (TracePhase(label="base", start_ns=0, end_ns=100 * SECOND),),
        "dropped": {"repeats": 2},
    }
    return Trace(
        arrival_ns=np.array([0, 5, 5, 60, 99], dtype=np.int64) * SECOND,
        user=np.array([0, 1, 0, 2, 1], dtype=np.int64),
        tenant=np.array([0, 1, 0, 2, 1], dtype=np.int32),
        phase=np.zeros(5, dtype=np.int32),
        history_tokens=np.array([2, 1, 3, 3, 1], dtype=np.int32),
        new_tokens=np.array([2, 1, 1, 3, 0], dtype=np.int32),
        item_offsets=np.array([0, 2, 3, 4, 7, 7], dtype=np.int64),
        item_values=np.array([3, 0, 1, 1, 2, 2, 3], dtype=np.int64),
        meta=TraceMeta(**fields | meta),
        user_ids=np.array([2**64 - 1, 7, 13053225291711363978], dtype=np.uint64),
        item_ids=np.array([-5, 0, 4294967297, 3], dtype=np.int64),
        feature_tables={
            "age": np.array([[1.5, 2], [3, 4], [5, 6]], dtype=np.float32),
            "kind": np.arange(2, dtype=np.int8),
        },
    )


def assert_equal(left: Trace, right: Trace) -> None:
    assert left.meta == right.meta
    for (name, array), (other, expected) in zip(left._arrays(), right._arrays(), strict=True):
        assert name == other
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_saved_and_loaded_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    trace = small()
    trace.save(tmp_path / "t.parquet")
    loaded = Trace.load(tmp_path / "t.parquet")
    assert_equal(loaded, trace)
    assert loaded.hash() == trace.hash()
    assert loaded.user_ids is not None
    assert loaded.user_ids.tolist() == [2**64 - 1, 7, 13053225291711363978]
    loaded.arrival_ns[0] = 0  # arrays belong to the trace: they may be written to
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_a_generated_trace_of_several_row_groups_survives(tmp_path: Path) -> None:
    trace = generate(flash_sale())
    trace.save(tmp_path / "t.parquet")
    assert pq.ParquetFile(tmp_path / "t.parquet").num_row_groups == 2
    assert_equal(Trace.load(tmp_path / "t.parquet"), trace)


def test_other_readers_find_plain_columns(tmp_path: Path) -> None:
    small().save(tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table["arrival_ns"].to_pylist() == [0, 5 * SECOND, 5 * SECOND, 60 * SECOND, 99 * SECOND]
    assert table["items"].to_pylist() == [[3, 0], [1], [1], [2, 2, 3], []]
    assert list(itertools.chain(*table["item_ids"].to_pylist())) == [-5, 0, 4294967297, 3]
    assert json.loads(table.schema.metadata[b"helm_rl.trace"])["name"] == "small"


def test_the_hash_sees_every_column_and_the_meta_data() -> None:
    trace = small()
    hashes = {trace.hash()}
    for name, array in trace._arrays():
        changed = array.copy()
        changed.reshape(-1)[-1] += 1
        if name.startswith("table."):
            changes: dict[str, Any] = {"feature_tables": trace.feature_tables | {name.removeprefix("table."): changed}}
        else:
            changes = {name: changed}
        hashes.add(replace(trace, **changes).hash())
    hashes.add(small(name="other").hash())
    assert len(hashes) == 1 + len(list(trace._arrays())) + 1


def test_slices_have_all_requests_in_order_and_no_more_memory_than_one(tmp_path: Path) -> None:
    trace = generate(flash_sale())
    trace.save(tmp_path / "t.parquet")
    parts = list(Trace.slices(tmp_path / "t.parquet", 10_000))
    assert [len(part) for part in parts[:-1]] == [10_000] * (len(parts) - 1)
    for name in ("arrival_ns", "user", "history_tokens", "item_values"):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(trace, name))
    for part in parts:
        assert part.item_offsets[0] == 0
        assert part.meta == trace.meta
        assert part.user_ids is None

    del parts, part
    tracemalloc.start()
    for part in Trace.slices(tmp_path / "t.parquet", 1_000):
        del part
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < trace.item_values.nbytes / 4
    with pytest.raises(UserError, match="at least 1 request"):
        next(Trace.slices(tmp_path / "t.parquet", 0))


def test_an_existing_file_is_kept_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        small().save(path)
    assert path.read_text() == "mine"
    small().save(path, overwrite=True)
    assert len(Trace.load(path)) == 5
    with pytest.raises(UserError, match="is a folder"):
        small().save(tmp_path, overwrite=True)


def test_nothing_is_left_of_a_trace_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_batch", fail)
    with pytest.raises(OSError, match="No space"):
        small().save(tmp_path / "t.parquet")
    assert list(tmp_path.iterdir()) == []


# The invariants


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arrival_ns": np.array([0, 6, 5, 60, 99], np.int64) * SECOND}, "arrival_ns decreases at request 2"),
        ({"arrival_ns": np.array([0, 5, 5, 60, 100], np.int64) * SECOND}, r"arrival_ns\[4\] = 100000000000 is outside"),
        ({"arrival_ns": np.array([0, 5, 5, 60, 99], np.float64)}, "arrival_ns must be int64"),
        ({"user": np.array([0, 1, 0, 3, 1], np.int64)}, r"user\[3\] = 3 is outside 0..2"),
        ({"user": np.array([0, 1, 0, 2], np.int64)}, r"user must be int64 of shape \(5,\)"),
        ({"tenant": np.array([0, -1, 0, 2, 1], np.int32)}, r"tenant\[1\] = -1"),
        ({"phase": np.array([0, 0, 1, 0, 0], np.int32)}, r"phase\[2\] = 1 is outside 0..0"),
        ({"history_tokens": np.array([2, 1, 0, 3, 1], np.int32)}, r"history_tokens\[2\] = 0"),
        ({"history_tokens": np.array([1, 1, 3, 3, 1], np.int32)}, "new_tokens exceeds history_tokens"),
        ({"new_tokens": np.array([2, 1, -1, 3, 0], np.int32)}, r"new_tokens\[2\] = -1"),
        ({"item_values": np.array([3, 0, 1, 1, 2, 2, 4], np.int64)}, r"item_values\[6\] = 4 is outside 0..3"),
        ({"item_offsets": np.array([0, 3, 2, 4, 7, 7], np.int64)}, "item_offsets decreases"),
        ({"item_offsets": np.array([0, 2, 3, 4, 7, 8], np.int64)}, "item_offsets must run from 0"),
        ({"item_offsets": np.array([1, 2, 3, 4, 7, 7], np.int64)}, "item_offsets must run from 0"),
        (
            {"item_offsets": np.array([0, 1, 3, 4, 7, 7], np.int64)},
            "number of items of a request is not its new_tokens",
        ),
        ({"user_ids": np.arange(2)}, "user_ids has 2 entries for 3 codes"),
        ({"item_ids": np.arange(4.0)}, "item_ids must be int64 or uint64"),
        ({"meta": small(measure_from_ns=101 * SECOND).meta}, "measure_from_ns lies outside"),
        ({"meta": small(content="law").meta}, "needs zipf_items"),
        ({"meta": small(content="blocks").meta}, "needs block_tokens"),
        ({"meta": small(content="blocks", block_tokens=2).meta}, "number of blocks"),
        ({"meta": small(phases=(TracePhase(label="b", start_ns=9, end_ns=0),)).meta}, r"phases\[0\] runs from 9 to 0"),
    ],
)
def test_each_invariant_is_checked_and_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    broken = replace(small(), **changes)
    with pytest.raises(UserError, match=said):
        broken.validate()
    with pytest.raises(UserError, match=said):
        broken.save(tmp_path / "t.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_phase_must_lie_in_the_trace_and_its_hot_set_in_the_items() -> None:
    base = TracePhase(label="base", start_ns=0, end_ns=100 * SECOND)
    outside = TracePhase(label="late", start_ns=50 * SECOND, end_ns=101 * SECOND)
    with pytest.raises(UserError, match=r"phases\[1\] \(late\) leaves the trace"):
        small(phases=(base, outside)).validate()
    hot = TracePhase(label="hot", start_ns=0, end_ns=SECOND, hot_fraction=0.5, hot_items=3, hot_first=2)
    with pytest.raises(UserError, match="its hot set is not within the 4 items"):
        small(phases=(base, hot)).validate()


# Files that are no trace


def written(tmp_path: Path) -> bytes:
    small().save(tmp_path / "good.parquet")
    return (tmp_path / "good.parquet").read_bytes()


def test_usual_mistakes_are_named(tmp_path: Path) -> None:
    data = written(tmp_path)
    path = tmp_path / "t.parquet"
    cases = {
        b"": "is empty",
        b"user_id,video_id\n1,2\n": "is not a Parquet file",
        bytes(range(256)): "is not a Parquet file",
        data[: len(data) // 2]: "was cut off",
        data[:5]: "was cut off",
        b"PAR1" + b"\xff" * 20 + b"PAR1": "damaged",
        data[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1": "damaged",
    }
    for content, said in cases.items():
        path.write_bytes(content)
        for read in (Trace.load, lambda path: list(Trace.slices(path, 10))):
            with pytest.raises(UserError, match=said) as caught:
                read(path)
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)
    for missing, said in ((tmp_path / "no.parquet", "does not exist"), (tmp_path, "is not a file")):
        with pytest.raises(UserError, match=said):
            Trace.load(missing)


def rewrite(tmp_path: Path, table: pa.Table) -> Path:
    path = tmp_path / "changed.parquet"
    pq.write_table(table, path)
    return path


def test_other_parquet_files_are_refused_by_what_they_lack(tmp_path: Path) -> None:
    written(tmp_path)
    good = pq.read_table(tmp_path / "good.parquet")
    meta = json.loads(good.schema.metadata[b"helm_rl.trace"])

    def with_meta(**changes: Any) -> pa.Table:
        text = json.dumps({k: v for k, v in (meta | changes).items() if v is not ...})
        return good.replace_schema_metadata({b"helm_rl.trace": text.encode()})

    def with_column(name: str, values: Any) -> pa.Table:
        return good.set_column(good.schema.get_field_index(name), name, values)

    cases = [
        (pa.table({"a": [1], "b": ["x"]}), r"is a Parquet file but not a helm-rl trace \(its columns: a, b\)"),
        (good.replace_schema_metadata({b"helm_rl.trace": b"{"}), "not the JSON of a trace"),
        (good.replace_schema_metadata({b"helm_rl.trace": b"[" * 100_000}), "not the JSON of a trace"),
        (good.replace_schema_metadata({b"helm_rl.trace": b"[]"}), "not the JSON of a trace"),
        (with_meta(format_version=2), "has trace format version 2; this helm-rl reads up to 1"),
        (with_meta(format_version="1"), "format_version = '1' must be 1"),
        (with_meta(users=...), "users: Field required"),
        (with_meta(users=0), "users: "),
        (with_meta(extra=1), "extra: "),
        (with_meta(phases=[]), "phases: "),
        (with_meta(users=2), r"not a sound trace: user\[3\] = 2 is outside 0..1"),
        (with_meta(origin_ns=2**80), "origin_ns does not fit"),
        (with_meta(users=2**63), "users or items do not fit"),
        (good.drop_columns(["user"]), "column user is missing"),
        (good.append_column("extra", pa.array(range(5))), "column extra is not one of a trace"),
        (
            with_column("user", pa.array([0, 1, 0, 2, 1], pa.int32())),
            "column user has type int32 where a trace has int64",
        ),
        (with_column("user", pa.array([0, 1, None, 2, 1])), "column user has empty cells"),
        (with_column("items", pa.array([[3, 0], [1], None, [2, 2, 3], []])), "column items has empty cells"),
        (with_column("items", pa.array([[3, 0], [1], [None], [2, 2, 3], []])), "column items has empty cells"),
        (with_column("items", pa.array(["3"] * 5)), "column items has type string"),
        (with_column("arrival_ns", pa.array([0, 5, 4, 60, 99], pa.int64())), "arrival_ns decreases at request 2"),
        (with_column("item_ids", pa.array([[1]] * 5)), "has no sound shape"),
        (good.slice(0, 0), "there is no request"),
        (good.slice(0, 4), "item_ids has 3 values, which do not make up the shape|user_ids has"),
    ]
    for table, said in cases:
        with pytest.raises(UserError, match=said) as caught:
            Trace.load(rewrite(tmp_path, table))
        assert "changed.parquet" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_order_is_checked_across_slices(tmp_path: Path) -> None:
    written(tmp_path)
    good = pq.read_table(tmp_path / "good.parquet")
    path = rewrite(tmp_path, good.take([0, 1, 3, 2, 4]))
    with pytest.raises(UserError, match="arrival_ns decreases"):
        list(Trace.slices(path, 3))


def test_a_damaged_file_is_an_error_or_has_the_same_requests(tmp_path: Path) -> None:
    """Bits flipped anywhere, files cut anywhere: never other requests, never another exception."""
    data = written(tmp_path)
    right = small()
    path = tmp_path / "t.parquet"
    refused = 0
    rng = np.random.default_rng(5)
    for position in rng.choice(len(data), size=400, replace=False):
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << rng.integers(8))]) + data[position + 1 :])
        try:
            loaded = Trace.load(path)
            assert np.array_equal(loaded.arrival_ns, right.arrival_ns)
            assert np.array_equal(loaded.user, right.user)
            assert np.array_equal(loaded.history_tokens, right.history_tokens)
            assert np.array_equal(loaded.item_values, right.item_values)
        except UserError:
            refused += 1
    assert refused > 100
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises(UserError):
            Trace.load(path)
    path.write_bytes(data)
    assert Trace.load(path).hash() == right.hash()


def test_flips_in_the_columns_are_caught_by_their_checksums(tmp_path: Path) -> None:
    data = written(tmp_path)
    metadata = pq.ParquetFile(tmp_path / "good.parquet").metadata.row_group(0).column(0)
    first = metadata.data_page_offset
    path = tmp_path / "t.parquet"
    last = first + metadata.total_compressed_size - 1
    path.write_bytes(data[:last] + bytes([data[last] ^ 1]) + data[last + 1 :])
    with pytest.raises(UserError, match="damaged"):
        Trace.load(path)


def test_a_file_that_declares_more_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.setattr("helm_rl.workloads.trace.free_bytes", lambda: 100)
    with pytest.raises(UserError, match="declares 5 requests"):
        Trace.load(tmp_path / "good.parquet")


# Segments and windows


def segments(seconds: float = 600, **load: Any) -> list[Segment]:
    return generate(scenario(seconds, **({"rate": 5} | load))).segments()


def in_seconds(found: list[Segment]) -> list[tuple[str, float, float]]:
    return [(segment.label, segment.start_ns / 1e9, segment.end_ns / 1e9) for segment in found]


def test_segments_are_cut_at_the_edges_of_phases() -> None:
    assert in_seconds(generate(flash_sale()).segments()) == [
        ("base", 0, 120),
        ("burst", 120, 180),
        ("base", 180, 600),
    ]
    phase = {"rate": 5, "requests_per_visit": 2}
    overlapping = [
        phase | {"start_s": 0, "seconds": 200, "label": "a"},
        phase | {"start_s": 100, "seconds": 500, "label": "b"},
    ]
    assert in_seconds(segments(phase=overlapping)) == [("a", 0, 100), ("a+b", 100, 200), ("b", 200, 600)]


def test_drifts_and_loads_without_phases_are_cut_every_minute() -> None:
    minutes = [("base", 60.0 * i, 60.0 * (i + 1)) for i in range(10)]
    assert in_seconds(segments()) == minutes
    assert in_seconds(segments(rate_end=9)) == minutes
    drift = {"start_s": 0, "seconds": 600, "rate": 0, "rate_end": 9, "requests_per_visit": 2, "label": "hot"}
    assert in_seconds(segments(phase=[drift])) == [("hot", start, end) for _, start, end in minutes]
    phase = {"start_s": 60, "seconds": 130, "rate": 5, "requests_per_visit": 2, "rate_end": 9, "label": "up"}
    assert in_seconds(segments(phase=[phase])) == [
        ("base", 0, 60),
        ("up", 60, 120),
        ("up", 120, 190),  # 10 s alone would be too short to judge
        ("base", 190, 600),
    ]
    assert in_seconds(segments(seconds=20)) == [("base", 0, 20)]
    assert in_seconds(segments(seconds=89)) == [("base", 0, 89)]
    assert in_seconds(segments(seconds=90)) == [("base", 0, 60), ("base", 60, 90)]


def test_segments_begin_where_measuring_begins() -> None:
    assert in_seconds(small().segments()) == [("base", 10, 60 + 10), ("base", 70, 100)]


def test_more_segments_than_anybody_evaluates_are_refused() -> None:
    long = TracePhase(label="base", start_ns=-(2**61), end_ns=2**61)
    far = small(phases=(long,), measure_from_ns=-(2**61))
    far.validate()
    with pytest.raises(UserError, match=r"is measured over 4,611,686,018 s, more than 100,000 segments"):
        far.segments()


@pytest.mark.parametrize("field", ["rate", "rate_end", "ramp_s", "factor"])
@pytest.mark.parametrize("value", [np.inf, np.nan, -1.0])
def test_a_phase_has_no_rate_that_is_not_one(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match=field):
        TracePhase(label="base", start_ns=0, end_ns=1, **{field: value})


def test_between_cuts_requests_items_phases_and_the_measured_part() -> None:
    trace = generate(flash_sale())
    part = trace.between(150 * SECOND, 200 * SECOND)
    part.validate()
    inside = (trace.arrival_ns >= 150 * SECOND) & (trace.arrival_ns < 200 * SECOND)
    assert len(part) == inside.sum()
    np.testing.assert_array_equal(part.history_tokens, trace.history_tokens[inside])
    _, values = gather(trace.item_offsets, trace.item_values, np.flatnonzero(inside))
    np.testing.assert_array_equal(part.item_values, values)
    assert part.meta.measure_from_ns == 150 * SECOND
    assert in_seconds(part.segments()) == [("burst", 150, 180), ("base", 180, 200)]
    assert part.meta.steps[-1] == "cut to [150, 200) s"
    assert in_seconds(trace.between(300 * SECOND, 400 * SECOND).segments()) == [("base", 300, 360), ("base", 360, 400)]
    with pytest.raises(UserError, match="no request"):
        trace.between(700 * SECOND, 800 * SECOND)


def test_gather() -> None:
    offsets, values = gather(np.array([0, 2, 2, 5]), np.array([1, 2, 3, 4, 5]), np.array([2, 0, 1, 0]))
    assert offsets.tolist() == [0, 3, 5, 5, 7]
    assert values.tolist() == [3, 4, 5, 1, 2, 1, 2]
