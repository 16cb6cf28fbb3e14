"""Other people's libraries take the environments as they are: Stable-Baselines3 trains on a node, TorchRL wraps it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envs  # noqa: F401 (registers the environments)
from helm_rl.workloads.generate import generate
from tests.envs.worlds import QUICK, scenario

EPISODE_S = 8.0
STEPS = 16  # of .5 s


def make() -> gym.Env[Any, Any]:
    """Return a node of a small world, in which the less alpha is the better."""
    small = scenario(**QUICK)
    return gym.make("helm_rl/HelmNode-v0", scenario=small, trace=generate(small), episode_s=EPISODE_S)


def mean_return(act: Callable[[Any], Any], episodes: int = 8) -> float:
    """Mean return over episodes whose starts nothing was trained on."""
    env, total = make(), 0.0
    for seed in range(1_000, 1_000 + episodes):
        obs, _ = env.reset(seed=seed)
        over = False
        while not over:
            obs, reward, _, over, _ = env.step(act(obs))
            total += float(reward)
    return total / episodes


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")
def test_stable_baselines3s_ppo_learns_on_a_node() -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    from stable_baselines3.common.env_util import make_vec_env

    seen: list[dict[str, Any]] = []

    def look(variables: dict[str, Any], _: dict[str, Any]) -> bool:
        seen.extend(info for info in variables["infos"] if "episode" in info)
        return True

    model = sb3.PPO(
        "MlpPolicy",
        make_vec_env(make, n_envs=2, seed=3),
        n_steps=64,
        batch_size=32,
        learning_rate=3e-3,
        gamma=0.9,
        seed=3,
        device="cpu",
    )

    def act(obs: Any) -> Any:
        return model.predict(obs, deterministic=True)[0]

    before = mean_return(act)
    model.learn(768, callback=look)
    assert model.num_timesteps == 768
    # Its own wrappers saw whole episodes, cut and not ended: PPO goes on to bootstrap from what they end with.
    assert len(seen) == 768 // STEPS
    assert {info["episode"]["l"] for info in seen} == {STEPS}
    assert all(info["TimeLimit.truncated"] and info["terminal_observation"].shape == (17,) for info in seen)
    least = mean_return(lambda obs: np.array([-1.0], np.float32))  # shrink at the full rate: near the best there is
    assert before < least - 2.0
    assert mean_return(act) > (before + least) / 2


# Elsewhere: importing TorchRL makes "spawn" the way in which the whole process starts others.
TORCHRL = f"""
import json, sys
import numpy as np, torch
from torchrl.envs import GymEnv, check_env_specs
from tests.envs.test_interoperability import EPISODE_S, QUICK, generate, make, scenario
assert torch.__version__.startswith(sys.argv[1]), torch.__version__
small = scenario(**QUICK)
env = GymEnv("envs:helm_rl/HelmNode-v0", scenario=small, trace=generate(small), episode_s=EPISODE_S)
check_env_specs(env)
env.set_seed(7)
got = env.rollout({2 * STEPS}, break_when_any_done=False)
plain = make()
plain.reset(seed=7)  # as set_seed does
obs, _ = plain.reset()
rows = []
for action in got["action"].numpy():
    before = obs
    obs, reward, terminated, truncated, _ = plain.step(action)
    rows.append((before, obs, reward, terminated, truncated))
    if truncated:
        obs, _ = plain.reset()
keys = ("observation", ("next", "observation"), ("next", "reward"), ("next", "terminated"), ("next", "truncated"))
same = [bool(np.array_equal(got[key].numpy().squeeze(), np.array(column, got[key].numpy().dtype)))
        for key, column in zip(keys, zip(*rows))]
print(json.dumps({{
    "same": same,
    "ends": got["next", "done"].flatten().nonzero().flatten().tolist(),
    "low": env.action_spec.space.low.tolist(),
    "high": env.action_spec.space.high.tolist(),
    "shape": list(env.observation_spec["observation"].shape),
}}))
"""


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="torchrl is not installed (extra 'dev')")
def test_torchrl_wraps_a_node_and_sees_what_gymnasium_shows() -> None:
    import torch

    done = subprocess.run([sys.executable, "-c", TORCHRL, torch.__version__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "same": [True] * 5,
        "ends": [STEPS - 1, 2 * STEPS - 1],  # truncated, and gone on with
        "low": [-1.0],
        "high": [1.0],
        "shape": [17],
    }
