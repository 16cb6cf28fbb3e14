"""The protocol that every controller follows: HELM, its layers, its peers, a user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from helm_rl.metrics import WindowStats

if TYPE_CHECKING:
    from helm_rl.control.burst import BurstState

FloatArray = npt.NDArray[np.float32]


class Controller(Protocol):
    """Moves alpha, the embedding cache's share of the pool."""

    def reset(self, seed: int) -> None:
        """Forget all history; called before every run."""
        ...

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the target alpha for an observation of schema v1, shape (17,), float32."""
        ...

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Look at one tick (min(10 ms, interval)); True asks for a decision at once.

        The simulator, which has its loop compiled, looks through the detector of `Watching` instead.
        """
        ...

    def feedback(self, window: WindowStats) -> None:
        """Take the measured window that followed the last decision; may be ignored."""
        ...


@runtime_checkable
class Watching(Protocol):
    """A controller with a burst detector, whose state compiled loops look through on every tick."""

    detector: BurstState


@runtime_checkable
class Timetable(Protocol):
    """A controller that goes by the clock alone: it acts on time whatever telemetry holds back or loses."""

    def at(self, time_ns: int) -> float:
        """Return the target alpha at a time of the trace's clock."""
        ...


@runtime_checkable
class Resuming(Protocol):
    """A controller that can go on from an alpha that it did not choose, and keep what it has learnt meanwhile."""

    def resume(self, applied_alpha: float) -> None:
        """Go on from what is applied now."""
        ...
