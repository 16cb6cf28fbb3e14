"""The training part on the real simulator, small: scenario to run, stopped and resumed, to bundle, to decision."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

import train.ppo_base
from envs.vector import NodeVectorEnv
from helm_rl.checkpoint import SourceSection, load_bundle, load_training_state
from helm_rl.control.base import BasePolicy
from helm_rl.errors import UserError
from helm_rl.export import export
from helm_rl.observation import OBSERVATION_NAMES, schema_hash
from helm_rl.scenario import load_scenario, scenario_hash
from helm_rl.workloads.generate import generate
from tests.train.test_ppo_base import assert_same_state, logged
from train import population
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
        scenario=(str(folder / "small.toml"),),
        runs=folder / "runs",
        num_envs=2,
        num_steps=32,
        num_minibatches=2,
        update_epochs=2,
        total_timesteps=64 * 5,
        checkpoint_every=3,
        validate_every=2,
    )


def test_from_a_scenario_to_a_decision(
    small: Args, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train.ppo_base.train(small)

    # Once more, with Ctrl-C in the fifth iteration: two are replayed by simulators that were never saved.
    def impatient(args: Args, threads: int | None = None) -> Any:
        envs, section = make_envs(args, threads)
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

    scenario = load_scenario(small.scenario[0])
    export(run, tmp_path / "bundle")
    config = load_bundle(tmp_path / "bundle").config
    assert config.environment.scenarios == (SourceSection(name="small", sha256=scenario_hash(scenario)),)
    assert config.environment.traces == ()
    assert config.bounds.model_dump() == {"alpha_min": 0.1, "alpha_max": 0.8, "rate_per_s": 0.06, "interval_s": (0.5,)}
    assert config.observation.names == tuple(OBSERVATION_NAMES)
    assert config.observation.schema_hash == schema_hash()
    assert config.training.steps == 320

    # Held-out arrivals were looked at after every second iteration and the last; the bundle is the best policy there.
    found = config.training.validation
    assert list(found.regrets) == [2, 4, 5]
    assert found.reference_ms.keys() == {"small"}
    assert found.best == min(found.regrets, key=lambda iteration: found.regrets[iteration]["small"])
    charts = logged(run)
    assert [step for step, _ in charts["validation/p99_regret/small"]] == [128, 256, 320]
    means = [value for _, value in charts["validation/mean_p99_regret"]]
    assert [value for _, value in charts["validation/best_mean_p99_regret"]] == np.minimum.accumulate(means).tolist()
    pictures = EventAccumulator(str(run), size_guidance={"images": 0}).Reload().Images("validation/replays")
    assert [picture.step for picture in pictures] == [128, 256, 320]
    assert all(picture.encoded_image_string.startswith(b"\x89PNG") for picture in pictures)
    tensors = load_training_state(run)[1]
    np.testing.assert_array_equal(
        load_bundle(tmp_path / "bundle").tensors["actor.4.bias"], tensors["best.actor.4.bias"]
    )
    assert f"this is the policy after {found.best} iterations" in (tmp_path / "bundle" / "README.md").read_text()

    # It decides as the simulator would have taken its action.
    policy = BasePolicy.load(tmp_path / "bundle")
    envs, _ = make_envs(small)
    obs, _ = envs.reset(seed=3)
    envs.close()
    assert np.abs(policy.action(obs[0])).max() > 1e-4
    net = load_net(run)
    net.load_state_dict(
        {n[5:]: train.ppo_base.torch.from_numpy(t) for n, t in tensors.items() if n[:5] == "best."}, False
    )
    action = np.clip(net(train.ppo_base.torch.from_numpy(obs)).detach().numpy()[0, 0], -1, 1)
    assert policy.decide(obs[0], 0.4, 0) == pytest.approx(0.4 + action * 0.06 * 0.5, abs=1e-7)

    # Whoever changes the scenario trains something else.
    text = Path(small.scenario[0]).read_text()
    try:
        Path(small.scenario[0]).write_text(text.replace("slo_ms = 100", "slo_ms = 90"))
        with pytest.raises(UserError, match="no longer the one trained on; changed: scenarios"):
            train.ppo_base.train(Args(resume=run, total_timesteps=640))
    finally:
        Path(small.scenario[0]).write_text(text)


def test_several_scenarios_the_papers_signals_and_an_end_without_gain(small: Args, tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text(SCENARIO.replace('"small"', '"slow"').replace("interval_s = 0.5", "interval_s = 2.0"))
    args = dataclasses.replace(
        small,
        scenario=(*small.scenario, str(slow)),
        variations=1,
        num_envs=3,
        signals="seven",
        total_timesteps=96 * 20,
        learning_rate=1e-12,  # nothing gets better
        validate_every=1,
        patience=2,
        runs=tmp_path / "runs",
    )
    run = train.ppo_base.train(args)
    state, tensors = load_training_state(run)
    assert state.training.iterations == 3
    assert state.training.stopped == "no lower regret on held-out arrivals in 2 looks, after 3 iterations"
    assert state.training.validation.best == 1
    assert [each.name for each in state.environment.scenarios] == ["small", "slow", "small~1"]
    assert state.environment.bounds is not None
    assert {0.5, 2.0} <= set(state.environment.bounds.interval_s)
    for layer in ("net.actor.0.weight", "net.critic.0.weight", "best.actor.0.weight"):
        assert (tensors[layer][:, 7:] == 0).all()
        assert (tensors[layer][:, :7] != 0).all()
    with pytest.raises(UserError, match=r"complete \(no lower regret .* a larger --patience goes on with it"):
        train.ppo_base.train(Args(resume=run))
    train.ppo_base.train(Args(resume=run, patience=3))
    assert load_training_state(run)[0].training.iterations == 4

    # A bundle is where another training can begin: at first the value network learns alone.
    export(run, tmp_path / "bundle")
    again = dataclasses.replace(args, start=tmp_path / "bundle", signals="all", learning_rate=0.01, critic_first=1)
    again = dataclasses.replace(again, total_timesteps=96, validate_every=0)
    first = load_training_state(train.ppo_base.train(again))[1]
    np.testing.assert_array_equal(first["net.actor.0.weight"], tensors["best.actor.0.weight"])
    assert (first["net.critic.0.weight"] != tensors["net.critic.0.weight"]).any()
    more = load_training_state(train.ppo_base.train(dataclasses.replace(again, total_timesteps=192)))[1]
    assert (more["net.actor.0.weight"] != tensors["best.actor.0.weight"]).any()


def test_a_run_is_made_a_bundle_at_once(small: Args, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that export makes of it."""
    asked = {**vars(small), "runs": tmp_path, "total_timesteps": 64, "validate_every": 0}
    population.main(population.Args(**asked, bundle=tmp_path / "bundle"))
    (run,) = tmp_path.glob("HelmNode-v0__*")
    assert capsys.readouterr().out == f"run: {run}\nbundle: {tmp_path / 'bundle'}\n"
    export(run, tmp_path / "exported")
    for name in ("config.json", "policy.safetensors", "README.md"):
        assert (tmp_path / "bundle" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes()


def test_on_a_trace(small: Args, tmp_path: Path) -> None:
    trace = generate(load_scenario(small.scenario[0]), seed=5)
    trace.save(tmp_path / "t.parquet")
    args = dataclasses.replace(small, trace=(tmp_path / "t.parquet",), total_timesteps=64, runs=tmp_path / "runs")
    run = train.ppo_base.train(args)
    export(run, tmp_path / "bundle")
    assert load_bundle(tmp_path / "bundle").config.environment.traces[0].sha256 == trace.hash()
    assert trace.hash() in (tmp_path / "bundle" / "README.md").read_text()


def test_a_wrong_scenario_or_trace_is_named_before_anything_is_made(small: Args, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(UserError, match="nowhere"):
        train.ppo_base.train(dataclasses.replace(small, scenario=("nowhere",), runs=runs))
    with pytest.raises(UserError, match=r"none\.parquet"):
        train.ppo_base.train(dataclasses.replace(small, trace=(tmp_path / "none.parquet",), runs=runs))
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
        train.ppo_base.train(dataclasses.replace(small, scenario=(str(path),), runs=tmp_path / "runs"))
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
