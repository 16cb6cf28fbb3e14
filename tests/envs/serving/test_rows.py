"""Which rows a request reads: the law, the same rows again, and never more than there is room for."""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.serving.rows import (
    POPULARITY_CLASSES,
    RowModel,
    build_rows,
    candidate_rows,
    candidate_token_rows,
    history_rows,
    token_rows,
)
from helm_rl.errors import UserError
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import trace

Int64Array = npt.NDArray[np.int64]
CANARY = -(2**62)
TAIL, HOT = 0, 1


def build(made: Trace, **changes: Any) -> RowModel:
    arguments: dict[str, Any] = {
        "features": 4,
        "candidates": 16,
        "page_tokens": 32,
        "rate": 0.25,
        "head": 0,
        "zipf": 1.05,
        "items": 300_000,
    }
    return build_rows(made, **(arguments | changes))


def draw(
    model: RowModel, request: int, user: int, first: int, last: int, phase: int = 0
) -> tuple[list[int], list[int]]:
    """Return the rows of tokens [first, last): of the tail, of the hot set. Writes past max_rows are found."""
    keys = np.full(model.max_rows + 64, CANARY, np.int64)
    tail, hot = history_rows(model.state, keys, 0, request, user, phase, first, last)
    assert tail + hot <= model.max_rows
    assert (keys[tail + hot :] == CANARY).all()
    return keys[:tail].tolist(), keys[tail : tail + hot].tolist()


