"""The rules that divide memory today, as contestants beside a policy."""

from __future__ import annotations

from collections.abc import Callable

from eval.comparison import Contestant
from helm_rl.control.peers.cliffhanger import Cliffhanger
from helm_rl.control.peers.hill_climbing import HillClimbing
from helm_rl.control.peers.marginal_hits import MarginalHits
from helm_rl.control.peers.miss_ratio_curve import MissRatioCurves
from helm_rl.control.peers.weighted_margins import WeightedMargins
from helm_rl.control.protocol import Controller
from helm_rl.scenario import Scenario

PEERS = {
    "marginal_hits",
    "cliffhanger",
    "miss_ratio_curves",
    "kv_first",
    "emb_first",
    "hill_climbing",
    "weighted_margins",
}
"""Their names in the figures."""
_CLIMBING_S = 10.0  # of requests at the base rate that a hill climber measures before each step
_LEAST_REQUESTS = 500


def peer_contestants(scenario: Scenario) -> list[Contestant]:
    """Return every peer within the scenario's bounds of alpha, as it comes: none is tuned to a load."""
    low, high = scenario.control.alpha_min, scenario.control.alpha_max
    step = min(0.02, scenario.control.rate_per_s * scenario.control.interval_s)
    requests = max(_LEAST_REQUESTS, round(_CLIMBING_S * scenario.load.rate))
    peers: list[tuple[str, str, str, Callable[[], Controller]]] = [
        (
            "marginal_hits",
            "marginal hits",
            "CacheLib: a step towards the cache whose next page would save more",
            lambda: MarginalHits(step, low, high),
        ),
        (
            "cliffhanger",
            "Cliffhanger",
            "each hit that more memory would have given is a credit of memory",
            lambda: Cliffhanger(alpha_min=low, alpha_max=high),
        ),
        (
            "miss_ratio_curves",
            "miss-ratio curves",
            "the alpha at which both caches together save most, by their ghosts",
            lambda: MissRatioCurves("optimum", low, high),
        ),
        (
            "kv_first",
            "KV first",
            "keys and values have what they can use, rows the rest",
            lambda: MissRatioCurves("kv-first", low, high),
        ),
        (
            "emb_first",
            "EMB first",
            "rows have what they can use, keys and values the rest",
            lambda: MissRatioCurves("emb-first", low, high),
        ),
        (
            "hill_climbing",
            "hill climbing",
            "goes on while latency falls, turns round when it rises",
            lambda: HillClimbing(requests=requests, alpha_min=low, alpha_max=high),
        ),
        (
            "weighted_margins",
            "weighted margins",
            "ours: towards the cache whose next page would save more, by how busy link and accelerator are",
            lambda: WeightedMargins(alpha_min=low, alpha_max=high),
        ),
    ]
    return [Contestant(key, title, meaning, make) for key, title, meaning, make in peers]
