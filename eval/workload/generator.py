"""How fast the generator draws, and how near its traces come to what they are asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from helm_rl.figures import Figure
from helm_rl.scenario import LoadSection, Scenario, load_scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.inspect import dispersion, gaps_to_previous, returning
from helm_rl.workloads.popularity import fit_zipf

IDS = 10_000_000
GOAL_IDS_PER_S = 15e6
GOAL_ERROR = 0.05
REPEATS = 5
DRAWS = 4

# Visits with lognormal pauses, as of users who are never seen again; a rate that varies, of single requests.
_VISITS = LoadSection(
    rate=100, requests_per_visit=6, think_s=20, think_sigma=1.0, users=10**10, zipf_items=0.9, items=10**6
)
_VARIED = LoadSection(rate=20, requests_per_visit=1, users=10**10, new_tokens_mean=1, rate_cv=0.7, rate_cv_s=3.0)
_WINDOW_S = 10.0


def measure(ids: int = IDS, advance: Callable[[str], None] = lambda _: None) -> dict[str, Figure]:
    """Draw `ids` item ids of the scenario steady, and traces of known statistics; `advance` is told what comes next."""
    figures = {}
    steady = load_scenario("steady")
    seconds = ids / (steady.load.rate * steady.load.new_tokens_mean) - steady.warm_s
    long = steady.model_copy(update={"seconds": seconds})
    generate(load_scenario("burst"))  # compiles
    best = math.inf
    for repeat in range(REPEATS):
        advance(f"generating {ids:,} ids, {repeat + 1} of {REPEATS}")
        begun = time.process_time()
        found = generate(long).item_values.size
        best = min(best, (time.process_time() - begun) / found)
    figures["trace.ids_per_s.generate"] = Figure(1 / best, "ids/s", "higher", GOAL_IDS_PER_S)
    advance("statistics of generated traces")
    for name, error in _errors(min(1.0, ids / IDS)).items():
        figures[f"trace.generate_error.{name}"] = Figure(error, "", "lower", GOAL_ERROR)
    return figures


def _errors(share: float) -> dict[str, float]:
    """Return relative errors of the means over DRAWS traces; share: of their usual length."""
    asked = Scenario(name="visits", slo_ms=100, seconds=4000 * share, warm_s=200, load=_VISITS)
    load = asked.load
    found: dict[str, list[float]] = {}
    for seed in range(1, DRAWS + 1):
        trace = generate(asked, seed)
        gap_ns = gaps_to_previous(trace.arrival_ns, trace.user)
        # Pauses that begin in the first half: of those near the end only the short ones are seen.
        begun_ns = trace.arrival_ns - gap_ns
        pauses = np.log(gap_ns[(gap_ns > 0) & (begun_ns < trace.end_ns // 2)] / 1e9)
        law = fit_zipf(np.unique(trace.item_values, return_counts=True)[1])
        measured = trace.arrival_ns >= 0
        values = {
            "rate": (len(trace) / (asked.seconds + asked.warm_s), load.rate),
            "exponent": (math.nan if law is None else law.exponent, load.zipf_items),
            "pause_median": (float(np.exp(np.median(pauses))), load.think_s * math.exp(-(load.think_sigma**2) / 2)),
            "pause_sigma": (float(pauses.std()), load.think_sigma),
            "hot_user_ratio": (float(returning(trace)[measured].mean()), _hot_user_ratio(load)),
            "history_mean": (float((trace.history_tokens - trace.new_tokens).mean()), _history_mean(load)),
            "new_tokens": (float(trace.new_tokens.mean()), load.new_tokens_mean),
        }
        for name, (value, wanted) in values.items():
            found.setdefault(name, []).append(value / wanted)
        varied = Scenario(name="varied", slo_ms=100, seconds=40_000 * share, warm_s=0, load=_VARIED)
        index = dispersion(generate(varied, seed), (_WINDOW_S,))[f"{_WINDOW_S:g}"]
        found.setdefault("dispersion", []).append(index / _dispersion(_VARIED))
    return {name: abs(float(np.mean(ratios)) - 1) for name, ratios in found.items()}


def _hot_user_ratio(load: LoadSection) -> float:
    """Return the share of requests that go on with a visit, after a pause of at most 60 s."""
    z = (math.log(60 / load.think_s) + load.think_sigma**2 / 2) / load.think_sigma
    return (1 - 1 / load.requests_per_visit) * 0.5 * math.erfc(-z / math.sqrt(2))


def _history_mean(load: LoadSection) -> float:
    """Return the mean history before a request: what was there, and what the visit's requests before it appended.

    A request has requests_per_visit - 1 before it in its visit, in the mean over requests. Of those before the trace,
    only what they appended to the history counts, which is part of what was there; the limit is not met often.
    """
    return load.history_mean + (load.requests_per_visit - 1) * load.new_tokens_mean


def _dispersion(load: LoadSection) -> float:
    """Return the index of dispersion of a rate that varies, over _WINDOW_S."""
    hold = load.rate_cv_s
    share = 1 - hold / _WINDOW_S * (1 - math.exp(-_WINDOW_S / hold))
    return 1 + 2 * load.rate * load.rate_cv**2 * hold * share
