"""Bundles and training states: what is written comes back, and anything else is refused in one sentence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import helm_rl.checkpoint
from helm_rl.checkpoint import load_bundle, load_training_state, save_training_state
from helm_rl.errors import UserError
from tests.helm_rl.policies import (
    ENVIRONMENT,
    NETWORK,
    make_bundle,
    make_run,
    net_tensors,
    network,
    training,
)

Tensors = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "bundle", network())
    return tmp_path / "bundle"


def edit_config(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads((bundle / "config.json").read_text())
    change(document)
    (bundle / "config.json").write_text(json.dumps(document))


def edit_tensors(bundle: Path, change: Callable[[Tensors], Any]) -> None:
    """Change the policy, and the recorded hash with it, as a forger or another program would."""
    tensors = dict(safetensors.numpy.load_file(bundle / "policy.safetensors"))
    change(tensors)
    data = safetensors.numpy.save(tensors)
    (bundle / "policy.safetensors").write_bytes(data)
    edit_config(bundle, lambda c: c["files"].update({"policy.safetensors": hashlib.sha256(data).hexdigest()}))


def rehash(digest: str) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["files"].update({"policy.safetensors": digest})


def test_a_bundle_comes_back_as_it_was(tmp_path: Path) -> None:
    net = network(5)
    written = make_bundle(tmp_path / "b", net)
    bundle = load_bundle(tmp_path / "b")
    assert bundle.config == written
    assert sorted(file.name for file in bundle.path.iterdir()) == ["README.md", "config.json", "policy.safetensors"]
    expected = {k: v for k, v in net_tensors(net).items() if k.startswith(("normaliser.", "actor."))}
    assert bundle.tensors.keys() == expected.keys()
    assert len(expected) == 9
    for name, array in expected.items():
        assert bundle.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(bundle.tensors[name], array)
    document = json.loads((tmp_path / "b" / "config.json").read_text())
    assert document["format_version"] == 1
    assert document["bounds"] == {"alpha_min": 0.1, "alpha_max": 0.9, "rate_per_s": 0.06, "interval_s": [0.5]}
    assert document["training"]["statistics"]["losses/explained_variance"] is None


@pytest.mark.parametrize("name", ["normaliser.mean", "normaliser.count", "actor.0.weight", "actor.4.bias"])
def test_a_missing_tensor_is_refused(bundle: Path, name: str) -> None:
    # A policy without its normaliser must not load.
    edit_tensors(bundle, lambda t: t.pop(name))
    with pytest.raises(UserError, match=rf"policy\.safetensors: tensor '{name}' is missing"):
        load_bundle(bundle)


def test_a_tensor_too_many_is_refused(bundle: Path) -> None:
    edit_tensors(bundle, lambda t: t.update(extra=np.zeros(3, np.float32)))
    with pytest.raises(UserError, match="tensor 'extra' does not belong there"):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("actor.0.weight", np.zeros((64, 16), np.float32), r"float32 \[64, 16\], expected float32 \[64, 17\]"),
        ("actor.0.weight", np.zeros((64, 17), np.float64), r"float64 \[64, 17\], expected float32 \[64, 17\]"),
        ("normaliser.mean", np.zeros(17, np.float32), r"float32 \[17\], expected float64 \[17\]"),
        ("normaliser.mean", np.full(17, np.nan), "'normaliser.mean' holds values that are not finite"),
        ("actor.4.bias", np.full(1, np.inf, np.float32), "'actor.4.bias' holds values that are not finite"),
        ("normaliser.var", np.full(17, -1.0), "'normaliser.var' holds a negative variance"),
        ("actor.4.bias", np.zeros(1, np.int16), "'actor.4.bias' has dtype I16"),
    ],
)
def test_a_wrong_tensor_is_refused(bundle: Path, name: str, array: Any, message: str) -> None:
    edit_tensors(bundle, lambda t: t.update({name: array}))
    with pytest.raises(UserError, match=message):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=2), "format_version: 2 is newer than 1"),
        # A newer format may look different all over: its version must be what is complained of.
        (lambda c: (c.clear(), c.update(format_version=9, what="ever")), "format_version: 9 is newer than 1"),
        (lambda c: c.pop("format_version"), "format_version: expected a number from 1 to 1, found None"),
        (lambda c: c.update(format_version="1"), "format_version: expected a number"),
        (lambda c: c.update(format_version=0), "format_version: expected a number"),
        (lambda c: c.pop("bounds"), r"config\.json: bounds: field required"),
        (lambda c: c["bounds"].pop("alpha_max"), r"config\.json: bounds\.alpha_max: field required"),
        (lambda c: c["bounds"].update(beta=1), r"bounds\.beta: extra inputs are not permitted"),
        (lambda c: c["bounds"].update(alpha_max="0.9"), r"bounds\.alpha_max: input should be a valid number"),
        (lambda c: c["bounds"].update(alpha_max=1.5), r"bounds\.alpha_max: .*less than or equal to 1"),
        (lambda c: c["bounds"].update(rate_per_s=1e308), r"bounds\.rate_per_s: .*less than or equal to 100"),
        (lambda c: c["bounds"].update(alpha_min=0.9), "alpha_min 0.9 is not below alpha_max"),
        (lambda c: c["network"].update(activation="relu"), r"network\.activation"),
        (lambda c: c["network"].update(action_size=2), r"network\.action_size: 2, but alpha is one number"),
        (
            lambda c: c["network"].update(hidden=[64, 0]),
            r"network\.hidden\.1: input should be greater than or equal to 1",
        ),
        (lambda c: c["network"].update(hidden=[64, 10**12]), r"tensor 'actor\.2\.weight' is float32 \[64, 64\]"),
        (lambda c: c["observation"].update(schema_hash="0" * 64), r"observation: .*schema v1 \(000000000000"),
        (lambda c: c["observation"]["names"].reverse(), "observation: the policy reads schema v1"),
        (lambda c: c["observation"].update(schema_version=7), "observation: the policy reads schema v7"),
        (lambda c: c["files"].update({"policy.safetensors": "0" * 64}), "damaged or replaced"),
        (lambda c: c["files"].update({"../../etc/passwd": "0" * 64}), "a bundle has policy.safetensors, and"),
        (lambda c: c.update(kind="residual"), r"config\.json: kind: "),
    ],
)
def test_a_wrong_config_is_refused(bundle: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    edit_config(bundle, change)
    with pytest.raises(UserError, match=message):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"config\.json, line 1, column 1: not JSON"),
        (b'{"format_version": 1,\n "kind": }', "line 2, column 10: not JSON"),
        (b"\x80\x02}q\x00.", "not UTF-8"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (b"[" * 200_000, "JSON, but none of ours"),
        (b'{"format_version": ' + b"9" * 5000 + b"}", "JSON, but none of ours"),
    ],
)
def test_a_config_that_is_no_json_is_refused(bundle: Path, content: bytes, message: str) -> None:
    (bundle / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_bundle(bundle)


def test_files_that_are_missing_or_cut_are_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no such bundle folder"):
        load_bundle(bundle / "nowhere")
    whole = (bundle / "policy.safetensors").read_bytes()
    (bundle / "policy.safetensors").write_bytes(whole[:-10])
    with pytest.raises(UserError, match=r"policy\.safetensors: its sha256 is .* damaged or replaced"):
        load_bundle(bundle)
    # The hash says that it is the one; it is still no safetensors file.
    for junk in (b"", b"\x80\x02}q\x00.", whole[:-10], b"\xff" * 64):
        (bundle / "policy.safetensors").write_bytes(junk)
        digest = hashlib.sha256(junk).hexdigest()
        edit_config(bundle, rehash(digest))
        with pytest.raises(UserError, match=r"policy\.safetensors: not a safetensors file"):
            load_bundle(bundle)
    monkeypatch.setattr(helm_rl.checkpoint, "MAX_TENSOR_BYTES", 10)
    with pytest.raises(UserError, match="64 bytes, more than the 10"):
        load_bundle(bundle)
    (bundle / "policy.safetensors").unlink()
    with pytest.raises(UserError, match=r"policy\.safetensors: no such file"):
        load_bundle(bundle)
    (bundle / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        load_bundle(bundle)


def test_a_normaliser_that_would_divide_by_zero_is_refused(bundle: Path) -> None:
    edit_tensors(bundle, lambda tensors: tensors.update({"normaliser.var": np.zeros(17)}))
    load_bundle(bundle)
    edit_config(bundle, lambda config: config["network"].update(epsilon=0))
    with pytest.raises(UserError, match=r"config\.json: network\.epsilon: must be above 0"):
        load_bundle(bundle)


def test_a_policy_that_is_not_whole_is_not_saved(tmp_path: Path) -> None:
    net = network()
    del net.actor[4]
    with pytest.raises(UserError, match=r"tensor 'actor\.4\.bias' is missing"):
        make_bundle(tmp_path / "b", net)
    assert list(tmp_path.iterdir()) == []


def test_what_stands_at_the_output_is_kept(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", network(1))
    before = (tmp_path / "b" / "policy.safetensors").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        make_bundle(tmp_path / "b", network(2))
    assert (tmp_path / "b" / "policy.safetensors").read_bytes() == before
    make_bundle(tmp_path / "b", network(2), overwrite=True)
    assert (tmp_path / "b" / "policy.safetensors").read_bytes() != before
    # Overwriting is for bundles: a folder of other things is never swept away.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    for path in (tmp_path / "mine", tmp_path / "mine" / "thesis.tex"):
        with pytest.raises(UserError, match="is not a bundle, so --overwrite leaves it alone"):
            make_bundle(path, network(), overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["b", "mine"]


def test_a_training_state_comes_back_and_replaces_the_one_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, network(1), iterations=3)
    make_run(run, network(2), iterations=4)
    state, tensors = load_training_state(run)
    assert state.training == training(4)
    assert state.environment == ENVIRONMENT
    expected = net_tensors(network(2))
    assert tensors.keys() == {f"net.{name}" for name in expected}
    for name, array in expected.items():
        np.testing.assert_array_equal(tensors[f"net.{name}"], array)
    assert sorted(file.name for file in run.iterdir()) == ["training_state-4.safetensors", "training_state.json"]


def test_a_crash_while_saving_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    make_run(run, network(1), iterations=3)

    def crash(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(helm_rl.checkpoint, "write_text", crash)
    with pytest.raises(OSError, match="No space left"):
        make_run(run, network(2), iterations=4)
    state, tensors = load_training_state(run)
    assert state.training.iterations == 3
    np.testing.assert_array_equal(tensors["net.actor.0.weight"], net_tensors(network(1))["actor.0.weight"])


def test_a_wrong_training_state_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(UserError, match="no such run folder"):
        load_training_state(run)
    run.mkdir()
    with pytest.raises(UserError, match="not a training run"):
        load_training_state(run)
    make_run(run, network())
    text = (run / "training_state.json").read_text()
    for old, new, message in (
        ('"format_version":', '"version":', "format_version"),
        ('"format_version": 1', '"format_version": 2', "newer than 1"),
        ("training_state-3.safetensors", "../../training_state-3.safetensors", r"tensors\.name"),
        ('"seed": 7,\n    "iterations"', '"iterations"', r"training\.seed: field required"),
        ('"steps": ', '"steps": 1' + 400 * "0", r"training\.steps: input should be less than"),
        ('"best": null', '"best": 3', r"training\.validation: value error, best is 3, which is none of the looks \[\]"),
        ('"regrets": {}', '"regrets": {"3": {"a": 0.1}}', "after 3 iterations is not at the arrivals of reference_ms"),
        (
            '"reference_ms": {},\n      "regrets": {},\n      "best": null',
            '"reference_ms": {"a": 1.0},\n      "regrets": {"4": {"a": 0.1}},\n      "best": 4',
            r"training: value error, looks after \[4\] iterations do not go with 3 in all",
        ),
    ):
        assert old in text
        (run / "training_state.json").write_text(text.replace(old, new))
        with pytest.raises(UserError, match=message):
            load_training_state(run)
    (run / "training_state.json").write_text(text)
    (run / "training_state-3.safetensors").unlink()
    with pytest.raises(UserError, match="no such file"):
        load_training_state(run)


def test_nothing_is_pickled(tmp_path: Path) -> None:
    save_training_state(tmp_path, {"x": np.arange(3)}, network=NETWORK, environment=ENVIRONMENT, training=training())
    make_bundle(tmp_path / "b", network())
    for file in tmp_path.rglob("*"):
        if file.suffix == ".safetensors":
            safetensors.numpy.load_file(file)
        elif file.suffix == ".json":
            json.loads(file.read_text())
        elif file.is_file():
            assert file.name == "README.md"
