"""Scenarios drawn around a given one: the same for a seed, different from each other, and about as hard."""

from __future__ import annotations

import numpy as np
import pytest

from helm_rl.errors import UserError
from helm_rl.profiles.hardware import check_fits, resolve_hardware
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import Scenario, load_scenario, scenario_hash
from train.variations import INTERVALS_S, PROFILES, _cold_ms, variations


def drawn(count: int = 40, seed: int = 3) -> list[Scenario]:
    return variations([load_scenario("burst"), load_scenario("trend")], count, seed)


def test_equal_seeds_give_equal_scenarios_and_others_give_others() -> None:
    hashes = [scenario_hash(each) for each in drawn()]
    assert hashes == [scenario_hash(each) for each in drawn()]
    assert len({*hashes, *(scenario_hash(each) for each in drawn(seed=4))}) == 80
    assert [each.name for each in drawn(3)] == ["burst~1", "trend~2", "burst~3"]


def test_everything_varies_within_its_range_and_stays_valid() -> None:
    found = drawn()
    for each in found:
        assert Scenario.model_validate(each.model_dump()) == each
        check_fits(resolve_model(each.model), resolve_hardware(each.hardware), each.hardware)
        assert each.hardware.link_gb_s is not None
        assert 0.2 <= each.hardware.link_gb_s <= 0.8
        assert 0.9 <= each.load.zipf_items <= 1.2
    assert {each.hardware.profile for each in found} == set(PROFILES)
    assert {each.control.interval_s for each in found} == set(INTERVALS_S)
    assert np.ptp([each.load.history_mean for each in found]) > 500


@pytest.mark.parametrize("name", ["burst", "trend", "short-video"])
def test_the_load_is_no_harder_than_the_given_one(name: str) -> None:
    scenario = load_scenario(name)
    for each in variations([scenario], 20, 1):
        # Busy time per second of either resource, of requests of which nothing is cached.
        before = [ms * scenario.load.rate for ms in _cold_ms(scenario)]
        after = [ms * each.load.rate for ms in _cold_ms(each)]
        shares = [new / old for new, old in zip(after, before, strict=True)]
        assert max(shares) <= 1.0 + 1e-9
        assert max(shares) >= 0.6 - 1e-9
        # Base and phases stay in proportion.
        for old, new in zip(scenario.load.phase, each.load.phase, strict=True):
            assert new.rate / each.load.rate == pytest.approx(old.rate / scenario.load.rate)


def decoder(layers: int) -> Scenario:
    """A large decoder with ffn 28672 and d_model 8192, .8e9 parameters a layer, on the largest device."""
    given = load_scenario("burst").model_dump()
    given["hardware"]["profile"] = "b200"
    sizes = {"d_model": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn": 28672}
    given["model"] = {"architecture": "decoder", "layers": layers, **sizes}
    return Scenario.model_validate(given)


def test_a_model_is_only_put_on_hardware_that_it_fits_on() -> None:
    found = variations([decoder(36)], 20, seed=1)
    assert {each.hardware.profile for each in found} == {"a100-80g", "h100"}
    for each in found:
        check_fits(resolve_model(each.model), resolve_hardware(each.hardware), each.hardware)
    with pytest.raises(UserError, match=r"take 12\d GiB, which none of the hardware has .*a100-80g, h100, l20"):
        variations([decoder(80)], 1, seed=1)
