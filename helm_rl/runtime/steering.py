"""What is in charge of a control loop: a controller with its bounds, of a bundle or of one's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from helm_rl.checkpoint import Bundle
from helm_rl.control.layers import controller
from helm_rl.control.protocol import Controller, FloatArray
from helm_rl.errors import UserError
from helm_rl.observation import HIGH, LOW, SIZE


@dataclass(frozen=True)
class Steering:
    """A controller, and what it may do.

    alpha_min, alpha_max: nothing else is ever asked of the server.
    neutral: what the controller is shown of signals that the server cannot give, float32 [17] within the schema's
        bounds; None: 0. For a policy, the mean of its normaliser: its network then sees 0.
    """

    controller: Controller
    alpha_min: float = 0.1
    alpha_max: float = 0.9
    neutral: FloatArray | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha_min <= self.alpha_max <= 1.0:  # NaN fails too
            raise UserError(f"alpha_min {self.alpha_min!r} and alpha_max {self.alpha_max!r} must ascend within [0, 1]")
        if self.neutral is not None and not ((self.neutral >= LOW) & (self.neutral <= HIGH)).all():
            raise UserError("neutral must lie within the bounds of the observation")


def steering_of(bundle: Bundle, interval_s: float) -> Steering:
    """Return a bundle's controller with its bounds; what a server cannot give its network will see as 0.

    It has decided once, so that nothing is left to compile or load.
    """
    made = controller(bundle, interval_s)
    bounds = bundle.config.bounds
    made.tick(0, math.nan, 0)
    made.decide(np.zeros(SIZE, np.float32), bounds.alpha_min, 0)
    neutral = np.clip(bundle.tensors["normaliser.mean"].astype(np.float32), LOW, HIGH)
    return Steering(made, bounds.alpha_min, bounds.alpha_max, neutral)
