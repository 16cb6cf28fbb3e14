"""Published measurements that the hardware profiles are fitted to and held against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from helm_rl.profiles.model import MODELS, ModelProfile

Quantity = Literal["compute", "attention", "onboard", "gather"]


@dataclass(frozen=True)
class Point:
    """One published time, and what the model has to know to predict it."""

    source: str
    hardware: str  # a name of helm_rl.profiles.hardware.HARDWARE
    fits: Quantity  # attention: the attention kernels of a batch, without the rest of it
    ms: float
    model: ModelProfile | None = None  # None where rows are gathered: no model runs
    batch: int = 1  # sequences
    tokens: int = 0  # history tokens of a sequence, cached ones included, candidates not
    cached: int = 0  # history tokens of a sequence whose keys and values are in HBM
    candidates: int = 0  # on top of a sequence's tokens
    spread: float = 1.0  # mean square of the sequences' tokens over the square of their mean; 1: all are alike
    moved_bytes: float | None = 0.0  # from host memory; None: not published
    resident_ms: float = 0.0  # published time of the same work with nothing to move
    note: str = ""

    @property
    def linear_flop(self) -> float:
        """FLOPs of the matrix products of tokens, over the batch."""
        assert self.model is not None
        return self.batch * (self.tokens - self.cached + self.candidates) * self.model.flops_per_token

    @property
    def pair_flop(self) -> float:
        """FLOPs of attention over the batch: causal within the history, each candidate to all of the history."""
        assert self.model is not None
        new = self.tokens - self.cached
        pairs = new * (self.cached + 0.5 * new * self.spread) + self.candidates * self.tokens
        return self.batch * pairs * self.model.flops_per_pair


_HSTU_8 = MODELS["hstu-8"]
# The benchmark's notes: the B200's attention kernel took no other head width than 128 (4 heads, as in its table).
# With 256 the fit would ask for 76 % of the chip's peak in all of a layer, norms and gates included.
_HSTU_8_B200 = replace(_HSTU_8, head_dim=128)

_HSTU_CHART = "NVIDIA/recsys-examples, examples/hstu/inference/benchmark, HSTU block on {} (read from the chart)"


def _hstu_chart(hardware: str, model: ModelProfile, batch: int, rows: dict[tuple[int, int], float]) -> list[Point]:
    """Return the points of one chart; `rows` maps (tokens, cached) to ms. All score 256 candidates."""
    source = _HSTU_CHART.format(hardware.upper())
    return [
        Point(source, hardware, "compute", ms, model, batch, tokens, cached, candidates=256)
        for (tokens, cached), ms in rows.items()
    ]


_L20_BATCH_8 = {
    (4096, 0): 71.5,
    (4096, 2048): 43.0,
    (4096, 3072): 25.0,
    (4096, 3584): 16.3,
    (4096, 3840): 10.5,
    (4096, 3968): 9.2,
    (2048, 0): 30.2,
    (2048, 1024): 17.7,
    (2048, 1536): 11.5,
    (2048, 1920): 6.2,
    (1024, 0): 14.0,
    (1024, 896): 4.9,
}
_B200_BATCH_8 = {
    (4096, 0): 3.98,
    (4096, 2048): 2.15,
    (4096, 3072): 1.30,
    (4096, 3584): 0.82,
    (4096, 3840): 0.58,
    (4096, 3968): 0.52,
}
_B200_BATCH_1 = {
    (4096, 0): 0.60,
    (4096, 2048): 0.36,
    (4096, 3072): 0.243,
    (4096, 3584): 0.213,
    (4096, 3840): 0.192,
    (4096, 3968): 0.183,
}


def _dlrm_v3() -> list[Point]:
    """Return the batch of generative-recommenders #530, and the share of it that the attention kernel takes.

    32 sequences of 1,024 tokens on average with 2,048 candidates each, 98,304 tokens together. The padding that it
    tells for three lengths (9.2, 23.2, 37.5 %) is that of lengths drawn evenly from 0 to twice the mean: mean square
    4/3. The kernels were timed by nsys: attention 39.1 % of 9.30 ms.
    """
    source = "meta-recsys/generative-recommenders, issue 530: H100 SXM5, 5 layers, Triton"
    whole = Point(source, "h100", "compute", 9.30, MODELS["hstu-5"], 32, 1024, 0, 2048, spread=4 / 3)
    return [whole, replace(whole, fits="attention", ms=0.391 * 9.30)]


def _onboard(source: str, hardware: str, model: ModelProfile, rows: dict[int, float]) -> list[Point]:
    """Return the times of bringing the keys and values of 8 sequences back; `rows` maps tokens of each to ms."""
    return [
        Point(
            source,
            hardware,
            "onboard",
            ms,
            model,
            8,
            tokens,
            tokens,
            moved_bytes=8 * tokens * model.kv_bytes_per_token,
        )
        for tokens, ms in rows.items()
    ]


_HKV = "NVIDIA-Merlin/HierarchicalKV, README: find, A100-SXM4-80GB, 1,048,576 keys of 256 B"
_DYNAMIC_EMB = (
    "NVIDIA/recsys-examples, corelib/dynamicemb/benchmark: H100, 1.05M ids, 434k of them unique, rows of 512 B"
)
_UNKNOWN = "how many rows were missing is not published"

POINTS: tuple[Point, ...] = (
    *_hstu_chart("l20", _HSTU_8, 8, _L20_BATCH_8),
    *_hstu_chart("b200", _HSTU_8_B200, 8, _B200_BATCH_8),
    *_hstu_chart("b200", _HSTU_8_B200, 1, _B200_BATCH_1),
    *_dlrm_v3(),
    *_onboard(
        "NVIDIA/recsys-examples: onboarding keys and values, H100",
        "h100",
        _HSTU_8,
        {1024: 17.3, 2048: 21.2, 4096: 37.3},
    ),
    # Launch and wait together: 2.77 + 9.27, 2.29 + 10.69, 2.30 + 15.78.
    *_onboard(
        "NVIDIA/recsys-examples, corelib/recsys_kvcache_manager/test/PERF_ANALYSIS.md: L20, FlexKV",
        "l20",
        MODELS["hstu-3"],
        {1024: 12.04, 2048: 12.98, 4096: 18.08},
    ),
    Point(_HKV, "a100-80g", "gather", 8.5, moved_bytes=0.50 * 2**20 * 256, resident_ms=0.52, note="half on the host"),
    Point(_HKV, "a100-80g", "gather", 15.0, moved_bytes=0.75 * 2**20 * 256, resident_ms=0.52, note="3/4 on the host"),
    # A table's unique rows are fetched, each once.
    Point(_DYNAMIC_EMB, "h100", "gather", 28.5, moved_bytes=434e3 * 512, resident_ms=0.64, note="none cached"),
    Point(_DYNAMIC_EMB, "h100", "gather", 3.5, moved_bytes=None, resident_ms=0.64, note=f"partly cached; {_UNKNOWN}"),
    Point(_DYNAMIC_EMB, "h100", "gather", 1.19, moved_bytes=None, resident_ms=0.64, note=f"cached; {_UNKNOWN}"),
)
