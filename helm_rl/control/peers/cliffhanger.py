"""Cliffhanger: every hit that a cache would have had with a little more memory earns it a credit of memory."""

from __future__ import annotations

from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats


class Cliffhanger:
    """Moves alpha in proportion to the difference of what 1 % more of the pool would save on either side.

    Source: Cidon, Eisenman, Alizadeh and Katti, "Cliffhanger: Scaling Performance Cliffs in Web Memory Caches",
    NSDI 2016: a hit in a queue's shadow grows it by a credit and shrinks another by the same, which follows the
    gradient of the hit rates. Here a shadow hit counts by the ms that it saves.

    Args:
        credit: alpha per ms saved in all, by the requests of a window, with 1 % more of the pool; above 0.
        alpha_min, alpha_max: bounds of the target.
        most: the most that alpha moves in a decision, in (0, 1].

    Raises:
        UserError: an argument lies outside its range.
    """

    def __init__(
        self, credit: float = 1e-3, alpha_min: float = 0.1, alpha_max: float = 0.9, most: float = 0.06
    ) -> None:
        if not 0.0 < credit < 1e9:
            raise UserError(f"Cliffhanger: credit must be a number above 0, not {credit!r}")
        if not 0.0 <= alpha_min < alpha_max <= 1.0:
            raise UserError(f"Cliffhanger: bounds must be 0 <= {alpha_min!r} < {alpha_max!r} <= 1")
        if not 0.0 < most <= 1.0:
            raise UserError(f"Cliffhanger: most must be above 0 and at most 1, not {most!r}")
        self.credit, self.alpha_min, self.alpha_max, self.most = credit, alpha_min, alpha_max, most
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget target and credits."""
        self.target: float | None = None
        self._credits = 0.0

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the target: the last one, and the credits earned since."""
        target = applied_alpha if self.target is None else self.target
        target += min(max(self._credits, -self.most), self.most)
        self._credits = 0.0
        self.target = min(max(target, self.alpha_min), self.alpha_max)
        return self.target

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """Earn credits for the savings that each side missed."""
        self._credits += self.credit * window.arrivals * (window.emb_margin_ms - window.kv_margin_ms)
