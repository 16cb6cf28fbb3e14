"""The export: a run's checkpoint becomes a bundle whose card says what it is, and nothing that was not measured."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tyro

from helm_rl.checkpoint import EnvironmentSection, SourceSection, load_bundle, load_training_state, save_training_state
from helm_rl.control.base import BasePolicy
from helm_rl.errors import UserError
from helm_rl.export import ExportArgs, export, main, model_card
from helm_rl.observation import OBSERVATION_NAMES, schema_hash
from tests.helm_rl.policies import ENVIRONMENT, NETWORK, make_run, network, observations, training


def test_the_bundle_acts_as_the_run_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = network(4)
    make_run(tmp_path / "run", net)
    arguments = [str(tmp_path / "run"), "--output", str(tmp_path / "bundle")]
    main(tyro.cli(ExportArgs, args=arguments))
    assert capsys.readouterr().out == f"bundle: {tmp_path / 'bundle'}\n"
    raw = observations(1, 50)
    policy = BasePolicy.load(tmp_path / "bundle")
    got = np.stack([policy.action(row) for row in raw.numpy()])
    np.testing.assert_allclose(got, net(raw).detach().numpy(), rtol=0, atol=1e-6)
    config = load_bundle(tmp_path / "bundle").config
    kept = {"seed": 7, "learning_rate": 0.001}  # not where the run lay
    assert config.training == training().model_copy(update={"arguments": kept})
    assert config.environment == ENVIRONMENT
    assert config.bounds == ENVIRONMENT.bounds


def test_the_card_says_what_it_is_from_what_is_known(tmp_path: Path) -> None:
    make_run(tmp_path / "run", network())
    export(tmp_path / "run", tmp_path / "bundle")
    card = (tmp_path / "bundle" / "README.md").read_text()
    assert card.startswith("# Base policy, trained on the scenario burst\n")
    for fact in (
        "ab" * 32,  # the scenario's hash
        schema_hash(),
        "helm-rl train base --seed 7",
        "| --learning-rate | 0.001 |",
        "| losses/value_loss | 0.0123456 |",
        "| losses/explained_variance | not defined |",
        "seed 7; 3072 environment steps in 3 iterations; 4 episodes ended; 12.3 s",
        "multiplied by 0.06 per second,",
        "Every interval (0.5 s)",
        "[0.1, 0.9]",
        "generated from the scenario",
        *[f"{i}. {name}\n" for i, name in enumerate(OBSERVATION_NAMES)],
    ):
        assert fact in card, fact
    assert not re.search(r"\bnan\b|None|\{|\}|/home/me", card)
    traced = ENVIRONMENT.model_copy(update={"traces": (SourceSection(name="mooncake.parquet", sha256="cd" * 32),)})
    make_run(tmp_path / "traced", network(), environment=traced)
    state = load_training_state(tmp_path / "traced")[0]
    card = model_card(state.network, state.environment, state.training)
    assert f"`mooncake.parquet`, sha256 `{'cd' * 32}`" in card
    assert "generated from the scenario" not in card


def test_an_existing_output_is_replaced_only_on_request(tmp_path: Path) -> None:
    make_run(tmp_path / "run", network(1))
    export(tmp_path / "run", tmp_path / "bundle")
    before = (tmp_path / "bundle" / "policy.safetensors").read_bytes()
    make_run(tmp_path / "run", network(2), iterations=4)
    with pytest.raises(UserError, match="exists already"):
        export(tmp_path / "run", tmp_path / "bundle")
    assert (tmp_path / "bundle" / "policy.safetensors").read_bytes() == before
    export(tmp_path / "run", tmp_path / "bundle", overwrite=True)
    assert load_bundle(tmp_path / "bundle").config.training.iterations == 4


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "fresh", network(), iterations=0)
    foreign = EnvironmentSection(env_id="Pendulum-v1", observation_size=3, action_size=1)
    make_run(tmp_path / "foreign", network(), environment=foreign)
    (tmp_path / "cut").mkdir()
    save_training_state(
        tmp_path / "cut", {"net.x": np.zeros(3)}, network=NETWORK, environment=ENVIRONMENT, training=training()
    )
    for run, message in (
        ("fresh", "nothing has been trained yet"),
        ("foreign", "trained on Pendulum-v1, not on a scenario"),
        ("cut", "is missing"),
        ("nowhere", "no such run folder"),
    ):
        with pytest.raises(UserError, match=message):
            export(tmp_path / run, tmp_path / "bundle")
        with pytest.raises(UserError):
            export(tmp_path / run, tmp_path / "no" / "such" / "bundle")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cut", "foreign", "fresh"]
