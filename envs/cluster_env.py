"""`helm_rl/HelmCluster-v0`: nodes behind a router on the model clock; the action is a split of memory for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envs.episode import FloatArray, Observer, check_episode_s, draw_episode, telemetry_seed, warm_up_ends
from envs.serving.cluster import ClusterSim, ClusterWindow
from envs.training_traces import TrainingTraces, cluster_reward
from helm_rl import observation
from helm_rl.errors import UserError
from helm_rl.scenario import Scenario, load_scenario
from helm_rl.workloads.trace import Trace


class HelmClusterEnv(gym.Env[FloatArray, FloatArray]):
    """N nodes, each as in `HelmNodeEnv`, that serve one load behind the scenario's router.

    ## Observation
    `Box(N, 17)` float32: a row of schema v1 for each node. The row of a node that is down is the last that it had.
    `burst_score` is 0: no detector looks at the ticks of a cluster's nodes.

    ## Action
    `Box(-1, 1, (N,))` float32: for each node the rate at which its target alpha changes, in units of the scenario's
    `control.rate_per_s`. What is asked of a node that is down is ignored.

    ## Reward
    The mean over the nodes that are up of what `HelmNodeEnv` earns, minus (with `paired`) the same of a static .5 on
    all nodes on the same arrivals; 0 where no node is up.

    ## Start
    As in `HelmNodeEnv`, with an alpha of its own for each node. Nodes that the scenario's events have lost by then are
    down.

    ## End
    Never terminated. Truncated after `episode_s`, or where the trace ends.

    ## Info
    `up`, bool [N]; `alpha`, `target`, float64 [N]; `p99_ms`, float64 [N] (decayed sketch; NaN: down); `window` (the
    `ClusterWindow`).

    Args:
        scenario: shipped name, path of a TOML file, or a Scenario; hardware.nodes says how many nodes there are.
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
        check_episode_s(episode_s, self.scenario)
        self._episode_s = episode_s
        nodes = self.scenario.hardware.nodes
        low, high = (np.tile(bound, (nodes, 1)) for bound in (observation.LOW, observation.HIGH))
        self.observation_space = spaces.Box(low, high, dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (nodes,), np.float32)
        self._observers = [Observer(self.scenario) for _ in range(nodes)]
        self._cluster: ClusterSim | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Start an episode.

        Options, each optional: `trace` (its number in the set), `start` (interval at which the episode begins),
        `alpha` (of all nodes, or one for each).
        """
        super().reset(seed=seed)
        self._cluster = None  # a reset that is refused leaves nothing to step
        episode = draw_episode(self._traces, self.np_random, options, self._episode_s)
        self._steps_left, self._k = episode.steps, episode.first
        self._reference = (
            self._traces.reference(episode.trace) if self._paired else np.zeros(self._traces.intervals(episode.trace))
        )
        cluster = ClusterSim(
            self.scenario,
            self._traces.trace(episode.trace),
            episode.alpha.tolist(),
            start_ns=episode.begin_ns,
            served=self._traces.served(episode.trace),
        )
        self._start_ns = episode.start_ns
        for observer in self._observers:
            observer.reset(telemetry_seed(self.scenario, self.np_random))
        for end in warm_up_ends(episode, self._interval_ns):
            window = cluster.run(end)
            obs = self._see(window)
        self._cluster = cluster
        return obs, self._info(cluster, window)

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Serve one interval with the targets that the action asks for."""
        cluster = self._cluster
        if cluster is None:
            raise gym.error.ResetNeeded("call reset before step")
        if self._steps_left == 0:
            raise gym.error.ResetNeeded("the episode has ended: call reset")
        rates = np.asarray(action, np.float64).reshape(len(cluster.nodes))
        if not np.isfinite(rates).all():
            raise ValueError(f"the action must be numbers in [-1, 1], got {action}")
        control = self.scenario.control
        before = cluster.alpha
        targets = self._targets(cluster) + np.clip(rates, -1.0, 1.0) * control.rate_per_s * control.interval_s
        cluster.set_targets(np.where(cluster.up, targets, np.nan))
        self._start_ns += self._interval_ns
        window = cluster.run(self._start_ns)
        moved = cluster.alpha - before
        earned = cluster_reward(window, self.scenario, moved) - float(self._reference[self._k])
        self._k += 1
        self._steps_left -= 1
        return self._see(window), earned, False, self._steps_left == 0, self._info(cluster, window)

    def _see(self, window: ClusterWindow) -> FloatArray:
        rows = [
            observer.last if node is None else observer.see(node)
            for node, observer in zip(window.nodes, self._observers, strict=True)
        ]
        return np.stack(rows)

    @staticmethod
    def _targets(cluster: ClusterSim) -> npt.NDArray[np.float64]:
        return np.array([node.target for node in cluster.nodes])

    def _info(self, cluster: ClusterSim, window: ClusterWindow) -> dict[str, Any]:
        return {
            "up": cluster.up.copy(),
            "alpha": cluster.alpha,
            "target": self._targets(cluster),
            "p99_ms": np.array([np.nan if node is None else node.p99_ms for node in window.nodes]),
            "window": window,
        }
