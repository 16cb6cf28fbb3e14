"""The ONNX file of a bundle: what it says of itself, and that one which lost or changed something is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helm_rl.checkpoint import Bundle, load_bundle
from helm_rl.errors import UserError
from helm_rl.frozen import freeze
from helm_rl.onnx_file import load_onnx, onnx_bytes, parse_onnx
from tests.helm_rl.policies import make_adapting_bundle, network

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return load_bundle(make_adapting_bundle(tmp_path_factory.mktemp("bundles") / "b", network(3)))


@pytest.fixture(scope="module")
def content(bundle: Bundle) -> bytes:
    return onnx_bytes(freeze(bundle))


def test_a_file_says_what_it_is(content: bytes, bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(content)
    found = load_onnx(tmp_path / "a.onnx").metadata
    config = bundle.config
    assert found.observation_schema_hash == config.observation.schema_hash
    assert found.observation_names == config.observation.names
    assert found.policy_sha256 == config.files["policy.safetensors"]
    assert (found.interval_s, found.rate_per_s, found.alpha_min, found.alpha_max) == (0.5, 0.06, 0.1, 0.9)
    assert (found.hidden, found.residual_hidden) == ((64, 64), (16, 16))
    assert (found.residual_bound, found.residual_limit, found.residual_pace) == pytest.approx((0.15, 0.05, 0.02))
    onnx.checker.check_model(onnx.load_model_from_string(content), full_check=True)


def test_a_missing_tensor_makes_loading_fail(content: bytes) -> None:
    names = [tensor.name for tensor in onnx.load_model_from_string(content).graph.initializer]
    assert {"normaliser.mean", "normaliser.std", "alpha_max", "base.0.weight", "residual.2.bias"} <= set(names)
    for k, name in enumerate(names):
        model = onnx.load_model_from_string(content)
        del model.graph.initializer[k]
        with pytest.raises(UserError, match=rf"^x: tensor '{re.escape(name)}' is missing \(1 missing in all\)$"):
            parse_onnx(model.SerializeToString(), "x")


def test_a_missing_step_makes_loading_fail(content: bytes) -> None:
    steps = [node.op_type for node in onnx.load_model_from_string(content).graph.node]
    for k in range(len(steps)):
        model = onnx.load_model_from_string(content)
        node = model.graph.node[k]
        for later in model.graph.node:  # past the step, as an export that drops it would
            for i, name in enumerate(later.input):
                if name in node.output:
                    later.input[i] = node.input[0]
        del model.graph.node[k]
        with pytest.raises(UserError, match=r"^x: the computation is not the one that helm-rl writes"):
            parse_onnx(model.SerializeToString(), "x")


def of(name: str) -> Callable[[Any], Any]:
    return lambda model: next(tensor for tensor in model.graph.initializer if tensor.name == name)


def fill(name: str, value: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        tensor = of(name)(model)
        array = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.full_like(array, value), name))

    return change


def say(key: str, value: str | None) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        (k,) = [k for k, prop in enumerate(model.metadata_props) if prop.key == key]
        if value is None:
            del model.metadata_props[k]
        else:
            model.metadata_props[k].value = value

    return change


def put_outside(model: Any) -> None:
    tensor = of("base.0.weight")(model)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


def grow(model: Any) -> None:
    of("base.1.weight")(model).dims[0] = 1 << 40


def name_type(model: Any) -> None:
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("clipped", onnx.TensorProto.STRING, [3]))


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "no bounds": (fill("alpha_max", 7.0), "tensor 'alpha_max' is not what the metadata says"),
    "wide bounds": (
        lambda m: (fill("alpha_max", 7.0)(m), say("alpha_max", "7.0")(m)),
        "metadata: alpha_max: input should be less than or equal to 1",
    ),
    "crossed bounds": (
        lambda m: (fill("alpha_min", 0.95)(m), say("alpha_min", "0.95")(m)),
        "metadata: alpha_min: 0.95 is not below alpha_max",
    ),
    "no action bound": (fill("action.high", 50.0), "tensor 'action.high' is not what the metadata says"),
    "not finite": (fill("base.1.bias", np.nan), "tensor 'base.1.bias' holds values that are not finite"),
    "no deviation": (fill("normaliser.std", 0.0), "tensor 'normaliser.std' holds a deviation that is not above 0"),
    "outside": (put_outside, r"tensor 'base.0.weight' is not float32 \[64, 17\] within the file"),
    "size": (grow, r"tensor 'base.1.weight' is not float32 \[64, 64\] within the file"),
    "twice": (lambda m: m.graph.initializer.append(m.graph.initializer[0]), "is left over, or is there twice"),
    "left over": (lambda m: m.graph.initializer.add(name="mine"), "tensor 'mine' is left over"),
    "other schema": (
        say("observation_schema_hash", "0" * 64),
        r"reads observations of schema v1 \(000000000000\.\.\.\)",
    ),
    "newer": (say("format_version", "3"), "format_version: 3 is newer than 2; upgrade helm-rl"),
    "no limit": (say("residual_limit", None), "metadata: residual_limit: field required"),
    "negative": (say("residual_pace", "-1.0"), "metadata: residual_pace: input should be greater than or equal to 0"),
    "limit": (fill("limit.high", 0.5), "tensor 'limit.high' is not what the metadata says"),
    "pace": (fill("pace.low", -1.0), "tensor 'pace.low' is not what the metadata says"),
    "no hash": (say("observation_schema_hash", None), "metadata: observation_schema_hash: field required"),
    "no number": (say("interval_s", "soon"), "metadata: interval_s: input should be a valid number"),
    "wide": (say("hidden", "[99999999999]"), "metadata: hidden: .* not the widths"),
    "opset": (lambda m: m.opset_import[0].__setattr__("version", 18), "the computation is not the one"),
    "version of the format": (lambda m: setattr(m, "ir_version", 10**6), "the computation is not the one"),
    "another type": (name_type, "the computation is not the one"),
    "training": (lambda m: m.training_info.add().algorithm.CopyFrom(m.graph), "the computation is not the one"),
    "a part": (lambda m: of("base.0.bias")(m).segment.__setattr__("end", 5), "tensor 'base.0.bias' is not float32"),
    "two contents": (lambda m: of("base.0.bias")(m).float_data.append(1.0), "tensor 'base.0.bias' is not float32"),
    "said twice": (lambda m: m.metadata_props.add(key="rate_per_s", value="0.06"), "the computation is not the one"),
    "foreign": (say("kind", "resnet"), "not one that 'helm-rl export' wrote"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_refused(change: str, content: bytes) -> None:
    model = onnx.load_model_from_string(content)
    make, message = CHANGES[change]
    make(model)
    with pytest.raises(UserError, match=message):
        parse_onnx(model.SerializeToString(), "x")


def test_what_is_no_file_of_ours_is_refused(content: bytes, tmp_path: Path) -> None:
    for wrong in (b"", b"no model", content[: len(content) // 2], np.random.default_rng(1).bytes(4000)):
        with pytest.raises(UserError, match=r"^x: (not an ONNX file|an ONNX file, but not one)"):
            parse_onnx(wrong, "x")
    with pytest.raises(UserError, match=r"a\.onnx: no such file; 'helm-rl export BUNDLE --onnx"):
        load_onnx(tmp_path / "a.onnx")
