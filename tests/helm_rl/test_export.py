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
from helm_rl.onnx_file import load_onnx
from tests.helm_rl.policies import (
    ENVIRONMENT,
    NETWORK,
    make_adapting_bundle,
    make_bundle,
    make_run,
    network,
    observations,
    training,
)


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


def run(*arguments: Path | str) -> None:
    main(tyro.cli(ExportArgs, args=[str(argument) for argument in arguments]))


def test_a_run_becomes_all_three_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnx")
    make_run(tmp_path / "run", network(4))
    onnx, header = tmp_path / "a.onnx", tmp_path / "a.h"
    run(tmp_path / "run", "--output", tmp_path / "bundle", "--onnx", onnx, "--header", header)
    bundle, checked, made = capsys.readouterr().out.splitlines()
    assert bundle == f"bundle: {tmp_path / 'bundle'}"
    assert re.fullmatch(rf"onnx: {onnx}, within \d\.\de-\d\d of the bundle on 10,000 observations \(onnx.*\)", checked)
    assert made == f"header: {header}"
    sha256 = load_bundle(tmp_path / "bundle").config.files["policy.safetensors"]
    assert load_onnx(onnx).metadata.policy_sha256 == sha256
    assert f"from the policy {sha256}" in header.read_text()
    before = onnx.read_bytes()
    make_bundle(tmp_path / "other", network(5))
    with pytest.raises(UserError, match=r"a\.onnx exists already"):
        run(tmp_path / "other", "--onnx", onnx)
    assert onnx.read_bytes() == before
    run(tmp_path / "other", "--onnx", onnx, "--overwrite")
    assert load_onnx(onnx).metadata.policy_sha256 != sha256


def test_what_a_file_leaves_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_adapting_bundle(tmp_path / "b", network(3))
    run(path, "--header", tmp_path / "a.h")
    assert capsys.readouterr().out == f"header: {tmp_path / 'a.h'}\n"
    learnt = path.with_suffix(".json")
    learnt.write_text(learnt.read_text().replace('"left":0', '"left":9'))
    run(path, "--output", tmp_path / "c", "--residual", learnt, "--header", tmp_path / "c.h")
    assert "\nleft out: the residual adapter, which its guard does not let act\n" in capsys.readouterr().out
    assert "helm_residual_weight0" in (tmp_path / "a.h").read_text()
    assert "helm_residual_weight0" not in (tmp_path / "c.h").read_text()


def test_files_are_made_of_a_bundle_and_for_one_interval(tmp_path: Path) -> None:
    make_run(tmp_path / "run", network())
    make_bundle(tmp_path / "b", network())
    out = tmp_path / "a.h"
    for arguments, message in (
        ((tmp_path / "b",), "nothing to make: name --output"),
        ((tmp_path / "run", "--header", out), "run: no bundle, of which --onnx, --header and --hub are made"),
        ((tmp_path / "b", "--header", out, "--residual", tmp_path / "r.json"), "become part of a bundle"),
        ((tmp_path / "b", "--header", out, "--interval-s", "2"), r"trained for 0\.5 s between decisions, and 2 s was"),
        ((tmp_path / "b", "--header", out, "--onnx", out), "name the same file"),
        ((tmp_path / "b", "--header", tmp_path / "b" / "a.h"), "is what is read, or lies in it"),
    ):
        with pytest.raises(UserError, match=message):
            run(*arguments)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["b", "run"]


def test_an_onnx_file_that_decides_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    make_bundle(tmp_path / "b", network())
    monkeypatch.setattr("helm_rl.export.most_error", lambda *_: 2e-5)
    with pytest.raises(UserError, match=r"alpha comes out up to 2\.0e-05 off, more than 1e-05"):
        run(tmp_path / "b", "--onnx", tmp_path / "a.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["b"]


def test_a_shipped_bundle_is_taken_by_its_name(tmp_path: Path) -> None:
    main(tyro.cli(ExportArgs, args=["helm-base-v1", "--output", str(tmp_path / "mine")]))
    shipped = load_bundle(Path(__file__).parents[2] / "checkpoints" / "helm-base-v1")
    assert load_bundle(tmp_path / "mine").config.files == shipped.config.files
