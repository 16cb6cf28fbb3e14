"""Model profiles: an architecture, from which FLOPs and KV bytes are derived, never set by hand."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from helm_rl.errors import UserError
from helm_rl.scenario import ModelSection


@dataclass(frozen=True)
class ModelProfile:
    """A generative recommender: its transformer, and what it reads per token and per request."""

    architecture: Literal["decoder", "hstu"]
    layers: int
    d_model: int
    heads: int
    kv_heads: int  # fewer than heads: grouped queries, several of which share one head of keys and values
    head_dim: int
    ffn: int  # hidden width of the SwiGLU block; 0 for HSTU, which has none
    features_per_token: int  # embedding rows read per token
    row_bytes: int
    candidates: int  # items scored per request
    value_bytes: int = 2  # of a weight, key, value or embedding: 2 is bf16, 4 is float32

    @property
    def parameters(self) -> int:
        """Weights of the matrix products of all layers; embedding tables, norms and biases are not counted."""
        attention = self.heads * self.head_dim
        if self.architecture == "hstu":
            # One projection to U, V, Q, K and one back (Zhai et al., arXiv 2402.17152).
            per_layer = self.d_model * 4 * attention + attention * self.d_model
        else:
            per_layer = self.d_model * (2 * attention + 2 * self.kv_heads * self.head_dim) + 3 * self.d_model * self.ffn
        return self.layers * per_layer

    @property
    def weight_bytes(self) -> int:
        """Bytes of `parameters` on the device."""
        return self.parameters * self.value_bytes

    @property
    def flops_per_token(self) -> float:
        """FLOPs of all matrix products of one token, attention excluded: 2 per weight."""
        return 2.0 * self.parameters

    @property
    def flops_per_pair(self) -> float:
        """FLOPs of attention for one (query, key) pair: the score and its share of the value, 2 each per element."""
        return 4.0 * self.layers * self.heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes


MODELS: dict[str, ModelProfile] = {
    "decoder-0.2b": ModelProfile("decoder", 16, 1024, 16, 4, 64, 2816, 32, 512, 256),
    # The layers of Qwen2-1.5B (arXiv 2407.10671): 12 heads of queries on 2 of keys and values.
    "decoder-1.5b": ModelProfile("decoder", 28, 1536, 12, 2, 128, 8960, 32, 512, 256),
    # The KuaiRand configuration of NVIDIA recsys-examples: 3 layers x 4 heads x 128.
    "hstu-3": ModelProfile("hstu", 3, 512, 4, 4, 128, 0, 32, 512, 256),
    # MLPerf DLRMv3's HSTU: 5 layers x 4 heads x 128.
    "hstu-5": ModelProfile("hstu", 5, 512, 4, 4, 128, 0, 32, 512, 256),
    # The inference benchmark of NVIDIA recsys-examples: 8 layers x 4 heads x 256.
    "hstu-8": ModelProfile("hstu", 8, 1024, 4, 4, 256, 0, 32, 512, 256),
}


def resolve_model(section: ModelSection) -> ModelProfile:
    """Return the scenario's model: a named profile with the fields that the scenario sets put in their place.

    Raises UserError for an unknown name or an architecture that cannot be.
    """
    if section.profile not in MODELS:
        raise UserError(f"model.profile = {section.profile!r} is unknown; known: {', '.join(sorted(MODELS))}")
    given = {f.name: getattr(section, f.name) for f in fields(ModelProfile)}
    model = replace(MODELS[section.profile], **{name: value for name, value in given.items() if value is not None})
    if model.heads % model.kv_heads:
        raise UserError(f"model.heads = {model.heads} must be a multiple of model.kv_heads = {model.kv_heads}")
    if model.architecture == "hstu" and model.heads != model.kv_heads:
        raise UserError(f"model.kv_heads = {model.kv_heads} must equal model.heads = {model.heads} for an hstu")
    if model.architecture == "decoder" and model.ffn == 0:
        raise UserError("model.ffn must be above 0 for a decoder")
    return model
