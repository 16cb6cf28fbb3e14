"""PPO: the faults that trainers have shipped, on environments that each show one of them."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

import train.ppo_base
from helm_rl.checkpoint import load_training_state
from helm_rl.control.policy_net import ActorCritic
from helm_rl.errors import UserError
from tests.train import toys
from train.minibatch import Batch, Gradient, Losses
from train.ppo_base import Args, advantages, check_args, discounts, evaluate, make_envs, make_run_folder, reset_seed
from train.state import load_net


def toy(name: str, runs: Path, **changes: Any) -> Args:
    """Arguments for a short training on a toy."""
    small = Args(
        env_id=f"tests.train.toys:{name}-v0",
        runs=runs,
        num_envs=4,
        num_steps=64,
        total_timesteps=4 * 64 * 4,
        num_minibatches=2,
        update_epochs=2,
    )
    return dataclasses.replace(small, **changes)


def logged(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of everything in the TensorBoard log, by tag."""
    accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def learned_value(runs: Path, name: str) -> float:
    args = toy(name, runs, gamma=0.9, total_timesteps=4 * 64 * 16, update_epochs=4, num_minibatches=4)
    net = load_net(train.ppo_base.train(args))
    with torch.no_grad():
        return net.value(net.normaliser(torch.zeros((1, 1)))).item()


def test_truncation_bootstraps_and_termination_does_not(tmp_path: Path) -> None:
    # Reward 1 for ever, limit 50, gamma .9 is worth 1 / (1 - .9).
    assert learned_value(tmp_path, "Constant") == pytest.approx(10.0, abs=0.3)
    # Over after 50 steps for good, which the observation does not tell apart: between the mean of (1 - .9^k) / .1 over
    # k = 1..50 and what one-step bootstrapping makes of it, v = 1 + .9 v * 49 / 50.
    mean, one_step = np.mean([(1 - 0.9**k) / 0.1 for k in range(1, 51)]), 1 / (1 - 0.9 * 49 / 50)
    assert mean - 0.2 < learned_value(tmp_path, "Terminating") < one_step + 0.2


