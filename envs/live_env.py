"""`helm_rl/HelmLive-v0`: the live cache engine on the wall clock, with the observation and action of `HelmNode-v0`."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envs.serving.live import LiveNode, LiveTotals
from envs.training_traces import SEEDS_FROM, reward
from helm_rl import observation
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import ObservationBuilder
from helm_rl.scenario import Scenario, load_scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace

FloatArray = npt.NDArray[np.float32]

_DEFAULT_EPISODE_S = 300.0


class HelmLiveEnv(gym.Env[FloatArray, FloatArray]):
    """A trace served in real time by an HSTU on pool, caches and host tables that are really there; see `LiveNode`.

    Observation and action are those of `HelmNode-v0`, so a policy trained there runs here. It is measured, so the same
    seed gives the same arrivals but never the same figures: the environment is registered as nondeterministic.

    ## Observation
    Schema v1, `Box(17,)` float32 within [-1, 1]: see `helm_rl.observation`. `burst_score` is 0: no detector looks at
    the ticks of the live node.

    ## Action
    `Box(-1, 1, (1,))` float32: the rate at which the target alpha changes, in units of the scenario's
    `control.rate_per_s`. The target stays within [alpha_min, alpha_max]; pages move within the migration budget.

    ## Step
    Sets the target and sleeps until the interval ends. Intervals follow each other without a gap: time that the caller
    takes between steps is part of the next one, and if it takes longer, whole intervals pass at once.

    ## Reward
    As of `HelmNode-v0` with `paired=False`: no other split can be measured on the same arrivals at the same time.

    ## Start
    An instant of the trace drawn by the reset's seed; alpha drawn uniformly from its range. The requests of the
    `warm_s` before are served as fast as the caches can; then one interval is waited for, for the first observation.

    ## End
    Never terminated. Truncated after `episode_s`, or where the trace ends.

    ## Info
    `alpha`, `target`, `p99_ms` (decayed sketch), `window` (the `WindowStats` behind the observation).

    Args:
        scenario: shipped name, path of a TOML file, or a Scenario; its pool is really allocated.
        trace: the arrivals; None generates them from the scenario.
        episode_s: seconds of an episode; default 300 s or the whole trace, whichever is shorter.
        backend: "cpu" or "cuda".
        speed: how many times faster than the trace's clock its requests arrive; every other time is real.
        compute_scale: times the compute time of the profile that what stands in for a decoder takes; 0: none.
        table_rows: rows of each of the four host tables; more miss more.
        verify: compare all rows and scores (of a stand-in, KV pages) with what they must be; `totals` counts what is
            wrong.
        warm_s: seconds of the trace (at its speed) that fill the caches before an episode.
        seed: of the generated trace.
        render_mode: None; there is nothing to render.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own spelling)

    def __init__(
        self,
        scenario: str | Path | Scenario = "laptop",
        trace: Trace | None = None,
        episode_s: float | None = None,
        *,
        backend: str = "cpu",
        speed: float = 1.0,
        compute_scale: float = 1.0,
        table_rows: int = 1 << 21,
        verify: bool = False,
        warm_s: float = 30.0,
        seed: int = 0,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            raise UserError(f"render_mode must be None, got {render_mode!r}: there is nothing to render")
        self.render_mode = None
        self.scenario = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
        self._interval_ns = round(self.scenario.control.interval_s * 1e9)
        if episode_s is not None and not self._interval_ns <= episode_s * 1e9 < math.inf:
            raise UserError(
                f"episode_s must be at least one interval ({self.scenario.control.interval_s:g} s), got {episode_s}"
            )
        if not 0 <= warm_s <= 1e6:
            raise UserError(f"warm_s must be in [0, 1e6] seconds, got {warm_s}")
        self._episode_s = episode_s
        self._warm_ns = round(warm_s * 1e9)
        self.observation_space = spaces.Box(observation.LOW, observation.HIGH, dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._builder = ObservationBuilder(self.scenario.slo_ms)
        self.node = LiveNode(
            self.scenario,
            generate(self.scenario, seed=SEEDS_FROM + seed) if trace is None else trace,
            backend=backend,
            speed=speed,
            compute_scale=compute_scale,
            table_rows=table_rows,
            verify=verify,
        )
        arrivals, meta = self.node.trace.arrival_ns, self.node.trace.meta
        self.intervals = int((arrivals[-1] - meta.measure_from_ns) // self._interval_ns)
        if self.intervals < 1:
            raise UserError(
                f"trace {meta.name} has less than one interval ({self.scenario.control.interval_s:g} s) after its "
                f"warm-up, at speed {speed:g}"
            )
        self._steps_left: int | None = None  # None: not reset
        # The node's threads know the node alone: an environment that is dropped without close ends them, too.
        self._close = weakref.finalize(self, self.node.close)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Start an episode; takes one interval of time and what the warm-up takes.

        Options, each optional: `start` (interval at which the episode begins), `alpha`.
        """
        super().reset(seed=seed)
        self._refuse_closed()
        self._steps_left = None  # a reset that is refused leaves nothing to step
        chosen = options or {}
        unknown = set(chosen) - {"start", "alpha"}
        if unknown:
            raise UserError(f"unknown reset options {sorted(unknown)}; known: start, alpha")
        control = self.scenario.control
        asked_s = _DEFAULT_EPISODE_S if self._episode_s is None else self._episode_s
        steps = min(self.intervals, max(1, round(asked_s / control.interval_s)))
        k = int(chosen.get("start", self.np_random.integers(self.intervals - steps + 1)))
        if not 0 <= k < self.intervals:
            raise UserError(f"option start must be in [0, {self.intervals}), got {k}")
        alpha = float(chosen.get("alpha", self.np_random.uniform(control.alpha_min, control.alpha_max)))
        if not control.alpha_min <= alpha <= control.alpha_max:
            raise UserError(f"option alpha must be in [{control.alpha_min:g}, {control.alpha_max:g}], got {alpha}")
        self._end_ns = self.node.trace.meta.measure_from_ns + k * self._interval_ns
        self.node.reset(alpha, self._end_ns - self._interval_ns, self._warm_ns)
        self._builder.reset()
        window = self.node.run(self._end_ns)
        self._steps_left = min(steps, self.intervals - k)
        return self._builder.update(window), self._info(window)

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Serve one interval with the target that the action asks for.

        Raises:
            RuntimeError: the node's serving failed; the error in it is the cause.
        """
        self._refuse_closed()
        if self._steps_left is None:
            raise gym.error.ResetNeeded("call reset before step")
        if self._steps_left == 0:
            raise gym.error.ResetNeeded("the episode has ended: call reset")
        rate = float(np.asarray(action).reshape(1)[0])
        if not math.isfinite(rate):
            raise ValueError(f"the action must be a number in [-1, 1], got {action}")
        node, control = self.node, self.scenario.control
        before = node.alpha
        node.set_target(node.target + min(max(rate, -1.0), 1.0) * control.rate_per_s * control.interval_s)
        passed = 1 + max(0, node.clock_ns() - self._end_ns) // self._interval_ns
        self._end_ns += passed * self._interval_ns
        window = node.run(self._end_ns)
        self._steps_left = max(0, self._steps_left - passed)
        earned = reward(window, self.scenario, window.alpha - before)
        return self._builder.update(window), earned, False, self._steps_left == 0, self._info(window)

    @property
    def totals(self) -> LiveTotals:
        """What was counted since the reset."""
        return self.node.totals

    def close(self) -> None:
        """Stop serving and give the memory back; twice is harmless."""
        self._steps_left = None
        self._close()

    def _refuse_closed(self) -> None:
        if not self._close.alive:
            raise gym.error.ClosedEnvironmentError("the environment was closed: make a new one")

    def _info(self, window: WindowStats) -> dict[str, Any]:
        return {"alpha": window.alpha, "target": window.target, "p99_ms": window.p99_ms, "window": window}
