"""Layer 1, the base policy: a trained network from a bundle, frozen in service, compiled with numba."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.jit import inner, kernel
from helm_rl.checkpoint import BoundsSection, Bundle, NetworkSection, Tensors, load_bundle
from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import OBSERVATION_NAMES, SIZE

ALPHA = OBSERVATION_NAMES.index("alpha")

# PolicyState.numbers
CLIP = 0  # of a normalised signal, in standard deviations
STEP = 1  # of the target in a decision, at an action of 1
ALPHA_MIN = 2
ALPHA_MAX = 3
TARGET = 4  # the policy's own, NaN: none yet
N_POLICY = 5


class PolicyState(NamedTuple):
    """The base policy.

    weights: of each layer in turn, [inputs, outputs], then its biases; widths: of the input and of each layer;
    normalised: the signals of the last decision in standard deviations, clipped; values: of the neurons of a layer,
    and of the layer before, [2, the widest].
    """

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    weights: FloatArray
    widths: npt.NDArray[np.int64]
    normalised: FloatArray
    values: FloatArray
    numbers: npt.NDArray[np.float64]


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
        target = float(self.state.numbers[TARGET])
        return None if math.isnan(target) else target

    def normalised(self, observation: FloatArray) -> FloatArray:
        """Return a raw observation, float32 (17,), as the network sees it: in standard deviations, clipped."""
        normalise(self.state, observation, observation[ALPHA])
        return self.state.normalised.copy()

    def action(self, observation: FloatArray) -> FloatArray:
        """Return the mean action, not clipped, float32 (1,), for a raw observation, float32 (17,)."""
        normalise(self.state, observation, observation[ALPHA])
        return np.array([mean_action(self.state)], np.float32)

    def reset(self, seed: int) -> None:
        """Forget the target."""
        self.state.numbers[TARGET] = math.nan

    def resume(self, applied_alpha: float) -> None:
        """Go on from an alpha that something else has set."""
        self.state.numbers[TARGET] = applied_alpha

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the new target; NaN or infinity in the observation or out of the network leaves it where it was.

        Before there is one, an applied alpha that is not finite comes back as it is, and is not remembered.

        Raises:
            ValueError: The observation has the wrong shape.
        """
        if observation.shape != (SIZE,):
            raise ValueError(f"expected an observation of shape ({SIZE},), got {observation.shape}")
        return float(decide_base(self.state, observation, float(applied_alpha)))

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn: the base policy works at its interval."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """Frozen in service: what was measured changes nothing."""


def _state(tensors: Tensors, network: NetworkSection, bounds: BoundsSection, step: float) -> PolicyState:
    # Layers sit at the even positions of the actor, activations between them.
    names = [f"actor.{2 * i}" for i in range(len(network.hidden) + 1)]
    weights = [tensors[f"{name}.weight"] for name in names]
    parts = [part.ravel() for name in names for part in (tensors[f"{name}.weight"].T, tensors[f"{name}.bias"])]
    widths = [weights[0].shape[1], *(weight.shape[0] for weight in weights)]
    numbers = np.zeros(N_POLICY)
    numbers[CLIP] = network.observation_clip
    numbers[STEP] = step
    numbers[ALPHA_MIN], numbers[ALPHA_MAX] = bounds.alpha_min, bounds.alpha_max
    numbers[TARGET] = math.nan
    return PolicyState(
        mean=tensors["normaliser.mean"],
        std=np.sqrt(tensors["normaliser.var"] + network.epsilon),
        weights=np.concatenate(parts),
        widths=np.array(widths, np.int64),
        normalised=np.zeros(widths[0], np.float32),
        values=np.zeros((2, max(widths[1:])), np.float32),
        numbers=numbers,
    )


@inner
def clamp(x: float, low: float, high: float) -> float:
    """Return x within [low, high]; NaN stays."""
    if x < low:
        return low
    return high if x > high else x


@inner
def all_finite(observation: FloatArray) -> bool:
    """Return whether no signal is NaN or infinite."""
    finite = True
    for signal in observation:
        finite &= math.isfinite(signal)
    return finite


@kernel
def normalise(policy: PolicyState, observation: FloatArray, alpha: float) -> None:
    """Bring an observation, [17] float32, to what the network sees, with `alpha` in place of its own."""
    clip = policy.numbers[CLIP]
    for i in range(observation.size):
        signal = np.float64(np.float32(alpha) if i == ALPHA else observation[i])
        policy.normalised[i] = np.float32(clamp((signal - policy.mean[i]) / policy.std[i], -clip, clip))


@kernel
def mean_action(policy: PolicyState) -> float:
    """Return the network's mean action, not clipped, for what `normalise` left; tanh between layers, float32."""
    widths = policy.widths
    before, weights = policy.normalised, policy.weights
    layers = widths.size - 1
    for k in range(layers):
        inputs, outputs = widths[k], widths[k + 1]
        after = policy.values[k % 2]
        biases = weights[inputs * outputs : (inputs + 1) * outputs]
        for j in range(outputs):
            after[j] = biases[j]
        for i in range(inputs):
            # Rows of their own: of an index that is a sum the compiler cannot tell its sign, and does not vectorise.
            signal, row = before[i], weights[i * outputs : (i + 1) * outputs]
            for j in range(outputs):
                after[j] += signal * row[j]
        if k < layers - 1:
            for j in range(outputs):
                after[j] = math.tanh(after[j])
        weights = weights[(inputs + 1) * outputs :]
        before = after
    return np.float64(before[0])


@inner
def within(policy: PolicyState, target: float) -> float:
    """Return a target within the bounds; NaN stays."""
    return clamp(target, policy.numbers[ALPHA_MIN], policy.numbers[ALPHA_MAX])


@inner
def move(policy: PolicyState, action: float, applied_alpha: float) -> float:
    """Move the target by an action, clipped, or if it is NaN not at all; return it."""
    numbers = policy.numbers
    target = applied_alpha if math.isnan(numbers[TARGET]) else numbers[TARGET]
    if not math.isfinite(target):
        return target
    if not math.isnan(action):
        target += clamp(action, -1.0, 1.0) * numbers[STEP]
    numbers[TARGET] = within(policy, target)
    return numbers[TARGET]


@kernel
def decide_base(policy: PolicyState, observation: FloatArray, applied_alpha: float) -> float:
    """As `BasePolicy.decide`."""
    action = math.nan
    if all_finite(observation):
        normalise(policy, observation, observation[ALPHA])
        action = mean_action(policy)
    return move(policy, action, applied_alpha)