def test_every_stored_transition_is_a_step_and_every_episode_is_logged(tmp_path: Path) -> None:
    # The reset steps of gymnasium 1.x are no transitions.
    toys.Counting.resets = toys.Counting.steps = toys.Counting.finished = 0
    args = toy("Counting", tmp_path, total_timesteps=4 * 64 * 3, checkpoint_every=2)
    run = train.ppo_base.train(args)
    state, _ = load_training_state(run)
    charts = logged(run)
    assert toys.Counting.steps == state.training.steps == 4 * 64 * 3
    assert state.training.episodes == toys.Counting.finished == len(charts["charts/episodic_return"])
    assert toys.Counting.resets == toys.Counting.finished + 2 * 4  # seeded ones: before iterations 0 and 2
    # Whole episodes of 7 steps, rewards 1 to 7; not one with a reset step of reward 0 in it.
    assert {value for _, value in charts["charts/episodic_return"]} == {28.0}
    assert {value for _, value in charts["charts/episodic_length"]} == {7.0}
    assert state.training.episodes == 4 * (128 // 7 + 64 // 7)


def test_the_normaliser_learns_in_training_alone_and_is_in_the_checkpoint(tmp_path: Path) -> None:
    args = toy("Reach", tmp_path)
    run = train.ppo_base.train(args)
    net = load_net(run)
    assert net.normaliser.count.item() == args.total_timesteps  # every observation acted on, once
    assert net.normaliser.mean[1].item() == pytest.approx(1e6, abs=1.5)
    assert net.normaliser.std[1].item() == pytest.approx(10.0, rel=0.1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()
    envs, _ = make_envs(args)
    evaluate(net, envs, episodes=4, max_steps=1000, seed=3)
    envs.close()
    assert net.training
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    # A new process acts the same on raw observations, bit for bit.
    raw = np.array([[0.3, 1e6 + 4, -1.0, 0.2], [-5.0, 1e6 - 30, 2.0, 9.0]])
    code = (
        "import torch; from pathlib import Path; from train.state import load_net;"
        f"net = load_net(Path({str(run)!r}));"
        f"print(*[x.hex() for x in net(torch.tensor({raw.tolist()!r}, "
        "dtype=torch.float64)).flatten().tolist()])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100).stdout
    assert out.split() == [x.hex() for x in net(torch.from_numpy(raw)).flatten().tolist()]


def test_the_environment_gets_the_action_clipped_and_the_density_is_of_the_one_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toys.Counting.actions.clear()
    drawn: list[torch.Tensor] = []
    log_prob = ActorCritic.log_prob

    def record(net: ActorCritic, mean: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        drawn.append(action.clone())
        return log_prob(net, mean, action)

    updated: list[torch.Tensor] = []
    take = Gradient.__call__

    def note(gradient: Gradient, batch: Batch, policy_weight: float) -> Losses:
        updated.append(batch.actions.clone())
        return take(gradient, batch, policy_weight)

    monkeypatch.setattr(ActorCritic, "log_prob", record)
    monkeypatch.setattr(Gradient, "__call__", note)
    args = toy("Counting", tmp_path, total_timesteps=256, update_epochs=1, num_minibatches=1)
    run = train.ppo_base.train(args)
    stored = drawn[0].flatten().numpy()
    given = np.array(toys.Counting.actions, dtype=np.float32)
    assert (np.abs(stored) > 1.0).sum() > 5
    np.testing.assert_array_equal(given, np.clip(stored, -1.0, 1.0))
    (seen,) = updated  # the update sees them as they were drawn, too
    assert torch.equal(seen.sort(dim=0).values, drawn[0].sort(dim=0).values)
    # The first pass compares the policy with itself.
    charts = logged(run)
    assert abs(charts["losses/approx_kl"][0][1]) < 1e-6
    assert charts["losses/clipfrac"][0][1] == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # The advantage of one sample, normalised, is NaN.
        ({"num_envs": 1, "num_steps": 8, "num_minibatches": 8}, "--num-minibatches 8 makes minibatches of one sample"),
        ({"total_timesteps": 255}, r"--total-timesteps 255 is less than one batch \(num_envs \* num_steps = 256\)"),
        (
            {"num_steps": 10**9, "total_timesteps": 10**11},
            "num_envs \\* num_steps must be at most 16,777,216, not 4,000",
        ),
        ({"num_minibatches": 3}, "--num-minibatches must divide .* 256, which 3 does not"),
        ({"num_envs": 0}, "--num-envs must be at least 1, not 0"),
        ({"num_steps": -1}, "--num-steps must be at least 1"),
        ({"checkpoint_every": 0}, "--checkpoint-every must be at least 1"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"learning_rate": 0.0}, "--learning-rate must be from 1e-12 to 1, not 0.0"),
        ({"learning_rate": math.nan}, "--learning-rate .* not nan"),
        ({"gamma": 1.0}, r"--gamma must be at least 0 and below 1, not 1\.0"),
        ({"gamma": math.nan}, "--gamma must be at least 0 and below 1, not nan"),
        ({"seed": 2**32}, "--seed must be below"),
        ({"gae_lambda": 1.5}, "--gae-lambda must be from 0 to 1, not 1.5"),
        ({"clip_coef": 0.0}, "--clip-coef"),
        ({"target_kl": -0.1}, "--target-kl"),
        ({"exp_name": "../up"}, "--exp-name"),
        ({"trace": Path("t.parquet")}, "--trace goes with the scenario"),
        ({"env_id": "Nothing-v0"}, "--env-id Nothing-v0: "),
        ({"env_id": "no.such.module:Nothing-v0"}, "--env-id no.such.module:Nothing-v0: "),
        (
            {"env_id": "tests.train.toys:Discrete-v0"},
            r"the action space must be a one-dimensional Box .* Discrete\(3\)",
        ),
        ({"resume": Path("nowhere")}, "nowhere: no such run folder"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train.ppo_base.train(toy("Reach", tmp_path / "runs", **changes))
    assert not (tmp_path / "runs").exists()


def test_the_defaults_are_legal() -> None:
    check_args(Args())


def test_an_evaluation_that_never_ends_is_an_error(tmp_path: Path) -> None:
    args = toy("Endless", tmp_path, eval_episodes=2, eval_max_steps=500)
    with pytest.raises(UserError, match=r"took 500 steps, and only 0 of 2 episodes.*--eval-max-steps \(now 500\)"):
        train.ppo_base.train(args)
    (run,) = tmp_path.iterdir()
    assert load_training_state(run)[0].training.iterations == 4  # what was trained is not lost


def test_an_evaluation_takes_the_first_episodes_of_each_environment() -> None:
    lengths = [3, 50]
    envs = SyncVectorEnv(
        [lambda n=n: gym.make("tests.train.toys:Endless-v0", max_episode_steps=n) for n in lengths],  # type: ignore[misc]
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    returns = evaluate(ActorCritic(1, 1), envs, episodes=3, max_steps=1000, seed=0)
    assert sorted(returns.tolist()) == [3.0, 3.0, 50.0]  # by order of ending it would be three times 3


def test_a_buffer_that_is_overwritten_and_numbers_of_numpy_change_nothing(tmp_path: Path) -> None:
    # With the final observation overwritten by the reset, the values would differ.
    plain = train.ppo_base.train(toy("Reach", tmp_path))
    other = train.ppo_base.train(toy("OneBuffer", tmp_path))
    assert_same_state(plain, other)


class Overwriting(VectorWrapper[Any, Any, Any, Any, Any]):
    """Hands out one observation array, one reward array and one of final observations, again and again."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.obs = np.zeros((env.num_envs, 4))
        self.final = np.zeros((env.num_envs, 4))
        self.reward = np.zeros(env.num_envs)

    def reset(self, **kwargs: Any) -> Any:
        self.obs[:], infos = self.env.reset(**kwargs)
        return self.obs, infos

    def step(self, actions: Any) -> Any:
        self.final[:] = np.nan
        self.obs[:], self.reward[:], terminated, truncated, infos = self.env.step(actions)
        actions[:] = np.nan  # and scribbles over what it was given
        if "final_obs" in infos:
            for i in np.flatnonzero(infos["_final_obs"]):
                self.final[i] = infos["final_obs"][i]
            infos["final_obs"] = self.final
        return self.obs, self.reward, terminated, truncated, infos


def test_a_vector_environment_may_overwrite_its_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train.ppo_base.train(toy("Reach", tmp_path))

    def overwriting(args: Args, threads: int | None = None) -> Any:
        envs, section = make_envs(args, threads)
        return Overwriting(envs), section

    monkeypatch.setattr(train.ppo_base, "make_envs", overwriting)
    assert_same_state(plain, train.ppo_base.train(toy("Reach", tmp_path)))


def assert_same_state(one: Path, other: Path) -> None:
    """The two runs' last checkpoints are the same, bit for bit, and so are their statistics."""
    (state, tensors), (other_state, other_tensors) = load_training_state(one), load_training_state(other)
    assert tensors.keys() == other_tensors.keys()
    for name, array in tensors.items():
        assert array.tobytes() == other_tensors[name].tobytes(), name
    assert state.training.statistics == other_state.training.statistics
    assert state.training.iterations == other_state.training.iterations


def test_a_run_is_a_function_of_its_seed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = train.ppo_base.train(toy("Reach", tmp_path, seed=3))
    torch.manual_seed(2)  # the global generators play no part
    np.random.seed(5)  # noqa: NPY002
    assert_same_state(one, train.ppo_base.train(toy("Reach", tmp_path, seed=3)))
    other = train.ppo_base.train(toy("Reach", tmp_path, seed=4))
    assert load_training_state(one)[0].training.statistics != load_training_state(other)[0].training.statistics


def test_it_learns(tmp_path: Path) -> None:
    args = toy(
        "Reach", tmp_path, num_envs=8, num_steps=128, total_timesteps=16 * 1024, num_minibatches=4, update_epochs=8
    )
    net = load_net(train.ppo_base.train(args))
    envs, _ = make_envs(args)
    trained = evaluate(net, envs, 16, 10_000, seed=9).mean()
    untrained = evaluate(ActorCritic(4, 1), envs, 16, 10_000, seed=9).mean()
    envs.close()
    assert untrained < -15  # standing still
    assert trained > -5


def test_the_tags_are_those_of_cleanrl(tmp_path: Path) -> None:
    args = toy("Reach", tmp_path)
    charts = logged(train.ppo_base.train(args))
    assert set(charts) == {
        "charts/episodic_return",
        "charts/episodic_length",
        "charts/SPS",
        "charts/learning_rate",
        "losses/value_loss",
        "losses/policy_loss",
        "losses/entropy",
        "losses/old_approx_kl",
        "losses/approx_kl",
        "losses/clipfrac",
        "losses/explained_variance",
    }
    # Annealed linearly from the full rate, logged once per iteration.
    assert charts["charts/learning_rate"] == [
        (256 * (i + 1), pytest.approx(1e-3 * (1 - i / 4), rel=1e-6)) for i in range(4)
    ]


def test_a_reward_that_is_not_finite_stops_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    toys.Faulty.steps = 0
    with pytest.raises(UserError, match=r"Faulty-v0, step 600: the reward of an environment is not finite: nan"):
        train.ppo_base.train(toy("Faulty", tmp_path))
    (run,) = tmp_path.iterdir()
    state, tensors = load_training_state(run)
    assert state.training.iterations == 2  # 600 is in the third iteration of 256
    assert all(np.isfinite(array).all() for array in tensors.values())


def test_a_first_observation_that_is_not_finite_leaves_no_run_behind(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"FaultyReset-v0, reset: the observation of an environment is not finite: \[nan\]$"
    ):
        train.ppo_base.train(toy("FaultyReset", tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    take = Gradient.__call__

    def poisoned(gradient: Gradient, batch: Batch, policy_weight: float) -> Losses:
        nonlocal calls
        calls += 1
        return take(gradient, batch._replace(targets=batch.targets + (math.inf if calls == 6 else 0.0)), policy_weight)

    monkeypatch.setattr(Gradient, "__call__", poisoned)
    # Four minibatches to an iteration: the sixth is in the second.
    with pytest.raises(UserError, match=r"in iteration 2 the loss became inf .*--learning-rate \(now 0.001\)"):
        train.ppo_base.train(toy("Reach", tmp_path))
    (run,) = tmp_path.iterdir()
    assert load_training_state(run)[0].training.iterations == 1
    assert torch.isfinite(load_net(run)(torch.zeros((1, 4)))).all()


def test_advantages_by_hand() -> None:
    rewards = np.array([[1.0, 1.0], [2.0, 0.0], [3.0, 5.0]])
    values = np.array([[0.5, 1.0], [0.4, 2.0], [0.3, 3.0]])
    ends = np.array([[False, False], [True, False], [False, False]])
    got = advantages(rewards, values, np.array([10.0, 20.0]), ends, gamma=np.array([0.5, 0.5]), gae_lambda=0.8)
    d2 = 3.0 + 0.5 * 10.0 - 0.3
    d1 = 2.0 - 0.4  # the episode ended: nothing of the next one flows back
    d0 = 1.0 + 0.5 * 0.4 - 0.5
    e2 = 5.0 + 0.5 * 20.0 - 3.0
    e1 = 0.0 + 0.5 * 3.0 - 2.0
    e0 = 1.0 + 0.5 * 2.0 - 1.0
    expected = [[d0 + 0.4 * d1, e0 + 0.4 * (e1 + 0.4 * e2)], [d1, e1 + 0.4 * e2], [d2, e2]]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_each_environment_discounts_by_its_own_interval_unless_told(tmp_path: Path) -> None:
    class Envs:
        interval_s = np.array([0.5, 5.0])

    args = Args(num_envs=2)
    np.testing.assert_allclose(discounts(args, Envs()), np.exp([-0.5 / 60, -5 / 60]), rtol=1e-12)  # type: ignore[arg-type]
    assert discounts(dataclasses.replace(args, gamma=0.5), Envs()).tolist() == [0.5, 0.5]  # type: ignore[arg-type]
    assert discounts(toy("Reach", tmp_path), Envs()).tolist() == [0.99] * 4  # type: ignore[arg-type]


def test_runs_of_one_second_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.ppo_base.time, "time", lambda: 1_700_000_000.7)
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(make_run_folder(tmp_path / "runs", "a.b:c/Reach-v0", "x", 1)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    name = "Reach-v0__x__1__1700000000"
    assert sorted(run.name for run in made) == sorted([name, *[f"{name}_{i}" for i in range(2, 9)]])
    assert all(run.is_dir() for run in made)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--runs .*file: cannot make a folder there"):
        make_run_folder(tmp_path / "file", "Reach-v0", "x", 1)


def test_reset_seeds_differ() -> None:
    seeds = {reset_seed(seed, iteration) for seed in range(50) for iteration in range(50)}
    assert len(seeds) == 2500


def test_episodes_that_never_fit_between_resets_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.ppo_base.train(toy("Endless", tmp_path, checkpoint_every=1))
    err = capsys.readouterr().err
    assert err.count("no episode ended within the 64 steps between two resets") == 1
    train.ppo_base.train(toy("Reach", tmp_path, checkpoint_every=1))
    assert "warning" not in capsys.readouterr().err


def test_the_main_program_says_where_the_run_is_and_names_an_error(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "train.ppo_base", "--runs", str(tmp_path), "--num-steps", "0"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --num-steps must be at least 1, not 0\n"
