"""The loops of `helm-rl bench train`: one task, one set of settings, and the simulator's time told from theirs."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from eval import training_loops
from eval.training_loops import Clocked, Settings, episode_returns, timed
from train import ppo_base

LOOPS = ("helm", "example", "sb3")


class Guess(gym.Env[Any, Any]):
    """Say minus what is seen; episodes of 16 steps. A step takes `busy_s` of CPU time, of which the clock is told."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, busy_s: float = 0.0) -> None:
        self.busy_s = busy_s
        self.t = self.steps = self.resets = 0

    def see(self) -> Any:
        self.seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.seen

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.resets += 1
        return self.see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        until = time.thread_time() + self.busy_s
        while time.thread_time() < until:
            pass
        reward = -float((action[0] + self.seen[0]) ** 2)
        self.t += 1
        self.steps += 1
        return self.see(), reward, False, self.t == 16, {}


def loop_of(name: str) -> training_loops.Loop:
    if name == "sb3":
        pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    loop: training_loops.Loop = getattr(training_loops, f"{name}_loop")
    return loop


def test_the_time_in_the_environment_is_no_overhead_and_sleep_is_no_time() -> None:
    """In a loop that takes a known time of its own."""

    def loop(envs: Any, settings: Settings, seed: int) -> Any:
        envs[0].reset(seed=seed)
        for _ in range(settings.total_timesteps):
            envs[0].step([0.0])
            until = time.thread_time() + 0.001
            while time.thread_time() < until:
                pass
        time.sleep(0.2)
        return None

    trained = timed(loop, [Guess(0.003)], Settings(50, 0.9), 1)
    assert trained.steps == 50
    assert trained.simulator_us == pytest.approx(3000, rel=0.1)
    assert trained.overhead_us == pytest.approx(1000, rel=0.2)


def test_a_loop_that_takes_other_steps_than_it_was_asked_for_is_a_fault() -> None:
    with pytest.raises(RuntimeError, match="a loop took 0 steps instead of 50"):
        timed(lambda envs, settings, seed: lambda obs: obs, [Guess()], Settings(50, 0.9), 1)


@pytest.mark.parametrize("name", LOOPS)
def test_a_slower_environment_leaves_the_overhead_alone_and_each_loop_learns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no loop leaves anything behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loop = loop_of(name)
    long = Settings(2048, 0.5, num_envs=2, num_steps=64, learning_rate=3e-3)
    learnt = timed(loop, [Guess(), Guess()], long, 1)
    assert learnt.simulator_us < 1000
    slow = timed(loop, [Guess(0.01), Guess(0.01)], Settings(128, 0.5, num_envs=2, num_steps=64), 1)
    assert slow.steps == 128
    assert 10_000 <= slow.simulator_us < 12_000
    assert 20 < slow.overhead_us < 8_000
    # Doing nothing earns -16 / 3 an episode, the best policy 0.
    still = episode_returns(lambda _: np.zeros(1, np.float32), Guess(), range(8)).mean()
    assert still == pytest.approx(-16 / 3, abs=1.0)
    assert episode_returns(learnt.policy, Guess(), range(8)).mean() > still / 4
    assert {path.name.partition("_")[0] for path in tmp_path.iterdir()} <= {"torchinductor"}  # torch's own cache


