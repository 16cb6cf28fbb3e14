"""Many nodes at once: as gymnasium's own vector environment over single ones, whatever the number of threads."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envs.cluster_env import HelmClusterEnv
from envs.node_env import HelmNodeEnv
from envs.training_traces import TrainingTraces
from envs.vector import NodeVectorEnv, ThreadedVectorEnv
from helm_rl.errors import UserError
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import QUICK, scenario

STEPS = 9  # episodes have 4


@pytest.fixture(scope="module")
def load() -> tuple[Scenario, list[Trace]]:
    small = scenario(seconds=8, **QUICK)
    return small, [generate(small, seed) for seed in (1, 2)]


def rollout(env: gym.vector.VectorEnv[Any, Any, Any], seed: int | list[int]) -> list[Any]:
    results: list[Any] = [env.reset(seed=seed)]
    size = (STEPS, env.num_envs, *env.single_action_space.shape)  # type: ignore[misc]
    actions = np.random.default_rng(0).uniform(-1, 1, size).astype(np.float32)
    results += [env.step(action) for action in actions]
    env.close()
    return results


def assert_same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert set(one) == set(two)
        for key in one:
            assert_same(one[key], two[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_same(a, b)
    elif isinstance(one, np.ndarray) and one.dtype != object:
        assert one.dtype == two.dtype
        assert np.array_equal(one, two, equal_nan=one.dtype.kind == "f")
    elif isinstance(one, np.ndarray):
        assert_same(list(one), list(two))
    else:
        assert one == two


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_it_is_gymnasiums_vector_of_single_environments(load: tuple[Scenario, list[Trace]], threads: int) -> None:
    small, traces = load
    shared = TrainingTraces(small, traces)
    single = SyncVectorEnv(
        [lambda: HelmNodeEnv(traces=shared, episode_s=2)] * 3, autoreset_mode=AutoresetMode.SAME_STEP
    )
    expected = rollout(single, 40)
    got = rollout(NodeVectorEnv(3, small, traces=traces, episode_s=2, threads=threads), 40)
    assert_same(got, expected)
    obs, rewards, terminations, truncations, infos = got[4]
    assert truncations.tolist() == [True] * 3
    assert not any(step[2].any() for step in got[1:])
    assert infos["_final_obs"].tolist() == [True] * 3
    final = np.stack(infos["final_obs"])
    assert final.shape == obs.shape == (3, 17)
    assert final.dtype == np.float32
    assert not np.array_equal(final, obs)
    assert "final_obs" not in got[3][4]
    assert rewards.dtype == np.float64
    assert terminations.dtype == truncations.dtype == np.bool_


def test_episodes_of_different_lengths_end_apart(load: tuple[Scenario, list[Trace]]) -> None:
    small, traces = load
    env = NodeVectorEnv(2, small, traces=traces, episode_s=2, paired=False)
    env.reset(seed=0)
    env.envs[1].reset(options={"start": 13})  # near the end of the trace: two intervals
    infos = [env.step(np.zeros((2, 1), np.float32))[4] for _ in range(4)]
    masks = [info["_final_obs"].tolist() if "final_obs" in info else None for info in infos]
    assert masks[0] is None
    assert [False, True] in masks
    assert masks[3] == [True, masks[3][1]]
    at = masks.index([False, True])
    assert infos[at]["final_obs"][0] is None
    assert infos[at]["final_info"]["_alpha"].tolist() == [False, True]
    env.close()


def test_of_steps_the_infos_of_ends_alone_are_told_where_that_is_asked_for(load: tuple[Scenario, list[Trace]]) -> None:
    small, traces = load
    every, ends = (
        rollout(NodeVectorEnv(2, small, traces=traces, episode_s=2, only_ends=only), 5) for only in (False, True)
    )
    assert_same(ends[0], every[0])
    for one, other in zip(ends[1:], every[1:], strict=True):
        assert_same(one[:4], other[:4])
        assert_same(one[4], {key: value for key, value in other[4].items() if key.lstrip("_").startswith("final_")})
    assert ["final_obs" in step[4] for step in ends[1:]] == [k % 4 == 3 for k in range(STEPS)]


def test_seeds(load: tuple[Scenario, list[Trace]]) -> None:
    small, traces = load

    def make() -> NodeVectorEnv:
        return NodeVectorEnv(2, small, traces=traces, episode_s=2)

    first = rollout(make(), 5)
    assert_same(rollout(make(), 5), first)
    assert_same(rollout(make(), [5, 6]), first)
    other = rollout(make(), [6, 5])
    assert not np.array_equal(other[0][0], first[0][0])
    with pytest.raises(UserError, match="one seed per environment: 3 for 2"):
        make().reset(seed=[1, 2, 3])


def test_generated_traces_follow_from_the_seed() -> None:
    small = scenario(seconds=6, **QUICK)
    results = []
    for seed, threads in ((3, 1), (3, 4), (4, 2)):
        env = NodeVectorEnv(2, small, seed=seed, trace_count=2, episode_s=2, threads=threads)
        results.append(rollout(env, 0))
    assert_same(results[0], results[1])
    assert not np.array_equal(results[0][0][0], results[2][0][0])


def test_clusters_and_several_scenarios(load: tuple[Scenario, list[Trace]]) -> None:
    """Environment i serves scenario i modulo their number, with traces of its own, whatever the number of threads."""
    calm, busy = (scenario(seconds=6, hardware__nodes=2, load__rate=rate, **QUICK) for rate in (60, 200))
    traces = [[generate(each, seed) for seed in (1, 2)] for each in (calm, busy)]
    sets = [TrainingTraces(each, own) for each, own in zip((calm, busy), traces, strict=True)]
    makers = [functools.partial(HelmClusterEnv, traces=sets[k], episode_s=2) for k in (0, 1, 0)]
    single = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    expected = rollout(single, 40)
    for threads in (1, 3):
        env = NodeVectorEnv(3, [calm, busy], traces=traces, episode_s=2, threads=threads)
        assert [each.scenario for each in env.envs] == [calm, busy, calm]
        got = rollout(env, 40)
        assert_same(got, expected)
    assert got[0][0].shape == (3, 2, 17)
    assert got[1][4]["alpha"].shape == (3, 2)
    assert got[1][4]["up"].tolist() == [[True, True]] * 3


def test_scenarios_bring_generated_traces_of_their_own() -> None:
    calm, busy = (scenario(seconds=4, load__rate=rate, **QUICK) for rate in (60, 200))
    env = NodeVectorEnv(2, [calm, busy], trace_count=1, episode_s=2, paired=False)
    env.reset(seed=0)
    arrivals = env.step(np.zeros((2, 1), np.float32))[4]["window"]
    assert 2 * arrivals[0].arrivals < arrivals[1].arrivals
    env.close()


def test_metadata_and_spaces(load: tuple[Scenario, list[Trace]]) -> None:
    env = NodeVectorEnv(2, load[0], traces=load[1])
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert env.observation_space.shape == (2, 17)
    assert env.action_space.shape == (2, 1)
    assert env.single_observation_space.shape == (17,)
    env.close()
    env.close()


def test_what_cannot_be_is_refused(load: tuple[Scenario, list[Trace]]) -> None:
    small, traces = load
    with pytest.raises(UserError, match="num_envs must be at least 1, got 0"):
        NodeVectorEnv(0, small)
    with pytest.raises(UserError, match="threads must be at least 1, got 0"):
        NodeVectorEnv(1, small, threads=0)
    with pytest.raises(UserError, match="no traces were given"):
        NodeVectorEnv(1, small, traces=[])
    two = scenario(seconds=8, hardware__nodes=2, **QUICK)
    with pytest.raises(UserError, match=r"shapes \(17,\) and \(2, 17\).*equally many hardware.nodes"):
        NodeVectorEnv(2, [small, two])
    with pytest.raises(UserError, match="no scenario was given"):
        NodeVectorEnv(2, [])
    with pytest.raises(UserError, match="one set of traces per scenario: 1 for 2"):
        NodeVectorEnv(2, [small, small], traces=[traces])
    env = NodeVectorEnv(2, small, traces=traces)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="one action per environment: 3 for 2"):
        env.step(np.zeros((3, 1), np.float32))
    before = [each._start_ns for each in env.envs]
    with pytest.raises(ValueError, match="actions must be numbers"):
        env.step(np.array([[0.5], [np.nan]], np.float32))
    assert [each._start_ns for each in env.envs] == before  # none has moved
    env.close()


class Watched(gym.Env[Any, Any]):
    """Says which threads have called it, in the order of the calls."""

    observation_space = action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, calls: list[tuple[str, int, bool]], number: int) -> None:
        self._calls = calls
        self._number = number

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._call("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._call("step")
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def _call(self, name: str) -> None:
        time.sleep(0.01)  # others that were free to begin would have
        self._calls.append((name, self._number, threading.current_thread() is threading.main_thread()))


def test_what_is_called_first_is_called_in_the_main_thread_before_all_others() -> None:
    """Where it compiles, Ctrl-C ends it there, and would wait for it in another thread."""
    calls: list[tuple[str, int, bool]] = []
    env = ThreadedVectorEnv([Watched(calls, number) for number in range(4)], threads=3)
    env.reset()
    env.step(np.zeros((4, 1), np.float32))
    assert calls[0] == ("reset", 0, True)
    assert calls[4] == ("step", 0, True)
    assert sorted(number for _, number, _ in calls[:4]) == sorted(number for _, number, _ in calls[4:]) == [0, 1, 2, 3]
    env.close()
