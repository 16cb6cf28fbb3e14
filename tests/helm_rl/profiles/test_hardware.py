"""Hardware profiles: times by hand, links, what does not fit, and unknown names."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from helm_rl.errors import UserError
from helm_rl.profiles.hardware import (
    HARDWARE,
    HardwareProfile,
    check_fits,
    link_gb_s,
    pcie_gb_s,
    resolve_hardware,
)
from helm_rl.profiles.model import MODELS
from helm_rl.scenario import HardwareSection


def test_prefill_by_hand() -> None:
    """100 TFLOP/s: work per token at half of it, attention at a quarter."""
    hardware = replace(HARDWARE["l20"], peak_tflop_s=100.0, linear_efficiency=0.5, pair_efficiency=0.25)
    assert hardware.prefill_ns(1e12, 0.0) == pytest.approx(20e6)  # 1 TFLOP at 50 TFLOP/s: 20 ms
    assert hardware.prefill_ns(0.0, 1e12) == pytest.approx(40e6)
    assert hardware.prefill_ns(1e12, 1e12) == pytest.approx(60e6)
    assert hardware.flop_per_s == pytest.approx(50e12)


@pytest.mark.parametrize("name", HARDWARE)
def test_every_profile_is_whole(name: str) -> None:
    profile = HARDWARE[name]
    assert 0.0 < profile.linear_efficiency <= 1.0
    assert 0.0 < profile.pair_efficiency <= 1.0
    assert profile.batch_ms > 0
    assert profile.request_ms > 0  # no latency is ever 0: its logarithm is taken
    assert min(profile.peak_tflop_s, profile.local_gb_s, profile.pcie_gb_s, profile.hbm_gib) > 0
    assert profile.source
    assert set(profile.extrapolated) <= {field.name for field in fields(HardwareProfile)}


def test_what_was_extrapolated_follows_its_rule() -> None:
    speeds = ("linear_efficiency", "pair_efficiency", "batch_ms")
    for name, nearest, copied in (
        ("a100-80g", "l20", speeds),
        ("h200", "h100", (*speeds, "local_gb_s", "pcie_gb_s", "onboard_ms")),
        ("h100", "b200", ("batch_ms",)),
        ("b200", "h100", ("local_gb_s", "pcie_gb_s", "onboard_ms")),
        ("l20", "a100-80g", ("local_gb_s",)),
    ):
        for field in copied:
            assert field in HARDWARE[name].extrapolated
            assert getattr(HARDWARE[name], field) == getattr(HARDWARE[nearest], field), (name, field)


def test_links_are_the_scenarios_or_else_the_profiles() -> None:
    local = HardwareSection(link="local-host")
    assert link_gb_s(local) == HARDWARE["a100-80g"].local_gb_s
    assert link_gb_s(HardwareSection(link="local-host", profile="h100")) == HARDWARE["h100"].local_gb_s
    assert link_gb_s(HardwareSection(link="remote-ps", profile="h100")) == 1.5
    assert link_gb_s(HardwareSection(link="local-host", link_gb_s=0.25)) == 0.25
    assert pcie_gb_s(local) == HARDWARE["a100-80g"].pcie_gb_s
    assert pcie_gb_s(HardwareSection(profile="h100")) == HARDWARE["h100"].pcie_gb_s
    assert pcie_gb_s(HardwareSection(pcie_gb_s=3.0)) == 3.0


def test_a_pool_beside_the_weights() -> None:
    """decoder-1.5b: 2 x 1,310,195,712 B = 2.44 GiB; an L20 shows 45 GiB."""
    model, hardware = MODELS["decoder-1.5b"], HARDWARE["l20"]
    check_fits(model, hardware, HardwareSection(profile="l20", pool_gib=42.55))
    with pytest.raises(UserError) as caught:
        check_fits(model, hardware, HardwareSection(profile="l20", pool_gib=42.57))
    assert str(caught.value) == (
        "hardware.pool_gib = 42.57 does not fit beside 2.44 GiB of model weights on hardware.profile = 'l20', "
        "which has 45 GiB; at most 42.55 GiB does"
    )


def test_what_the_message_says_fits_does() -> None:
    for layers in range(1, 400, 7):
        model = replace(MODELS["decoder-1.5b"], layers=layers)
        try:
            check_fits(model, HARDWARE["l20"], HardwareSection(profile="l20", pool_gib=48))
        except UserError as error:
            most = float(str(error).rpartition("at most ")[2].partition(" ")[0])
            check_fits(model, HARDWARE["l20"], HardwareSection(profile="l20", pool_gib=most))


def test_a_model_larger_than_the_device() -> None:
    model = replace(MODELS["decoder-1.5b"], layers=1024)
    with pytest.raises(UserError, match=r"^model\.layers = 1024: the weights take 89\.2 GiB, .* has 80 GiB;"):
        check_fits(model, HARDWARE["a100-80g"], HardwareSection())


def test_an_unknown_profile_is_refused() -> None:
    assert resolve_hardware(HardwareSection()) is HARDWARE["a100-80g"]
    with pytest.raises(
        UserError,
        match=r"hardware\.profile = 'tpu' is unknown; known: a100-80g, b200, cpu, cpu-thread, h100, h200, l20",
    ):
        resolve_hardware(HardwareSection(profile="tpu"))
