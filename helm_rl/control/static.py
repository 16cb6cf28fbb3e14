"""The controller that never moves: a fixed alpha."""

from __future__ import annotations

from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats


class StaticAlpha:
    """Asks for the same alpha whatever happens.

    Args:
        alpha: The embedding cache's share of the pool, within [0, 1].

    Raises:
        UserError: `alpha` is not within [0, 1].
    """

    def __init__(self, alpha: float) -> None:
        if not 0.0 <= alpha <= 1.0:  # NaN fails too
            raise UserError(f"a static alpha must be within 0 and 1, not {alpha!r}")
        self.alpha = float(alpha)

    def reset(self, seed: int) -> None:
        """There is no history to forget."""

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the fixed alpha."""
        return self.alpha

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """What was measured changes nothing."""
