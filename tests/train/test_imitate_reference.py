"""The imitation: the moves it is shown, what is learnt of them, and a bundle that training can start from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import train.ppo_base
from envs.node_env import HelmNodeEnv
from envs.training_traces import SEEDS_FROM, TrainingTraces
from helm_rl.checkpoint import load_bundle
from helm_rl.control.base import BasePolicy
from helm_rl.control.policy_net import ActorCritic
from helm_rl.control.schedule import ScheduledAlpha
from helm_rl.errors import UserError
from helm_rl.observation import SIZE
from helm_rl.scenario import load_scenario
from tests.train.test_on_a_scenario import SCENARIO
from train.imitate_reference import Args, Example, Shown, fit, main, move_to, show


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("scenario") / "small.toml"
    file.write_text(SCENARIO)
    return str(file)


@pytest.fixture(scope="module")
def example(path: str) -> Example:
    traces = TrainingTraces(load_scenario(path), count=1)
    return Example(traces, 0, ScheduledAlpha([0, 20_000_000_000], [0.3, 0.7]))


def test_a_move_leads_to_the_schedule_as_fast_as_it_may(example: Example) -> None:
    env = HelmNodeEnv(traces=example.traces)
    # .06 per second for half a second is .03 at the most.
    assert move_to(example.schedule, env, 0, 0.5) == -1.0
    assert move_to(example.schedule, env, 0, 0.29) == pytest.approx(1 / 3)
    assert move_to(example.schedule, env, 20_000_000_000, 0.3) == 1.0


def test_what_is_shown_is_the_way_back_to_the_schedule(example: Example) -> None:
    shown = show(example, None, 3)
    assert shown.observations.shape == (example.traces.intervals(0), SIZE)
    applied = shown.observations[:, 5]
    # Late in each half the disturbed target lies near the schedule, and early in the second half it moves up.
    assert abs(np.median(applied[30:38]) - 0.3) < 0.06
    assert abs(np.median(applied[-8:]) - 0.7) < 0.06
    assert (shown.moves[41:45] == 1.0).all()
    assert np.array_equal(shown.observations, show(example, None, 3).observations)
    # A network steers itself: one that never moves stays where it began, and is shown the way all the time.
    still = ActorCritic(SIZE, 1)
    torch.nn.init.zeros_(still.actor[-1].weight)
    own = show(example, still, 3)
    assert np.ptp(own.observations[:, 5]) < 1e-6
    assert set(np.abs(own.moves[:38, 0])) == {1.0}


def test_a_rule_that_the_observation_tells_is_learnt(path: str) -> None:
    rng = np.random.default_rng(1)
    observations = rng.uniform(0, 1, (4_000, SIZE)).astype(np.float32)
    moves = np.clip(4 * (observations[:, :1] - observations[:, 5:6]), -1, 1)
    net = ActorCritic(SIZE, 1, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    args = Args(output=Path("none"), steps=800)
    error = fit(net, [Shown(observations, moves)], args, generator, Console(quiet=True))
    assert error < 0.15
    fresh = rng.uniform(0, 1, (500, SIZE)).astype(np.float32)
    with torch.no_grad():
        got = net(torch.from_numpy(fresh)).numpy()
    assert np.sqrt(np.mean((got - np.clip(4 * (fresh[:, :1] - fresh[:, 5:6]), -1, 1)) ** 2)) < 0.2


def test_the_command_makes_a_bundle_that_training_starts_from(path: str, tmp_path: Path) -> None:
    args = Args(output=tmp_path / "start", scenario=(path,), draws=1, replays=0, rounds=2, steps=20)
    main(args)
    bundle = load_bundle(tmp_path / "start")
    assert bundle.config.training.steps == 2 * 79  # whole intervals of half a second after the warm-up
    assert bundle.config.training.arguments["rounds"] == 2
    assert bundle.config.environment.scenarios[0].name == "small"
    assert "Fitted to schedules that were found offline" in (tmp_path / "start" / "README.md").read_text()
    assert np.isfinite(BasePolicy.of(bundle).action(np.zeros(SIZE, np.float32))).all()
    run = train.ppo_base.train(
        train.ppo_base.Args(
            scenario=(path,), start=tmp_path / "start", runs=tmp_path, num_envs=1, num_steps=16, num_minibatches=2,
            total_timesteps=16, update_epochs=1, validate_every=0,
        )
    )  # fmt: skip
    from helm_rl.checkpoint import load_training_state

    state, tensors = load_training_state(run)
    assert state.training.commands[:-1] == bundle.config.training.commands  # all that it takes to make it again
    np.testing.assert_array_equal(tensors["net.actor.4.weight"], bundle.tensors["actor.4.weight"])
    assert tensors["net.normaliser.count"] == bundle.tensors["normaliser.count"] + 16


def test_arrivals_are_those_of_training(example: Example) -> None:
    assert example.traces.trace(0).meta.seed == SEEDS_FROM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draws": 0}, "--draws must be at least 1, not 0"),
        ({"learning_rate": 0.0}, "--learning-rate must be above 0 and at most 1"),
        ({"scenario": ("nowhere",)}, "nowhere is neither a shipped scenario"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_made(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        main(Args(**{"output": tmp_path / "b", **change}))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_bundle_is_refused_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("my notes")
    with pytest.raises(UserError, match="is not a bundle, so --overwrite leaves it alone"):
        main(Args(output=tmp_path, scenario=("nowhere",), overwrite=True))
