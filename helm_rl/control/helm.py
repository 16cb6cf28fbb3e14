"""HELM whole: base policy, residual adapter and recovery, behind checks of what it is shown, in one decision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_engine.jit import MOST_BYTES
from helm_rl.control import burst, kernel
from helm_rl.control.base import BasePolicy
from helm_rl.control.burst import BurstSettings, BurstState, new_burst_state
from helm_rl.control.guard import Mode
from helm_rl.control.protocol import FloatArray
from helm_rl.control.recovery import RETURNING, Recovery, new_recovery
from helm_rl.control.residual import Residual
from helm_rl.control.residual_kernel import new_adapter, new_net
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import SIZE

CAUSES = ("not_finite", "out_of_range", "stale", "late", "no_alpha", "network")
"""Why a decision fell back: a signal is NaN or infinite; one is outside its bounds in the schema; the observation is
too old; the call came too late; no applied alpha is known where one is needed; a network overflowed."""

_MOST_INTERVALS = 1_000_000
_FOREVER_NS = 1 << 62
_CONTROL = Mode.CONTROL.value


@dataclass(frozen=True)
class Limits:
    """How old an observation may be, and how late a call, in intervals.

    Args:
        stale: age above which an observation is not decided upon.
        late: time beyond the interval after which a call is late; the target then moves by one interval's step at most.

    Raises:
        UserError: a value is not above 0 and at most 1,000,000.
    """

    stale: float = 3.0
    late: float = 0.5

    def __post_init__(self) -> None:
        for name in ("stale", "late"):
            intervals = getattr(self, name)
            if not 0.0 < intervals <= _MOST_INTERVALS:  # NaN fails too
                raise UserError(
                    f"limits: {name} must be above 0 and at most {_MOST_INTERVALS:,} intervals, not {intervals!r}"
                )


class Helm:
    """The controller of a bundle.

    A decision is one compiled call (`helm_rl.control.kernel.decide`) over arrays that all layers share; Python only
    learns, from windows of feedback, before it. What is shown is checked before it is decided upon. Where that fails
    the target stays at the last safe alpha, the last that was decided upon; before there is one, at the applied alpha,
    within the bounds; where that is no number within [0, 1] either, NaN comes out: leave alone what is applied.
    `fallbacks` counts these by their causes; with them late calls, after which the target moves by one interval's step
    at most, and overflows: of the network, which then does not move its target, or of the adapter's, which then adds
    nothing. While a burst is on only the share of hot users has to be valid, for the rule reads nothing else.

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
        # Without a bound there is nothing to choose, and nothing to learn.
        self._learns = None if adapter is None or adapter.settings.bound == 0.0 else adapter
        self._top: BasePolicy | Residual | Recovery = recovery or adapter or base
        interval_s = base.interval_s
        self._counts = np.zeros(kernel.N_HELM_COUNTS, np.int64)
        self._counts[kernel.INTERVAL_NS] = round(interval_s * 1e9)
        self._counts[kernel.LATE_NS] = round(interval_s * (1.0 + self.limits.late) * 1e9)
        self._counts[kernel.STALE_NS] = round(interval_s * self.limits.stale * 1e9)
        self._numbers = np.zeros(kernel.N_HELM)
        self._observation = np.zeros(SIZE, np.float32)
        self._memory = np.zeros(MOST_BYTES, np.uint8)
        # A memoryview writes and reads in a third of the time that an array takes, and lets no other dtype pass.
        self._shown: Any = self._observation.data
        self._counted = self._counts.data
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget all history, the counts of `fallbacks` too."""
        self._top.reset(seed)
        if self.recovery is not None:
            self.detector = self.recovery.detector
        self._state = self._gathered()
        kernel.store(self._memory, self._state)
        # So that no later call has to compile; what is so old changes nothing but a count.
        kernel.decide(self._memory, math.nan, 0, _FOREVER_NS, _CONTROL)
        self._counts[: len(CAUSES)] = 0
        self._counts[kernel.DECIDED_NS] = burst.UNSET
        self._numbers[kernel.SAFE] = math.nan

    def _gathered(self) -> kernel.HelmState:
        """Return the state of all layers; of one that is not there, a state that does nothing."""
        adapter, recovery = self.adapter, self.recovery
        return kernel.HelmState(
            policy=self.base.state,
            net=new_net([np.zeros((1, 1))] * 3) if adapter is None else adapter.net.state,
            adapter=new_adapter(0.0, 0.0, 1) if adapter is None else adapter.state,
            recovery=new_recovery(0.0, 0.0, 0.0) if recovery is None else recovery.state,
            detector=new_burst_state(BurstSettings()) if recovery is None else recovery.detector,
            observation=self._observation,
            numbers=self._numbers,
            counts=self._counts,
        )

    def resume(self, applied_alpha: float) -> None:
        """Go on from an alpha that something else has set; what was learnt, and the detectors' state, stay."""
        self._numbers[kernel.SAFE] = math.nan
        self._counts[kernel.DECIDED_NS] = burst.UNSET
        self._state.recovery.numbers[RETURNING] = math.nan
        (self.adapter or self.base).resume(applied_alpha)

    def fallbacks(self) -> dict[str, int]:
        """Return how often decisions have fallen back since the last reset, by the names of CAUSES.

        Each decision counts for one cause at most, but a late one for "late" beside it. Cheap enough for every scrape.
        """
        return dict(zip(CAUSES, self._counted[: len(CAUSES)], strict=True))

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int, age_ns: int = 0) -> float:
        """Return the new target alpha, or NaN: see the class.

        Args:
            observation: of schema v1, [17] float32.
            applied_alpha: what is applied by now.
            now_ns: when the decision is taken, by a clock that does not go back.
            age_ns: how long before that the observation's newest measurements were taken. `runtime.ControlLoop`, which
                drives any controller, leaves it out: it asks for no decision upon what is older than two intervals,
                and counts that itself.

        Raises:
            ValueError: the observation has the wrong shape.
        """
        try:
            self._shown[:] = observation
        except (TypeError, ValueError):  # another dtype, or another shape
            if np.shape(observation) != (SIZE,):
                raise ValueError(f"expected an observation of shape ({SIZE},), got {np.shape(observation)}") from None
            self._observation[:] = observation
        adapter, mode = self._learns, _CONTROL
        if adapter is not None:
            if adapter.pending is not None and not (self.recovery is not None and self.recovery.steers):
                adapter.learn(self._observation)
            mode = adapter.mode().value
        target: float = kernel.decide(self._memory, float(applied_alpha), now_ns, age_ns, mode)
        if adapter is not None and self._counted[kernel.HANDED_BACK]:
            adapter.interrupt()
        return target

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Show one tick to the detectors; True: a burst was found, decide at once."""
        return self._top.tick(arrivals, p99_ms, now_ns)

    def feedback(self, window: WindowStats) -> None:
        """Take the window that followed the last decision, from which the adapter learns."""
        self._top.feedback(window)
