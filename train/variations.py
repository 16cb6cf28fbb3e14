"""Scenarios drawn around a given one: other load, skew, histories, hardware, link and interval."""

from __future__ import annotations

import math

import numpy as np

from helm_rl.errors import UserError
from helm_rl.profiles.hardware import HARDWARE, link_gb_s, resolve_hardware
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import LoadSection, Scenario, at_load

PROFILES = ("a100-80g", "h100", "l20")
"""Hardware that is drawn, where the model fits. The others are never trained on: what a policy does there is new."""
INTERVALS_S = (0.5, 1.0, 2.0, 5.0)
LINK_FACTOR = 2.0
HISTORY_FACTOR = 1.6
ZIPF_SPREAD = 0.15
POOL_FACTORS = (0.7, 1.2)
LEAST_ROOM_GIB = 1.0
"""What a device must have beside the model's weights."""
LOADS = (0.6, 1.0)
"""Shares of the given scenario's load, brought to what the drawn hardware, link and histories can take."""


def vary(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Draw a scenario around `scenario`, whose phases, users and SLO stay.

    Of the hardware's profile, the interval, link and histories (log-uniform within a factor of LINK_FACTOR and
    HISTORY_FACTOR), the exponent of the items' popularity, the pool and the load each is drawn by itself. The rates are
    scaled by what a request without any hit takes of link and accelerator, so that the load is about as hard as before.

    Raises UserError if the model fits on none of PROFILES.
    """
    load, hardware = scenario.load, scenario.hardware
    history = {} if load.history_quantiles else {"history_mean": _history(load, rng)}
    zipf = max(0.0, load.zipf_items + rng.uniform(-ZIPF_SPREAD, ZIPF_SPREAD))
    weight_gib = resolve_model(scenario.model).weight_bytes / 2**30
    profiles = [name for name in PROFILES if HARDWARE[name].hbm_gib - weight_gib >= LEAST_ROOM_GIB]
    if not profiles:
        raise UserError(
            f"scenario {scenario.name}: the weights of its model take {weight_gib:.0f} GiB, which none of the hardware "
            f"has that variations are drawn on ({', '.join(PROFILES)}); train without --variations"
        )
    profile = profiles[rng.integers(len(profiles))]
    room_gib = HARDWARE[profile].hbm_gib - weight_gib
    changed = scenario.model_copy(
        update={
            "load": load.model_copy(update={"zipf_items": round(zipf, 4), **history}),
            "hardware": hardware.model_copy(
                update={
                    "profile": profile,
                    "link_gb_s": float(f"{link_gb_s(hardware) * _factor(LINK_FACTOR, rng):.4g}"),
                    "pool_gib": float(f"{min(hardware.pool_gib * rng.uniform(*POOL_FACTORS), 0.9 * room_gib):.4g}"),
                }
            ),
            "control": scenario.control.model_copy(
                update={"interval_s": INTERVALS_S[rng.integers(len(INTERVALS_S))]},
            ),
        }
    )
    return at_load(as_hard(changed, scenario), rng.uniform(*LOADS))


def as_hard(changed: Scenario, before: Scenario) -> Scenario:
    """Return `changed`, which has the rates of `before`, with rates that keep neither resource busier than they did.

    Busy with requests of which nothing is cached: what caches save is not the same, so that it is only about as hard.
    """
    times = zip(_cold_ms(before), _cold_ms(changed), strict=True)
    return at_load(changed, min(old / new for old, new in times if new > 0))


def variations(scenarios: list[Scenario], count: int, seed: int) -> list[Scenario]:
    """Return `count` scenarios drawn around the given ones in turn, named after them; equal seeds, equal scenarios."""
    drawn = []
    for index in range(count):
        scenario = scenarios[index % len(scenarios)]
        rng = np.random.default_rng([seed, index])
        drawn.append(vary(scenario, rng).model_copy(update={"name": f"{scenario.name}~{index + 1}"}))
    return drawn


def _factor(most: float, rng: np.random.Generator) -> float:
    return float(most ** rng.uniform(-1.0, 1.0))


def _history(load: LoadSection, rng: np.random.Generator) -> float:
    most = 0.9 * load.history_max
    return float(f"{min(max(load.history_mean * _factor(HISTORY_FACTOR, rng), 1.0), most):.4g}")


def _cold_ms(scenario: Scenario) -> tuple[float, float]:
    """Return the ms of link and of accelerator that a mean request takes of which nothing is cached."""
    load, model = scenario.load, resolve_model(scenario.model)
    mean = float(np.mean(load.history_quantiles)) if load.history_quantiles else load.history_mean
    rows = mean * model.features_per_token + model.candidates
    tokens = mean + model.candidates
    flop = tokens * model.flops_per_token, tokens * (tokens + 1) / 2 * model.flops_per_pair
    compute_ms = resolve_hardware(scenario.hardware).prefill_ns(*flop) * 1e-6
    link_ms = rows * model.row_bytes / link_gb_s(scenario.hardware) * 1e-6
    assert math.isfinite(link_ms)
    return link_ms, compute_ms
