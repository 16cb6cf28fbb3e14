"""Model profiles: FLOPs and bytes worked out by hand, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from helm_rl.errors import UserError
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
    assert model.parameters == weights
    assert model.weight_bytes == 2 * weights
    assert model.flops_per_token == 2 * weights
    assert model.flops_per_pair == 16 * 16 * (2 * 64 + 2 * 64)  # scores, then values
    assert model.kv_bytes_per_token == 16_384
    assert (model.features_per_token, model.row_bytes, model.candidates) == (32, 512, 256)


def test_decoder_15b_is_qwen2() -> None:
    """28 layers, d 1536, 12 heads on 2 KV heads of 128, SwiGLU 8960: its card counts 1.31B outside of embeddings."""
    model = MODELS["decoder-1.5b"]
    assert model.parameters == 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960) == 1_310_195_712
    assert model.flops_per_token == 2_620_391_424
    assert model.kv_bytes_per_token == 28_672
    # Grouped queries save keys and values, not attention: 12 heads score each pair.
    assert model.flops_per_pair == 28 * 12 * (2 * 128 + 2 * 128)


def test_hstu_by_hand() -> None:
    model = resolve_model(ModelSection(profile="hstu-8"))
    # U, V, Q, K of 4 x 256 each from 1024, and one projection back.
    assert model.parameters == 8 * (1024 * 4 * 1024 + 1024 * 1024) == 41_943_040
    assert model.flops_per_token == 2 * 8 * (1024 * 4 * 1024 + 1024 * 1024)
    assert model.flops_per_pair == 8 * 4 * 4 * 256
    assert MODELS["hstu-5"].parameters == 5 * 5 * 512 * 512
    assert MODELS["hstu-3"].parameters == 3 * 5 * 512 * 512


def test_kv_bytes_are_the_published_ones() -> None:
    published = {
        "hstu-8": 32_768,  # NVIDIA recsys-examples' benchmark
        "hstu-5": 10_240,  # dlrm_v3
        "hstu-3": 6_144,  # the KuaiRand configuration
        "decoder-1.5b": 28_672,  # Qwen2-1.5B
        "decoder-0.2b": 16_384,
    }
    assert {name: model.kv_bytes_per_token for name, model in MODELS.items()} == published


def test_fields_of_the_scenario_take_the_place_of_the_profiles() -> None:
    model = resolve_model(ModelSection(layers=32, kv_heads=16, candidates=0))
    assert model.kv_bytes_per_token == 16_384 * 2 * 4
    assert model.candidates == 0
    assert model.d_model == MODELS["decoder-0.2b"].d_model
    assert MODELS["decoder-0.2b"].layers == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"profile": "decoder-7b"},
            "model.profile = 'decoder-7b' is unknown; known: decoder-0.2b, decoder-1.5b, hstu-3, hstu-5, hstu-8",
        ),
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
