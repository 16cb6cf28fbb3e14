"""The rules that divide memory today: each against windows worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helm_rl.control.peers.cliffhanger import Cliffhanger
from helm_rl.control.peers.hill_climbing import HillClimbing
from helm_rl.control.peers.marginal_hits import MarginalHits
from helm_rl.control.peers.miss_ratio_curve import MissRatioCurves
from helm_rl.control.peers.weighted_margins import WeightedMargins
from helm_rl.control.protocol import Controller
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import SIZE

OBSERVATION = np.zeros(SIZE, np.float32)
SECOND = 1_000_000_000


def window(**changes: Any) -> WindowStats:
    """Return a window of 100 requests in which nothing else happened."""
    fields: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(WindowStats)}
    fields |= {"end_ns": SECOND, "arrivals": 100, "completed": 100, "emb_saved_ms": (), "kv_saved_ms": ()}
    return WindowStats(**{**fields, **changes})


def steered(controller: Controller, windows: list[WindowStats], alpha: float = 0.5) -> list[float]:
    """Return the targets after each window, alpha being where the last target put it."""
    controller.reset(0)
    targets = []
    for i, one in enumerate(windows):
        controller.feedback(one)
        alpha = controller.decide(OBSERVATION, alpha, i * SECOND)
        targets.append(alpha)
    return targets


def test_marginal_hits_steps_towards_the_side_that_saves_more() -> None:
    rule = MarginalHits(step=0.02)
    assert steered(rule, [window(emb_margin_ms=2.0, kv_margin_ms=1.0)] * 3) == pytest.approx([0.52, 0.54, 0.56])
    assert steered(rule, [window(emb_margin_ms=1.0, kv_margin_ms=2.0)] * 2) == pytest.approx([0.48, 0.46])
    assert steered(rule, [window(emb_margin_ms=1.0, kv_margin_ms=1.05)]) == [0.5]  # within the dead band
    assert steered(rule, [window()]) == [0.5]  # nothing would save anything
    assert steered(rule, [window(emb_margin_ms=1.0)] * 30)[-1] == 0.9


def test_marginal_hits_smooths_and_ignores_windows_without_requests() -> None:
    # .3 * 4 + .7 * 0 = 1.2 is still above 1: the turn comes a window later.
    turn = [window(emb_margin_ms=4.0, kv_margin_ms=1.0), window(emb_margin_ms=0.0, kv_margin_ms=1.0)]
    assert steered(MarginalHits(), [turn[0], turn[1], turn[1]]) == pytest.approx([0.52, 0.54, 0.52])
    idle = window(arrivals=0, emb_margin_ms=0.0, kv_margin_ms=9.0)
    assert steered(MarginalHits(), [turn[0], idle]) == pytest.approx([0.52, 0.54])


def test_weighted_margins_go_by_what_pages_are_worth_where_time_is_scarce() -> None:
    # Link half busy and accelerator idle: a ms of the link weighs 8 ms of prefill.
    busy = {"end_ns": SECOND, "link_busy_ns": SECOND // 2, "compute_busy_ns": 0}
    rule = WeightedMargins(rate_per_s=0.01, smoothing_s=0.0)
    assert steered(rule, [window(emb_margin_ms=1.0, kv_margin_ms=8.0, **busy)]) == pytest.approx([0.5])
    more = window(emb_margin_ms=3.0, kv_margin_ms=8.0, **busy)  # 24 against 8
    assert steered(rule, [more, more]) == pytest.approx([0.505, 0.51])
    prefill = window(emb_margin_ms=3.0, kv_margin_ms=80.0, kv_margin_link_ms=8.0, **busy)  # 24 against 72
    assert steered(rule, [prefill]) == pytest.approx([0.495])
    assert steered(rule, [window(**busy), window(arrivals=0, emb_margin_ms=9.0, **busy)]) == [0.5, 0.5]
    assert steered(WeightedMargins(rate_per_s=0.5), [window(emb_margin_ms=1.0, **busy)] * 30)[-1] == 0.9
    slow = WeightedMargins(rate_per_s=0.01, smoothing_s=10.0)
    assert steered(slow, [more]) == pytest.approx([0.5 + 0.01 * 0.5 * -math.expm1(-0.1)])


def test_cliffhanger_earns_credits_for_every_ms_missed() -> None:
    rule = Cliffhanger(credit=1e-4)
    # 100 requests x 2 ms x 1e-4
    assert steered(rule, [window(emb_margin_ms=3.0, kv_margin_ms=1.0)] * 2) == pytest.approx([0.52, 0.54])
    assert steered(rule, [window(kv_margin_ms=1.0)]) == pytest.approx([0.49])
    assert steered(rule, [window(kv_margin_ms=1e6)]) == pytest.approx([0.44])  # at most .06
    rule.feedback(window(emb_margin_ms=1.0))
    rule.reset(0)
    assert rule.decide(OBSERVATION, 0.3, 0) == 0.3  # forgotten


def test_hill_climbing_turns_round_when_it_gets_worse() -> None:
    rule = HillClimbing(step=0.1, requests=200, decay=0.5, restart=10.0)

    def at(log_latency: float) -> list[WindowStats]:
        return [window(log_latency_sum=100 * log_latency)] * 2  # enough for one step

    targets = steered(rule, [*at(-1.0), *at(-1.2), *at(-1.1), *at(-1.3)])
    # The first step is a guess; it got better: on; worse: back by half; better: on.
    assert targets[1::2] == pytest.approx([0.6, 0.7, 0.65, 0.6])
    assert targets[::2] == pytest.approx([0.5, 0.6, 0.7, 0.65])  # too few requests for another step


def test_hill_climbing_starts_anew_when_the_load_changes() -> None:
    rule = HillClimbing(step=0.1, requests=100, decay=0.5, restart=0.5)
    loads = [-2.0, -1.9, -1.8, -0.5]
    targets = steered(rule, [window(log_latency_sum=100 * load) for load in loads])
    # steps .1, worse: -.05, worse: .025, much worse: the first step again, turned and halved
    assert np.diff([0.5, *targets]) == pytest.approx([0.1, -0.05, 0.025, -0.05])


def test_hill_climbing_stays_within_its_bounds_and_comes_back() -> None:
    rule = HillClimbing(step=0.3, requests=100, alpha_min=0.2, alpha_max=0.8)
    targets = steered(rule, [window(log_latency_sum=-100.0 - i) for i in range(4)])
    assert targets == pytest.approx([0.8, 0.8, 0.5, 0.2])


def curve(shares: list[float], saved: list[float]) -> tuple[float, ...]:
    return tuple(np.interp(np.linspace(0, 1, 65), shares, saved).tolist())


def test_the_optimum_of_two_curves() -> None:
    # Rows save 10 ms with .25 of the pool and no more beyond; keys and values 1 ms with each .1 of it.
    both = window(emb_saved_ms=curve([0, 0.25, 1], [0, 10, 10]), kv_saved_ms=curve([0, 1], [0, 10]))
    assert steered(MissRatioCurves("optimum"), [both]) == [0.25]
    assert steered(MissRatioCurves("emb-first"), [both]) == [0.25]
    assert steered(MissRatioCurves("kv-first"), [both]) == [0.1]  # they could use it all
    small = window(emb_saved_ms=curve([0, 1], [0, 10]), kv_saved_ms=curve([0, 0.5, 1], [0, 1, 1]))
    assert steered(MissRatioCurves("kv-first"), [small]) == [0.5]
    assert steered(MissRatioCurves("optimum"), [small]) == [0.9]


def test_curves_are_smoothed_and_what_says_nothing_is_ignored() -> None:
    low = window(emb_saved_ms=curve([0, 0.25, 1], [0, 10, 10]), kv_saved_ms=curve([0, 1], [0, 10]))
    high = window(emb_saved_ms=curve([0, 1], [0, 30]), kv_saved_ms=curve([0, 1], [0, 10]))
    assert steered(MissRatioCurves(smoothing=0.1), [low, high])[1] == 0.25
    assert steered(MissRatioCurves(smoothing=1.0), [low, high])[1] == 0.9
    assert steered(MissRatioCurves(), [window(arrivals=0, emb_saved_ms=low.emb_saved_ms), window()], 0.4) == [0.4, 0.4]
    flat = window(emb_saved_ms=(0.0,) * 65, kv_saved_ms=(0.0,) * 65)
    assert steered(MissRatioCurves(), [flat], 0.375) == [0.375]  # all the same: it stays


@pytest.mark.parametrize(
    "make",
    [
        lambda: MarginalHits(step=0.0),
        lambda: MarginalHits(alpha_min=0.9, alpha_max=0.1),
        lambda: MarginalHits(dead_band=1.0),
        lambda: Cliffhanger(credit=math.nan),
        lambda: Cliffhanger(alpha_max=1.5),
        lambda: Cliffhanger(most=0.0),
        lambda: HillClimbing(requests=0),
        lambda: HillClimbing(step=math.inf),
        lambda: HillClimbing(decay=0.0),
        lambda: HillClimbing(restart=math.nan),
        lambda: HillClimbing(alpha_min=-0.1),
        lambda: WeightedMargins(rate_per_s=0.0),
        lambda: WeightedMargins(smoothing_s=math.inf),
        lambda: WeightedMargins(alpha_min=math.nan),
        lambda: MissRatioCurves("best"),  # type: ignore[arg-type]
        lambda: MissRatioCurves(smoothing=0.0),
        lambda: MissRatioCurves(alpha_min=math.nan),
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UserError):
        make()
