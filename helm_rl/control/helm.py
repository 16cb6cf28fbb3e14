"""HELM whole: base policy, residual adapter and recovery, behind checks of what it is shown, in one decision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from helm_rl.control.base import BasePolicy
from helm_rl.control.burst import BurstState
from helm_rl.control.protocol import FloatArray
from helm_rl.control.recovery import Recovery
from helm_rl.control.residual import Residual
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import HIGH, LOW

CAUSES = ("not_finite", "out_of_range", "stale", "late", "no_alpha", "network")
"""Why a decision fell back: a signal is NaN or infinite; one is outside its bounds in the schema; the observation is
too old; the call came too late; no applied alpha is known where one is needed; the network overflowed."""


@dataclass(frozen=True)
class Limits:
    """How old an observation may be, and how late a call, in intervals.

    Args:
        stale: age above which an observation is not decided upon.
        late: time beyond the interval after which a call is late; the target then moves by one interval's step at most.

    Raises:
        UserError: a value is not a number above 0.
    """

    stale: float = 3.0
    late: float = 0.5

    def __post_init__(self) -> None:
        for name in ("stale", "late"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise UserError(f"limits: {name} must be a number of intervals above 0, not {getattr(self, name)!r}")


class Helm:
    """The controller of a bundle.

    What it is shown is checked before it is decided upon. Where that fails the target stays at the last safe alpha,
    the last that was decided upon; before there is one, at the applied alpha, within the bounds; where that is no
    number within [0, 1] either, NaN comes out: leave alone what is applied. `fallbacks` counts these by their causes.
    While a burst is on only the share of hot users has to be valid, for the rule reads nothing else.

    Args:
        base: the frozen policy.
        adapter: the residual adapter above it, made for this `base`; None: there is none.
        recovery: what takes over in a burst, above the adapter or else the base; None: nothing does.
        limits: of age and lateness.

    Where it has a recovery it has a `detector`, as `Watching` says.
    """

    detector: BurstState

    def __init__(
        self,
        base: BasePolicy,
        adapter: Residual | None = None,
        recovery: Recovery | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.base = base
        self.adapter = adapter
        self.recovery = recovery
        self.limits = Limits() if limits is None else limits
        self._top: BasePolicy | Residual | Recovery = recovery or adapter or base
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget all history, the counts of `fallbacks` too."""
        self._counts = dict.fromkeys(CAUSES, 0)
        self._safe = math.nan
        self._decided_ns: int | None = None
        self._top.reset(seed)
        if self.recovery is not None:
            self.detector = self.recovery.detector

    def resume(self, applied_alpha: float) -> None:
        """Go on from an alpha that something else has set; what was learnt, and the detectors' state, stay."""
        self._safe = math.nan
        (self.adapter or self.base).resume(applied_alpha)

    def fallbacks(self) -> dict[str, int]:
        """Return how often decisions have fallen back since the last reset, by the names of CAUSES.

        Each decision counts for one cause at most, but a late one for "late" beside it. Cheap enough for every scrape.
        """
        return dict(self._counts)

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int, age_ns: int = 0) -> float:
        """Return the new target alpha, or NaN: see the class.

        Args:
            observation: of schema v1, [17] float32.
            applied_alpha: what is applied by now.
            now_ns: when the decision is taken, by a clock that does not go back.
            age_ns: how long before that the observation's newest measurements were taken.
        """
        interval_ns = self.base.step / self.base.bounds.rate_per_s * 1e9
        if self._decided_ns is not None and now_ns - self._decided_ns > (1.0 + self.limits.late) * interval_ns:
            self._counts["late"] += 1
        self._decided_ns = now_ns
        cause = None
        if not 0.0 <= applied_alpha <= 1.0 and math.isnan(self._safe):
            cause = "no_alpha"
        elif age_ns > self.limits.stale * interval_ns:
            cause = "stale"
        elif not np.isfinite(observation).all():
            cause = "not_finite"
        elif not ((observation >= LOW) & (observation <= HIGH)).all():
            cause = "out_of_range"
        if cause is None:
            target = self._top.decide(observation, applied_alpha, now_ns)
            if math.isfinite(target):
                self._safe = target
                return target
            cause = "no_alpha"
        self._counts[cause] += 1
        if math.isfinite(self._safe):
            return self._safe
        bounds = self.base.bounds
        known = 0.0 <= applied_alpha <= 1.0
        return min(max(applied_alpha, bounds.alpha_min), bounds.alpha_max) if known else math.nan

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Show one tick to the detectors; True: a burst was found, decide at once."""
        return self._top.tick(arrivals, p99_ms, now_ns)

    def feedback(self, window: WindowStats) -> None:
        """Take the window that followed the last decision, from which the adapter learns."""
        self._top.feedback(window)
