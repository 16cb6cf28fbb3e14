"""Layer 2, the residual adapter: a small offset of the base policy's target that is learnt while serving goes on.

It learns from what the service measures, never from a reference: what one more page would save on either side (by the
ghosts), each millisecond weighted by how near the resource that it is saved on is to its limit. Where both are worth
the same, the adapter is content. A guard decides by latency whether it may act, and how far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from helm_rl.control.base import BasePolicy
from helm_rl.control.guard import ControlNodes, Guard, GuardSettings, GuardState, Mode, NodeGuard, Sums
from helm_rl.control.lean import lean
from helm_rl.control.protocol import FloatArray
from helm_rl.control.residual_kernel import LIMIT, OFFSET, ascend, decide_adapted, forward, new_adapter, new_net
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import HIGH, OBSERVATION_NAMES, SIZE

_P99 = OBSERVATION_NAMES.index("p99_over_slo")
_EMA_S = 60.0
_MOST_STEP = 2.0


@dataclass(frozen=True)
class ResidualSettings:
    """How far the adapter may go, and how fast it learns.

    Args:
        bound: most that the target is moved, in alpha; 0: the base policy as it is.
        stride: how far it may go at first, and how much further each time that its guard lets it, in alpha.
        pace: most that the offset changes per second, in alpha: memory that moves fast is cold where it arrives.
        hidden: width of the two hidden layers.
        learning_rate: step of the gradient ascent, per sample.
        rate_gain: how much it rises with the deviation of P99 from its moving average: the step is
            1 + rate_gain * |P99 - EMA| / EMA times as long, at most _MOST_STEP times.
        pull: weight of the offset, in units of its bound, against the lean; larger offsets need clearer signs.

    Raises:
        UserError: a value lies outside its range.
    """

    bound: float = 0.15
    stride: float = 0.05
    pace: float = 0.005
    hidden: int = 16
    learning_rate: float = 0.01
    rate_gain: float = 1.0
    pull: float = 0.02

    def __post_init__(self) -> None:
        ranges = {
            "bound": (0.0, 0.5),
            "stride": (0.001, 0.5),
            "pace": (0.0, 1.0),
            "hidden": (1, 256),
            "learning_rate": (0.0, 10.0),
            "rate_gain": (0.0, 100.0),
            "pull": (0.0, 100.0),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:  # NaN fails too
                raise UserError(f"residual adapter: {name} must be within {low:g} and {high:g}, not {value!r}")


@dataclass(frozen=True)
class Learnt:
    """What an adapter has learnt, with its settings; without what belongs to the replay or the minute it learns in.

    weights, biases: of the network's layers, as `ResidualNet` has them.
    """

    settings: ResidualSettings
    guard_settings: GuardSettings
    weights: list[list[list[float]]]
    biases: list[list[float]]
    guard: GuardState


class ResidualNet:
    """tanh of a network of two tanh layers, whose last layer starts at zero; one sample at a time, in float64."""

    def __init__(self, inputs: int, hidden: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.state = new_net(
            [
                rng.standard_normal((inputs, hidden)) / math.sqrt(inputs),
                rng.standard_normal((hidden, hidden)) / math.sqrt(hidden),
                np.zeros((hidden, 1)),
            ]
        )

    @property
    def weights(self) -> tuple[npt.NDArray[np.float64], ...]:
        """Of each layer, [inputs, outputs]; to be changed in place."""
        return self.state[:3]

    @property
    def biases(self) -> tuple[npt.NDArray[np.float64], ...]:
        """Of each layer, [outputs]; to be changed in place."""
        return self.state[3:6]

    def forward(self, x: npt.NDArray[np.float64]) -> float:
        """Return the output, within (-1, 1), for an input, float64 [inputs]."""
        return float(forward(self.state, x))

    def ascend(self, x: npt.NDArray[np.float64], slope: float, step: float) -> None:
        """Move the weights by `step` along `slope` times the gradient of the output before its tanh."""
        ascend(self.state, x, slope, step)


class Residual:
    """The base policy, and on top of its own summed target an offset that is learnt online.

    The base sees the alpha that would be applied without the offset, so that it does not take it back.

    Args:
        base: the frozen policy.
        settings: of the adapter; guard: of what decides whether it may act.
    """

    def __init__(
        self, base: BasePolicy, settings: ResidualSettings | None = None, guard: GuardSettings | None = None
    ) -> None:
        self.base = base
        self.settings = ResidualSettings() if settings is None else settings
        self.guard_settings = GuardSettings() if guard is None else guard
        self._learnt: Learnt | None = None
        self.net: ResidualNet
        self.guard: NodeGuard
        self._role: tuple[Mode, int]
        self.reset(0)

    @classmethod
    def of(cls, base: BasePolicy, learnt: Learnt) -> Residual:
        """Return an adapter that begins with what another one has learnt, and goes back to that when it is reset."""
        adapter = cls(base, learnt.settings, learnt.guard_settings)
        adapter._learnt = learnt
        adapter.reset(0)
        return adapter

    def learnt(self) -> Learnt:
        """Return what was learnt so far on one node; nothing in it is shared."""
        assert isinstance(self.guard, Guard)
        return Learnt(
            settings=self.settings,
            guard_settings=self.guard_settings,
            weights=[weight.tolist() for weight in self.net.weights],
            biases=[bias.tolist() for bias in self.net.biases],
            guard=self.guard.state(),
        )

    def reset(self, seed: int) -> None:
        """Forget all that was learnt since it was made, and reset the base."""
        learnt = self._learnt
        self.net = ResidualNet(SIZE + 1, self.settings.hidden, seed)
        if learnt is not None:
            for layer, (weights, biases) in enumerate(zip(learnt.weights, learnt.biases, strict=True)):
                self.net.weights[layer][...] = weights
                self.net.biases[layer][...] = biases
        guard = Guard(self.guard_settings, seed, self.base.interval_s, None if learnt is None else learnt.guard)
        self._sit_under(guard)
        self._p99_ema = math.nan
        self._urgency = 1.0
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Reset the base, and begin anew where the service does; what was learnt stays."""
        self.base.reset(seed)
        self.offset = 0.0
        self.state.taken[0] = 0
        self.interrupt()

    def interrupt(self) -> None:
        """Learn nothing from what was measured while something else has steered."""
        self.guard.interrupt()
        self.pending: WindowStats | None = None

    def resume(self, applied_alpha: float) -> None:
        """Go on after something else has steered, from what is applied by then; what was learnt stays."""
        self.restart(0)

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the base's target and the offset together, within the bundle's bounds.

        Without a bound it is the base's target; where the observation holds a number that is not finite, the offset
        stays as it is.
        """
        if self.settings.bound == 0.0:
            return self.base.decide(observation, applied_alpha, now_ns)
        self.learn(observation)
        mode, applied_alpha = self.mode().value, float(applied_alpha)
        return float(decide_adapted(self.base.state, self.net.state, self.state, observation, applied_alpha, mode))

    @property
    def offset(self) -> float:
        """The offset that acts."""
        return float(self.state.numbers[OFFSET])

    @offset.setter
    def offset(self, offset: float) -> None:
        self.state.numbers[OFFSET] = offset

    def mode(self) -> Mode:
        """Return what the block is for; how far the offset may go in it is there for the decision."""
        mode, reach = self.guard.mode, self.guard.reach
        if self._role != (mode, reach):
            self._role = mode, reach
            self.state.numbers[LIMIT] = self._limit(mode, reach)
        return mode

    def learn(self, observation: FloatArray) -> None:
        """Learn from the pending window, if there is one, before a decision upon what was observed at its end."""
        if self.pending is None:
            return
        p99, acted = float(observation[_P99]), self.guard.mode is Mode.ACT
        sample = self.guard.take(self.pending, p99 if p99 <= HIGH[_P99] else math.nan)
        self.pending = None
        if sample is not None:
            self._learn(sample, acted)

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Never ask for a decision out of turn."""
        return False

    def feedback(self, window: WindowStats) -> None:
        """Take the window that followed the last decision; it is learnt from at the next one."""
        self.pending = window
        p99_ms = window.p99_ms
        if not math.isfinite(p99_ms) or p99_ms <= 0:
            return
        if math.isnan(self._p99_ema):
            self._p99_ema = p99_ms
        off = abs(p99_ms - self._p99_ema) / self._p99_ema
        weight = -math.expm1(-(window.end_ns - window.start_ns) * 1e-9 / _EMA_S)
        self._p99_ema += weight * (p99_ms - self._p99_ema)
        self._urgency = min(1.0 + self.settings.rate_gain * off, _MOST_STEP)

    def _sit_under(self, guard: NodeGuard) -> None:
        """Take a guard, before anything has been decided under it."""
        settings, interval_s = self.settings, self.base.interval_s
        self.guard = guard
        self.state = new_adapter(settings.bound, settings.pace * interval_s, guard.sample)
        self._role = Mode.REST, 0  # what the state's limit is for

    def _limit(self, mode: Mode, reach: int) -> float:
        """Return how far the offset may go, in alpha."""
        if mode is Mode.REST:
            return 0.0
        steps = min(reach, math.ceil(self.settings.bound / self.settings.stride - 1e-9))
        return min(self.settings.bound, self.settings.stride * (steps if mode is Mode.ACT else steps - 1))

    def _learn(self, sample: Sums, acted: bool) -> None:
        """Move the offset towards the side that a sample in which it acted leans to."""
        taken, self.state.taken[0] = int(self.state.taken[0]), 0
        if not acted or not taken:
            return
        slope, limit = lean(sample), self._limit(Mode.ACT, self.guard.reach)
        step = self.settings.learning_rate * self._urgency / taken
        for x in self.state.inputs[:taken]:
            meant = self.net.forward(x)
            if abs(meant) * self.settings.bound < limit or slope * meant < 0.0:  # it learns no further than it may
                self.net.ascend(x, slope - self.settings.pull * meant, step)


def on_cluster(
    bases: Sequence[BasePolicy],
    settings: ResidualSettings | None = None,
    guard: GuardSettings | None = None,
    seed: int = 0,
) -> tuple[list[Residual], ControlNodes]:
    """Return an adapter for each node of a cluster, all of which learn one network, and their guard.

    Args:
        bases: the frozen policy of each node, at least 2.
        settings, guard: as for `Residual`.
        seed: of what is drawn.

    A reset of one would take it from the others' network and guard: between replays, `restart` them.
    """
    adapters = [Residual(base, settings, guard) for base in bases]
    nodes = ControlNodes(len(bases), guard, seed, bases[0].interval_s)
    for number, (adapter, node) in enumerate(zip(adapters, nodes.nodes, strict=True)):
        adapter.reset(seed + number)
        adapter.net = adapters[0].net
        adapter._sit_under(node)
    return adapters, nodes
