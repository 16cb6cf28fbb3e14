"""Layer 1, the base policy: a trained network from a bundle, frozen in service, compiled with numba."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from helm_rl.checkpoint import BoundsSection, Bundle, NetworkSection, Tensors, load_bundle
from helm_rl.control import kernel
from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import SIZE


class BasePolicy:
    """Adds the network's mean action, a rate of change of alpha, to its own target.

    The target starts at the applied alpha of the first decision after a reset. What comes out is always within
    the bundle's [alpha_min, alpha_max].

    Args:
        tensors: Of its actor and normaliser, as a bundle has them; `BasePolicy.load` reads one from a folder.
        network, bounds: What they belong to.
        interval_s: Seconds between decisions, among those it was trained for; may be left out where that is one.
        where: Names the policy in errors.

    Raises:
        UserError: It was trained for other intervals.
    """

    def __init__(
        self,
        tensors: Tensors,
        network: NetworkSection,
        bounds: BoundsSection,
        interval_s: float | None = None,
        where: str = "the policy",
    ) -> None:
        self.bounds = bounds
        trained = bounds.interval_s
        if interval_s is None and len(trained) == 1:
            interval_s = trained[0]
        if interval_s is None or not trained[0] * (1 - 1e-9) <= interval_s <= trained[-1] * (1 + 1e-9):
            asked = "no interval was given" if interval_s is None else f"{interval_s:g} s was asked for"
            span = f"{trained[0]:g} s" if len(trained) == 1 else f"{trained[0]:g} to {trained[-1]:g} s"
            raise UserError(f"{where}: the policy was trained for {span} between decisions, and {asked}")
        self.interval_s = interval_s
        self.step = bounds.rate_per_s * interval_s
        self.state = _state(tensors, network, bounds, self.step)

    @classmethod
    def of(cls, bundle: Bundle, interval_s: float | None = None) -> BasePolicy:
        """Return the policy of a checked bundle."""
        return cls(bundle.tensors, bundle.config.network, bundle.config.bounds, interval_s, str(bundle.path))

    @classmethod
    def load(cls, path: Path, interval_s: float | None = None) -> BasePolicy:
        """Read a bundle folder strictly; UserError says what is wrong with it."""
        return cls.of(load_bundle(path), interval_s)

    @property
    def target(self) -> float | None:
        """The policy's own target; None before the first decision after a reset."""
        target = float(self.state.numbers[kernel.TARGET])
        return None if math.isnan(target) else target

    def normalised(self, observation: FloatArray) -> FloatArray:
        """Return a raw observation, float32 (17,), as the network sees it: in standard deviations, clipped."""
        kernel.normalise(self.state, observation, observation[kernel.ALPHA])
        return self.state.normalised.copy()

    def action(self, observation: FloatArray) -> FloatArray:
        """Return the mean action, not clipped, float32 (1,), for a raw observation, float32 (17,)."""
        kernel.normalise(self.state, observation, observation[kernel.ALPHA])
        return np.array([kernel.mean_action(self.state)], np.float32)

    def reset(self, seed: int) -> None:
        """Forget the target."""
        self.state.numbers[kernel.TARGET] = math.nan

    def resume(self, applied_alpha: float) -> None:
        """Go on from an alpha that something else has set."""
        self.state.numbers[kernel.TARGET] = applied_alpha

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the new target; NaN or infinity in the observation or out of the network leaves it where it was.

        Before there is one, an applied alpha that is not finite comes back as it is, and is not remembered.

        Raises:
            ValueError: The observation has the wrong shape.
        """
        if observation.shape != (SIZE,):
            raise ValueError(f"expected an observation of shape ({SIZE},), got {observation.shape}")
        return float(kernel.decide_base(self.state, observation, applied_alpha))

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn: the base policy works at its interval."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """Frozen in service: what was measured changes nothing."""


def _state(tensors: Tensors, network: NetworkSection, bounds: BoundsSection, step: float) -> kernel.PolicyState:
    # Layers sit at the even positions of the actor, activations between them.
    names = [f"actor.{2 * i}" for i in range(len(network.hidden) + 1)]
    weights = [tensors[f"{name}.weight"] for name in names]
    parts = [part.ravel() for name in names for part in (tensors[f"{name}.weight"].T, tensors[f"{name}.bias"])]
    widths = [weights[0].shape[1], *(weight.shape[0] for weight in weights)]
    numbers = np.zeros(kernel.N_POLICY)
    numbers[kernel.CLIP] = network.observation_clip
    numbers[kernel.STEP] = step
    numbers[kernel.ALPHA_MIN], numbers[kernel.ALPHA_MAX] = bounds.alpha_min, bounds.alpha_max
    numbers[kernel.TARGET] = math.nan
    return kernel.PolicyState(
        mean=tensors["normaliser.mean"],
        std=np.sqrt(tensors["normaliser.var"] + network.epsilon),
        weights=np.concatenate(parts),
        widths=np.array(widths, np.int64),
        normalised=np.zeros(widths[0], np.float32),
        values=np.zeros((2, max(widths[1:])), np.float32),
        numbers=numbers,
    )