def draw_candidates(model: RowModel, request: int, count: int, part: int, phase: int = 0, start: int = 0) -> list[int]:
    keys = np.full(model.max_rows + 64, CANARY, np.int64)
    end = candidate_rows(model.state, keys, start, request, phase, count, part)
    assert end <= model.max_rows
    assert (keys[end:] == CANARY).all()
    return keys[start:end].tolist()


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("head", [0, 50, 5_000])
def test_draws_follow_the_law(exponent: float, head: int) -> None:
    items = 100_000
    made = trace([0.0], history=1_000, zipf_items=exponent, law_items=items)
    model = build(made, head=head, rate=0.5, features=8)
    probability = np.arange(1, items + 1) ** -exponent
    probability /= probability.sum()

    # The share of the tail: of all draws, those past the head.
    assert model.state.tail_share[0] == pytest.approx(probability[head:].sum(), rel=1e-3)
    strata = np.concatenate([np.array(draw(model, 0, user, 0, 1_000)[0]) for user in range(60)])
    expected_draws = 60 * 1_000 * 8 * 0.5 * probability[head:].sum()
    assert strata.size == pytest.approx(expected_draws, rel=0.001, abs=4 * expected_draws**0.5)

    # Stratum s holds ranks head + 2 s + 1 and + 2. In each tenth of the tail's mass there is a tenth of the draws.
    expected = np.cumsum(probability[head:]) / probability[head:].sum()
    assert strata.min() >= 0
    assert strata.max() <= model.strata
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        edge = int(np.searchsorted(expected, share) // 2) + 1
        want = expected[min(2 * edge, expected.size) - 1]
        got = np.count_nonzero(strata < edge) / strata.size
        # Ranks 1 to 3 carry much of a steep law, and the integral spreads them a little.
        spread = 0.06 if exponent > 1.5 and head == 0 else 0.008
        assert got == pytest.approx(want, abs=spread + 2 / strata.size**0.5)


def lru_hits(stream: list[list[int]], capacity: int, warm: int) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = asked = 0
    for i, keys in enumerate(stream):
        for key in keys:
            hit = key in cache
            if hit:
                cache.move_to_end(key)
            else:
                cache[key] = None
                if len(cache) > capacity:
                    cache.popitem(last=False)
            if i >= warm:
                hits += hit
                asked += 1
    return hits / asked


def test_an_lru_on_the_sample_hits_as_often_as_on_all_rows() -> None:
    items, head, capacity, requests = 60_000, 100, 6_400, 400
    made = trace(np.arange(requests).tolist(), history=150, zipf_items=1.05, law_items=items)

    # The truth: independent draws of the exact law, the head among them.
    probability = np.arange(1, items + 1) ** -1.05
    edges = np.cumsum(probability) / probability.sum()
    rng = np.random.default_rng(0)
    true = [np.searchsorted(edges, rng.random(600)).tolist() for _ in range(requests)]
    truth = lru_hits(true, capacity, 200)

    for rate in (1.0, 0.125):
        model = build(made, head=head, rate=rate)
        stream = [draw(model, i, i, 0, 150)[0] for i in range(requests)]
        misses = 1.0 - lru_hits(stream, round(capacity * rate), 200)
        assert 1.0 - model.state.tail_share[0] * misses == pytest.approx(truth, abs=0.012)


@pytest.mark.parametrize("content", ["law", "items", "blocks"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_of_a_history_give_together_what_the_whole_gives(content: str, data: st.DataObject) -> None:
    model = WORLDS[content]
    a, b = sorted((data.draw(st.integers(0, 300)), data.draw(st.integers(0, 300))))
    phase = data.draw(st.integers(0, 2))
    user = 0 if content == "items" else data.draw(st.integers(0, 3))
    whole, before, after = (draw(model, 0, user, i, j, phase) for i, j in ((0, b), (0, a), (a, b)))
    for part in (TAIL, HOT):
        assert Counter(whole[part]) == Counter(before[part]) + Counter(after[part])


def worlds() -> dict[str, RowModel]:
    hot = ((0.0, 0), (0.5, 500), (1.0, 500))
    items = np.random.default_rng(1).integers(0, 1000, 300).tolist()
    return {
        "law": build(trace([0.0], history=300, hot=hot)),
        "items": build(trace([0.0], history=300, new=300, items=items, hot=hot, content="items")),
        # 300 tokens in blocks of 7: 43 of them.
        "blocks": build(
            trace([0.0], history=300, items=list(range(43)), hot=hot, content="blocks", block_tokens=7), features=5
        ),
    }


WORLDS = worlds()


def test_a_token_read_again_reads_the_same_rows() -> None:
    model = build(trace([0.0, 1.0], user=[3, 3], history=[200, 260], hot=((0.4, 300),)))
    assert draw(model, 0, 3, 0, 200) == draw(model, 1, 3, 0, 200)
    assert draw(model, 0, 3, 0, 200) != draw(model, 0, 2, 0, 200)
    assert draw(model, 0, 3, 50, 50) == ([], [])


def test_hot_rows_are_apart_and_equally_likely() -> None:
    hot = ((0.0, 0), (0.6, 400), (0.6, 400), (1.0, 400))
    model = build(trace([0.0], history=30_000, hot=hot), rate=0.25)
    asked = 30_000 * 4 * 0.25
    counts = {}
    for phase, fraction in enumerate((0.0, 0.6, 0.6, 1.0)):
        tail, rows = draw(model, 0, 0, 0, 30_000, phase)
        assert len(rows) / asked == pytest.approx(fraction, abs=0.01)
        assert len(tail) / asked == pytest.approx(1 - fraction, abs=0.01)
        assert max(tail, default=0) <= model.strata
        counts[phase] = Counter(rows)
    # A hundred strata of four rows each; phases have sets of their own.
    assert [len(counts[phase]) for phase in range(4)] == [0, 100, 100, 100]
    assert min(counts[3].values()) > 200
    assert max(counts[3].values()) < 400
    assert not set(counts[1]) & set(counts[2])
    assert min(min(counts[phase]) for phase in (1, 2, 3)) > model.strata


def test_candidates_are_drawn_anew_for_each_request() -> None:
    model = build(trace([0.0, 1.0], hot=((0.5, 400),)), candidates=500)
    for part in (TAIL, HOT):
        first, second = draw_candidates(model, 0, 500, part), draw_candidates(model, 1, 500, part)
        assert len(first) == pytest.approx(500 * 4 * 0.25 * 0.5, abs=1)
        assert set(first) != set(second)
        assert draw_candidates(model, 0, 500, part, start=7) == first
    assert draw_candidates(model, 0, 0, TAIL) == []


def test_item_histories_are_the_users_own_items_in_order() -> None:
    made = trace(
        [0.0, 1.0, 2.0, 3.0],
        user=[1, 0, 1, 1],
        history=[2, 3, 5, 6],
        new=[2, 3, 3, 1],
        items=[10, 11, 20, 21, 22, 12, 13, 14, 15],
        content="items",
    )
    model = build(made, features=2, rate=1.0)
    assert draw(model, 3, 1, 0, 6)[0] == [2 * item + j for item in range(10, 16) for j in (0, 1)]
    assert draw(model, 2, 1, 2, 5)[0] == [24, 25, 26, 27, 28, 29]
    assert draw(model, 1, 0, 0, 3)[0] == [40, 41, 42, 43, 44, 45]


def test_a_history_longer_than_the_trace_tells_reads_items_of_the_log() -> None:
    """As after `Trace.between`: the user's older events are not in the trace."""
    made = trace([0.0, 1.0], user=[0, 1], history=[1000, 4], new=[2, 2], items=[7, 8, 5, 6], content="items")
    model = build(made, features=1, rate=1.0)
    whole = draw(model, 0, 0, 0, 1000)[0]
    assert whole[998:] == [7, 8]
    assert set(whole[:998]) == {5, 6, 7, 8}
    assert whole == draw(model, 0, 0, 0, 500)[0] + draw(model, 0, 0, 500, 1000)[0]
    assert draw(model, 1, 1, 0, 4)[0][2:] == [5, 6]
    # Nor is there anything after the last one.
    assert set(draw(model, 1, 1, 4, 40)[0]) <= {5, 6, 7, 8}


def test_sampled_items_are_the_same_each_time_and_their_share_is_the_rate() -> None:
    items = list(range(20_000))
    made = trace([0.0, 1.0], user=[0, 1], history=20_000, new=20_000, items=items + items, content="items")
    model = build(made, features=1, rate=0.3, candidates=16)
    sampled = draw(model, 0, 0, 0, 20_000)[0]
    assert sampled == draw(model, 1, 1, 0, 20_000)[0]
    assert len(sampled) / 20_000 == pytest.approx(0.3, abs=0.01)
    # The ghosts sample by `mix(key)`: were items sampled by the same hash, all of the smallest hashes would be here.
    hashes = np.array([splitmix(key) for key in sampled], dtype=np.float64) / 2.0**64
    assert np.count_nonzero(hashes < 0.1) / len(sampled) == pytest.approx(0.1, abs=0.015)


def splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_item_content_knows_no_hot_set() -> None:
    made = trace([0.0], history=50, new=50, items=list(range(50)), hot=((0.6, 10),), content="items")
    model = build(made, rate=1.0)
    assert model.state.hot_fraction[0] == 0.0
    assert model.state.tail_share[0] == 1.0
    assert draw_candidates(model, 0, 16, HOT) == []
    assert {key // 4 for key in draw_candidates(model, 0, 16, TAIL)} <= set(range(50))


def test_an_item_trace_without_items_is_refused() -> None:
    with pytest.raises(UserError, match="not one item"):
        build(trace([0.0], new=0, content="items"))


def test_equal_blocks_read_equal_rows_whoever_asks() -> None:
    made = trace(
        [0.0, 1.0],
        user=[0, 1],
        history=[300, 300],
        new=[1, 1],
        items=[5, 6, 7, 5, 9, 7],
        content="blocks",
        block_tokens=100,
    )
    model = build(made, rate=1.0)
    parts = [[draw(model, i, i, 100 * k, 100 * k + 100)[0] for k in range(3)] for i in (0, 1)]
    assert parts[0][0] == parts[1][0]
    assert parts[0][1] != parts[1][1]
    assert parts[0][2] == parts[1][2]
    assert min(len(part) for part in itertools.chain(*parts)) >= 399


@settings(max_examples=150, deadline=None)
@given(
    content=st.sampled_from(["law", "items", "blocks"]),
    history=st.integers(1, 400),
    new=st.integers(0, 30),
    features=st.integers(1, 40),
    candidates=st.integers(0, 300),
    rate=st.floats(1e-4, 1.0),
    width=st.integers(1, 600),
    head=st.integers(0, 1000),
    exponent=st.sampled_from([0.0, 0.99, 1.0, 1.05, 3.0, 10.0]),
    law_items=st.sampled_from([1, 2, 1000, 10**12]),
    hot=st.tuples(st.sampled_from([0.0, 1e-9, 0.3, 1.0 - 1e-9, 1.0]), st.sampled_from([1, 77, 300_000])),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 1000),
)
def test_no_request_has_more_rows_than_there_is_room_for(
    content: str,
    history: int,
    new: int,
    features: int,
    candidates: int,
    rate: float,
    width: int,
    head: int,
    exponent: float,
    law_items: int,
    hot: tuple[float, int],
    ends: tuple[float, float],
    seed: int,
) -> None:
    """Kernels check no index, so an overrun would corrupt memory; `draw` looks for writes past max_rows."""
    new = min(new, history)
    count = -(-history // width) if content == "blocks" else new
    if content == "items" and count == 0:
        return
    meta: dict[str, Any] = {"content": content}
    if content == "blocks":
        meta["block_tokens"] = width
    items = np.random.default_rng(seed).integers(0, 300_000, count).tolist()
    made = trace([0.0], user=[seed], history=history, new=new, items=items, hot=(hot,), **meta)
    model = build(
        made,
        features=features,
        candidates=candidates,
        rate=rate,
        page_tokens=width,
        head=head,
        zipf=exponent,
        items=law_items,
    )
    first, last = sorted(round(end * history) for end in ends)
    total = 0
    for start, stop in ((0, history), (first, last)):
        tail, rows = draw(model, 0, seed, start, stop)
        keys = np.full(model.max_rows + 64, CANARY, np.int64)
        n = len(tail) + len(rows)
        for part in (HOT, TAIL):
            n = candidate_rows(model.state, keys, n, 0, 0, candidates, part)
        assert n <= model.max_rows
        assert (keys[n:] == CANARY).all()
        total = max(total, n)
    # And the room is not absurd: within a few rows a block of what is drawn on the average.
    mean = (history + candidates) * features * rate
    blocks = history if content == "items" else history // width + 1
    assert model.max_rows <= mean + (history % width + width) * features * rate + 4 * blocks + candidates + 8
    assert np.isfinite(model.state.edges).all()
    assert (np.diff(model.state.edges) >= 0).all()
    assert 0.0 <= model.state.tail_share[0] <= 1.0


def test_a_hot_set_beyond_the_range_of_the_hash_is_clipped() -> None:
    made = trace([0.0], hot=((0.5, 10**12),), law_items=10**12, catalogue=10**12)
    assert build(made, rate=1.0).state.hot_strata[0] == 2**32 - 1


@pytest.mark.parametrize("rate", [1.0, 1 / 64, 1e-6])
def test_draws_fall_into_the_classes_of_popularity_by_their_shares(rate: float) -> None:
    made = trace([0.0])
    model = build_rows(
        made, features=1000, candidates=1000, page_tokens=128, rate=rate, head=1000, zipf=1.05, items=10_000_000
    )
    first, share = model.state.class_first, model.state.class_share
    assert first[0] == 0
    assert np.all(np.diff(first) > 0)
    assert share.sum() == pytest.approx(1.0)
    if rate == 1.0:
        assert share == pytest.approx(1 / POPULARITY_CLASSES, rel=0.01)
    keys = np.zeros(model.max_rows, np.int64)
    drawn = np.concatenate(
        [keys[: candidate_rows(model.state, keys, 0, i, 0, 1000, 0)].copy() for i in range(round(1 / rate) % 999 + 1)]
    )
    counts = np.bincount(np.searchsorted(first, drawn, side="right") - 1, minlength=first.size)
    assert counts / drawn.size == pytest.approx(share, abs=4 * math.sqrt(0.06 / drawn.size) + 1e-9)


def draw_tokens(model: RowModel, request: int, user: int, first: int, last: int, phase: int = 0) -> Int64Array:
    """Return the rows of tokens [first, last), [tokens, 4]."""
    keys = np.full(4 * (last - first) + 8, CANARY, np.int64)
    assert token_rows(model.state, keys, request, user, phase, first, last) == 4 * (last - first)
    assert (keys[4 * (last - first) :] == CANARY).all()
    return keys[: 4 * (last - first)].reshape(-1, 4)


@pytest.mark.parametrize("content", ["law", "items", "blocks"])
def test_a_token_reads_as_many_rows_as_it_has_features_the_same_in_any_request(content: str) -> None:
    columns: dict[str, Any] = {"block_tokens": 16, "items": range(100)} if content == "blocks" else {}
    if content == "items":
        columns = {"items": [5, 7, 9, 11, 13, 15]}
    made = trace([0.0, 1.0], [3, 3], [800, 800], [3, 3], content=content, **columns)
    model = build(made, rate=1.0)
    whole = draw_tokens(model, 0, 3, 0, 700)
    for first, last in ((0, 1), (16, 32), (31, 500), (699, 700)):
        assert np.array_equal(draw_tokens(model, 0, 3, first, last), whole[first:last])
    if content != "blocks":  # whose histories are those of the request
        assert np.array_equal(draw_tokens(model, 1, 3, 0, 700), whole)
        assert not np.array_equal(draw_tokens(model, 0, 4, 0, 700), whole)
    if content == "items":
        assert (whole // 4 == whole[:, :1] // 4).all()
        assert (whole % 4 == np.arange(4)).all()


@pytest.mark.parametrize("of", ["history", "candidates"])
def test_tokens_draw_from_law_and_hot_set_in_their_shares(of: str) -> None:
    """As `history_rows` does, at rate 1."""
    items = 100_000
    made = trace([0.0], history=5_000, zipf_items=0.8, law_items=items, hot=((0.0, 0), (0.4, 50)))
    model = build(made, rate=1.0)
    if of == "history":
        keys = np.concatenate([draw_tokens(model, 0, user, 0, 5_000, phase=1).ravel() for user in range(10)])
    else:
        keys = np.empty(200_000, np.int64)
        assert candidate_token_rows(model.state, keys, 0, 0, 1, 50_000) == 200_000
    hot = keys >= 2**60
    assert hot.mean() == pytest.approx(0.4, abs=0.01)
    _, counts = np.unique(keys[hot], return_counts=True)
    assert counts.size == 50
    assert counts.max() < 1.2 * counts.mean()
    assert set(np.unique(keys[hot])) <= set(draw(model, 0, 0, 0, 5_000, phase=1)[1])
    probability = np.arange(1, items + 1) ** -0.8
    expected = np.cumsum(probability) / probability.sum()
    for rank in (10, 1_000, 30_000):
        assert (keys[~hot] < rank).mean() == pytest.approx(expected[rank - 1], abs=0.01)


def test_candidates_tokens_are_new_in_each_request_and_items_where_the_log_has_some() -> None:
    made = trace([0.0, 1.0], [3, 3], 800, 3, content="items", items=[5, 7, 9, 11, 13, 15])
    model = build(made, rate=1.0)
    keys = np.full((2, 90), CANARY, np.int64)
    for request in range(2):
        assert candidate_token_rows(model.state, keys[request], 2, request, 0, 20) == 82
    assert (keys[:, :2] == CANARY).all()
    assert (keys[:, 82:] == CANARY).all()
    rows = keys[:, 2:82].reshape(2, 20, 4)
    assert not np.array_equal(rows[0], rows[1])
    assert set((rows // 4).ravel().tolist()) <= {5, 7, 9, 11, 13, 15}
    assert (rows % 4 == np.arange(4)).all()
