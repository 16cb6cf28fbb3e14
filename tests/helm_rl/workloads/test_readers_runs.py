"""The external sort, the dictionaries and the cutting of text: against plain Python on random input."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helm_rl.errors import UserError
from helm_rl.workloads.readers import delimited as cut
from helm_rl.workloads.readers import read_trace, runs, source
from helm_rl.workloads.readers.codes import Codes
from helm_rl.workloads.readers.rows import Rows
from helm_rl.workloads.readers.runs import Runs, sort_order
from helm_rl.workloads.trace import StringIds
from tests.helm_rl.workloads.test_readers import T0, jsonl, log, request, row


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a few rows, pieces and marks smaller still, chunks of a few lines."""
    monkeypatch.setattr(runs, "RUN_ROWS", 20)
    monkeypatch.setattr(runs, "PIECE_ROWS", 7)
    monkeypatch.setattr(runs, "_MARK", 3)
    monkeypatch.setattr(source, "CHUNK_BYTES", 700)


TIMES = st.lists(st.integers(-(2**61), 2**61) | st.integers(0, 50), min_size=1, max_size=120)


@given(TIMES, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_order_is_that_of_a_stable_sort(times: list[int], rng: random.Random) -> None:
    users = [rng.randrange(3) for _ in times]
    first, second = np.array(times, dtype=np.int64), np.array(users, dtype=np.int32)
    found = sort_order(first, second)
    expected = sorted(range(len(times)), key=lambda i: (times[i], users[i]))
    assert (list(range(len(times))) if found is None else found.tolist()) == expected


@given(TIMES, st.integers(1, 9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_spilled_sort_gives_all_rows_in_order(times: list[int], batch: int, ragged: bool) -> None:
    n = len(times)
    lengths = np.arange(n, dtype=np.int32) % 4 if ragged else None
    items = np.arange(n if lengths is None else lengths.sum(), dtype=np.int32)
    starts = np.arange(n + 1) if lengths is None else np.concatenate([[0], np.cumsum(lengths)])
    with pytest.MonkeyPatch.context() as patch, Runs(None) as collected:
        for name, value in (("RUN_ROWS", 10), ("PIECE_ROWS", 5), ("_MARK", 3)):
            patch.setattr(runs, name, value)
        for i in range(0, n, batch):
            part = slice(i, min(i + batch, n))
            collected.add(
                Rows(
                    np.array(times[part], dtype=np.int64),
                    user=np.arange(part.start, part.stop, dtype=np.int32),
                    item=items[starts[part.start] : starts[part.stop]],
                    lengths=None if lengths is None else lengths[part],
                )
            )
        collected.finish()
        low, high = min(times), max(times)
        got: list[tuple[int, int, list[int]]] = []
        for piece in collected.pieces(low, high + 1):
            assert piece.user is not None
            assert piece.item is not None
            ends = np.cumsum(piece.lengths if piece.lengths is not None else np.ones(piece.time_ns.size, np.int64))
            cells = np.split(piece.item, ends[:-1])
            got += [
                (t, u, c.tolist()) for t, u, c in zip(piece.time_ns.tolist(), piece.user.tolist(), cells, strict=True)
            ]
    order = sorted(range(n), key=lambda i: times[i])
    assert got == [(times[i], i, items[starts[i] : starts[i + 1]].tolist()) for i in order]


def shuffled_log(folder: Path, rows: int = 400) -> tuple[Path, Path]:
    """Two files of one log, by user, with ties and repeats."""
    rng = np.random.default_rng(4)
    lines = [row(int(u), int(v), T0 + int(t) * 500) for u, v, t in rng.integers(0, [9, 30, 60], size=(rows, 3))]
    lines += lines[:20]
    lines.sort(key=lambda line: int(line.split(",")[0]))
    return log(folder, *lines[::2], name="a.csv"), log(folder, *lines[1::2], name="b.csv")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"start_s": 3.0, "end_s": 20.0},
        {"requests": "session-gap", "session_s": 1.0},
        {"requests": "row"},
        {"spread": True},
        {"candidates": 3, "candidate_window_s": 2.0},
        {"arrivals": 10.0},
    ],
)
def test_a_trace_does_not_depend_on_runs_and_pieces(
    tmp_path: Path, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    paths = shuffled_log(tmp_path)
    whole = read_trace(paths, **options)
    request.getfixturevalue("small_runs")
    cut_up = read_trace(paths, **options)
    assert whole.meta == cut_up.meta
    assert whole.hash() == cut_up.hash()


def test_content_blocks_carry_over_pieces(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(5)
    lines = []
    for i in range(200):
        conversation = int(rng.integers(8))
        blocks = [0, *(100 * conversation + k for k in range(1 + int(rng.integers(5))))]
        lines.append(request_line(i * 10, len(blocks), blocks))
    whole = read_trace(jsonl(tmp_path, *lines))
    request.getfixturevalue("small_runs")
    assert read_trace(tmp_path / "log.jsonl").hash() == whole.hash()
    assert (whole.new_tokens < whole.history_tokens).any()


def request_line(time: int, count: int, blocks: list[int]) -> str:
    return request(time, 512 * count, blocks)


def test_files_in_any_order_give_the_same_trace(tmp_path: Path) -> None:
    first, second = shuffled_log(tmp_path)
    one, other = read_trace([first, second]), read_trace([second, first])
    # Rows of one request stay in the log's order, so compare what does not depend on it.
    np.testing.assert_array_equal(one.arrival_ns, other.arrival_ns)
    np.testing.assert_array_equal(one.user, other.user)
    np.testing.assert_array_equal(one.item_offsets, other.item_offsets)
    np.testing.assert_array_equal(one.history_tokens, other.history_tokens)
    np.testing.assert_array_equal(one.item_ids, other.item_ids)


def test_nothing_is_left_of_the_spill(tmp_path: Path, small_runs: None) -> None:
    with Runs(tmp_path) as collected:
        for i in range(10):
            collected.add(Rows(np.arange(30, dtype=np.int64) * (i % 3)))
        assert list(tmp_path.iterdir()) == []  # it has no name from the start
        collected.finish()
        assert sum(part.time_ns.size for part in collected.pieces(0, 10**9)) == 300


def test_files_with_other_columns_are_no_one_log(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Timestamp,Model,Request tokens,Response tokens\n1,m,5,5\n")
    (tmp_path / "b.csv").write_text("Timestamp,Session ID,Model,Request tokens,Response tokens\n1,s,m,5,5\n")
    with pytest.raises(UserError, match="must have the same columns; some lack user"):
        read_trace([tmp_path / "a.csv", tmp_path / "b.csv"])


# Dictionaries


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=40), max_size=6))
@settings(max_examples=40, deadline=None)
def test_numbers_are_coded_exactly_and_in_order(batches: list[list[int]]) -> None:
    book = Codes("id")
    coded: list[int] = []
    for batch in batches:
        values = np.array(batch, dtype=np.int64)
        coded += book.add_numbers(values.view(np.uint64), bool((values < 0).any()), False).tolist()
    flat = [value for batch in batches for value in batch]
    if not flat:
        return
    ids, place = book.ordered()
    assert ids.tolist() == sorted(set(flat))
    assert [ids[place[code]] for code in coded] == flat


