"""How the loads of the families were set: `python -m eval.suite.calibrate SCENARIO`, by statics alone.

A Steady scenario gives model, hardware, SLO and the shape of its users' load. What is found are the largest rates that
the best of five statics (.1, .3, .5, .7, .9) serves within the SLO, on arrivals of their own, to 3 %:

- steady: of these users alone;
- mix: of a load of which .9 are users who stay, once it has come up;
- burst: at the height of a burst of users who stay, .8 of all (`helm-rl eval map` asks the same of its cells).

SHARE of them is what the shipped files have: Steady runs at that of the first, Trend goes from there to that of the
mix, and Burst has at its height that of the burst. No controller takes part.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from eval.map.grid import PREPARING_SEED, Grid, Setting
from eval.map.measure import LIMIT_ALPHAS, a_static_holds, largest_rate, largest_that_holds
from eval.map.player import Player
from eval.segments import Span
from helm_rl.errors import UserError
from helm_rl.scenario import Scenario, load_scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace

SHARE = 0.95
HOT_IN_MIX, HOT_IN_BURST = 0.9, 0.8
SECONDS, RAMP_S, SETTLED_S = 300.0, 30.0, 60.0
"""Of the patterns of steady and mix; the mix comes up over its first RAMP_S, and is judged from SETTLED_S until it goes
down."""
LEAST_RATE = 6.0
"""Requests/s below which a pattern has too few requests for a P99."""


@dataclass(frozen=True)
class Limits:
    """Requests/s; burst: at its height, base load included."""

    steady: float
    mix: float
    burst: float


def limits(steady: Scenario) -> Limits:
    """Find the limits of a family by its Steady scenario; UserError where even a few requests/s miss the SLO."""
    mix = _largest(steady, HOT_IN_MIX)
    alone = _largest(steady, 0.0)
    hardware = steady.hardware
    grid = Grid(hardware=hardware.profile, pool_gib=hardware.pool_gib, link_gb_s=hardware.link_gb_s)
    setting = Setting(steady.model.profile, hardware.link, hardware.kv_host_gib, steady.load.history_mean, HOT_IN_BURST)
    burst = largest_rate(grid, setting)
    if mix is None or alone is None or burst is None:
        raise UserError(f"scenario {steady.name}: no static serves even {LEAST_RATE:g} requests/s within the SLO")
    return Limits(alone, mix, burst)


def _largest(steady: Scenario, hot: float) -> float | None:
    """Return the largest rate of all users, of whom a share stays."""
    alphas = list(LIMIT_ALPHAS)

    def holds(rate: float) -> bool:
        scenario = pattern(steady, rate, hot)
        trace = generate(scenario, seed=PREPARING_SEED)
        segment = _settled(trace) if hot else None
        return a_static_holds(Player(scenario, trace), scenario.slo_ms, alphas, segment)

    return largest_that_holds(holds, LEAST_RATE)


def pattern(steady: Scenario, rate: float, hot: float, seconds: float = SECONDS) -> Scenario:
    """Return the pattern of `rate` requests/s of which a share is of users who stay."""
    (staying,) = load_scenario("burst").load.phase
    coming = staying.model_copy(
        update={"start_s": 0.0, "seconds": seconds, "ramp_s": RAMP_S, "rate": rate * hot, "label": "hot"}
    )
    load = steady.load.model_copy(update={"rate": rate * (1 - hot), "phase": (coming,) if hot else ()})
    return steady.model_copy(update={"seconds": seconds, "load": load})


def _settled(trace: Trace) -> Span:
    start_ns, end_ns = round(SETTLED_S * 1e9), round((SECONDS - RAMP_S) * 1e9)
    first, last = (int(index) for index in trace.arrival_ns.searchsorted([start_ns, end_ns]))
    return Span("settled", start_ns, end_ns, first, (first + last) // 2, last)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = limits(load_scenario(name))
        print(f"{name}: limits of {found}")
        print(f"  steady {SHARE * found.steady:.4g}; trend to {SHARE * found.mix * (1 - HOT_IN_MIX):.4g}", end="")
        print(f" and {SHARE * found.mix * HOT_IN_MIX:.4g}", end="")
        print(f"; burst {SHARE * found.burst * (1 - HOT_IN_BURST):.4g} and {SHARE * found.burst * HOT_IN_BURST:.4g}")
