"""The training part on the real simulator, small: scenario to run, stopped and resumed, to bundle, to decision."""

from __future__ import annotations

import dataclasses
import errno
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train.ppo_base
from envs.vector import NodeVectorEnv
from helm_rl.checkpoint import load_bundle, load_training_state
from helm_rl.control.base import BasePolicy
from helm_rl.errors import UserError
from helm_rl.export import export
from helm_rl.observation import OBSERVATION_NAMES, schema_hash
from helm_rl.scenario import load_scenario, scenario_hash
from helm_rl.workloads.generate import generate
from tests.train.test_ppo_base import assert_same_state
from train.ppo_base import Args, make_envs
from train.state import load_net

SCENARIO = """
name = "small"
slo_ms = 100
seconds = 40
warm_s = 5
seed = 1
[hardware]
pool_gib = 2
[control]
interval_s = 0.5
alpha_max = 0.8
[load]
rate = 30
users = 500
items = 1e5
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Args:
    folder = tmp_path_factory.mktemp("small")
    (folder / "small.toml").write_text(SCENARIO)
    return Args(
        scenario=str(folder / "small.toml"),
        runs=folder / "runs",
        num_envs=2,
        num_steps=32,
        num_minibatches=2,
        update_epochs=2,
        total_timesteps=64 * 5,
        checkpoint_every=3,
    )


def test_from_a_scenario_to_a_decision(
    small: Args, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train.ppo_base.train(small)

    # Once more, with Ctrl-C in the fifth iteration: two are replayed by simulators that were never saved.
    def impatient(args: Args) -> Any:
        envs, section = make_envs(args)
        step, taken = envs.step, 0

        def stop(actions: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken == 4 * 32 + 9:
                raise KeyboardInterrupt
            return step(actions)

        monkeypatch.setattr(envs, "step", stop)
        return envs, section

    with monkeypatch.context() as patch:
        patch.setattr(train.ppo_base, "make_envs", impatient)
        with pytest.raises(KeyboardInterrupt):
            train.ppo_base.train(dataclasses.replace(small, runs=tmp_path))
    (run,) = tmp_path.iterdir()
    assert load_training_state(run)[0].training.iterations == 4
    train.ppo_base.main(Args(resume=run))
    assert_same_state(whole, run)
    assert f"next: helm-rl export {run} --output" in capsys.readouterr().out

    scenario = load_scenario(small.scenario)
    export(run, tmp_path / "bundle")
    config = load_bundle(tmp_path / "bundle").config
    assert config.environment.scenario_hash == scenario_hash(scenario)
    assert config.environment.trace_hash is None
    assert config.bounds.model_dump() == {"alpha_min": 0.1, "alpha_max": 0.8, "rate_per_s": 0.06, "interval_s": 0.5}
    assert config.observation.names == tuple(OBSERVATION_NAMES)
    assert config.observation.schema_hash == schema_hash()
    assert config.training.arguments["gamma"] == pytest.approx(math.exp(-0.5 / 60))
    assert config.training.steps == 320

    # It decides as the simulator would have taken its action.
    policy = BasePolicy.load(tmp_path / "bundle")
    envs, _ = make_envs(small)
    obs, _ = envs.reset(seed=3)
    envs.close()
    assert np.abs(policy.action(obs[0])).max() > 1e-4
    action = np.clip(load_net(run)(train.ppo_base.torch.from_numpy(obs)).detach().numpy()[0, 0], -1, 1)
    assert policy.decide(obs[0], 0.4, 0) == pytest.approx(0.4 + action * 0.06 * 0.5, abs=1e-7)

    # Whoever changes the scenario trains something else.
    text = Path(small.scenario).read_text()
    try:
        Path(small.scenario).write_text(text.replace("slo_ms = 100", "slo_ms = 90"))
        with pytest.raises(UserError, match="no longer the one trained on; changed: scenario_hash"):
            train.ppo_base.train(Args(resume=run, total_timesteps=640))
    finally:
        Path(small.scenario).write_text(text)


def test_on_a_trace(small: Args, tmp_path: Path) -> None:
    trace = generate(load_scenario(small.scenario), seed=5)
    trace.save(tmp_path / "t.parquet")
    args = dataclasses.replace(small, trace=tmp_path / "t.parquet", total_timesteps=64, runs=tmp_path / "runs")
    run = train.ppo_base.train(args)
    export(run, tmp_path / "bundle")
    assert load_bundle(tmp_path / "bundle").config.environment.trace_hash == trace.hash()
    assert trace.hash() in (tmp_path / "bundle" / "README.md").read_text()


def test_a_wrong_scenario_or_trace_is_named_before_anything_is_made(small: Args, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(UserError, match="nowhere"):
        train.ppo_base.train(dataclasses.replace(small, scenario="nowhere", runs=runs))
    with pytest.raises(UserError, match=r"none\.parquet"):
        train.ppo_base.train(dataclasses.replace(small, trace=tmp_path / "none.parquet", runs=runs))
    assert not runs.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seconds = 0.4", "less than one interval"),
        ("seconds = 40\n[hardware]\npage_kib = 1", r"hardware\.page_kib = 1 is too small"),
    ],
)
def test_a_scenario_that_cannot_run_leaves_no_run_behind(small: Args, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(f'name = "wrong"\nslo_ms = 100\n{line}\n')
    with pytest.raises(UserError, match=message):
        train.ppo_base.train(dataclasses.replace(small, scenario=str(path), runs=tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_before_the_first_checkpoint_leaves_no_run_behind(
    small: Args, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(NodeVectorEnv, "reset", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.ppo_base.train(dataclasses.replace(small, runs=tmp_path / "runs"))
    assert "--resume" not in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_disk_that_takes_no_checkpoint_leaves_no_run_behind(
    small: Args, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train.ppo_base, "save_training_state", full)
    with pytest.raises(OSError, match="No space left"):
        train.ppo_base.train(dataclasses.replace(small, runs=tmp_path / "runs"))
    assert list((tmp_path / "runs").iterdir()) == []
