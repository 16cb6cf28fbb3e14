"""A guard for what learns in service: switchback blocks, with it and without it, tell whether it helps or harms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats


@dataclass(frozen=True)
class GuardSettings:
    """How with and without are compared.

    Args:
        block: intervals of a block; a pair is one with and one without, in an order drawn by lot.
        settle: of these, the first that are not counted: what the block before left.
        probation: pairs before which nothing is decided but harm.
        harm: standard errors by which latency with it must be worse for it to be switched off.
        proof: standard errors by which the time that a request takes must be better, once probation is over.
        rest: intervals for which it then stays off; doubled each time.
        share: blocks without it among all, once it has proven itself.
        memory: pairs that are remembered.

    Raises:
        UserError: a value lies outside its range.
    """

    block: int = 10
    settle: int = 3
    probation: int = 20
    harm: float = 1.64
    proof: float = 1.0
    rest: int = 600
    share: float = 0.1
    memory: int = 60

    def __post_init__(self) -> None:
        if not 0 <= self.settle < self.block:
            raise UserError(f"guard: settle must be at least 0 and below block = {self.block}, not {self.settle!r}")
        for name in ("probation", "rest", "memory"):
            if getattr(self, name) < 1:
                raise UserError(f"guard: {name} must be at least 1, not {getattr(self, name)!r}")
        for name in ("harm", "proof"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise UserError(f"guard: {name} must be a number of at least 0, not {getattr(self, name)!r}")
        if not 0.0 < self.share <= 0.5:
            raise UserError(f"guard: share must be above 0 and at most .5, not {self.share!r}")


@dataclass
class _Block:
    """What a block has measured: sums over its counted intervals."""

    tail_cost: float = 0.0
    completed: int = 0
    busy_ms: float = 0.0
    arrivals: int = 0
    observed: float = 0.0
    intervals: int = 0

    def add(self, window: WindowStats, observed_demand: float) -> None:
        self.tail_cost += window.tail_cost_sum
        self.completed += window.completed
        self.busy_ms += (window.link_busy_ns + window.compute_busy_ns) * 1e-6
        self.arrivals += window.arrivals
        self.observed += observed_demand
        self.intervals += 1


@dataclass
class _Series:
    """Differences, with less without, of the last pairs."""

    values: list[float] = field(default_factory=list)

    def add(self, value: float, memory: int) -> None:
        self.values = [*self.values, value][-memory:]

    @property
    def z(self) -> float:
        """Mean over its standard error; 0 where nothing varies and nothing differs."""
        values = np.array(self.values)
        mean, spread = float(values.mean()), float(values.std(ddof=1)) if values.size > 1 else 0.0
        if spread == 0.0:
            return math.copysign(math.inf, mean) if mean else 0.0
        return mean / spread * math.sqrt(values.size)


class SwitchbackGuard:
    """Decides, block by block, whether the learner acts; `on` says so for the decision that comes.

    Latency is the judge of harm: the log of the mean tail cost. It is noisy, so that what helps a little would be long
    in proving it; what must be proven is that the time which a request takes of link and accelerator falls when the
    learner acts. It must fall by the feedback that was learnt from and by the observation: feedback that tells nothing,
    is not caused by what was done, or says the contrary of what is so, proves nothing.
    """

    def __init__(self, settings: GuardSettings | None = None, seed: int = 0) -> None:
        self.settings = GuardSettings() if settings is None else settings
        self._rng = np.random.default_rng([seed, 0x5EED])
        self.tripped = 0
        """Times that the learner was switched off."""
        self._forget()
        self._resting = 0
        self._at = 0
        self.on = False
        self._next_block()

    @property
    def proven(self) -> bool:
        """Whether probation is over and was passed."""
        return self._pairs >= self.settings.probation and not self._resting

    def take(self, window: WindowStats, observed_demand: float) -> None:
        """Take the window that the last decision ruled, and what the observation has as the demand of a request.

        observed_demand: in any unit; a number that is not finite makes the window count for nothing.
        """
        if self._resting:
            self._resting -= 1
            if not self._resting:
                self._forget()
                self._next_block()
            return
        if self._at >= self.settings.settle and math.isfinite(observed_demand):
            self._seen.setdefault(self.on, _Block()).add(window, observed_demand)
        self._at += 1
        if self._at == self.settings.block:
            if len(self._seen) == 2 and not self._order:
                self._compare()
            if not self._resting:
                self._next_block()

    def _forget(self) -> None:
        self._latency, self._claimed, self._observed = _Series(), _Series(), _Series()
        self._pairs = 0
        self._order: list[bool] = []
        self._seen: dict[bool, _Block] = {}

    def _next_block(self) -> None:
        if not self._order:
            self._seen = {}
            with_it = 1 if not self.proven else max(1, round(1.0 / self.settings.share) - 1)
            self._order = [True] * with_it + [False]
            self._rng.shuffle(self._order)
        self.on = bool(self._order.pop())
        self._at = 0

    def _compare(self) -> None:
        """Add the pair that is complete, and switch the learner off if it harms, or has not proven itself in time."""
        acting, without = self._seen[True], self._seen[False]
        if min(acting.completed, without.completed, acting.arrivals, without.arrivals) == 0:
            return
        memory = self.settings.memory
        costs = [max(block.tail_cost / block.completed, 1e-12) for block in (acting, without)]
        self._latency.add(math.log(costs[0] / costs[1]), memory)
        self._claimed.add(acting.busy_ms / acting.arrivals - without.busy_ms / without.arrivals, memory)
        self._observed.add(acting.observed / acting.intervals - without.observed / without.intervals, memory)
        self._pairs += 1
        if self._pairs < max(2, self.settings.probation // 2):
            return
        harms = self._latency.z > self.settings.harm
        least = max(self._claimed.z, self._observed.z)
        if harms or (self._pairs >= self.settings.probation and least > -self.settings.proof):
            self._resting = self.settings.rest * 2**self.tripped
            self.tripped += 1
            self.on = False
