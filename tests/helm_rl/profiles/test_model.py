"""Model profiles: FLOPs and bytes worked out by hand, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from helm_rl.errors import UserError
from helm_rl.profiles.hardware import HARDWARE
from helm_rl.profiles.model import MODELS, resolve_model
from helm_rl.scenario import ModelSection


def test_decoder_02b_by_hand() -> None:
    """16 layers, d 1024, 16 heads and 4 KV heads of 64, SwiGLU 2816."""
    model = resolve_model(ModelSection())
    query_and_output = 2 * 1024 * (16 * 64)
    key_and_value = 2 * 1024 * (4 * 64)
    swiglu = 3 * 1024 * 2816
    weights = 16 * (query_and_output + key_and_value + swiglu)
    assert weights == 180_355_072  # about .2B
    assert model.flops_per_token == 2 * weights
    assert model.flops_per_pair == 16 * 16 * (2 * 64 + 2 * 64)  # scores, then values
    assert model.kv_bytes_per_token == 16_384
    assert (model.features_per_token, model.row_bytes, model.candidates) == (32, 512, 256)
    assert model.flops_per_token / HARDWARE["a100-80g"].flop_per_s == pytest.approx(2.1e-6, rel=0.01)


def test_hstu_by_hand() -> None:
    model = resolve_model(ModelSection(profile="hstu-8"))
    # U, V, Q, K of 4 x 256 each from 1024, and one projection back.
    assert model.flops_per_token == 2 * 8 * (1024 * 4 * 1024 + 1024 * 1024)
    assert model.flops_per_pair == 8 * 4 * 4 * 256
    assert model.kv_bytes_per_token == 2 * 8 * 4 * 256 * 2
    assert resolve_model(ModelSection(profile="hstu-5")).kv_bytes_per_token == 2 * 5 * 4 * 128 * 2


def test_fields_of_the_scenario_take_the_place_of_the_profiles() -> None:
    model = resolve_model(ModelSection(layers=32, kv_heads=16, candidates=0))
    assert model.kv_bytes_per_token == 16_384 * 2 * 4
    assert model.candidates == 0
    assert model.d_model == MODELS["decoder-0.2b"].d_model
    assert MODELS["decoder-0.2b"].layers == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"profile": "decoder-7b"}, "model.profile = 'decoder-7b' is unknown; known: decoder-0.2b, hstu-5, hstu-8"),
        ({"kv_heads": 3}, "model.heads = 16 must be a multiple of model.kv_heads = 3"),
        ({"heads": 2}, "model.heads = 2 must be a multiple of model.kv_heads = 4"),
        ({"profile": "hstu-8", "architecture": "decoder"}, "model.ffn must be above 0 for a decoder"),
        ({"architecture": "hstu"}, "model.kv_heads = 4 must equal model.heads = 16"),
        ({"profile": "hstu-8", "heads": 8}, "model.kv_heads = 4 must equal model.heads = 8"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_model(ModelSection(**fields))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_hstu_of_ones_own() -> None:
    model = resolve_model(ModelSection(architecture="hstu", heads=8, kv_heads=8, head_dim=128))
    assert model.flops_per_token == 2 * 16 * (1024 * 4 * 1024 + 1024 * 1024)
    assert model.kv_bytes_per_token == 2 * 16 * 1024 * 2
