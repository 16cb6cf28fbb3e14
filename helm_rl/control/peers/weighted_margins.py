"""Marginal hits, each weighted by how near the resource that it saves time of is to its limit."""

from __future__ import annotations

import math

from helm_rl.control.lean import lean
from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats


class WeightedMargins:
    """Moves alpha towards the side that a page is worth more to, in proportion to how much more.

    Source: `helm_rl.control.lean`, which the residual adapter learns from; as a rule of its own it shows what training
    adds to it.

    Args:
        rate_per_s: what alpha moves by in a second if one side is worth everything, above 0 and at most 1.
        smoothing_s: time constant of the lean's moving average, in seconds; 0: none.
        alpha_min, alpha_max: bounds of the target.

    Raises:
        UserError: an argument lies outside its range.
    """

    def __init__(
        self, rate_per_s: float = 0.01, smoothing_s: float = 10.0, alpha_min: float = 0.1, alpha_max: float = 0.9
    ) -> None:
        if not 0.0 < rate_per_s <= 1.0:
            raise UserError(f"weighted margins: rate_per_s must be above 0 and at most 1, not {rate_per_s!r}")
        if not 0.0 <= smoothing_s < math.inf:
            raise UserError(f"weighted margins: smoothing_s must be a number of at least 0, not {smoothing_s!r}")
        if not 0.0 <= alpha_min < alpha_max <= 1.0:
            raise UserError(f"weighted margins: bounds must be 0 <= {alpha_min!r} < {alpha_max!r} <= 1")
        self.rate_per_s, self.smoothing_s = rate_per_s, smoothing_s
        self.alpha_min, self.alpha_max = alpha_min, alpha_max
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget target and lean."""
        self.target: float | None = None
        self._lean = self._step = 0.0

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the target: the last one, moved by the lean of the windows since."""
        target = (applied_alpha if self.target is None else self.target) + self._step
        self._step = 0.0
        self.target = min(max(target, self.alpha_min), self.alpha_max)
        return self.target

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """Take a window into the average; one without arrivals says nothing."""
        if window.arrivals == 0:
            return
        seconds = window.length_ns * 1e-9
        weight = -math.expm1(-seconds / self.smoothing_s) if self.smoothing_s else 1.0
        self._lean += weight * (lean(window) - self._lean)
        self._step += self.rate_per_s * seconds * self._lean
