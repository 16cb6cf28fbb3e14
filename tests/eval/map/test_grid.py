from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from eval.map.grid import LINKS, MODELS, MOST_REQUESTS, Grid, Setting, requests
from helm_rl.errors import UserError
from helm_rl.workloads.generate import generate

SETTING = Setting("decoder-0.2b", "remote-ps", 0.0, 1500.0, 0.8)


def test_hot_users_make_their_share_of_the_rate_at_the_height_of_the_burst() -> None:
    trace = generate(Grid().scenario(SETTING, 300.0), seed=1)
    at_height = (trace.arrival_ns >= 85e9) & (trace.arrival_ns < 115e9)
    assert at_height.sum() / 30 == pytest.approx(300, rel=0.05)
    assert (trace.phase[at_height] == 1).mean() == pytest.approx(0.8, abs=0.02)
    before = (trace.arrival_ns >= 0) & (trace.arrival_ns < 60e9)
    assert before.sum() / 60 == pytest.approx(60, rel=0.1)
    assert [segment.label for segment in trace.segments()] == ["base", "burst", "base"]
    assert len(trace) == pytest.approx(requests(SETTING, 300.0, 1.0), rel=0.1)


def test_a_dense_pattern_takes_half_the_time_with_the_same_users() -> None:
    rate = 1.1 * MOST_REQUESTS / requests(SETTING, 1.0, 1.0)
    dense, full = Grid().scenario(SETTING, rate), Grid().scenario(SETTING, rate / 2)
    assert (dense.seconds, dense.warm_s) == (full.seconds / 2, full.warm_s / 2)
    assert dense.load.phase[0].start_s == full.load.phase[0].start_s / 2
    assert dense.load.phase[0].think_s == full.load.phase[0].think_s


def test_models_that_cannot_compute_a_full_history_in_time_get_another_slo_and_shorter_histories() -> None:
    slos = {model: Grid().scenario(Setting(model, "remote-ps", 0.0, 1500.0, 0.5), 50.0).slo_ms for model in MODELS}
    assert slos == {"hstu-5": 100.0, "decoder-0.2b": 100.0, "decoder-1.5b": 200.0}
    assert Grid().histories_of("decoder-1.5b") == (500.0, 1500.0)
    assert Grid(histories=(700.0,)).histories_of("decoder-1.5b") == (700.0,)


def test_every_cell_comes_once_and_a_part_of_them_is_balanced() -> None:
    settings = Grid().settings()
    assert len(settings) == len(set(settings)) == 3 * 2 * 3 * 2 * 2
    third = settings[: len(settings) // 3]
    assert min(Counter(setting.model for setting in third)[model] for model in MODELS) >= 5
    assert min(Counter(setting.link for setting in third)[link] for link in LINKS) >= 8
    assert settings == Grid().settings()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"models": ("decoder-9b",)}, "decoder-9b"),
        ({"models": ()}, "--models needs at least one value"),
        ({"links": ("usb",)}, "--links: 'usb' is unknown; known: remote-ps, local-host"),
        ({"loads": ("heavy",)}, "--loads: 'heavy' is unknown; known: moderate, limit"),
        ({"hot_shares": (1.0,)}, "--hot-shares must lie in .05 to .95, got 1"),
        ({"histories": (9000.0,)}, "--histories must lie in 1 to 7782"),
        ({"host_gib": (0.0, 0.0)}, "--host-gib names a value twice: 0.0 0.0"),
        ({"host_gib": (float("nan"),)}, "--host-gib must lie in"),
        ({"pool_gib": 79.9}, "--pool-gib 79.9 does not fit beside"),
        ({"link_gb_s": 0.0}, "--link-gb-s must be above 0 and at most 10,000, got 0"),
        ({"hardware": "abacus"}, "--hardware abacus is unknown"),
    ],
)
def test_what_cannot_be_mapped_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        Grid(**fields).check()
    assert message in str(error.value)


def test_options_tell_apart_what_gives_other_results() -> None:
    usual = Grid().options()
    assert usual["GB/s of remote-ps"] == 1.5
    assert Grid(link_gb_s=1.5).options()["GB/s of remote-ps"] == 1.5
    assert Grid(link_gb_s=0.4).options()["GB/s of local-host"] == 0.4
    assert usual["profile decoder-1.5b"]["slo_ms"] == 200.0
    assert usual == Grid().options() != Grid(pool_gib=24.0).options()
