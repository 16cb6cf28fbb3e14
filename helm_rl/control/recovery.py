"""Layer 3, burst-aware recovery: while a burst is on, a rule sets the target in place of the controller below."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.jit import kernel
from helm_rl.control import burst
from helm_rl.control.base import clamp
from helm_rl.control.burst import BurstSettings, look, new_burst_state
from helm_rl.control.protocol import Controller, FloatArray, Resuming
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import OBSERVATION_NAMES

HOT_USERS = OBSERVATION_NAMES.index("hot_user_ratio")

# RecoveryState.numbers
ALPHA_COLD = 0
ALPHA_HOT = 1
RATE_PER_S = 2
RETURNING = 3  # the target on its way back to that of the controller below; NaN: it is that
RULED = 4  # what the rule came to

# What `decide_by_rule` says
RULES, ASKS, HANDS_BACK = 0, 1, 2


@dataclass(frozen=True)
class RecoveryRule:
    """The target while a burst is on: alpha_cold where no user is hot, alpha_hot where all are, linear between.

    A burst of users who stay wants their keys and values, so alpha_hot is the lower one as a rule; what both are is
    fitted for a node and its load. Within [0, 1], UserError otherwise.
    """

    alpha_cold: float
    alpha_hot: float

    def __post_init__(self) -> None:
        for name in ("alpha_cold", "alpha_hot"):
            if not 0.0 <= getattr(self, name) <= 1.0:  # NaN fails too
                raise UserError(f"a recovery rule's {name} must be within 0 and 1, not {getattr(self, name)!r}")


class Recovery:
    """A controller, and above it a rule that takes over for as long as a burst is on.

    The rule's target may jump: what bounds it is the node's budget of migration. When the burst is over the controller
    below goes on from the alpha that is applied then, and the target follows it at a bounded rate until both agree: to
    take memory from a regime at the moment it ends is ruinous.

    Args:
        inner: the controller below; reset after a burst unless it is `Resuming`.
        rule: what the target is meanwhile.
        settings: of the detectors.
        rate_per_s: how fast the target may change after a burst, until it is the controller's again.

    Raises:
        UserError: rate_per_s is not a number above 0.
    """

    def __init__(
        self,
        inner: Controller,
        rule: RecoveryRule,
        settings: BurstSettings | None = None,
        *,
        rate_per_s: float = 0.06,
    ) -> None:
        if not 0.0 < rate_per_s < math.inf:
            raise UserError(f"recovery: rate_per_s must be a number above 0, not {rate_per_s!r}")
        self.inner = inner
        self.rule = rule
        self.settings = BurstSettings() if settings is None else settings
        self.rate_per_s = rate_per_s
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget all bursts, and reset the controller below."""
        self.detector = new_burst_state(self.settings)
        self._seed = seed
        self.state = new_recovery(self.rule.alpha_cold, self.rule.alpha_hot, self.rate_per_s)
        self._decided_ns = 0
        self.inner.reset(seed)

    @property
    def active(self) -> bool:
        """Whether a burst is on."""
        return bool(self.detector.counts[burst.ACTIVE] > 0)

    @property
    def steers(self) -> bool:
        """Whether a burst is on, or the controller below has not decided since the last one."""
        return self.active or bool(self.state.took_over[0])

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the rule's target while a burst is on, else that of the controller below, or the way to it.

        Where the share of hot users is not a number the applied alpha stays; where that is not known either, what comes
        out is no number, and the controller below goes on once it is.
        """
        applied_alpha = float(applied_alpha)
        passed_s = max(now_ns - self._decided_ns, 0) * 1e-9
        self._decided_ns = now_ns
        decides = decide_by_rule(self.state, self.active, float(observation[HOT_USERS]), applied_alpha)
        if decides == RULES:
            return float(self.state.numbers[RULED])
        if decides == HANDS_BACK:
            if isinstance(self.inner, Resuming):
                self.inner.resume(applied_alpha)
            else:
                self.inner.reset(self._seed)
        return float(way_back(self.state, self.inner.decide(observation, applied_alpha, now_ns), passed_s))

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Show one tick to the detectors; True: a burst was found, decide at once.

        A P99 that is not finite counts as not known.
        """
        return bool(look(self.detector, float(arrivals), p99_ms if math.isfinite(p99_ms) else math.nan))

    def feedback(self, window: WindowStats) -> None:
        """Pass on what was measured, but not where a burst was on at any moment: the rule steered it."""
        if not self.steers:
            self.inner.feedback(window)


class RecoveryState(NamedTuple):
    """The recovery rule; took_over[0]: whether it has steered since the controller below did."""

    numbers: npt.NDArray[np.float64]
    took_over: npt.NDArray[np.bool_]


def new_recovery(alpha_cold: float, alpha_hot: float, rate_per_s: float) -> RecoveryState:
    """Return a rule that has not steered yet."""
    return RecoveryState(np.array([alpha_cold, alpha_hot, rate_per_s, math.nan, math.nan]), np.zeros(1, np.bool_))


@kernel
def decide_by_rule(recovery: RecoveryState, burst_is_on: bool, hot_user_ratio: float, applied_alpha: float) -> int:
    """Say who decides: the rule, with RULED, the controller below, or it again after the rule.

    While a burst is on the rule does. Where it lacks a number it keeps to the applied alpha.
    """
    numbers = recovery.numbers
    if burst_is_on:
        recovery.took_over[0] = True
        hot = clamp(hot_user_ratio, 0.0, 1.0)
        numbers[RULED] = numbers[ALPHA_COLD] + (numbers[ALPHA_HOT] - numbers[ALPHA_COLD]) * hot
        if not math.isfinite(hot_user_ratio):
            numbers[RULED] = applied_alpha
        return RULES
    if not recovery.took_over[0]:
        return ASKS
    if not math.isfinite(applied_alpha):
        numbers[RULED] = applied_alpha
        return RULES
    recovery.took_over[0] = False
    numbers[RETURNING] = applied_alpha
    return HANDS_BACK


@kernel
def way_back(recovery: RecoveryState, target: float, passed_s: float) -> float:
    """Return the target of the controller below, or after a burst the way to it, a step at the rate further."""
    numbers = recovery.numbers
    if math.isnan(numbers[RETURNING]) or not math.isfinite(target):
        return target
    step = numbers[RATE_PER_S] * passed_s
    if abs(target - numbers[RETURNING]) <= step:
        numbers[RETURNING] = math.nan
        return target
    numbers[RETURNING] += math.copysign(step, target - numbers[RETURNING])
    return numbers[RETURNING]