@given(st.lists(st.text(max_size=20), min_size=1, max_size=60), st.lists(st.integers(0, 2**64 - 1), max_size=10))
@settings(max_examples=40, deadline=None)
def test_texts_are_coded_exactly_and_numbers_turn_into_text(texts: list[str], numbers: list[int]) -> None:
    book = Codes("id")
    values = np.array(numbers, dtype=np.uint64)
    coded = book.add_numbers(values, False, bool((values >= 2**63).any())).tolist() if numbers else []
    raw = [text.encode("utf-8", "surrogatepass") for text in texts]
    ends = np.cumsum([len(text) for text in raw])
    data = np.frombuffer(b"".join(raw), dtype=np.uint8)
    coded += book.add_texts(data, np.concatenate([[0], ends[:-1]]), ends).tolist()
    ids, place = book.ordered()
    assert isinstance(ids, StringIds)
    entries = [ids.data[a:b].tobytes() for a, b in zip(ids.offsets[:-1], ids.offsets[1:], strict=True)]
    assert entries == sorted({*raw, *(str(number).encode() for number in numbers)})
    assert [entries[place[code]] for code in coded] == [*(str(number).encode() for number in numbers), *raw]


def test_many_ids_grow_the_dictionary() -> None:
    book = Codes("id")
    values = np.random.default_rng(0).permutation(np.arange(100_000, dtype=np.uint64) * np.uint64(2**40))
    codes = book.add_numbers(values, False, False)
    assert codes.tolist() == list(range(100_000))
    assert book.add_numbers(values[::-1].copy(), False, False).tolist() == list(range(100_000))[::-1]


def test_ids_of_both_signs_beyond_int64_need_text(tmp_path: Path) -> None:
    path = log(tmp_path, row(-1, 1, T0), row(2**64 - 1, 1, T0))
    with pytest.raises(UserError, match=r"field user_id: ids below 0 and ids above 2\^63 - 1 in one log"):
        read_trace(path)


# Cells


def cells_of(text: str, separator: str, wanted: list[int], columns: int, greedy: int = -1, quoted: bool = True) -> Any:
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    shape = (len(wanted), 100)
    starts, ends = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    line, count, state = np.zeros(100, np.int32), np.zeros(100, np.int32), np.zeros(100, np.uint8)
    rows, _, end = cut.split_rows(
        data,
        0,
        np.frombuffer(separator.encode(), np.uint8),
        np.array(wanted, np.int64),
        columns,
        greedy,
        quoted,
        starts,
        ends,
        line,
        state,
        count,
        np.zeros(cut.MOST_CELLS + 1, np.int64),
        np.zeros(2, np.int64),
        np.zeros(2, np.int64),
    )
    assert end == data.size
    found = [
        [data[starts[k, i] : ends[k, i]].tobytes().decode() if state[i] == 0 else None for k in range(len(wanted))]
        for i in range(rows)
    ]
    return found, line[:rows].tolist(), state[:rows].tolist()


