"""Layer 1, the base policy: a trained network from a bundle, frozen in service, run with NumPy alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from helm_rl.checkpoint import BoundsSection, Bundle, NetworkSection, Tensors, load_bundle
from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats


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
        self.step = bounds.rate_per_s * interval_s
        self.target: float | None = None
        self._mean = tensors["normaliser.mean"]
        self._std = np.sqrt(tensors["normaliser.var"] + network.epsilon)
        self._clip = network.observation_clip
        # Layers sit at the even positions of the actor, activations between them.
        depth = len(network.hidden)
        self._layers = [
            (np.ascontiguousarray(tensors[f"actor.{2 * i}.weight"].T), tensors[f"actor.{2 * i}.bias"])
            for i in range(depth + 1)
        ]

    @classmethod
    def of(cls, bundle: Bundle, interval_s: float | None = None) -> BasePolicy:
        """Return the policy of a checked bundle."""
        return cls(bundle.tensors, bundle.config.network, bundle.config.bounds, interval_s, str(bundle.path))

    @classmethod
    def load(cls, path: Path, interval_s: float | None = None) -> BasePolicy:
        """Read a bundle folder strictly; UserError says what is wrong with it."""
        return cls.of(load_bundle(path), interval_s)

    def normalised(self, observation: FloatArray) -> FloatArray:
        """Return a raw observation, float32 (17,), as the network sees it: in standard deviations, clipped."""
        return np.clip((observation - self._mean) / self._std, -self._clip, self._clip).astype(np.float32)

    def action(self, observation: FloatArray) -> FloatArray:
        """Return the mean action, not clipped, float32 (1,), for a raw observation, float32 (17,)."""
        x = self.normalised(observation)
        for weight, bias in self._layers[:-1]:
            x = np.tanh(x @ weight + bias)
        weight, bias = self._layers[-1]
        mean: FloatArray = x @ weight + bias
        return mean

    def reset(self, seed: int) -> None:
        """Forget the target."""
        self.target = None

    def resume(self, applied_alpha: float) -> None:
        """Go on from an alpha that something else has set."""
        self.target = applied_alpha

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the new target; NaN or infinity in the observation or out of the network leaves it where it was.

        Before there is one, an applied alpha that is not finite comes back as it is, and is not remembered.

        Raises:
            ValueError: The observation has the wrong shape.
        """
        bounds = self.bounds
        if observation.shape != self._mean.shape:
            raise ValueError(f"expected an observation of shape {self._mean.shape}, got {observation.shape}")
        target = applied_alpha if self.target is None else self.target
        if not math.isfinite(target):
            return target
        if np.isfinite(observation).all():
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                action = float(self.action(observation)[0])
            if not math.isnan(action):
                target += min(max(action, -1.0), 1.0) * self.step
        self.target = min(max(target, bounds.alpha_min), bounds.alpha_max)
        return self.target

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn: the base policy works at its interval."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """Frozen in service: what was measured changes nothing."""
