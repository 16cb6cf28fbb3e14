from __future__ import annotations

from eval.comparison import Estimate
from eval.wording import alpha, counted, flat_set, interval_ms, milliseconds, percent, times


def test_latencies() -> None:
    assert milliseconds(138.42) == "138.4"
    assert milliseconds(10_000.0) == "10,000"
    assert interval_ms(Estimate(1.0, (135.84, 1140.1), (1.0, 1.0))) == "135.8 to 1,140"
    assert interval_ms(Estimate(1.0, None, (1.0,))) == ""
    assert interval_ms(Estimate(1.0, (1.0, 1.0), (1.0, 1.0))) == ""


def test_numbers_of_things() -> None:
    assert [counted(n, "draw") for n in (0, 1, 2_000)] == ["0 draws", "1 draw", "2,000 draws"]
    assert [counted(n, "family", "families") for n in (1, 2)] == ["1 family", "2 families"]


def test_shares_and_ratios() -> None:
    assert percent(0.034) == "3.4 %"
    assert percent(0.34) == "34 %"
    assert percent(-0.021) == "-2.1 %"
    assert percent(71.94) == "7,194 %"
    assert times(1.624) == "1.62 ×"
    assert times(0.0222) == "0.022 ×"


def test_alphas_and_flat_sets() -> None:
    assert alpha(0.6) == "0.60"
    assert alpha(0.613333) == "0.613"
    assert flat_set(((0.18, 0.22), (0.7, 0.7))) == "0.18 to 0.22, 0.70"
