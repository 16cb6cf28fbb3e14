"""`helm_rl/HelmCluster-v0`: what Gymnasium asks of it, and that it is the nodes of a cluster, one row each."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs.cluster_env import HelmClusterEnv
from envs.node_env import HelmNodeEnv
from envs.serving.cluster import ClusterSim
from envs.training_traces import TrainingTraces, cluster_reward, reward
from helm_rl import observation
from helm_rl.errors import UserError
from helm_rl.observation import ObservationBuilder
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import QUICK, scenario

ID = "helm_rl/HelmCluster-v0"
SECOND = 1_000_000_000
ALPHA = observation.OBSERVATION_NAMES.index("alpha")


def world(nodes: int = 3, **changes: Any) -> Scenario:
    return scenario(**{**QUICK, "hardware__nodes": nodes, "load__rate": 60 * nodes, "seconds": 10, **changes})


@pytest.fixture(scope="module")
def load() -> tuple[Scenario, Trace]:
    small = world()
    return small, generate(small)


def actions(*rates: float) -> np.ndarray:
    return np.array(rates, np.float32)


@pytest.mark.filterwarnings("error")
def test_gymnasiums_check_passes_without_a_warning(load: tuple[Scenario, Trace]) -> None:
    made = gym.make(ID, scenario=load[0], trace=load[1], episode_s=2)
    check_env(made.unwrapped, skip_render_check=False)
    made.close()


def test_spaces(load: tuple[Scenario, Trace]) -> None:
    env = HelmClusterEnv(*load)
    assert env.observation_space.shape == (3, 17)
    assert np.array_equal(env.observation_space.low[1], observation.LOW)  # type: ignore[attr-defined]
    assert env.action_space == gym.spaces.Box(-1.0, 1.0, (3,), np.float32)


def test_it_is_a_cluster_run_by_hand(load: tuple[Scenario, Trace]) -> None:
    """Each row is what that node's windows give, the reward the mean of the nodes' less that of a static half."""
    small, made = load
    env = HelmClusterEnv(small, made, episode_s=2)
    obs, info = env.reset(seed=0, options={"start": 4, "alpha": [0.2, 0.5, 0.8]})
    cluster = ClusterSim(small, made, [0.2, 0.5, 0.8])
    builders = [ObservationBuilder(small.slo_ms) for _ in range(3)]
    ends = [end for end in range(-20 * SECOND, SECOND + 1, SECOND) if end > cluster.now_ns]
    for end in [*ends, 3 * SECOND // 2, 2 * SECOND]:
        window = cluster.run(end)
        expected = [builder.update(node) for builder, node in zip(builders, window.nodes, strict=True) if node]
    assert np.array_equal(obs, np.stack(expected))
    assert info["window"] == window
    assert info["up"].tolist() == [True] * 3
    assert info["alpha"] == pytest.approx([0.2, 0.5, 0.8], abs=1 / 256)

    obs, earned, terminated, truncated, info = env.step(actions(1.0, 0.0, -0.5))
    before = cluster.alpha
    cluster.set_targets([0.23, 0.5, 0.785])
    window = cluster.run(5 * SECOND // 2)
    assert info["target"] == pytest.approx([0.23, 0.5, 0.785])
    assert np.array_equal(
        obs, np.stack([builder.update(node) for builder, node in zip(builders, window.nodes, strict=True) if node])
    )
    moved = cluster.alpha - before
    mean = np.mean([reward(node, small, moved[k]) for k, node in enumerate(window.nodes) if node is not None])
    reference = TrainingTraces(small, [made]).reference(0)
    assert earned == pytest.approx(float(mean) - reference[4])
    assert (terminated, truncated) == (False, False)
    # The reference: a static half on all nodes, warm from the start.
    half = ClusterSim(small, made, 0.5)
    half.run(0)
    still = np.zeros(3)
    by_hand = [cluster_reward(half.run((k + 1) * SECOND // 2), small, still) for k in range(len(reference))]
    assert reference == pytest.approx(by_hand)


def test_one_node_is_helm_node(load: tuple[Scenario, Trace]) -> None:
    small, made = world(1, load__rate=180), load[1]
    one, single = HelmClusterEnv(small, made, episode_s=2), HelmNodeEnv(small, made, episode_s=2)
    obs, _ = one.reset(seed=3)
    expected, _ = single.reset(seed=3)
    assert np.array_equal(obs[0], expected)
    for rate in (1.0, -0.3):
        obs, earned, _, _, info = one.step(actions(rate))
        expected, single_earned, _, _, single_info = single.step(actions(rate))
        assert np.array_equal(obs[0], expected)
        assert earned == single_earned
        assert info["target"].tolist() == [single_info["target"]]


def rollout(env: gym.Env[Any, Any], seed: int, steps: int = 6) -> list[Any]:
    rng = np.random.default_rng(seed)
    obs, info = env.reset(seed=seed)
    result = [obs.tolist(), info["alpha"].tolist()]
    for _ in range(steps):
        obs, earned, _, truncated, info = env.step(rng.uniform(-1, 1, 3).astype(np.float32))
        result += [obs.tolist(), earned, truncated, info["alpha"].tolist()]
    return result


def test_same_seed_same_bits(load: tuple[Scenario, Trace]) -> None:
    one, two = (HelmClusterEnv(*load, episode_s=3) for _ in range(2))
    first = rollout(one, 7)
    assert rollout(one, 7) == first == rollout(two, 7)
    assert rollout(two, 8) != first
    assert len(set(first[1])) == 3  # each node starts with an alpha of its own


def test_a_node_that_is_down_repeats_its_row() -> None:
    events = [{"at_s": 2.2, "node": 1, "action": "lose"}, {"at_s": 3.7, "node": 1, "action": "return"}]
    small = world(event=events)
    env = HelmClusterEnv(small, generate(small), episode_s=4)
    env.reset(seed=0, options={"start": 3, "alpha": 0.5})  # 1.5 s
    steps = [env.step(actions(0.0, 1.0, 0.0)) for _ in range(6)]
    ups = [info["up"].tolist()[1] for _, _, _, _, info in steps]
    assert ups == [True, False, False, False, True, True]
    rows = [obs[1] for obs, *_ in steps]
    assert np.array_equal(rows[1], rows[0])
    assert np.array_equal(rows[3], rows[0])
    assert not np.array_equal(rows[4], rows[0])
    assert not np.array_equal(steps[1][0][0], steps[0][0][0])  # its neighbours' go on
    infos = [info for *_, info in steps]
    assert [np.isnan(info["p99_ms"]).tolist() for info in infos[:3]] == [
        [False] * 3,
        [False, True, False],
        [False, True, False],
    ]
    # Nothing is asked of it meanwhile; when it returns it has the target that it had.
    assert [round(info["target"][1], 3) for info in infos] == [0.53, 0.56, 0.56, 0.56, 0.56, 0.59]
    # Of a window, those that are up count.
    window = infos[1]["window"]
    assert window.nodes[1] is None
    expected = np.mean([reward(node, small, 0.0) for node in window.nodes if node is not None])
    assert cluster_reward(window, small, np.zeros(3)) == pytest.approx(float(expected))
    assert cluster_reward(type(window)((None, None), 5, 0), small, np.zeros(2)) == 0.0


def test_late_telemetry() -> None:
    """What is seen is what was seen a second before, row by row."""
    prompt, late = world(), world(telemetry__delay_s=1.0)
    made = generate(prompt)
    seen = []
    for small in (prompt, late):
        env = HelmClusterEnv(small, made, episode_s=4, paired=False)
        rows = [env.reset(seed=0, options={"start": 6, "alpha": 0.5})[0]]
        rows += [env.step(actions(1.0, 0.0, -1.0))[0] for _ in range(6)]
        seen.append(rows)
    for k in range(2, 7):
        assert np.array_equal(seen[1][k], seen[0][k - 2])
    assert not np.array_equal(seen[1][2], seen[0][2])


def test_what_cannot_be_is_refused(load: tuple[Scenario, Trace]) -> None:
    env = HelmClusterEnv(*load, episode_s=2)
    with pytest.raises(gym.error.ResetNeeded, match="call reset before step"):
        env.step(actions(0, 0, 0))
    for alpha in ([0.2, 0.3], [[0.2, 0.3, 0.4]]):
        with pytest.raises(UserError, match="one number or one for each of 3 nodes"):
            env.reset(options={"alpha": alpha})
    with pytest.raises(UserError, match=r"option alpha must be in \[0.1, 0.9\], got \[0.2, 0.95, 0.4\]"):
        env.reset(options={"alpha": [0.2, 0.95, 0.4]})
    env.reset(seed=1)
    with pytest.raises(ValueError, match="the action must be numbers"):
        env.step(actions(0, np.nan, 0))
    with pytest.raises(ValueError, match="reshape"):
        env.step(actions(0, 0))
    with pytest.raises(UserError, match=r"hardware.nodes = 3: this is one node; helm_rl/HelmCluster-v0 serves"):
        HelmNodeEnv(*load)
    with pytest.raises(UserError, match="episode_s must be at least one interval"):
        HelmClusterEnv(*load, episode_s=0.1)
    with pytest.raises(UserError, match="render_mode must be None"):
        HelmClusterEnv(*load, render_mode="human")
