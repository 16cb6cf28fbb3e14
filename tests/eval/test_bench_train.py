"""`helm-rl bench train`: the simulator's time is told from the loop's, and the three learn the same."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from eval import bench_train, training_loops
from eval.bench_train import (
    EXAMPLE,
    HELM,
    ITERATION,
    SB3,
    Args,
    Measured,
    figures_of,
    loops_table,
    main,
    return_sentences,
)
from eval.training_loops import Clocked, Settings, Trained, episode_returns, helm_loop, timed
from helm_rl.errors import UserError
from tests.envs.worlds import QUICK, scenario
from train import ppo_base


class Guess(gym.Env[Any, Any]):
    """Say minus what is seen; episodes of 16 steps. A step takes `busy_s` of CPU time, of which the clock is told."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, busy_s: float = 0.0) -> None:
        self.busy_s = busy_s
        self.t = 0

    def see(self) -> Any:
        self.seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.seen

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        until = time.thread_time() + self.busy_s
        while time.thread_time() < until:
            pass
        reward = -float((action[0] + self.seen[0]) ** 2)
        self.t += 1
        return self.see(), reward, False, self.t == 16, {}


def loops() -> dict[str, Any]:
    pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    return {HELM: helm_loop, EXAMPLE: training_loops.example_loop, SB3: training_loops.sb3_loop}


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


@pytest.mark.parametrize("name", [HELM, EXAMPLE, SB3])
def test_a_slower_environment_leaves_the_overhead_alone_and_each_loop_learns(name: str) -> None:
    loop = loops()[name]
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


def test_all_have_the_defaults_of_train_base() -> None:
    theirs = dataclasses.asdict(ppo_base.Args())
    ours = dataclasses.asdict(Settings(ITERATION, 0.9))
    assert {name: theirs[name] for name in ours if name not in ("total_timesteps", "gamma")} == {
        name: value for name, value in ours.items() if name not in ("total_timesteps", "gamma")
    }
    assert ours["num_envs"] * ours["num_steps"] == ITERATION


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


def trained(overhead_us: float, simulator_us: float = 500.0) -> Trained:
    return Trained(lambda obs: obs, 1000, (overhead_us + simulator_us) * 1e-3, simulator_us * 1e-3)


def measured(theirs: float = 0.0) -> Measured:
    """Three trainings of each; the peer's policies return `theirs` more than ours, training by training."""
    returns = np.array([[1.0, 3.0], [2.0, 4.0], [3.0, 5.1]])
    runs = {HELM: [trained(20), trained(30), trained(90)], SB3: [trained(50), trained(60), trained(100)]}
    return Measured(runs, {HELM: returns, SB3: returns + theirs}, np.array([-1.0, -2.0]))


def test_figures_are_medians_and_ratios_are_taken_round_by_round() -> None:
    figures = figures_of(measured(0.5))
    value = {name: figure.value for name, figure in figures.items()}
    assert value["train.overhead_us_per_step"] == pytest.approx(30)
    assert value["train.overhead_us_per_step.sb3"] == pytest.approx(60)
    assert value["train.simulator_us_per_step.sb3"] == pytest.approx(500)
    assert value["train.overhead_ratio_vs_sb3"] == pytest.approx(0.5)  # of .4, .5 and .9
    assert figures["train.overhead_ratio_vs_sb3"].goal == 0.5
    assert value["train.steps_per_s"] == pytest.approx(1e6 / 530)
    assert value["train.return"] == pytest.approx(3.0, abs=0.05)
    assert value["train.return_difference.sb3"] == pytest.approx(-0.5)
    assert value["train.return.still"] == -1.5
    assert "train.overhead_ratio_vs_cleanrl_loop" not in figures
    row = [list(column.cells)[1] for column in loops_table(measured()).columns]
    assert row[:5] == ["Stable-Baselines3 PPO", "60.0", "50.0", "100.0", "500.0"]


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [(0.0, "equal within the interval"), (0.5, "NOT equal: ours return less"), (-0.5, "NOT equal: ours return more")],
)
def test_returns_are_equal_only_where_the_interval_holds_zero(theirs: float, verdict: str) -> None:
    assert return_sentences(measured(theirs))[1].endswith(f": {verdict}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timesteps": 1000}, "--timesteps must be at least 1024, got 1000"),
        ({"timesteps": 1500}, "--timesteps must be whole iterations of 1,024, got 1500"),
        ({"repeats": 0}, "--repeats must be at least 1, got 0"),
        ({"episodes": 0}, "--episodes must be at least 1, got 0"),
        ({"json": Path(), "overwrite": True}, "is a folder; name a file"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(Args(**change))


def test_what_cannot_run_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_loops, "EXAMPLE", tmp_path / "cleanrl_ppo.py")
    monkeypatch.setattr(bench_train.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("helm_rl.scenario.load_scenario", lambda name: scenario(**QUICK))
    main(Args(timesteps=1024, repeats=1, episodes=1, json=tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["train.overhead_us_per_step"]["value"] > 0
    assert not [name for name in figures if "sb3" in name or "cleanrl" in name or "regret" in name]
    out = capsys.readouterr().out.replace("\n", " ")
    assert "examples/cleanrl_ppo.py is left out: it comes with the repository alone." in out
    assert "Stable-Baselines3 PPO is left out: it is not installed (pip install 'helm-rl[bench]')." in out


@pytest.mark.parametrize(("seconds", "said"), [(61.2, "61 s"), (float("inf"), "did not come to a regret of 5 %")])
def test_regret_is_timed_where_asked_for(
    seconds: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_train, "measure", lambda *_: measured())
    monkeypatch.setattr(bench_train, "seconds_to_regret", lambda: seconds)
    main(Args(regret=True, json=tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["train.seconds_to_regret_05"]["value"] == (seconds if np.isfinite(seconds) else None)
    assert said in capsys.readouterr().out


def test_resets_count_as_the_simulators_time_but_not_as_steps() -> None:
    clocked = Clocked(Guess(0.002))
    clocked.reset(seed=1)
    before = clocked.seconds
    assert before > 0
    clocked.step([0.5])
    assert clocked.steps == 1
    assert clocked.seconds - before >= 0.002