PIECES = st.lists(
    st.lists(st.text("ab1 .", min_size=0, max_size=4), min_size=3, max_size=3), min_size=1, max_size=8
).filter(lambda rows: all(any(cell.strip() for cell in row) for row in rows))


@given(PIECES, st.sampled_from([",", "\t", "::", ", "]), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_cells_are_what_split_would_give(
    rows: list[list[str]], separator: str, end: str, last: bool, quoted: bool
) -> None:
    text = end.join(separator.join(cells) for cells in rows) + (end if last else "")
    found, lines, state = cells_of(text, separator, [0, 2], 3, quoted=quoted)
    assert lines == list(range(len(rows)))
    for cells, got, code in zip(rows, found, state, strict=True):
        whole = separator.join(cells).split(separator)
        if len(whole) != 3:
            assert code == cut.COLUMNS
        else:
            assert got == [whole[0].strip(" \t"), whole[2].strip(" \t")]


def test_quotes_separators_within_them_and_quotes_that_do_not_close() -> None:
    found, _, state = cells_of('"a,b",2,"c"\n"open,2,3\n x , "y" ,z\n"a""b",2,3\n', ",", [0, 1], 3)
    assert found == [["a,b", "2"], [None, None], ["x", "y"], [None, None]]
    assert state == [0, cut.OPEN_QUOTE, 0, cut.INNER_QUOTE]


def test_a_greedy_column_takes_the_separators_that_are_too_many() -> None:
    found, _, state = cells_of("1,k,5\n2,a,b,,c,6\n3,7\n", ",", [0, 1, 2], 3, greedy=1, quoted=False)
    assert found == [["1", "k", "5"], ["2", "a,b,,c", "6"], [None] * 3]
    assert state == [0, 0, cut.COLUMNS]


def parse(kernel: Any, texts: list[str], dtype: Any, *more: Any) -> tuple[list[int], list[int], Any]:
    raw = [text.encode() for text in texts]
    ends = np.cumsum([len(text) for text in raw]).astype(np.int32)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int32)
    out, state = np.zeros(len(texts), dtype), np.zeros(len(texts), np.uint8)
    seen = kernel(np.frombuffer(b"".join(raw), np.uint8), starts, ends, *more, out, state)
    return out.tolist(), state.tolist(), seen


def test_whole_numbers() -> None:
    texts = ["0", "-9223372036854775808", "18446744073709551615", "007", "7.0", "", "-", "NA", "1e3", "7.5", "9" * 20]
    values, state, seen = parse(cut.parse_whole, texts, np.uint64)
    assert values[:5] == [0, 2**63, 2**64 - 1, 7, 7]
    assert state == [0, 0, 0, 0, 0, cut.EMPTY, *[cut.NOT_NUMBER] * 4, cut.RANGE]
    assert seen == (1, 1, 2)


@given(st.decimals(-(10**9), 10**9, places=9), st.sampled_from(["s", "ms"]))
@settings(max_examples=100, deadline=None)
def test_decimal_times_are_exact_to_the_nanosecond(value: Any, unit: str) -> None:
    power = {"s": 9, "ms": 6}[unit]
    text = format(value, "f")
    ((out,), (state,), _) = parse(cut.parse_decimal_time, [text], np.int64, power)
    assert state == 0
    exact = abs(value) * 10**power
    nearest = int(exact) + (exact - int(exact) >= type(value)("0.5"))
    assert out == (-nearest if value < 0 else nearest)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("2023-11-16 18:17:03.9799600", 1_700_158_623_979_960_000),
        ("2024-05-10 00:00:00.009930+00:00", 1_715_299_200_009_930_000),
        ("2024-05-12 00:00:00+00:00", 1_715_472_000_000_000_000),
        ("2014-04-07T10:51:09.277Z", 1_396_867_869_277_000_000),
        ("2024-05-12T02:30:00+02:30", 1_715_472_000_000_000_000),
        ("2024-05-11 22:00:00-0200", 1_715_472_000_000_000_000),
        ("2024-02-29", 1_709_164_800_000_000_000),
        ("1969-12-31 23:59:59.999999999", -1),
    ],
)
def test_iso_times(text: str, ns: int) -> None:
    ((out,), (state,), _) = parse(cut.parse_iso_time, [text], np.int64)
    assert (out, state) == (ns, 0)


@pytest.mark.parametrize(
    "text",
    [
        "2023-02-29",
        "2023-13-01",
        "2023-1-1",
        "2023-11-16 24:00:00",
        "2023-11-16 18:17",
        "2023-11-16 18:17:03.",
        "x" * 30,
        "2023-11-16 18:17:03 UTC",
        "2023-11-16 18:17:03.1234567890",
        "2023-11-16 18:17:03+2",
        "20231116",
    ],
)
def test_times_that_are_none(text: str) -> None:
    _, (state,), _ = parse(cut.parse_iso_time, [text], np.int64)
    assert state == cut.NOT_NUMBER
