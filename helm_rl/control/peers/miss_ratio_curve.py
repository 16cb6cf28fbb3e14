"""Dividing memory by miss-ratio curves: the optimum of what both caches would save, or one of them first."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats

_ENOUGH = 0.99  # of what a cache could save with the whole pool, for it to have what it needs

Aim = Literal["optimum", "kv-first", "emb-first"]


class MissRatioCurves:
    """Asks for the alpha that the ghosts' curves of saved ms, over the share of the pool, say is best.

    Source of the optimum: argmin of the cost of misses over partitions, from curves as SHARDS gives them (Waldspurger
    et al., "Efficient MRC Construction with SHARDS", FAST 2015; used to divide memory since Thiebaut, Stone and Wolf,
    IEEE ToC 1992). "kv-first" gives keys and values the share with which they save .99 of what they could save with
    the whole pool, and the rest to rows; "emb-first" the other way round.

    Args:
        aim: what is sought.
        alpha_min, alpha_max: bounds of the target.
        smoothing: weight of a new window's curves, in (0, 1].

    Raises:
        UserError: an argument lies outside its range.
    """

    def __init__(
        self, aim: Aim = "optimum", alpha_min: float = 0.1, alpha_max: float = 0.9, smoothing: float = 0.3
    ) -> None:
        if aim not in ("optimum", "kv-first", "emb-first"):
            raise UserError(f"miss-ratio curves: aim must be optimum, kv-first or emb-first, not {aim!r}")
        if not 0.0 <= alpha_min < alpha_max <= 1.0:
            raise UserError(f"miss-ratio curves: bounds must be 0 <= {alpha_min!r} < {alpha_max!r} <= 1")
        if not 0.0 < smoothing <= 1.0:
            raise UserError(f"miss-ratio curves: smoothing must be above 0 and at most 1, not {smoothing!r}")
        self.aim, self.alpha_min, self.alpha_max, self.smoothing = aim, alpha_min, alpha_max, smoothing
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget the curves."""
        self._curves: npt.NDArray[np.float64] | None = None

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the best alpha by the curves so far; the applied one while there are none."""
        if self._curves is None:
            return applied_alpha
        emb, kv = self._curves
        steps = emb.size - 1
        if self.aim == "optimum":
            total = emb + kv[::-1]
            best = np.flatnonzero(total >= total.max() * (1.0 - 1e-9))
            share = float(best[np.argmin(np.abs(best / steps - applied_alpha))] / steps)  # of equals, the nearest
        elif self.aim == "kv-first":
            share = 1.0 - int(np.argmax(kv >= _ENOUGH * kv[-1])) / steps
        else:
            share = int(np.argmax(emb >= _ENOUGH * emb[-1])) / steps
        return min(max(share, self.alpha_min), self.alpha_max)

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """Smooth the curves of a window; one without arrivals, or without ghosts, says nothing."""
        if window.arrivals == 0 or not window.emb_saved_ms:
            return
        new = np.array([window.emb_saved_ms, window.kv_saved_ms])
        self._curves = new if self._curves is None else self._curves + self.smoothing * (new - self._curves)
