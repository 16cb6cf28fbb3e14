from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from eval.comparison import DEPLOYABLE, POLICY
from eval.suite.cells import RECORDED
from eval.suite.given import read_decision, read_map
from eval.suite.goals import fell_short, goals
from eval.suite.plots import MapCell
from eval.suite.records import ServedRecord
from eval.suite.report import headline, write_report
from eval.suite.suite import Suite
from eval.suite.summary import Summary, summarise
from helm_rl.errors import UserError
from tests.eval.browser import Browser
from tests.eval.suite.worlds import faked, measured, small_plan

ROOT = Path(__file__).resolve().parents[3]
SERVED = ServedRecord(
    p99_ms=50.0, p50_ms=9.0, slo=0.999, throughput_per_s=900.0, shed=0.0, imbalance=1.1, burst_p99_ms=(49.0,)
)


@pytest.fixture(scope="module")
def summary(suite: Suite) -> Summary:
    """A suite on a fake node, with a cluster's results put beside it."""
    found = summarise(suite)
    served = {("helm", POLICY): (SERVED, SERVED), ("random", "one_node_static"): (SERVED,)}
    return replace(found, served=served, clustered=found.cells[2].cell, nodes=32)


@pytest.fixture(scope="module")
def page(summary: Summary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    cells = [MapCell("decoder-0.2b, remote-ps", 0.01 * k, 0.5 * k) for k in range(12)]
    cells += [MapCell("hstu-5, local-host", 0.0, 1.0)]
    write_report(path, summary, cells, {"one decision on alpha, whole (median)": "3.1 µs"})
    return path


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a policy, cluster, map or decisions."""
    folder = tmp_path_factory.mktemp("plain")
    path = folder / "report.html"
    with faked():
        write_report(path, summarise(measured(small_plan(), folder / "suite")))
    return path


def test_goals_are_met_or_missed_by_what_was_measured(summary: Summary) -> None:
    found = {goal.title: goal for goal in goals(summary)}
    against = found["P99 against the deployable static"]
    checks = {check.where: check for check in against.checks}
    # The policy stays where the deployable static is: no worse on Steady, which is enough, and no better elsewhere.
    assert checks["decoder, Steady"].reached
    assert checks["decoder, Trend"].reached is False
    assert checks["decoder, Burst"].text == "+0.0 %"
    assert checks["decoder, Burst"].known == "the best schedule known: -79.8 %"
    assert against.reached is False
    assert found["throughput, against the best static"].reached
    assert found["shift of the best ratio between regimes"].reached is None
    (shift, _) = found["shift of the best ratio between regimes"].checks
    assert shift.value == pytest.approx(0.4)
    captured = {check.where: check for check in found["P99 against the best static in hindsight of each trace"].checks}
    assert captured["decoder, Steady"].reached is None  # there is no headroom
    assert captured["decoder, Burst"].reached is False
    bursts = found["bursts with a P99 violation: naive reallocation / HELM"]
    assert [check.text for check in bursts.checks] == ["100 % of 4", "100 % of 4"]


def test_what_fell_short_is_computed(summary: Summary) -> None:
    found = goals(summary)
    lines = fell_short(found)
    assert len(lines) == sum(goal.reached is False for goal in found)
    (line,) = [line for line in lines if line.startswith("P99 against the deployable static")]
    assert "decoder, Burst +0.0 % (the best schedule known: -79.8 %)" in line
    assert "Steady" not in line
    # Had it been faster there, nothing of that would stand here.
    runs = [replace(result, runs=result.runs | {POLICY: result.reference.run}) for cell in summary.cells
            for result in cell.comparison.results]  # fmt: skip
    at = iter(runs)
    cells = tuple(
        replace(
            cell,
            comparison=replace(cell.comparison, results=tuple(next(at) for _ in cell.comparison.results)),
            capacities={POLICY: (1.2,), DEPLOYABLE: (1.0,), "hindsight_static": (1.2,)},
        )
        for cell in summary.cells
    )
    better = goals(replace(summary, cells=cells))
    missed = [goal.title for goal in better if goal.reached is False]
    against = ["P99 against the best single static ratio over the three patterns", "P99 against the best"]
    assert [title.split(" of ")[0] for title in missed] == against


def test_the_page_states_the_measured_numbers(page: Path, summary: Summary) -> None:
    text = html.unescape(page.read_text(encoding="utf-8")).replace("\N{NO-BREAK SPACE}", " ")
    assert headline(summary, goals(summary)) in text
    assert "Over 6 loads of 2 families, 2 draws each" in text
    for cell in summary.cells:
        for row in cell.comparison.rows:
            value = cell.comparison.estimate(row.key, "p99_ms").value
            assert f"<b>{value:.1f}</b>" in text or f"<b>{value:,.0f}</b>" in text
        assert cell.comparison.results[0].trace_hash[:12] in text
    for line in fell_short(goals(summary)):
        assert line in text
    for said in ("32 nodes under the burst of decoder", "3.1 µs", "Where adapting pays", "the paper", "-24 to -38 %"):
        assert said in text
    assert "<script" not in text
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", text)


@pytest.fixture
def recorded_page(summary: Summary, tmp_path: Path) -> Path:
    """Four recorded loads beside the others."""
    logs = ("azure", "mooncake", "ragpulse", "twitter")
    recorded = tuple(
        replace(cell, cell=replace(cell.cell, family=RECORDED, pattern=log))
        for cell, log in zip(summary.cells, logs, strict=False)
    )
    path = tmp_path / "report.html"
    write_report(path, replace(summary, cells=summary.cells + recorded), (), None)
    return path


@pytest.fixture
def published() -> Path:
    """The repository's own page: of four families, one of recorded arrivals."""
    return ROOT / "docs" / "suite" / "report.html"


@pytest.mark.parametrize(
    ("which", "pictures"), [("page", 4), ("plain_page", 2), ("recorded_page", 3), ("published", 4)]
)
@pytest.mark.parametrize("width", [390, 700, 1200])
def test_a_browser_shows_the_whole_page(
    browser: Browser, which: str, pictures: int, width: int, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(which)
    browser.open(path, width, 844)
    assert browser.problems() == []
    assert browser.requested() == [path.resolve().as_uri()]
    images = browser.evaluate(
        "Promise.all([...document.images].map(i => i.decode().then(() => [i.complete, i.naturalWidth, i.clientWidth])))"
    )
    assert len(images) == pictures
    assert all(complete and natural > 0 and shown > 300 for complete, natural, shown in images)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    cut_off = browser.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5"
        " || e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display != 'inline')"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert cut_off == []
    narrow = browser.evaluate("[...document.images].every(i => i.naturalWidth < 400)")
    assert narrow == (width == 390)


def test_a_browser_prints_it(browser: Browser, page: Path) -> None:
    browser.open(page, 1200, 844)
    pdf = browser.print_pdf()
    assert pdf.startswith(b"%PDF")
    assert 4 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 16


def test_a_map_and_decisions_are_read(tmp_path: Path) -> None:
    cell = {"model": "hstu-5", "link": "remote-ps", "headroom": 0.2, "deployable_loss": 0.1, "other": 1}
    (tmp_path / "cells.json").write_text(json.dumps([cell, cell | {"headroom": None}]))
    assert read_map(tmp_path) == [MapCell("hstu-5, remote-ps", 0.2, 0.1)]
    path = tmp_path / "decision.json"
    figure = {"value": 3.14159, "unit": "us", "goal": None, "better": "lower"}
    path.write_text(json.dumps({"figures": {"decision.p50_us": figure, "router.p50_us": figure | {"value": None}}}))
    assert read_decision(path) == {"one decision on alpha, whole (median)": "3.14 µs"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("{}", "is no list of a map's cells"),
        ("[3]", "cell 0: is no table"),
        ('[{"headroom": "x", "model": "m", "link": "l"}]', "cell 0: headroom must be a number, found x"),
        ('[{"headroom": 1, "model": "m", "link": "l"}]', "cell 0: deployable_loss must be a number, found None"),
        ('[{"headroom": 1}]', "cell 0: model must be a short text"),
        ("[]", "no cell of this map was measured"),
    ],
)
def test_what_is_no_map_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "cells.json").write_text(text)
    with pytest.raises(UserError, match=said):
        read_map(tmp_path)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--map: there is no .*cells\.json; it takes a folder of helm-rl eval map"):
        read_map(tmp_path)
    with pytest.raises(UserError, match=r"--decision: there is no .*none\.json"):
        read_decision(tmp_path / "none.json")
    (tmp_path / "some.json").write_text('{"figures": {}}')
    with pytest.raises(UserError, match="has no figure of decisions"):
        read_decision(tmp_path / "some.json")