class Asked(Exception):
    """Carries what a loop asked its training for."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings


def asked_of_helm(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(args: ppo_base.Args, envs: Any, *_: Any) -> None:
        assert (envs.num_envs, args.validate_every, args.track) == (2, 0, False)
        raise Asked(
            **{name: getattr(args, name) for name in COMMON},
            entropy=args.ent_coef,
            normalises_advantages=args.norm_adv,
            stops_at_kl=args.target_kl,
            anneals=args.anneal_lr,
            threads=torch.get_num_threads(),
        )

    monkeypatch.setattr(ppo_base, "learn", learn)


def asked_of_example(monkeypatch: pytest.MonkeyPatch) -> None:
    script = training_loops.load_example()

    def main(args: Any) -> None:
        # The rest is written out in it: no entropy, no annealing, advantages normalised, no bound on the KL divergence.
        assert not {"ent_coef", "anneal_lr", "norm_adv", "target_kl"} & set(vars(args))
        envs = [gym.make(args.env_id) for _ in range(2)]
        assert all(isinstance(env.unwrapped, Clocked) for env in envs)
        raise Asked(**{name: getattr(args, name) for name in COMMON}, **REST, threads=torch.get_num_threads())

    monkeypatch.setattr(training_loops, "load_example", lambda: SimpleNamespace(main=main, Args=script.Args))


def asked_of_sb3(monkeypatch: pytest.MonkeyPatch) -> None:
    from stable_baselines3 import PPO

    def learn(model: PPO, total_timesteps: int) -> None:
        assert (model.clip_range_vf, model.device.type) == (None, "cpu")
        rate, clip = model.lr_schedule, model.clip_range
        assert callable(clip)
        raise Asked(
            total_timesteps=total_timesteps,
            gamma=model.gamma,
            num_envs=model.n_envs,
            num_steps=model.n_steps,
            num_minibatches=model.n_envs * model.n_steps / model.batch_size,
            update_epochs=model.n_epochs,
            learning_rate=rate(1.0),
            gae_lambda=model.gae_lambda,
            clip_coef=clip(1.0),
            vf_coef=model.vf_coef,
            max_grad_norm=model.max_grad_norm,
            entropy=model.ent_coef,
            normalises_advantages=model.normalize_advantage,
            stops_at_kl=model.target_kl,
            anneals=rate(0.1) != rate(1.0) or clip(0.1) != clip(1.0),
            threads=torch.get_num_threads(),
        )

    monkeypatch.setattr(PPO, "learn", learn)


COMMON = [field.name for field in dataclasses.fields(Settings)]
REST: dict[str, Any] = {"entropy": 0.0, "normalises_advantages": True, "stops_at_kl": None, "anneals": False}
ASKED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "helm": asked_of_helm,
    "example": asked_of_example,
    "sb3": asked_of_sb3,
}


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_trains_with_the_settings_that_it_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them the default of any of the three."""
    loop = loop_of(name)
    settings = Settings(
        total_timesteps=192,
        gamma=0.91,
        num_envs=2,
        num_steps=24,
        num_minibatches=3,
        update_epochs=5,
        learning_rate=2e-3,
        gae_lambda=0.89,
        clip_coef=0.17,
        vf_coef=0.3,
        max_grad_norm=0.7,
    )
    ASKED[name](monkeypatch)
    threads = torch.get_num_threads()
    with pytest.raises(Asked) as asked:
        timed(loop, [Guess(), Guess()], settings, 1)
    assert asked.value.settings == {**dataclasses.asdict(settings), **REST, "threads": 1}
    assert torch.get_num_threads() == threads
    assert training_loops.TIMED_ENV not in gym.registry


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_takes_the_steps_and_updates_of_the_same_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,024 steps in 4 iterations, each with 5 passes over 4 minibatches of 64."""
    loop = loop_of(name)
    optimisers: list[torch.optim.Adam] = []
    begin = torch.optim.Adam.__init__

    def begin_and_tell(optimiser: torch.optim.Adam, *args: Any, **options: Any) -> None:
        optimisers.append(optimiser)
        begin(optimiser, *args, **options)

    monkeypatch.setattr(torch.optim.Adam, "__init__", begin_and_tell)
    envs = [Guess(), Guess()]
    found = timed(loop, envs, Settings(1024, 0.5, num_envs=2, num_steps=128, update_epochs=5), 1)
    assert found.steps == 1024
    assert [env.steps for env in envs] == [512, 512]
    (optimiser,) = optimisers
    assert {int(state["step"]) for state in optimiser.state.values()} == {4 * 5 * 4}
    assert [group["lr"] for group in optimiser.param_groups] == [1e-3]
    # Either environment ended 32 episodes and began one more; no reset was spent on a transition.
    assert [env.resets for env in envs] == [33, 33]
    act = found.policy(np.array([5.0, -5.0], np.float32))
    assert act.shape == (1,)
    assert -1.0 <= act[0] <= 1.0


@pytest.mark.parametrize("name", LOOPS)
def test_the_seed_alone_decides_what_is_learnt(name: str) -> None:
    loop = loop_of(name)
    seen = np.array([0.3, -0.7], np.float32)
    settings = Settings(128, 0.5, num_envs=2, num_steps=64)
    one, again, other = (timed(loop, [Guess(), Guess()], settings, seed).policy(seen)[0] for seed in (1, 1, 2))
    assert one == again != other


def test_all_have_the_defaults_of_train_base() -> None:
    theirs = dataclasses.asdict(ppo_base.Args())
    ours = dataclasses.asdict(Settings(1024, 0.9))
    assert {name: theirs[name] for name in ours if name not in ("total_timesteps", "gamma")} == {
        name: value for name, value in ours.items() if name not in ("total_timesteps", "gamma")
    }


def test_actions_are_clipped_to_the_bounds() -> None:
    act = training_loops._policy(lambda obs: 3.0 * obs)
    assert act(np.array([0.5, -0.2, -4.0], np.float32)).tolist() == pytest.approx([1.0, -0.6, -1.0])


def test_policies_are_judged_from_the_given_seeds() -> None:
    def act(obs: Any) -> Any:
        seen.append(float(obs[0]))
        return np.zeros(1)

    seen: list[float] = []
    first = episode_returns(act, Guess(), [3, 4])
    again = episode_returns(act, Guess(), [4])
    assert first[1] == again[0] != first[0]
    assert first[0] == pytest.approx(-sum(x**2 for x in seen[:16]))


def test_resets_count_as_the_simulators_time_but_not_as_steps() -> None:
    clocked = Clocked(Guess(0.002))
    clocked.reset(seed=1)
    before = clocked.seconds
    assert before > 0
    clocked.step([0.5])
    assert clocked.steps == 1
    assert clocked.seconds - before >= 0.002
