"""Layer 2, the residual adapter: a small offset of the base policy's target that is learnt while serving goes on.

What it learns from are the service's own measurements, never a reference: which cache would save more time per request
with one page more (the ghosts), and, through its guard, what became of latency and of the time that a request takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from helm_rl.control.base import BasePolicy
from helm_rl.control.guard import GuardSettings, SwitchbackGuard
from helm_rl.control.protocol import FloatArray
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import OBSERVATION_NAMES, SIZE

_ALPHA, _LINK, _COMPUTE = (OBSERVATION_NAMES.index(name) for name in ("alpha", "link_demand", "compute_demand"))
_EMA_S = 60.0
_LEAST_MS = 1e-4  # ms per request and 1 % of the pool: margins below it are noise of the ghosts
_MOST_STEP = 5.0


@dataclass(frozen=True)
class ResidualSettings:
    """How far the adapter may go, and how fast it learns.

    Args:
        bound: most that the target is moved, in alpha; 0: the base policy as it is.
        hidden: width of the two hidden layers.
        learning_rate: step of the gradient ascent; rises with |P99 - EMA(P99)|, to _MOST_STEP times this at the most.
        rate_gain: how much it rises: the step is 1 + rate_gain * |P99 - EMA| / EMA times as long.
        pull: weight of the offset's own square, against the gain; larger offsets need clearer signs.
        balance_cold, balance_hot: ln(margin of EMB / margin of KV) at which nothing is to be gained, where no user is
            hot and where all are; linear between. Above 0: the requests that make the tail are those whose keys and
            values are missing, and of users who hardly return they are the longest.

    Raises:
        UserError: a value lies outside its range.
    """

    bound: float = 0.05
    hidden: int = 16
    learning_rate: float = 0.02
    rate_gain: float = 1.0
    pull: float = 0.1
    balance_cold: float = 1.4
    balance_hot: float = 0.1

    def __post_init__(self) -> None:
        ranges = {
            "bound": (0.0, 0.5),
            "hidden": (1, 1024),
            "learning_rate": (0.0, 10.0),
            "rate_gain": (0.0, 100.0),
            "pull": (0.0, 100.0),
            "balance_cold": (-10.0, 10.0),
            "balance_hot": (-10.0, 10.0),
        }
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:  # NaN fails too
                raise UserError(
                    f"residual adapter: {name} must be within {low:g} and {high:g}, not {getattr(self, name)!r}"
                )


class ResidualNet:
    """tanh of a network of two tanh layers, whose last layer starts at zero; one sample at a time, in float64."""

    def __init__(self, inputs: int, hidden: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.weights = [
            rng.standard_normal((inputs, hidden)) / math.sqrt(inputs),
            rng.standard_normal((hidden, hidden)) / math.sqrt(hidden),
            np.zeros((hidden, 1)),
        ]
        self.biases = [np.zeros(hidden), np.zeros(hidden), np.zeros(1)]

    def forward(self, x: npt.NDArray[np.float64]) -> tuple[float, list[npt.NDArray[np.float64]]]:
        """Return the output, within (-1, 1), and what `ascend` needs of the way there."""
        layers = [x]
        for weight, bias in zip(self.weights, self.biases, strict=True):
            layers.append(np.tanh(layers[-1] @ weight + bias))
        return float(layers[-1][0]), layers

    def ascend(self, layers: list[npt.NDArray[np.float64]], slope: float, step: float) -> None:
        """Move the weights by `step` along the gradient of the output times `slope`."""
        delta = slope * (1.0 - layers[-1] ** 2)
        for i in range(len(self.weights) - 1, -1, -1):
            before = layers[i]
            back = self.weights[i] @ delta
            self.weights[i] += step * np.outer(before, delta)
            self.biases[i] += step * delta
            delta = back * (1.0 - before**2)


class Residual:
    """The base policy, and on top of its own summed target an offset that is learnt online.

    The base sees the alpha that would be applied without the offset, so that it does not take it back.

    Args:
        base: the frozen policy.
        settings: of the adapter; guard: of the comparison that keeps it from doing harm.
    """

    def __init__(
        self, base: BasePolicy, settings: ResidualSettings | None = None, guard: GuardSettings | None = None
    ) -> None:
        self.base = base
        self.settings = ResidualSettings() if settings is None else settings
        self._guard_settings = guard
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget all that was learnt, and reset the base."""
        self.net = ResidualNet(SIZE + 1, self.settings.hidden, seed)
        self.guard = SwitchbackGuard(self._guard_settings, seed)
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Reset the base, and begin anew where the service does; what was learnt stays."""
        self.base.reset(seed)
        self.offset = 0.0
        self._window: WindowStats | None = None
        self._layers: list[npt.NDArray[np.float64]] | None = None
        self._p99_ema = math.nan

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the base's target and the offset together, within the bundle's bounds.

        Without a bound, or where the observation holds a number that is not finite, it is the base's target.
        """
        bound, bounds = self.settings.bound, self.base.config.bounds
        if bound == 0.0:
            return self.base.decide(observation, applied_alpha, now_ns)
        own = observation.copy()
        own[_ALPHA] = np.float32(min(max(float(observation[_ALPHA]) - self.offset, 0.0), 1.0))
        if self._window is not None:
            self.guard.take(self._window, float(observation[_LINK] + observation[_COMPUTE]))
            self._window = None
        before = self.base.target
        target = self.base.decide(own, applied_alpha - self.offset, now_ns)
        self._layers = None
        if not np.isfinite(observation).all():
            return min(max(target + self.offset, bounds.alpha_min), bounds.alpha_max)
        moved = 0.0 if before is None else (target - before) / self.base.step
        output, layers = self.net.forward(np.concatenate([self.base.normalised(own), [moved]]).astype(np.float64))
        if self.guard.on:
            self.offset, self._layers = bound * output, layers
        else:
            self.offset = 0.0
        return min(max(target + self.offset, bounds.alpha_min), bounds.alpha_max)

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """Learn from the window that followed the last decision; the guard takes it at the next one."""
        if self.settings.bound == 0.0:
            return
        self._window = window
        step = self.settings.learning_rate * self._urgency(window)
        gain = self._gain(window)
        if self._layers is not None and math.isfinite(gain):
            output = float(self._layers[-1][0])
            self.net.ascend(self._layers, gain - self.settings.pull * output, step)
            self._layers = None

    def _gain(self, window: WindowStats) -> float:
        """Return which way more is saved, from -1 (KV) to 1 (EMB); NaN where neither margin says anything."""
        emb, kv = window.emb_margin_ms, window.kv_margin_ms
        if not (math.isfinite(emb) and math.isfinite(kv)) or max(emb, kv) <= _LEAST_MS:
            return math.nan
        hot = window.returning / max(window.arrivals, 1)
        balance = self.settings.balance_cold + (self.settings.balance_hot - self.settings.balance_cold) * hot
        return math.tanh(math.log(max(emb, _LEAST_MS) / max(kv, _LEAST_MS)) - balance)

    def _urgency(self, window: WindowStats) -> float:
        """Return how many times its length a step is to have: more where P99 has just left its average."""
        p99_ms = window.p99_ms
        if not math.isfinite(p99_ms):
            return 1.0
        if math.isnan(self._p99_ema):
            self._p99_ema = p99_ms
        off = abs(p99_ms - self._p99_ema) / self._p99_ema
        weight = -math.expm1(-(window.end_ns - window.start_ns) * 1e-9 / _EMA_S)
        self._p99_ema += weight * (p99_ms - self._p99_ema)
        return min(1.0 + self.settings.rate_gain * off, _MOST_STEP)
