"""The controller that follows a timetable: the offline reference, or an operator's own plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats


class ScheduledAlpha:
    """Asks for alphas[i] from times_ns[i] on, until times_ns[i + 1]; before times_ns[0] for alphas[0].

    Args:
        times_ns: Starts, int64 nanoseconds of the trace's clock, strictly increasing, shape (k,), k >= 1.
        alphas: The embedding cache's share of the pool from each start on, within [0, 1], shape (k,).

    Raises:
        UserError: Lengths differ or are zero, times do not increase, an alpha is not within [0, 1].
    """

    def __init__(
        self,
        times_ns: Sequence[int] | npt.NDArray[np.int64],
        alphas: Sequence[float] | npt.NDArray[np.floating],
    ) -> None:
        times = np.asarray(times_ns)
        self.alphas: npt.NDArray[np.float64] = np.array(alphas, dtype=np.float64)
        if times.ndim != 1 or self.alphas.shape != times.shape or times.size == 0:
            raise UserError(
                f"a schedule needs as many times as alphas, at least one: got shapes {times.shape} and "
                f"{self.alphas.shape}"
            )
        # Times held in floats lose nanoseconds long before they look wrong.
        if times.dtype.kind not in "iu":
            raise UserError(f"a schedule's times must be integer nanoseconds, not {times.dtype}")
        self.times_ns: npt.NDArray[np.int64] = times.astype(np.int64)
        late = np.flatnonzero(np.diff(self.times_ns) <= 0)
        if late.size:
            i = int(late[0]) + 1
            raise UserError(
                f"a schedule's times must increase: time {i} is {self.times_ns[i]} ns, after {self.times_ns[i - 1]} ns"
            )
        wrong = np.flatnonzero(~((self.alphas >= 0.0) & (self.alphas <= 1.0)))
        if wrong.size:
            i = int(wrong[0])
            raise UserError(f"a schedule's alphas must be within 0 and 1: alpha {i} is {self.alphas[i]}")

    def reset(self, seed: int) -> None:
        """There is no history to forget."""

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the alpha in force at `now_ns`."""
        return self.at(now_ns)

    def at(self, time_ns: int) -> float:
        """Return the alpha in force at a time of the trace's clock."""
        i = int(np.searchsorted(self.times_ns, time_ns, side="right")) - 1
        return float(self.alphas[max(i, 0)])

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """What was measured changes nothing."""
