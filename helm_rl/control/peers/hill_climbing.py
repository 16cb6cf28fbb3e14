"""Hill climbing on measured latency: go on while it gets better, turn round when it gets worse."""

from __future__ import annotations

import math

from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats


class HillClimbing:
    """Moves alpha one way for a while; if mean log latency rose meanwhile, turns round and takes a shorter step.

    Source: Einziger, Eytan, Friedman and Manes, "Adaptive Software Cache Management", Middleware 2018, whose climber
    samples the hit rate of some thousands of requests for each step. Latency stands for it here, for the hits of two
    caches are not worth the same.

    Args:
        step: what alpha moves by at first, in (0, 1].
        requests: that are measured before each step; at least 1.
        decay: of the step after each that made things worse, in (0, 1].
        restart: rise of mean log latency at which the step is the first one again: the load has changed.
        alpha_min, alpha_max: bounds of the target.

    Raises:
        UserError: an argument lies outside its range.
    """

    def __init__(
        self,
        step: float = 0.06,
        requests: int = 5_000,
        decay: float = 0.9,
        restart: float = 0.25,
        alpha_min: float = 0.1,
        alpha_max: float = 0.9,
    ) -> None:
        if not 0.0 < step <= 1.0:
            raise UserError(f"hill climbing: step must be above 0 and at most 1, not {step!r}")
        if requests < 1:
            raise UserError(f"hill climbing: requests must be at least 1, not {requests!r}")
        if not 0.0 < decay <= 1.0:
            raise UserError(f"hill climbing: decay must be above 0 and at most 1, not {decay!r}")
        if not restart > 0.0:
            raise UserError(f"hill climbing: restart must be above 0, not {restart!r}")
        if not 0.0 <= alpha_min < alpha_max <= 1.0:
            raise UserError(f"hill climbing: bounds must be 0 <= {alpha_min!r} < {alpha_max!r} <= 1")
        self.first_step, self.requests, self.decay, self.restart = step, requests, decay, restart
        self.alpha_min, self.alpha_max = alpha_min, alpha_max
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget target, direction and what was measured."""
        self.target: float | None = None
        self._step = self.first_step
        self._before = math.nan
        self._sum = 0.0
        self._completed = 0

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the target, which moves once enough requests were measured."""
        if self.target is None:
            self.target = min(max(applied_alpha, self.alpha_min), self.alpha_max)
            inwards = 0.5 * (self.alpha_min + self.alpha_max) - self.target
            self._step = math.copysign(self.first_step, inwards)  # from a bound there is one way only
        if self._completed >= self.requests:
            log_latency = self._sum / self._completed
            worse = log_latency - self._before  # NaN at first
            if abs(worse) > self.restart:
                self._step = math.copysign(self.first_step, self._step)
            if worse > 0.0:
                self._step *= -self.decay
            target = self.target + self._step
            if not self.alpha_min <= target <= self.alpha_max:
                self._step = -self._step
            self.target = min(max(target, self.alpha_min), self.alpha_max)
            self._before, self._sum, self._completed = log_latency, 0.0, 0
        return self.target

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """Add the latencies of a window to what is measured."""
        self._sum += window.log_latency_sum
        self._completed += window.completed
