from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from eval import plots
from eval.comparison import POLICY, Comparison, Contestant, compare
from eval.report import write_report
from eval.sweep import Work
from helm_rl.control.schedule import ScheduledAlpha
from helm_rl.scenario import Scenario, load_scenario
from tests.eval.browser import Browser
from tests.eval.fakes import FakeServing, small_scenario

TIMES = [-20_000_000_000, 45_000_000_000, 90_000_000_000]
LATE = Contestant(
    POLICY, "policy", "the bundle <b>late</b>", lambda: ScheduledAlpha(TIMES, [0.56, 0.2, 0.6]), origin="a test"
)


def compared(scenario: Scenario, best: dict[str, float] | None = None, **arguments: object) -> Comparison:
    work = Work(2, replay=FakeServing(best))
    try:
        return compare(scenario, work, **arguments)  # type: ignore[arg-type]
    finally:
        work.close()


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compared(small_scenario(), seeds=2, policies=[LATE])


@pytest.fixture(scope="module")
def page(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, comparison, {"time taken": "1 s"})
    return path


@pytest.fixture(scope="module")
def drift_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten segments, one draw, no policy: the other shape that a report has."""
    load = load_scenario("trend").load.model_copy(update={"rate": 20.0, "rate_end": 8.0})
    scenario = load_scenario("trend").model_copy(update={"load": load})
    path = tmp_path_factory.mktemp("report") / "drift.html"
    write_report(path, compared(scenario, {"hot": 0.4, "base": 0.5}, seeds=1, step=0.05))
    return path


def test_the_page_states_the_measured_numbers(page: Path, comparison: Comparison) -> None:
    text = page.read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    for key in ("policy", "half_static", "deployable_static", "hindsight_static", "segment_optimum"):
        assert f"{comparison.estimate(key, 'p99_ms').value:.1f}" in text
    policy = comparison.estimate(POLICY, "p99_ms").value
    assert f"the policy answered 99 % of requests within {policy:.1f} ms" in text
    for result in comparison.results:
        assert result.trace_hash in text
        assert str(result.seed) in text
    for wanted in ("time taken", "numba", "sha256", "best schedule known here", "not a bound"):
        assert wanted in text


def test_the_page_is_self_contained_and_escapes_what_it_quotes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    addresses = re.findall(r'(?:src|srcset|href)="([^"]*)"', text)
    assert len([each for each in addresses if each.startswith("data:image/svg+xml;base64,")]) == 8
    assert all(each.startswith("data:") for each in addresses)
    assert "<script" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "&lt;b&gt;late&lt;/b&gt;" in text
    assert "<b>late</b>" not in text


def test_plots_are_labelled_svg_and_the_same_twice(comparison: Comparison) -> None:
    for draw in (plots.tail_by_controller, plots.latency_distribution):
        first = plots.svg(draw, comparison, narrow=True)
        assert first == plots.svg(draw, comparison, narrow=True)
        assert first.startswith(b"<?xml")
        assert b"<svg" in first
        (axes,) = draw(comparison, False).axes
        assert "(ms, log scale)" in axes.get_xlabel()


def test_curves_mark_the_minimum_of_every_regime(comparison: Comparison) -> None:
    figure = plots.curves_by_regime(comparison, False)
    notes = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert [note.split(",")[0] for note in notes[1:]] == ["α* 0.60", "α* 0.20", "α* 0.60"]
    assert all(axes.get_yscale() == "log" for axes in figure.axes)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (40, 12_000, [50, 100, 200, 500, 1000, 2000, 5000, 10_000]),
        (30, 90, [30, 40, 50, 60, 80]),
        (1, 1e6, [1, 10, 100, 1e3, 1e4, 1e5, 1e6]),
        (8_200, 12_500, None),
        (75, 75.5, None),
    ],
)
def test_a_log_axis_has_a_handful_of_plain_ticks(low: float, high: float, ticks: list[float] | None) -> None:
    axes = Figure().subplots()
    plots.log_ms(axes.yaxis, axes.set_yscale)
    axes.set_ylim(low, high)
    found = [tick for tick in axes.yaxis.get_major_locator()() if low <= tick <= high]
    assert 3 <= len(found) <= 8
    assert ticks is None or found == ticks


def test_the_burst_is_shaded_over_its_time(comparison: Comparison) -> None:
    above, below = plots.alpha_over_time(comparison, False).axes
    for axes in (above, below):
        bands = [patch for patch in axes.patches if to_hex(patch.get_facecolor()) == plots.BURST]
        assert [(band.get_x(), band.get_width()) for band in bands] == [(40.0, 40.0)]  # type: ignore[attr-defined]


def test_a_page_that_cannot_be_written_leaves_nothing(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise RuntimeError("no ink")

    monkeypatch.setattr(plots, "svg", broken)
    with pytest.raises(RuntimeError, match="no ink"):
        write_report(tmp_path / "report.html", comparison)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("which", ["page", "drift_page"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_the_whole_page(
    browser: Browser, which: str, width: int, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(which)
    browser.open(path, width, 844)
    assert browser.problems() == []
    assert browser.requested() == [path.resolve().as_uri()]
    assert browser.evaluate("innerWidth") == width
    images = browser.evaluate(
        "Promise.all([...document.images].map(i => i.decode().then(() => [i.complete, i.naturalWidth, i.clientWidth])))"
    )
    assert len(images) == 4
    assert all(complete and natural > 0 and shown > 300 for complete, natural, shown in images)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    too_wide = browser.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert too_wide == []
    # On a phone the drawings made for it are shown, not the wide ones made small.
    narrow = browser.evaluate("[...document.images].every(i => i.naturalWidth < 400)")
    assert narrow == (width == 390)


def test_a_browser_prints_it(browser: Browser, page: Path) -> None:
    browser.open(page, 1200, 844)
    pdf = browser.print_pdf()
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 8


def test_the_browser_check_would_see_a_broken_page(browser: Browser, page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = re.sub(r"data:image/svg\+xml;base64,[^\"]*", "data:image/svg+xml;base64,AAAA", text, count=2)
    broken = broken.replace("</main>", '<p style="width:900px">x</p><script>undefined.x</script></main>')
    path = tmp_path / "broken.html"
    path.write_text(broken, encoding="utf-8")
    browser.open(path, 390, 844)
    assert browser.problems()
    assert browser.evaluate("[...document.images].some(i => i.naturalWidth === 0)")
    assert browser.evaluate("document.documentElement.scrollWidth") > 390


def test_data_uris_hold_what_was_drawn(page: Path, comparison: Comparison) -> None:
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', page.read_text(encoding="utf-8"))
    assert base64.b64decode(found[0]) == plots.svg(plots.tail_by_controller, comparison, False)
