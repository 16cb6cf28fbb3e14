"""A rule instead of a policy: one alpha for users who hardly return, another for users who stay."""

from __future__ import annotations

import math

from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import OBSERVATION_NAMES

_HOT_USERS = OBSERVATION_NAMES.index("hot_user_ratio")
_MARGIN = 0.05  # of the threshold on either side, so that noise about it does not move memory to and fro


class RegimeRule:
    """Asks for `alpha_hot` while the hot-user ratio is high, and for `alpha_cold` while it is low.

    The regime changes when the ratio passes the threshold by .05. Without a rate the target jumps, which is the naive
    way to reallocate: the memory that one cache gives up at once is still in use.

    Args:
        alpha_cold, alpha_hot: The embedding cache's share of the pool in each regime, within [0, 1].
        threshold: Hot-user ratio between them, within [0, 1].
        rate_per_s: The most that the target moves in a second; None: at once.

    Raises:
        UserError: An argument lies outside its range.
    """

    def __init__(
        self, alpha_cold: float, alpha_hot: float, threshold: float = 0.4, rate_per_s: float | None = None
    ) -> None:
        for name, value in (("alpha_cold", alpha_cold), ("alpha_hot", alpha_hot), ("threshold", threshold)):
            if not 0.0 <= value <= 1.0:  # NaN fails too
                raise UserError(f"a regime rule's {name} must be within 0 and 1, not {value!r}")
        if rate_per_s is not None and not 0.0 < rate_per_s < math.inf:
            raise UserError(f"a regime rule's rate_per_s must be a number above 0, not {rate_per_s!r}")
        self.alpha_cold = float(alpha_cold)
        self.alpha_hot = float(alpha_hot)
        self.threshold = float(threshold)
        self.rate_per_s = rate_per_s
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Be in the cold regime, and forget target and time."""
        self.hot = False
        self.target: float | None = None
        self._decided_ns: int | None = None

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the target: the regime's alpha, or as near to it as the rate allows since the last decision."""
        ratio = float(observation[_HOT_USERS])
        if ratio > self.threshold + _MARGIN:
            self.hot = True
        elif ratio < self.threshold - _MARGIN:  # where it is not a number the regime stays
            self.hot = False
        goal = self.alpha_hot if self.hot else self.alpha_cold
        if self.rate_per_s is not None:
            start = applied_alpha if self.target is None else self.target
            seconds = 0.0 if self._decided_ns is None else (now_ns - self._decided_ns) * 1e-9
            most = self.rate_per_s * seconds
            goal = min(max(goal, start - most), start + most)
        self.target, self._decided_ns = goal, now_ns
        return goal

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """What was measured changes nothing but the observation."""
