"""What is said about a trace is so, and its page shows it."""

from __future__ import annotations

import html.parser
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import StepPatch

from helm_rl import cli
from helm_rl.workloads import plots
from helm_rl.workloads.generate import generate, zipf_codes
from helm_rl.workloads.inspect import TraceSummary, dispersion, summarise
from helm_rl.workloads.page import render
from helm_rl.workloads.popularity import fit_zipf
from helm_rl.workloads.trace import Trace, TraceMeta, TracePhase
from helm_rl.workloads.wording import curves_in_words, popularity_in_words, rate_in_words, rows, tables
from tests.helm_rl.workloads.loads import flash_sale, scenario

SECOND = 1_000_000_000


def trace_of(arrival_s: list[float], users: list[int], items: list[list[int]], histories: list[int]) -> Trace:
    """A recorded trace of a few requests; all the items that a request names are new."""
    counts = [len(named) for named in items]
    end_ns = round(arrival_s[-1] * SECOND) + 1
    return Trace(
        arrival_ns=np.rint(np.array(arrival_s) * SECOND).astype(np.int64),
        user=np.array(users, np.int64),
        tenant=np.zeros(len(users), np.int32),
        phase=np.zeros(len(users), np.int32),
        history_tokens=np.array(histories, np.int32),
        new_tokens=np.array(counts, np.int32),
        item_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        item_values=np.array([item for named in items for item in named], np.int64),
        meta=TraceMeta(
            name="a <b> & $x$",
            source="test",
            origin_ns=0,
            measure_from_ns=0,
            users=max(users) + 1,
            items=1 + max((max(named) for named in items if named), default=0),
            content="items",
            phases=(TracePhase(label="base", start_ns=0, end_ns=end_ns),),
            steps=("sorted <i>",),
            dropped={"blank lines": 3},
        ),
    )


@pytest.fixture(scope="module")
def burst() -> TraceSummary:
    return summarise(generate(flash_sale()))


def test_windows_show_what_changes_over_time() -> None:
    trace = trace_of(
        [0, 0.5, 0.5, 61, 119.9],
        [0, 1, 0, 0, 1],
        [[7], [7, 8], [9], [7, 7], [1]],
        [10, 20, 11, 13, 21],
    )
    found = summarise(trace)
    over = found.over_time
    assert over.window_s == 1
    assert len(over.start_s) == 120
    assert (over.start_s[0], over.start_s[61]) == (0, 61)
    assert (over.items[0], over.items[61], over.items[1]) == (3, 1, 0)
    assert (over.users[0], over.history_tokens[0]) == (2, 20 + 11)
    assert over.history_tokens[61] == 13
    assert over.hot_user_ratio[0] == pytest.approx(1 / 3)
    assert over.hot_user_ratio[1] is None
    assert over.hot_user_ratio[61] == 0  # 60.5 s after his last
    assert over.rate_per_s[0] == 3
    assert over.history_tokens_mean[0] == pytest.approx(41 / 3)
    assert found.same_instant == pytest.approx(1 / 5)
    assert found.repeated == 0
    assert found.return_gap_shares == {
        "0 to 1 s": pytest.approx(1 / 3),
        "1 to 10 s": 0,
        "10 to 60 s": 0,
        "60 to 300 s": pytest.approx(2 / 3),
        "300 to 1800 s": 0,
        "over 1800 s": 0,
    }
    assert found.top_items_share == pytest.approx(4 / 7)
    assert found.popularity_points.y[0] == 4
    assert found.embedding_curve is not None
    assert found.embedding_curve.working_set == 4
    assert found.kv_curve.working_set == 13 + 21


def test_a_trace_that_ends_on_an_edge_has_no_window_of_a_nanosecond() -> None:
    """Its last request comes at 120 s, its end is 1 ns later: that request belongs to the window before."""
    found = summarise(trace_of([0.5, 1.5, 119.25, 120.0], [0, 1, 2, 3], [[1]] * 4, [1, 1, 1, 5]))
    over = found.over_time
    assert over.window_s == 2
    assert len(over.start_s) == len(over.rate_per_s) == 60
    assert over.rate_per_s[-1] == pytest.approx(2 / 2)
    assert over.history_tokens[-1] == 1 + 5
    assert max(over.rate_per_s) == pytest.approx(1)


