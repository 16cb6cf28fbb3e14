"""Small environments that show one property of a trainer each; `tests.train.toys:NAME` is their Gymnasium id."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from train.ppo_base import reset_seed

Obs = npt.NDArray[np.float64]


class Toy(gym.Env[Any, Any]):
    """A step counter, an action of one number; what is rewarded and when it ends is for the others to say."""

    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, obs_size: int = 1) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (obs_size,), np.float64)
        self.t = 0

    def observe(self) -> Any:
        return np.zeros(self.observation_space.shape or ())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.t += 1
        return self.observe(), 1.0, False, False, {}


class Terminating(Toy):
    """Reward 1, and after 50 steps it is over for good."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, _, _, info = super().step(action)
        return obs, reward, self.t >= 50, False, info


class Reach(Toy):
    """Drive a position to a target that moves at random; two features are noise, one of them far from zero."""

    def __init__(self, limit: int = 40) -> None:
        super().__init__(4)
        self.limit = limit
        self.x = self.target = 0.0

    def observe(self) -> Any:
        noise = self.np_random.normal(size=2)
        return np.array([self.x - self.target, 1e6 + 10 * noise[0], noise[1], self.x])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        gym.Env.reset(self, seed=seed)
        self.t, self.x, self.target = 0, 0.0, float(self.np_random.uniform(-1, 1))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.t += 1
        self.x += 0.2 * float(action[0])
        self.target += 0.05 * float(self.np_random.normal())
        return self.observe(), -abs(self.x - self.target), False, self.t >= self.limit, {}


class Interrupting(Reach):
    """Sends this process Ctrl-C in the step that TOY_INTERRUPT_AT (environment variable) numbers."""

    steps = 0

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        Interrupting.steps += 1
        if Interrupting.steps == int(os.environ.get("TOY_INTERRUPT_AT", "0")):
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


class Sleepy(Reach):
    """Takes TOY_SLEEP_S seconds per step, so that there is time to interrupt it."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        time.sleep(float(os.environ.get("TOY_SLEEP_S", "0")))
        return super().step(action)


class OneBuffer(Reach):
    """Reach, but every observation is the same array, overwritten, and the numbers are NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(4)

    def observe(self) -> Any:
        self.buffer[:] = super().observe()
        return self.buffer

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, np.array([reward]), np.bool_(terminated), np.bool_(truncated), info


class Faulty(Toy):
    """Its 600th reward, counted over all environments, is NaN."""

    steps = 0

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        Faulty.steps += 1
        obs, _, _, _, info = super().step(action)
        return obs, float("nan") if Faulty.steps == 600 else 1.0, False, False, info


class FaultySecond(Toy):
    """Its 600th reward, counted over all environments of a process, is NaN where this is a run of the seed 2."""

    steps = 0
    second = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:  # that of the first environment, before the first iteration, tells the runs apart
            FaultySecond.second = seed in {reset_seed(2, 0) + i for i in range(4)}
            FaultySecond.steps = 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        FaultySecond.steps += 1
        obs, _, _, _, info = super().step(action)
        nan = FaultySecond.second and FaultySecond.steps == 600
        return obs, float("nan") if nan else 1.0, False, False, info


class FaultyReset(Toy):
    """Its first observation is NaN."""

    def observe(self) -> Any:
        return super().observe() + (math.nan if self.t == 0 else 0.0)


class Counting(Toy):
    """Writes down what happens to it, over all environments: resets, steps, the actions that it got."""

    resets = 0
    steps = 0
    finished = 0
    actions: list[float] = []  # noqa: RUF012  one list for all, on purpose

    def observe(self) -> Any:
        return np.array([float(self.t)])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        Counting.resets += 1
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, _, _, _, info = super().step(action)
        Counting.steps += 1
        Counting.actions.append(float(action[0]))
        ends = self.t >= 7
        Counting.finished += ends
        # The reward tells a first observation (t = 0) from any step's: none may be stored with reward 0.
        return obs, float(self.t), ends, False, info


class Entropic(Toy):
    """Not a function of its seed: it draws from the system."""

    def observe(self) -> Any:
        return np.frombuffer(os.urandom(1), dtype=np.uint8).astype(np.float64)


class Discrete(Toy):
    action_space = gym.spaces.Discrete(3)  # type: ignore[assignment]


gym.register("Constant-v0", entry_point=f"{__name__}:Toy", max_episode_steps=50)
gym.register("Endless-v0", entry_point=f"{__name__}:Toy")
for _class in (
    Terminating,
    Reach,
    Interrupting,
    Sleepy,
    OneBuffer,
    Faulty,
    FaultySecond,
    FaultyReset,
    Counting,
    Entropic,
    Discrete,
):
    gym.register(f"{_class.__name__}-v0", entry_point=f"{__name__}:{_class.__name__}")
