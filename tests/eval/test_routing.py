"""`helm-rl eval routing`: the loads it serves, what it makes of a replay, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.serving.cluster import ClusterWindow
from envs.serving.replay import ClusterReplay
from eval.routing import HELM, NAIVE, NAIVE_HELM, ROUTERS, Args, imbalance, main, reallocating, reduce, stretch
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.routing import ROUTERS as ALL_ROUTERS
from helm_rl.scenario import load_scenario
from helm_rl.workloads.generate import generate
from tests.helm_rl.test_observation import window

SECOND = 1_000_000_000
SCENARIO = """
name = "tiny [x]"
slo_ms = 100
seconds = 20
warm_s = 5
[model]
features_per_token = 4
candidates = 16
[hardware]
pool_gib = 0.0625
page_kib = 256
link_gb_s = 0.1
[control]
migrate_pages_per_s = 200
[load]
rate = 40
users = 400
items = 2e7
history_mean = 300
history_max = 1024
[[load.phase]]
label = "sale"
start_s = 6
seconds = 10
rate = 60
requests_per_visit = 8
think_s = 0.5
hot_fraction = 0.5
"""


def test_a_scenario_is_scaled_and_its_bursts_repeated() -> None:
    burst = load_scenario("burst")
    load, phase = burst.load, burst.load.phase[0]
    scaled = stretch(burst, 3, 8)
    assert scaled.hardware.nodes == 8
    assert (scaled.load.rate, scaled.load.users) == (8 * load.rate, 8 * load.users)
    period_s = phase.start_s + phase.seconds
    expected = [(phase.start_s + k * period_s, phase.seconds, 8 * phase.rate) for k in range(3)]
    assert [(each.start_s, each.seconds, each.rate) for each in scaled.load.phase] == expected
    assert scaled.seconds == 3 * period_s + 60
    assert [each.label for each in scaled.load.phase] == ["burst"] * 3
    one = stretch(burst, 1, 1)
    assert (one.load.phase, one.load.rate, one.seconds) == (load.phase, load.rate, period_s + 60)
    # Each burst sells something else.
    firsts = [phase.hot_first for phase in generate(stretch(burst, 3, 1)).meta.phases[1:]]
    assert len(set(firsts)) == 3


def test_what_naive_and_budgeted_mean() -> None:
    burst = stretch(load_scenario("burst"), 1, 4)
    naive, mixed, helm = (reallocating(burst, way) for way in (NAIVE, NAIVE_HELM, HELM))
    assert [each.router.policy for each in (naive, mixed, helm)] == ["least-loaded", "helm", "helm"]
    assert [each.hardware.refill_share for each in (naive, mixed, helm)] == [0.0, 0.0, burst.hardware.refill_share]
    assert burst.hardware.refill_share > 0
    assert naive.control.migrate_pages_per_s == mixed.control.migrate_pages_per_s > 1e8
    assert helm.control == burst.control
    assert set(ROUTERS) == set(ALL_ROUTERS)


def node(second: int, busy: float, **changes: Any) -> WindowStats:
    times = {"link_busy_ns": round(busy * SECOND / 4), "compute_busy_ns": round(busy * SECOND * 3 / 4)}
    return window(start_s=second, end_s=second + 1, **{**times, **changes})


def played(windows: list[ClusterWindow], **changes: Any) -> ClusterReplay:
    base = {
        "latency_ms": np.zeros(0, np.float32),
        "measured": np.zeros(0, np.bool_),
        "node_of": np.zeros(0, np.int16),
        "time_s": np.arange(1.0, len(windows) + 1) - 5,  # the first five are warm-up
        "alpha": np.full((len(windows), 2), 0.5, np.float32),
        "windows": windows,
        "decide_us": 1.0,
    }
    return ClusterReplay(**{**base, **changes})


def test_imbalance_by_hand() -> None:
    """In the first 10 s 3 + 1, in the next 2 and 2, in the last, of five seconds, one is down: 1.5, 1, 2."""
    pairs = [(9.0, 0.0)] * 5 + [(0.3, 0.1)] * 10 + [(0.2, 0.2)] * 10
    windows = [ClusterWindow((node(k, one), node(k, other)), 0, 0) for k, (one, other) in enumerate(pairs)]
    windows += [ClusterWindow((None, node(k, 0.4)), 0, 0) for k in range(25, 30)]
    assert imbalance(played(windows), 0.0) == pytest.approx((1.5 + 1.0 + 2.0) / 3)


def test_a_replay_is_reduced_to_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(SCENARIO)
    scenario = stretch(load_scenario(path), 1, 2)
    trace = generate(scenario, 3)
    n = len(trace)
    latency_ms = np.full(n, 10, np.float32)
    arrival_s = trace.arrival_ns * 1e-9
    measured = trace.arrival_ns >= 0
    inside = np.flatnonzero((arrival_s >= 6) & (arrival_s <= 16))
    latency_ms[inside[: len(inside) // 2]] = 150
    latency_ms[~measured] = 10_000
    latency_ms[np.flatnonzero(measured)[-1]] = 10_000
    seconds = 81
    counters = {"history_tokens": 100, "rows": 10.0, "fetched_bytes": 2e9, "refilled_bytes": 1e9}
    windows = [
        ClusterWindow(
            (
                node(k, 0.5, history_tokens_hit=30, rows_hit=9.0, **counters),
                node(k, 0.5, history_tokens_hit=50, rows_hit=8.0, **counters),
            ),
            0,
            0,
        )
        for k in range(seconds)
    ]
    alpha = np.linspace(0.1, 0.9, seconds, dtype=np.float32)[:, None].repeat(2, axis=1)
    result = played(windows, latency_ms=latency_ms, measured=measured, alpha=alpha)
    served = reduce(result, trace, scenario)
    assert served.kv_hit == pytest.approx(0.4)
    assert served.emb_hit == pytest.approx(0.85)
    assert served.critical_gb == pytest.approx(76 * 4)
    assert served.refilled_gb == pytest.approx(76 * 2)
    assert served.burst_p99_ms == (150,)
    assert served.p50_ms == 10
    assert served.slo == pytest.approx(1 - (len(inside) // 2 + 1) / measured.sum())
    assert served.shed == pytest.approx(1 / measured.sum())
    assert served.window_s.tolist() == [5, 15, 25, 35, 45, 55, 65, 75]
    assert served.window_p99_ms[:4].tolist() == [
        150,
        150 if 150 in latency_ms[(arrival_s >= 10) & (arrival_s < 20)] else 10,
        10,
        10,
    ]
    assert served.window_alpha[0] == pytest.approx(alpha[14, 0])


def test_from_start_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(SCENARIO)
    args = Args(
        scenario=str(path),
        nodes=2,
        seeds=1,
        routers=("helm", "random"),
        bursts=2,
        json=tmp_path / "figures.json",
        plot=tmp_path / "bursts.png",
    )
    main(args)
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["routing.helm.kv_hit"]["value"] > figures["routing.random.kv_hit"]["value"]
    assert figures["routing.helm.p99_ms"]["value"] > 0
    assert 1 <= figures["routing.random.imbalance"]["value"] < 2
    assert figures["burst.violations.naive"]["value"] in (0.0, 0.5, 1.0)
    assert 0.1 <= figures["burst.alpha.hot"]["value"] <= 0.9
    shown = capsys.readouterr().out
    assert "tiny [x]" in shown
    assert "2 bursts, alpha" in shown
    assert (tmp_path / "bursts.png").read_bytes()[:4] == b"\x89PNG"
    # The same again, at an alpha of one's own.
    main(replace(args, bursts=0, plot=None, alpha=0.3, overwrite=True))
    again = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert again["routing.alpha"]["value"] == 0.3
    assert not [name for name in again if name.startswith("burst.")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "--nodes must lie in 1 to 512, got 0"),
        ({"seeds": 0}, "--seeds must be at least 1, got 0"),
        ({"bursts": -1}, "--bursts must lie in 0 to 100"),
        ({"jobs": 0}, "--jobs must lie in 1 to 1024"),
        ({"routers": ("helm", "helm")}, "--routers names a router twice"),
        ({"routers": (), "bursts": 0}, "there is nothing to measure"),
        ({"alpha": 0.95}, "--alpha must lie in the scenario's 0.1 to 0.9, got 0.95"),
        ({"scenario": "steady"}, "scenario steady has no .*so no bursts"),
        ({"plot": Path("x.pdf")}, "--plot must end in .png or .svg"),
        ({"plot": Path("x.png"), "bursts": 0}, "--plot draws bursts"),
        ({"json": Path(), "overwrite": True}, "is a folder; name a file"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(Args(**change))