def test_a_short_rest_belongs_to_the_window_before_and_a_long_one_is_its_own() -> None:
    times = [*np.arange(0.5, 100), 100.2]
    short = summarise(trace_of(times, list(range(101)), [[1]] * 101, [1] * 101)).over_time
    assert (len(short.rate_per_s), short.rate_per_s[-1]) == (100, pytest.approx(2 / 1.2))
    assert short.end_s == pytest.approx(100.2)
    times[-1] = 100.8
    long = summarise(trace_of(times, list(range(101)), [[1]] * 101, [1] * 101)).over_time
    assert (len(long.rate_per_s), long.rate_per_s[-1]) == (101, pytest.approx(1 / 0.8))


def test_windows_and_pauses_suit_a_clock_of_seconds() -> None:
    """Ten requests a second, told to the second: what is shorter than a second says nothing."""
    times = np.repeat(np.arange(40), 10).tolist()
    users = [10 * (i // 20) + i % 10 for i in range(400)]  # each in two seconds, and none in others
    found = summarise(trace_of(times, users, [[1]] * 400, [1] * 400))
    assert found.clock_step_s == 1
    assert list(found.dispersion) == ["1"]
    assert found.dispersion["1"] == pytest.approx(0, abs=1e-9)
    assert found.over_time.window_s == 1
    assert found.over_time.rate_per_s == [pytest.approx(10)] * 40  # the last second too, of which 1 ns is seen
    assert next(iter(found.return_gap_shares)) == "0 to 1 s"
    coarse = summarise(trace_of([3.0 * time for time in times], users, [[1]] * 400, [1] * 400))
    assert coarse.over_time.window_s == 50
    assert list(coarse.return_gap_shares)[:2] == ["0 to 10 s", "10 to 60 s"]
    assert coarse.return_gap_shares["0 to 10 s"] == 1
    said = dict(rows(coarse))
    assert said["pauses"] == "of one user's requests: 0 to 10 s: 100.0%"  # no empty classes
    assert "steps of 3 s" in said["clock"]
    assert "--spread" in said["clock"]


def test_the_last_window_is_drawn_as_wide_as_it_is() -> None:
    """Of a clock of seconds the last one lasts until the next, though the trace ends as it begins."""
    found = summarise(trace_of(np.repeat(np.arange(40), 10).tolist(), list(range(400)), [[1]] * 400, [1] * 400))
    above, below = plots.over_time(found, narrow=True).axes
    assert above.get_xlim() == below.get_xlim() == (0, 40)
    (drawn,) = above.patches
    assert isinstance(drawn, StepPatch)
    assert drawn.get_data().edges.tolist() == list(range(41))
    assert drawn.get_data().values.tolist() == found.over_time.rate_per_s


@pytest.mark.parametrize("longest", [45, 59, 250, 2900, 30])
def test_every_axis_has_numbers_however_little_it_spans(longest: int) -> None:
    found = summarise(trace_of([0, 30, 30 + longest], [0, 0, 0], [[1], [2], [2]], [11, 12, 13]))
    for draw in (plots.pauses_and_histories, plots.popularity, plots.miss_ratios):
        figure = draw(found, True)
        figure.draw_without_rendering()
        for axes in figure.axes:
            for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
                shown = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
                assert sum(bool(tick.label1.get_text()) for tick in shown) >= 2, (draw, axis.axis_name, low, high)


def test_requests_of_one_instant_have_no_rate() -> None:
    found = summarise(trace_of([0, 0, 0], [0, 1, 2], [[1]] * 3, [1] * 3))
    assert found.rate_mean is None
    assert "within a millisecond" in dict(rows(found))["rate"]
    assert max(found.over_time.rate_per_s) < 1e6
    assert "000,000" not in render(found)


def test_the_kv_curve_is_called_exact_only_where_no_history_shrinks() -> None:
    grow = trace_of([0, 5, 9, 12], [0, 1, 0, 1], [[1], [2], [1], [1]], [5, 6, 7, 8])
    found = summarise(grow)
    assert found.shrinking == 0
    assert "so the curves are exact" in curves_in_words(found)
    shrunk = summarise(replace(grow, history_tokens=np.array([5, 6, 4, 6], np.int32)))
    assert shrunk.shrinking == 1
    assert "1 of 2 returns find a shorter history" in render(shrunk).replace("&#39;", "'")
    assert "curves are exact" not in render(shrunk)
    assert "a node also reads the rows of the whole history" in render(shrunk)


def test_blocks_are_not_called_items() -> None:
    trace = trace_of([0, 5, 9], [0, 1, 0], [[1], [2], [1]], [5, 6, 7])
    blocks = replace(trace, meta=trace.meta.model_copy(update={"content": "blocks", "block_tokens": 512}))
    found = summarise(blocks)
    assert tables(found)[1].rows[0][0] == "embeddings, content blocks of 512 tokens"
    assert "content blocks" in dict(rows(found))
    assert "items (an item is" not in render(found)
    assert tables(summarise(trace))[1].rows[0][0] == "embeddings, items"


def test_a_trace_without_items_says_so() -> None:
    found = summarise(trace_of([0, 30, 65], [0, 1, 2], [[], [], []], [3, 4, 5]))
    said = dict(rows(found))
    assert said["items"] == "no request names one"
    assert "popularity" not in said
    assert "no request names an item" in render(found)


def test_rare_requests_and_origins_are_told_in_digits() -> None:
    assert rate_in_words(1234.56) == "1,234.6/s"
    assert rate_in_words(0.5) == "30.0/min"
    assert rate_in_words(0.00713) == "25.7/h"
    assert rate_in_words(1e-5) == "0.036/h"
    trace = trace_of([0, 3600 * 72], [0, 1], [[1], [1]], [3, 4])
    found = summarise(trace)
    assert "(3.0 days)" in dict(rows(found))["span"]
    assert (found.segments, found.empty_segments) == (4320, 4318)
    assert "4,318 of them without a request" in dict(rows(found))["segments"]
    dated = replace(found, origin_ns=1_700_158_546_680_590_000)
    assert dict(rows(dated))["span"].endswith("0 is 2023-11-16 18:15:46.68059 UTC")
    early = dict(rows(replace(found, origin_ns=874_724_710 * SECOND)))["span"]  # MovieLens 100K's first
    assert early.endswith("0 is 1997-09-20 03:05:10 UTC")
    assert dict(rows(replace(found, origin_ns=82 * SECOND)))["span"].endswith("0 is 82 s on the source's clock")


def test_a_trace_of_more_segments_than_results_can_be_told_for_is_inspected_all_the_same() -> None:
    found = summarise(trace_of([0, 70 * 86_400], [0, 0], [[1], [1]], [1, 2]))
    assert (found.segments, found.empty_segments, found.requests) == (None, 0, 2)
    assert dict(rows(found))["segments"].startswith("more than 100,000, too many")


def test_requests_at_the_last_tick_of_a_coarse_clock_came_until_the_next() -> None:
    times = [float(second) for second in range(4) for _ in range(25)]
    found = summarise(trace_of(times, list(range(100)), [[1]] * 100, [1] * 100))
    assert (found.clock_step_s, found.rate_mean) == (1.0, 25.0)
    days = [86_400.0 * day for day in range(3) for _ in range(10)]
    found = summarise(trace_of(days, list(range(30)), [[1]] * 30, [1] * 30))
    assert (found.clock_step_s, found.dispersion) == (86_400.0, {})
    assert found.rate_mean == pytest.approx(10 / 86_400)


def test_dispersion_is_the_variance_over_the_mean() -> None:
    trace = trace_of([*range(20), 20.5], [0] * 21, [[0]] * 21, [1] * 21)
    assert dispersion(trace, (1.0,)) == {"1": pytest.approx(0, abs=1e-12)}
    twice = trace_of([2.0 * (i // 4) for i in range(40)] + [20.0], [0] * 41, [[0]] * 41, [1] * 41)
    counts = np.array([4, 0] * 10)
    assert dispersion(twice, (1.0, 60.0)) == {"1": pytest.approx(counts.var(ddof=1) / counts.mean())}


def test_poisson_arrivals_have_a_dispersion_of_one_and_visits_more() -> None:
    single = dispersion(generate(scenario(seconds=2000, rate=50, requests_per_visit=1)), (1.0, 10.0))
    assert single["1"] == pytest.approx(1, abs=0.13)
    assert single["10"] == pytest.approx(1, abs=0.4)
    # Requests of visits come together: over windows far longer than a visit, a geometric number n of them has
    # E[n^2] / E[n] = 2 * 5 - 1.
    visits = dispersion(generate(scenario(seconds=20_000, rate=20, requests_per_visit=5, think_s=0.5)), (60.0,))
    assert visits["60"] == pytest.approx(9, rel=0.25)


@pytest.mark.parametrize("exponent", [0.6, 0.9, 1.05, 1.4])
def test_the_exponent_of_a_law_is_found_and_it_fits(exponent: float) -> None:
    counts = np.unique(zipf_codes(np.random.default_rng(5), 300_000, exponent, 100_000), return_counts=True)[1]
    fit = fit_zipf(counts)
    assert fit is not None
    assert fit.exponent == pytest.approx(exponent, rel=0.03)
    assert fit.fits
    assert "; it fits" in popularity_in_words(fit)


def test_what_is_no_law_is_said_to_be_none(burst: TraceSummary) -> None:
    assert burst.popularity is not None
    assert not burst.popularity.fits  # the law, and a hot set beside it
    assert popularity_in_words(burst.popularity).startswith("no Zipf law fits")
    steps = fit_zipf(np.concatenate([np.full(50, 1000), np.full(5000, 20)]))
    assert steps is not None
    assert not steps.fits
    assert fit_zipf(np.full(100_000, 2)) is None
    assert fit_zipf(np.zeros(0, np.int64)) is None
    assert "too few items" in popularity_in_words(None)


def test_everything_said_is_json(burst: TraceSummary) -> None:
    json.dumps(asdict(burst), allow_nan=False)
    no_items = trace_of([0, 1], [0, 1], [[], []], [3, 4])
    found = summarise(no_items)
    assert found.embedding_curve is None
    assert found.popularity_points.x == []
    json.dumps(asdict(found), allow_nan=False)
    assert render(found).count("<svg") == 10
    assert found.dispersion == {"0.1": pytest.approx(1, rel=0.2)}


class _Page(html.parser.HTMLParser):
    """Collects tags, ids and what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset"):
                self.links.append(value or "")


def test_the_page_loads_nothing_and_shows_what_there_is() -> None:
    text = render(summarise(trace_of([0, 5, 9], [0, 1, 0], [[1], [2], [1]], [5, 6, 7])))
    page = _Page()
    page.feed(text)
    assert page.tags.count("svg") == 10
    assert not {"script", "img", "i"} & set(page.tags)
    assert page.tags.count("link") == 1
    assert "<b>a" not in text
    assert "a &lt;b&gt; &amp; $x$" in text
    assert "sorted &lt;i&gt;" in text
    assert "Left out, blank lines: 3" in text
    assert len(set(page.ids)) == len(page.ids)
    assert {link.removeprefix("#") for link in page.links if link != "data:,"} <= set(page.ids)
    assert not re.search(r"url\((?!#)", text)
    # No colour but the style sheet's, so that the page can be dark.
    assert not re.search(r"#0[1-6]0[1-6]0[1-6]", text)
    assert re.findall(r"(?:fill|stroke): (#\w+)", text) == []


def test_the_page_names_the_phases(burst: TraceSummary) -> None:
    text = render(burst)
    assert "Shaded: a phase that adds load" in text
    assert "(exact)" not in text
    assert "Every key was followed" in text
    sampled = replace(burst, kv_curve=replace(burst.kv_curve, rate=0.25))
    assert "25.0% of the keys" in render(sampled)


def test_inspect_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = trace_of([0, 5, 9], [0, 1, 0], [[1], [2], [1]], [5, 6, 7])
    trace.save(tmp_path / "t.parquet")
    asked = ["trace", "inspect", str(tmp_path / "t.parquet"), "--html"]
    assert cli.main([*asked, str(tmp_path / "t.html")]) == 0
    assert "misses of an LRU cache" in capsys.readouterr().out
    assert (tmp_path / "t.html").read_text().startswith("<!doctype html>")
    assert cli.main([*asked, str(tmp_path / "t.html")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.main([*asked, str(tmp_path / "t.parquet"), "--overwrite"]) == 2
    assert "is what is read" in capsys.readouterr().err
    assert cli.main([*asked, str(tmp_path / "x"), "--json", str(tmp_path / "x")]) == 2
    assert "name the same file" in capsys.readouterr().err
