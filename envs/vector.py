"""A vector environment of nodes or clusters, stepped on threads: the compiled loop releases the GIL."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envs.cluster_env import HelmClusterEnv
from envs.episode import FloatArray
from envs.node_env import HelmNodeEnv
from envs.training_traces import TrainingTraces, is_cluster
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import Trace

T = TypeVar("T")


class ThreadedVectorEnv(VectorEnv[FloatArray, FloatArray, npt.NDArray[Any]]):
    """Environments that are never terminated, side by side; an episode that ends is reset in the same step.

    It behaves as gymnasium's `SyncVectorEnv` with AutoresetMode.SAME_STEP does, infos included: where an episode ends,
    `final_obs` and `final_info` hold its end, the mask `_final_obs` says where that is, and the rest is the next
    episode's start. Results do not depend on the number of threads.

    Args:
        envs: the environments, at least one, with equal spaces; observations are float32.
        threads: default: the cores that the process may use.
        only_ends: of `step`, infos hold `final_obs` and `final_info` alone: what nobody reads takes time, too.
    """

    def __init__(
        self, envs: Sequence[gym.Env[Any, Any]], threads: int | None = None, *, only_ends: bool = False
    ) -> None:
        super().__init__()
        if threads is not None and threads < 1:
            raise UserError(f"threads must be at least 1, got {threads}")
        self.envs = list(envs)
        self.num_envs = len(self.envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._obs_shape = (self.num_envs, *(self.single_observation_space.shape or ()))
        self._only_ends = only_ends
        self._all = np.ones(self.num_envs, np.bool_)
        self._workers = min(threads or len(os.sched_getaffinity(0)), self.num_envs)
        self._threads = ThreadPoolExecutor(self._workers)
        self._has_reset = self._has_stepped = False

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Start an episode in every node; env i is seeded with seed + i, as in gymnasium."""
        seeds = seed if isinstance(seed, list) else [None if seed is None else seed + i for i in range(self.num_envs)]
        if len(seeds) != self.num_envs:
            raise UserError(f"one seed per environment: {len(seeds)} for {self.num_envs}")
        compiled, self._has_reset = self._has_reset, True
        results = self._map(lambda i: self.envs[i].reset(seed=seeds[i], options=options), compiled)
        return np.stack([obs for obs, _ in results]), self._join([info for _, info in results])

    def step(
        self, actions: FloatArray
    ) -> tuple[FloatArray, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        """Serve one interval in every node."""
        if len(actions) != self.num_envs:
            raise ValueError(f"one action per environment: {len(actions)} for {self.num_envs}")
        if not np.isfinite(actions).all():  # before some of them have moved and others not
            raise ValueError(f"actions must be numbers in [-1, 1], got {actions}")

        def one(i: int) -> tuple[Any, Any, bool, dict[str, Any]]:
            seen, reward, _, truncated, info = self.envs[i].step(actions[i])
            if truncated:
                final = {"final_obs": seen, "final_info": info}
                seen, info = self.envs[i].reset()
                info = final if self._only_ends else final | info
            elif self._only_ends:
                info = {}
            return seen, reward, truncated, info

        # Put together here and not where each is stepped: small operations are fast one after another
        compiled, self._has_stepped = self._has_stepped, True
        seen, rewards, truncated, each = zip(*self._map(one, compiled), strict=True)
        obs = np.empty(self._obs_shape, np.float32)
        for row, one_seen in zip(obs, seen, strict=True):
            row[:] = one_seen
        truncations = np.array(truncated, np.bool_)
        infos = {} if self._only_ends and not any(truncated) else self._join(list(each))
        return obs, np.array(rewards, np.float64), np.zeros(self.num_envs, np.bool_), truncations, infos

    def close_extras(self, **_: Any) -> None:
        """Stop the threads."""
        self._threads.shutdown()

    def _map(self, work: Callable[[int], T], compiled: bool) -> list[T]:
        """Call `work` for every environment; each thread, this one among them, takes the next that nobody has.

        compiled: False at its first call, of which this thread alone does the first environment's part, and so compiles
            what that runs: Ctrl-C reaches the main thread, and would have to wait for another that compiles.
        """
        if self._workers == 1:
            return [work(i) for i in range(self.num_envs)]
        results: list[T] = [None] * self.num_envs  # type: ignore[list-item]
        numbers = itertools.count()
        if not compiled:
            results[next(numbers)] = work(0)

        def take() -> None:
            while (i := next(numbers)) < self.num_envs:
                results[i] = work(i)

        others = [self._threads.submit(take) for _ in range(self._workers - 1)]
        try:
            take()
        finally:
            wait(others)  # an environment that is still at work must not be stepped again
        for other in others:
            other.result()  # raises what it raised
        return results

    def _join(self, infos: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the infos of all environments as gymnasium's `_add_info` puts them together, in less time."""
        joined: dict[str, Any] = {}
        keys = infos[0].keys()
        if "final_obs" in keys or any(info.keys() != keys for info in infos):
            for i, info in enumerate(infos):
                joined = self._add_info(joined, info, i)
            return joined
        for key, first in infos[0].items():
            values = [info[key] for info in infos]
            if type(first) is float:
                joined[key] = np.array(values, np.float64)
            elif isinstance(first, WindowStats):
                joined[key] = np.empty(self.num_envs, np.object_)
                joined[key][:] = values
            else:
                for i, value in enumerate(values):
                    joined = self._add_info(joined, {key: value}, i)
                continue
            joined[f"_{key}"] = self._all.copy()
        return joined


class NodeVectorEnv(ThreadedVectorEnv):
    """`num_envs` nodes, or clusters of them; an episode that ends is reset in the same step.

    Where a scenario has several nodes, or events, its environments are `HelmClusterEnv`. Of several scenarios,
    environment i serves the one at i modulo their number; they must have equally many nodes.

    Args:
        num_envs: number of environments.
        scenario: what they serve, or several scenarios.
        seed: of the training traces.
        traces: arrivals to use instead of generated ones; of several scenarios, a sequence for each.
        trace_count: traces to generate for each scenario.
        episode_s, paired: see `HelmNodeEnv`.
        threads, only_ends: see `ThreadedVectorEnv`.
    """

    def __init__(
        self,
        num_envs: int,
        scenario: Scenario | Sequence[Scenario],
        seed: int = 0,
        traces: Sequence[Trace] | Sequence[Sequence[Trace]] | None = None,
        *,
        trace_count: int = 8,
        episode_s: float | None = None,
        paired: bool = True,
        threads: int | None = None,
        only_ends: bool = False,
    ) -> None:
        if num_envs < 1:
            raise UserError(f"num_envs must be at least 1, got {num_envs}")
        shared = [
            TrainingTraces(each, given, count=trace_count, seed=seed) for each, given in _each_with(scenario, traces)
        ]
        sets = [shared[i % len(shared)] for i in range(num_envs)]
        envs = [
            (HelmClusterEnv if is_cluster(each.scenario) else HelmNodeEnv)(
                traces=each, episode_s=episode_s, paired=paired
            )
            for each in sets
        ]
        for env in envs:
            if env.observation_space != envs[0].observation_space:
                raise UserError(
                    f"scenarios {envs[0].scenario.name} and {env.scenario.name} have observations of shapes "
                    f"{envs[0].observation_space.shape} and {env.observation_space.shape}; those of one vector "
                    "environment must be alike: equally many hardware.nodes, with [[event]] tables in all or in none"
                )
        self.interval_s = np.array([each.scenario.control.interval_s for each in sets])
        """Seconds of a step, float64 [num_envs]."""
        super().__init__(envs, threads, only_ends=only_ends)


def _each_with(
    scenario: Scenario | Sequence[Scenario], traces: Sequence[Trace] | Sequence[Sequence[Trace]] | None
) -> list[tuple[Scenario, Sequence[Trace] | None]]:
    """Return each scenario with its own traces."""
    if isinstance(scenario, Scenario):
        return [(scenario, cast(Sequence[Trace] | None, traces))]
    if not scenario:
        raise UserError("no scenario was given: at least one is needed")
    if traces is None:
        return [(each, None) for each in scenario]
    if len(traces) != len(scenario):
        raise UserError(f"one set of traces per scenario: {len(traces)} for {len(scenario)}")
    return list(zip(scenario, cast(Sequence[Sequence[Trace]], traces), strict=True))
