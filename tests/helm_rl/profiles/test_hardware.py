"""Hardware profiles: against the point they were fitted to, and unknown names."""

from __future__ import annotations

import pytest

from helm_rl.errors import UserError
from helm_rl.profiles.hardware import HARDWARE, resolve_hardware
from helm_rl.profiles.model import MODELS
from helm_rl.scenario import HardwareSection


def test_l20_meets_its_published_point() -> None:
    """HSTU of 8 layers, batch 8, 4096 tokens each, nothing cached: 71.5 ms."""
    model, hardware = MODELS["hstu-8"], HARDWARE["l20"]
    flop = 8 * (4096 * model.flops_per_token + 4096**2 / 2 * model.flops_per_pair)
    assert flop / hardware.flop_per_s * 1e3 + hardware.batch_ms == pytest.approx(71.5, rel=0.02)


def test_flop_per_s_is_a_share_of_the_peak() -> None:
    assert HARDWARE["a100-80g"].flop_per_s == pytest.approx(312e12 * 0.55)
    for profile in HARDWARE.values():
        assert 0.0 < profile.efficiency < 1.0
        assert profile.batch_ms > 0
        assert profile.request_ms > 0  # no latency is ever 0: its logarithm is taken


def test_profiles_without_a_point_of_their_own_say_so() -> None:
    assert {name for name, profile in HARDWARE.items() if profile.source.startswith("extrapolated")} == {
        "a100-80g",
        "h100",
    }


def test_an_unknown_profile_is_refused() -> None:
    assert resolve_hardware(HardwareSection()) is HARDWARE["a100-80g"]
    with pytest.raises(UserError, match=r"hardware\.profile = 'b200' is unknown; known: a100-80g, h100, l20"):
        resolve_hardware(HardwareSection(profile="b200"))
