"""Three PPO loops on the same environments with the same settings, timed without what the simulator takes.

Ours is `train base`'s own loop; the others are `examples/cleanrl_ppo.py`, as it stands there for users to copy, and
Stable-Baselines3's PPO.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from envs.vector import ThreadedVectorEnv
from helm_rl.checkpoint import EnvironmentSection
from helm_rl.control.policy_net import HIDDEN, LOG_STD
from train import ppo_base

Policy = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
"""Takes an observation, [17], and returns the action that it finds best, [1], within the bounds."""

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "cleanrl_ppo.py"
TIMED_ENV = "helm_rl_timed/Env-v0"


@dataclass(frozen=True)
class Settings:
    """What the three have in common; the defaults are `train base`'s, and so are the names. gamma: per step."""

    total_timesteps: int
    gamma: float
    num_envs: int = 8
    num_steps: int = 128
    num_minibatches: int = 4
    update_epochs: int = 8
    learning_rate: float = 1e-3
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5


@dataclass(frozen=True)
class Trained:
    """What a training made, and the CPU time of it, over all threads: in all, and inside the environments."""

    policy: Policy
    steps: int
    cpu_s: float
    simulator_s: float

    @property
    def overhead_us(self) -> float:
        """CPU time per environment step that the environments did not take."""
        return (self.cpu_s - self.simulator_s) / self.steps * 1e6

    @property
    def simulator_us(self) -> float:
        """CPU time per environment step inside the environments, resets included."""
        return self.simulator_s / self.steps * 1e6


class Clocked(gym.Env[Any, Any]):
    """An environment, and the CPU time that its calls took their thread; all that is charged to the simulator."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self._env = env
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.seconds = 0.0
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset; the time counts, the step does not."""
        begun = time.thread_time()
        result = self._env.reset(seed=seed, options=options)
        self.seconds += time.thread_time() - begun
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; the time counts."""
        begun = time.thread_time()
        result = self._env.step(action)
        self.seconds += time.thread_time() - begun
        self.steps += 1
        return result


Loop = Callable[[Sequence[Clocked], Settings, int], Policy]
"""Trains on environments with a seed and returns the policy."""


def timed(loop: Loop, envs: Sequence[gym.Env[Any, Any]], settings: Settings, seed: int) -> Trained:
    """Train with a loop on `settings.num_envs` environments, which have been made, with torch on one thread.

    Raises RuntimeError if the loop took another number of steps than it was to.
    """
    clocked = [Clocked(env) for env in envs]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        begun = time.process_time()
        policy = loop(clocked, settings, seed)
        cpu_s = time.process_time() - begun
    finally:
        torch.set_num_threads(threads)
    steps = sum(env.steps for env in clocked)
    if steps != settings.total_timesteps:
        raise RuntimeError(f"a loop took {steps} steps instead of {settings.total_timesteps}")
    return Trained(policy, steps, cpu_s, sum(env.seconds for env in clocked))


def helm_loop(envs: Sequence[Clocked], settings: Settings, seed: int) -> Policy:
    """Train with `train base`'s loop: checkpoints and TensorBoard's log as always, without held-out arrivals."""
    args = ppo_base.Args(seed=seed, anneal_lr=False, validate_every=0, **asdict(settings))
    vector = ThreadedVectorEnv(envs, threads=1, only_ends=True)
    (observation_size,), (action_size,) = envs[0].observation_space.shape, envs[0].action_space.shape  # type: ignore[misc]
    section = EnvironmentSection(env_id=args.env_id, observation_size=observation_size, action_size=action_size)
    silent = Console(file=io.StringIO())
    with tempfile.TemporaryDirectory(prefix="helm-rl-") as folder, contextlib.closing(vector):
        start, _ = vector.reset(seed=ppo_base.reset_seed(seed, 0))
        with SummaryWriter(folder) as writer:
            net = ppo_base.learn(args, vector, section, Path(folder), writer, silent, None, start, None).eval()
    return _policy(lambda obs: net(obs))


def example_loop(envs: Sequence[Clocked], settings: Settings, seed: int) -> Policy:
    """Train with examples/cleanrl_ppo.py, whose environments come from `gym.make`, and its wrappers around them."""
    script = load_example()
    waiting = list(envs)

    def hand_out(**_: Any) -> Clocked:
        return waiting.pop()

    gym.register(TIMED_ENV, entry_point=hand_out)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            agent = script.main(script.Args(env_id=TIMED_ENV, seed=seed, **asdict(settings)))
    finally:
        gym.registry.pop(TIMED_ENV)
    return _policy(agent.actor_mean)


def sb3_loop(envs: Sequence[Clocked], settings: Settings, seed: int) -> Policy:
    """Train with Stable-Baselines3's PPO in its own vector environment, each environment in its Monitor."""
    import stable_baselines3
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    waiting = list(envs)
    vector = DummyVecEnv([lambda: Monitor(waiting.pop())] * settings.num_envs)
    model = stable_baselines3.PPO(
        "MlpPolicy",
        vector,
        learning_rate=settings.learning_rate,
        n_steps=settings.num_steps,
        batch_size=settings.num_envs * settings.num_steps // settings.num_minibatches,
        n_epochs=settings.update_epochs,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        clip_range=settings.clip_coef,
        vf_coef=settings.vf_coef,
        max_grad_norm=settings.max_grad_norm,
        policy_kwargs={
            "net_arch": {"pi": list(HIDDEN), "vf": list(HIDDEN)},
            "activation_fn": torch.nn.Tanh,
            "log_std_init": LOG_STD,
        },
        seed=seed,
        device="cpu",
    )
    model.set_logger(Logger(folder=None, output_formats=[]))  # its own one prints nothing, too, but leaves a folder
    model.learn(settings.total_timesteps)
    actor = model.policy
    return _policy(lambda obs: actor.get_distribution(obs.float().unsqueeze(0)).mode()[0])


def load_example() -> ModuleType:
    """Import examples/cleanrl_ppo.py, which is no part of any package."""
    spec = importlib.util.spec_from_file_location("cleanrl_ppo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def episode_returns(policy: Policy, env: gym.Env[Any, Any], seeds: Sequence[int]) -> npt.NDArray[np.float64]:
    """Run an episode from each seed; return their returns, [seeds]."""
    returns = np.zeros(len(seeds))
    for k, seed in enumerate(seeds):
        obs, _ = env.reset(seed=seed)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            returns[k] += float(reward)
            over = terminated or truncated
    return returns


def _policy(mean: Callable[[torch.Tensor], torch.Tensor]) -> Policy:
    def act(obs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            return np.clip(mean(torch.as_tensor(obs)).numpy(), -1.0, 1.0)

    return act
