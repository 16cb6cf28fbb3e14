"""The families of the suite: a model on a device behind a link, and three loads of its users near what that bears."""

from __future__ import annotations

from helm_rl.scenario import Scenario, load_scenario

PATTERNS = ("steady", "trend", "burst")
FAMILIES = {
    "decoder": "a decoder of .2 billion parameters on an A100, rows over 25 GbE, histories of 1,500 tokens",
    "hstu": "HSTU of 8 layers on an H100, rows over 100 GbE, histories of 4,000 tokens",
    "large": "a decoder of 1.5 billion parameters on an H100, rows over 25 GbE, histories of 500 tokens",
}
"""What each is, in a few words; its loads were set by eval.suite.calibrate, before any controller was seen on them."""
_FIRST = "decoder"


def scenario_of(family: str, pattern: str) -> Scenario:
    """Return a family's load: the shipped scenario of that name."""
    return load_scenario(pattern if family == _FIRST else f"{family}-{pattern}")
