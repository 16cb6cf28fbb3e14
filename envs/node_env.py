"""`helm_rl/HelmNode-v0`: one serving node on the model clock, whose split of memory is the action."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from envs.episode import FloatArray, Observer, check_episode_s, draw_episode, telemetry_seed, warm_up_ends
from envs.serving.node import NodeSim
from envs.training_traces import TrainingTraces, reward
from helm_rl import observation
from helm_rl.control.burst import BurstSettings, new_burst_state
from helm_rl.errors import UserError
from helm_rl.scenario import Scenario, load_scenario
from helm_rl.workloads.trace import Trace


class HelmNodeEnv(gym.Env[FloatArray, FloatArray]):
    """A node that serves a generative recommender under trace-driven load.

    ## Observation
    Schema v1, `Box(17,)` float32 within [-1, 1]: see `helm_rl.observation`. Where the scenario's telemetry is late or
    lost, it is the last that arrived; zeros before the first.

    ## Action
    `Box(-1, 1, (1,))` float32: the rate at which the target alpha changes, in units of the scenario's
    `control.rate_per_s`. The target stays within [alpha_min, alpha_max]; alpha follows it within the migration budget.

    ## Reward
    -ln(1 + mean((latency / SLO)^4) / .25) * interval_s - move_cost * |alpha moved| over the interval (see
    `envs.training_traces.reward`), minus (with `paired`) the same of a static .5 on the same arrivals.

    ## Start
    A trace of the set and an instant in it, drawn by the reset's seed; alpha drawn uniformly from its range and kept
    for 30 s of warm-up that the agent does not see.

    ## End
    Never terminated. Truncated after `episode_s`, or where the trace ends.

    ## Info
    `alpha`, `target`, `p99_ms` (decayed sketch), `window` (the `WindowStats` behind the observation).

    Args:
        scenario: shipped name, path of a TOML file, or a Scenario.
        trace: the arrivals; None generates `trace_count` traces from the scenario.
        episode_s: seconds of an episode; default 300 s or the whole trace, whichever is shorter.
        paired: subtract the reward of a static .5.
        trace_count, seed: how many traces are generated, and from which seed.
        traces: a set to share with other environments, instead of the three above.
        render_mode: None; there is nothing to render.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own spelling)

    def __init__(
        self,
        scenario: str | Path | Scenario = "burst",
        trace: Trace | None = None,
        episode_s: float | None = None,
        *,
        paired: bool = True,
        trace_count: int = 1,
        seed: int = 0,
        traces: TrainingTraces | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            raise UserError(f"render_mode must be None, got {render_mode!r}: there is nothing to render")
        self.render_mode = None
        if traces is None:
            loaded = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
            traces = TrainingTraces(loaded, None if trace is None else [trace], count=trace_count, seed=seed)
        self.scenario = traces.scenario
        self._traces = traces
        self._interval_ns = traces.interval_ns
        self._paired = paired
        if self.scenario.hardware.nodes != 1:
            raise UserError(
                f"scenario {self.scenario.name} has hardware.nodes = {self.scenario.hardware.nodes}: this is one node; "
                "helm_rl/HelmCluster-v0 serves with several"
            )
        if self.scenario.event:
            raise UserError(
                f"scenario {self.scenario.name} has [[event]] tables, and this node is always up: leave them out; "
                "helm_rl/HelmCluster-v0 takes them"
            )
        check_episode_s(episode_s, self.scenario)
        self._episode_s = episode_s
        self.observation_space = spaces.Box(observation.LOW, observation.HIGH, dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._observer = Observer(self.scenario)
        self._node: NodeSim | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Start an episode.

        Options, each optional: `trace` (its number in the set), `start` (interval at which the episode begins),
        `alpha`.
        """
        super().reset(seed=seed)
        self._node = None  # a reset that is refused leaves nothing to step
        episode = draw_episode(self._traces, self.np_random, options, self._episode_s)
        self._steps_left, self._k = episode.steps, episode.first
        self._reference = (
            self._traces.reference(episode.trace) if self._paired else np.zeros(self._traces.intervals(episode.trace))
        )
        self._node = NodeSim(
            self.scenario,
            self._traces.trace(episode.trace),
            float(episode.alpha[0]),
            start_ns=episode.begin_ns,
            served=self._traces.served(episode.trace),
        )
        self._start_ns = episode.start_ns
        self._detector = new_burst_state(BurstSettings())
        self._observer.reset(telemetry_seed(self.scenario, self.np_random))
        for end in warm_up_ends(episode, self._interval_ns):
            window = self._node.run(end, self._detector)
            obs = self._observer.see(window)
        return obs, self._info(window)

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Serve one interval with the target that the action asks for."""
        node = self._node
        if node is None:
            raise gym.error.ResetNeeded("call reset before step")
        if self._steps_left == 0:
            raise gym.error.ResetNeeded("the episode has ended: call reset")
        rate = float(np.asarray(action).reshape(1)[0])
        if not math.isfinite(rate):
            raise ValueError(f"the action must be a number in [-1, 1], got {action}")
        control = self.scenario.control
        before = node.alpha
        node.set_target(node.target + min(max(rate, -1.0), 1.0) * control.rate_per_s * control.interval_s)
        self._start_ns += self._interval_ns
        window = node.run(self._start_ns, self._detector)
        earned = reward(window, self.scenario, window.alpha - before) - float(self._reference[self._k])
        self._k += 1
        self._steps_left -= 1
        return self._observer.see(window), earned, False, self._steps_left == 0, self._info(window)

    def _info(self, window: Any) -> dict[str, Any]:
        return {"alpha": window.alpha, "target": window.target, "p99_ms": window.p99_ms, "window": window}
