"""CacheLib's marginal hits: a step of memory goes to the cache whose next page would save more."""

from __future__ import annotations

import math

from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats

_OLD = 0.3  # weight of the smoothed value against the new one, as in CacheLib


class MarginalHits:
    """Moves alpha by a fixed step towards the side with the larger marginal saving.

    Source: the MarginalHits rebalancing strategy of CacheLib (Berg et al., OSDI 2020): every cache is ranked by the
    hits in its tail, smoothed, and memory goes from the lowest to the highest. Here a hit counts by the ms that it
    saves, for one of rows and one of keys and values are not worth the same, and the tail is a ghost's estimate.

    Args:
        step: what alpha moves by in a decision, in (0, 1].
        alpha_min, alpha_max: bounds of the target.
        dead_band: the sides are held equal while their savings differ by less than this share of the larger one.

    Raises:
        UserError: an argument lies outside its range.
    """

    def __init__(
        self, step: float = 0.02, alpha_min: float = 0.1, alpha_max: float = 0.9, dead_band: float = 0.1
    ) -> None:
        if not 0.0 < step <= 1.0:
            raise UserError(f"marginal hits: step must be above 0 and at most 1, not {step!r}")
        if not 0.0 <= alpha_min < alpha_max <= 1.0:
            raise UserError(f"marginal hits: bounds must be 0 <= {alpha_min!r} < {alpha_max!r} <= 1")
        if not 0.0 <= dead_band < 1.0:
            raise UserError(f"marginal hits: dead_band must be at least 0 and below 1, not {dead_band!r}")
        self.step, self.alpha_min, self.alpha_max, self.dead_band = step, alpha_min, alpha_max, dead_band
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget target and smoothed savings."""
        self.target: float | None = None
        self._emb_ms = self._kv_ms = math.nan

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the target: the last one, a step further towards the side that would save more."""
        target = applied_alpha if self.target is None else self.target
        more = max(self._emb_ms, self._kv_ms)
        if more > 0.0 and abs(self._emb_ms - self._kv_ms) > self.dead_band * more:
            target += math.copysign(self.step, self._emb_ms - self._kv_ms)
        self.target = min(max(target, self.alpha_min), self.alpha_max)
        return self.target

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """Smooth what 1 % more of the pool would have saved on either side; a window without arrivals says nothing."""
        if window.arrivals == 0:
            return
        self._emb_ms = _smooth(self._emb_ms, window.emb_margin_ms)
        self._kv_ms = _smooth(self._kv_ms, window.kv_margin_ms)


def _smooth(old: float, new: float) -> float:
    return new if math.isnan(old) else _OLD * old + (1.0 - _OLD) * new
