"""The load that the tests of traces draw, which no tuning of the shipped scenarios changes."""

from __future__ import annotations

from typing import Any

from helm_rl.scenario import Scenario

SALE = {
    "start_s": 120,
    "seconds": 60,
    "rate": 420,
    "requests_per_visit": 15,
    "hot_fraction": 0.6,
    "hot_items": 4000,
    "label": "burst",
}


def scenario(seconds: float = 600, warm_s: float = 60, **load: Any) -> Scenario:
    """A scenario of the load given and defaults."""
    return Scenario.model_validate({"name": "test", "slo_ms": 100, "seconds": seconds, "warm_s": warm_s, "load": load})


def flash_sale() -> Scenario:
    """140 requests/s of users who hardly return; for a minute 420 more, of users who stay."""
    return scenario(phase=[SALE])
