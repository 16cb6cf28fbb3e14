"""A bundle's decision as one ONNX file, and the strict reading of such a file."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, Json, ValidationError

from helm_rl import __version__
from helm_rl.checkpoint import MAX_TENSOR_BYTES, Section, Shapes, Tensors
from helm_rl.errors import UserError
from helm_rl.frozen import START, STATE_SIZE, Decisions, Frozen, Layers
from helm_rl.observation import HIGH, LOW, OBSERVATION_NAMES, SCHEMA_VERSION, SIZE, schema_hash

# onnx comes with an extra, so its types are not at hand when this is imported.
_Model: TypeAlias = Any
_Node: TypeAlias = Any
_Tensor: TypeAlias = Any
_End: TypeAlias = Any

KIND = "helm_rl_decision"
FORMAT_VERSION = 2
OPSET, IR_VERSION = 17, 8  # of 2022: what runs on servers is seldom new
_ALPHA = OBSERVATION_NAMES.index("alpha")

_ABOUT = """One decision on alpha, the embedding cache's share of the pool, by the policy of a helm-rl bundle.

In: observation, float32 [N, 17], raw, in the order of the metadata's observation_names; applied_alpha, float64 [N, 1],
the share that is applied now; state, float64 [N, 2], that of the last decision, at first, and after something else has
set alpha, NaN and 0.
Out: alpha, float64 [N, 1], the target for the next interval_s seconds; next_state, float64 [N, 2].
An observation with a number outside the schema's range, NaN for one, leaves alpha where it was; before there is a
target, at applied_alpha. Where that is no share either, alpha is no finite number: keep what is applied.
"""

Widths = tuple[int, ...]


class OnnxMetadata(Section):
    """`metadata_props` of the file, each as text.

    observation_names, hidden and residual_hidden are JSON. policy_sha256: of the bundle's weights; observation_clip: of
    what is normalised; interval_s: seconds between decisions; hidden, residual_hidden: widths of the networks' hidden
    layers, the latter empty where no offset is added; residual_bound: of the offset, of which residual_limit is
    allowed; residual_pace: most that it changes in a decision.
    """

    kind: Literal["helm_rl_decision"]
    format_version: int
    helm_rl_version: str
    policy_sha256: str
    observation_schema_version: int
    observation_schema_hash: str
    observation_names: Json[tuple[str, ...]]
    observation_clip: float = Field(gt=0)
    interval_s: float = Field(gt=0, le=10)
    rate_per_s: float = Field(gt=0, le=100)
    alpha_min: float = Field(ge=0, le=1)
    alpha_max: float = Field(ge=0, le=1)
    hidden: Json[Widths]
    residual_hidden: Json[Widths]
    residual_bound: float = Field(ge=0, le=0.5)
    residual_limit: float = Field(ge=0, le=0.5)
    residual_pace: float = Field(ge=0, le=10)


@dataclass(frozen=True)
class OnnxDecision:
    """A checked file. runtime: what runs it, and its version; call: takes the inputs by name, returns the outputs."""

    metadata: OnnxMetadata
    runtime: str
    call: Callable[[dict[str, Any]], Any]

    def decide(
        self,
        observation: npt.NDArray[np.float32],
        applied_alpha: npt.NDArray[np.float64],
        state: npt.NDArray[np.float64],
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Decide for raw observations [n, 17], applied alphas [n] and states [n, 2]; return alphas [n] and states."""
        inputs = {"observation": observation, "applied_alpha": applied_alpha[:, np.newaxis], "state": state}
        alpha, next_state = self.call(inputs)
        return alpha[:, 0], next_state


def onnx_bytes(frozen: Frozen) -> bytes:
    """Return the content of the file."""
    from onnx import numpy_helper

    fields = {
        "kind": KIND,
        "format_version": str(FORMAT_VERSION),
        "helm_rl_version": __version__,
        "policy_sha256": frozen.policy_sha256,
        "observation_schema_version": str(SCHEMA_VERSION),
        "observation_schema_hash": schema_hash(),
        "observation_names": json.dumps(OBSERVATION_NAMES),
        "observation_clip": repr(frozen.clip),
        "interval_s": repr(frozen.interval_s),
        "rate_per_s": repr(frozen.rate_per_s),
        "alpha_min": repr(frozen.alpha_min),
        "alpha_max": repr(frozen.alpha_max),
        "hidden": json.dumps(_hidden(frozen.base)),
        "residual_hidden": json.dumps(_hidden(frozen.residual)),
        "residual_bound": repr(frozen.bound),
        "residual_limit": repr(frozen.limit),
        "residual_pace": repr(frozen.pace),
    }
    metadata = OnnxMetadata.model_validate(fields)
    tensors = _constants(metadata) | {"normaliser.mean": frozen.mean, "normaliser.std": frozen.std}
    for network, layers in (("base", frozen.base), ("residual", frozen.residual)):
        for i, (weight, bias) in enumerate(layers):
            tensors |= {f"{network}.{i}.weight": weight, f"{network}.{i}.bias": bias}
    initialisers = [numpy_helper.from_array(np.array(array, order="C"), name) for name, array in tensors.items()]
    content: bytes = _model(metadata, fields, initialisers).SerializeToString()
    return content


def _model(metadata: OnnxMetadata, fields: dict[str, str], initialisers: list[_Tensor]) -> _Model:
    """Return the whole file: nothing else belongs in one with this metadata, as text, and these weights."""
    from onnx import helper

    model = helper.make_model(
        helper.make_graph(_nodes(metadata), KIND, *_ends(), initialisers),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="helm-rl",
        producer_version=metadata.helm_rl_version,
        doc_string=_ABOUT,
    )
    helper.set_model_props(model, fields)
    return model


def load_onnx(path: Path) -> OnnxDecision:
    """Read what `helm-rl export --onnx` wrote.

    onnxruntime runs it if it is installed, else the reference evaluator that comes with onnx.

    Raises:
        UserError: the file is missing, not such a one, or changed since: a field of its metadata, a tensor or a step of
            the computation is missing, left over or wrong; the format is newer; the observation schema is not ours.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; 'helm-rl export BUNDLE --onnx FILE.onnx' writes one")
    size = path.stat().st_size
    if size > MAX_TENSOR_BYTES:
        raise UserError(f"{path}: {size} bytes, more than the {MAX_TENSOR_BYTES} that it could need")
    return parse_onnx(path.read_bytes(), str(path))


def parse_onnx(content: bytes, where: str) -> OnnxDecision:
    """Check the content of a file, as `load_onnx` does; `where` names it in errors."""
    import onnx

    try:
        model = onnx.ModelProto.FromString(content)
    except Exception:  # protobuf's own, which is no dependency of ours
        raise UserError(f"{where}: not an ONNX file, or cut short") from None
    metadata = _metadata(model, where)
    _check_tensors(model, metadata, where)
    fields = {prop.key: prop.value for prop in model.metadata_props}
    written = _model(metadata, fields, list(model.graph.initializer))
    written.doc_string = model.doc_string  # words, which another version may have chosen differently
    if model != written:
        raise UserError(f"{where}: the computation is not the one that helm-rl writes; export it again")
    return OnnxDecision(metadata, *_runner(model))


def most_error(written: OnnxDecision, ours: Decisions) -> float:
    """Return by how much the alphas of a file differ at most from a bundle's; infinity where one of both is none."""
    state = np.tile(np.array(START), (ours.alpha.shape[1], 1))
    error = 0.0
    for observation, applied, expected in zip(ours.observation, ours.applied_alpha, ours.alpha, strict=True):
        alpha, state = written.decide(observation, applied, state)
        known = np.isfinite(expected)
        if (known != np.isfinite(alpha)).any():
            return math.inf
        error = max(error, float(np.abs(alpha[known] - expected[known]).max(initial=0.0)))
    return error


def _runner(model: _Model) -> tuple[str, Callable[[dict[str, Any]], Any]]:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        import onnx
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(model)
        return f"onnx {onnx.__version__}'s reference evaluator", lambda inputs: evaluator.run(None, inputs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return f"onnxruntime {onnxruntime.__version__}", lambda inputs: session.run(None, inputs)


def _metadata(model: _Model, where: str) -> OnnxMetadata:
    fields = {prop.key: prop.value for prop in model.metadata_props}
    if fields.get("kind") != KIND:
        raise UserError(f"{where}: an ONNX file, but not one that 'helm-rl export' wrote")
    version = fields.get("format_version", "")
    if version.isdecimal() and len(version) < 10 and int(version) > FORMAT_VERSION:
        raise UserError(f"{where}: format_version: {version} is newer than {FORMAT_VERSION}; upgrade helm-rl")
    try:
        metadata = OnnxMetadata.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UserError(f"{where}: metadata: {first['loc'][0]}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    ours = (FORMAT_VERSION, SCHEMA_VERSION, schema_hash(), OBSERVATION_NAMES)
    theirs = (
        metadata.format_version,
        metadata.observation_schema_version,
        metadata.observation_schema_hash,
        metadata.observation_names,
    )
    if theirs != ours:
        raise UserError(
            f"{where}: metadata: it reads observations of schema v{theirs[1]} ({theirs[2][:12]}...), this helm-rl "
            f"makes v{ours[1]} ({ours[2][:12]}...); export it again"
        )
    if metadata.alpha_min >= metadata.alpha_max:
        raise UserError(f"{where}: metadata: alpha_min: {metadata.alpha_min} is not below alpha_max")
    for name in ("hidden", "residual_hidden"):
        widths = getattr(metadata, name)
        if len(widths) > 8 or not all(1 <= width <= 1 << 20 for width in widths):
            raise UserError(f"{where}: metadata: {name}: {widths} are not the widths of at most 8 layers")
    return metadata


def _check_tensors(model: _Model, metadata: OnnxMetadata, where: str) -> None:
    """Raise UserError unless the initialisers are those that belong to the metadata, and hold numbers."""
    from onnx import helper, numpy_helper

    constants, expected = _constants(metadata), _shapes(metadata)
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    missing, extra = [n for n in expected if n not in found], [n for n in found if n not in expected]
    if missing:
        raise UserError(f"{where}: tensor '{missing[0]}' is missing ({len(missing)} missing in all)")
    if extra or len(found) < len(model.graph.initializer):
        raise UserError(f"{where}: tensor '{(extra or list(found))[0]}' is left over, or is there twice")
    for name, (dtype, shape) in expected.items():
        tensor = found[name]
        same = tensor.data_type == helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) and tuple(tensor.dims) == shape
        whole = len(tensor.raw_data) == math.prod(shape) * np.dtype(dtype).itemsize
        alone = {field.name for field, _ in tensor.ListFields()} <= {"name", "data_type", "dims", "raw_data"}
        if not (same and whole and alone):
            raise UserError(f"{where}: tensor '{name}' is not {np.dtype(dtype)} {list(shape)} within the file")
        array = numpy_helper.to_array(tensor)
        if not np.isfinite(array).all():
            raise UserError(f"{where}: tensor '{name}' holds values that are not finite")
        if name in constants and not np.array_equal(array, constants[name]):
            raise UserError(f"{where}: tensor '{name}' is not what the metadata says")
        if name == "normaliser.std" and (array <= 0).any():
            raise UserError(f"{where}: tensor '{name}' holds a deviation that is not above 0")


def _hidden(layers: Layers) -> Widths:
    return tuple(weight.shape[0] for weight, _ in layers[:-1])


def _constants(metadata: OnnxMetadata) -> Tensors:
    """Return the initialisers that follow from the metadata."""
    numbers = {
        "deviations.low": -metadata.observation_clip,
        "deviations.high": metadata.observation_clip,
        "action.low": -1.0,
        "action.high": 1.0,
        "step": metadata.rate_per_s * metadata.interval_s,
        "alpha_min": metadata.alpha_min,
        "alpha_max": metadata.alpha_max,
        "share.low": 0.0,
        "share.high": 1.0,
    }
    others: Tensors = {
        "observation.low": LOW,
        "observation.high": HIGH,
        "state.parts": np.ones(STATE_SIZE, np.int64),
    }
    if metadata.residual_hidden:
        limit, pace = metadata.residual_limit, metadata.residual_pace
        numbers |= {"bound": metadata.residual_bound, "limit.low": -limit, "limit.high": limit}
        numbers |= {"pace.low": -pace, "pace.high": pace}
        others |= {"alpha.index": np.array([_ALPHA]), "alpha.mask": np.arange(SIZE) == _ALPHA}
    return others | {name: np.array(value, np.float64) for name, value in numbers.items()}


def _shapes(metadata: OnnxMetadata) -> Shapes:
    """Return the type and shape of each initialiser."""
    shapes: Shapes = {name: (array.dtype.type, array.shape) for name, array in _constants(metadata).items()}
    shapes |= dict.fromkeys(("normaliser.mean", "normaliser.std"), (np.float64, (SIZE,)))
    networks = {"base": (SIZE, *metadata.hidden, 1)}
    if metadata.residual_hidden:
        networks["residual"] = (SIZE + 1, *metadata.residual_hidden, 1)
    for network, widths in networks.items():
        for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            shapes[f"{network}.{i}.weight"] = (np.float32, (outputs, inputs))
            shapes[f"{network}.{i}.bias"] = (np.float32, (outputs,))
    return shapes


def _ends() -> tuple[list[_End], list[_End]]:
    """Return the inputs and the outputs; N is free."""
    from onnx import TensorProto, helper

    def end(name: str, kind: int, columns: int) -> _End:
        return helper.make_tensor_value_info(name, kind, ["N", columns])

    alpha, state = (TensorProto.DOUBLE, 1), (TensorProto.DOUBLE, STATE_SIZE)
    inputs = [end("observation", TensorProto.FLOAT, SIZE), end("applied_alpha", *alpha), end("state", *state)]
    return inputs, [end("alpha", *alpha), end("next_state", *state)]


def _nodes(metadata: OnnxMetadata) -> list[_Node]:
    """Return the steps of the computation, as `helm_rl.frozen` has it."""
    from onnx import TensorProto, helper

    nodes: list[_Node] = []

    def step(kind: str, inputs: str, outputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs.split(), outputs.split(), **attributes))
        return outputs

    def cast(value: str, output: str, to: int) -> str:
        return step("Cast", value, output, to=to)

    def network(name: str, value: str, layers: int) -> str:
        for i in range(layers):
            if i > 0:
                value = step("Tanh", value, f"{name}.{i}.input")
            value = step("Gemm", f"{value} {name}.{i}.weight {name}.{i}.bias", f"{name}.{i}.output", transB=1)
        return value

    adapts = bool(metadata.residual_hidden)
    step("GreaterOrEqual", "observation observation.low", "observation.above")
    step("LessOrEqual", "observation observation.high", "observation.below")
    within = cast(step("And", "observation.above observation.below", "observation.within"), "within", TensorProto.FLOAT)
    cast(step("ReduceMin", within, "within.least", axes=[1], keepdims=1), "usable", TensorProto.BOOL)
    step("Split", "state state.parts", "last.target last.offset", axis=1)
    step("IsNaN", "last.target", "last.nan")
    step("IsInf", "last.target", "last.infinite")
    step("Or", "last.nan last.infinite", "first")
    step("Not", "first", "begun")
    step("GreaterOrEqual", "applied_alpha share.low", "applied.above")
    step("LessOrEqual", "applied_alpha share.high", "applied.below")
    step("And", "applied.above applied.below", "applied.known")
    step("Or", "begun applied.known", "alpha.known")
    step("And", "usable alpha.known", "decides")

    own, applied = "observation", "applied_alpha"
    if adapts:  # the base sees the alpha that would be applied without the offset
        applied = step("Sub", "applied_alpha last.offset", "own.applied")
        seen = cast(step("Gather", "observation alpha.index", "alpha.seen", axis=1), "alpha.wide", TensorProto.DOUBLE)
        step("Sub", f"{seen} last.offset", "alpha.less")
        shown = cast(step("Clip", "alpha.less share.low share.high", "alpha.own"), "alpha.shown", TensorProto.FLOAT)
        own = step("Where", f"alpha.mask {shown} observation", "own.observation")
    step("Where", f"first {applied} last.target", "before")
    step("Sub", f"{cast(own, 'own.wide', TensorProto.DOUBLE)} normaliser.mean", "centred")
    step("Div", "centred normaliser.std", "deviations")
    cast(step("Clip", "deviations deviations.low deviations.high", "clipped"), "normalised", TensorProto.FLOAT)
    cast(network("base", "normalised", len(metadata.hidden) + 1), "action", TensorProto.DOUBLE)
    step("IsNaN", "action", "action.nan")
    step("Mul", f"{step('Clip', 'action action.low action.high', 'action.clipped')} step", "change")
    step("Where", f"action.nan before {step('Add', 'before change', 'changed')}", "unbounded")
    step("Clip", "unbounded alpha_min alpha_max", "bounded")
    target = step("Where", "decides bounded last.target", "target")

    offset, whole = "last.offset", target
    if adapts:
        step("Sub", "bounded before", "moved")
        step("Div", "moved step", "moved.steps")
        moved = cast(step("Where", "first share.low moved.steps", "moved.known"), "moved.input", TensorProto.FLOAT)
        step("Concat", f"normalised {moved}", "residual.input", axis=1)
        odds = step("Tanh", network("residual", "residual.input", len(metadata.residual_hidden) + 1), "odds")
        step("Mul", f"{cast(odds, 'odds.wide', TensorProto.DOUBLE)} bound", "offset.free")
        step("IsNaN", "offset.free", "offset.nan")
        step("Where", "offset.nan share.low offset.free", "offset.said")
        step("Sub", f"{step('Clip', 'offset.said limit.low limit.high', 'offset.meant')} last.offset", "offset.way")
        step("Add", f"last.offset {step('Clip', 'offset.way pace.low pace.high', 'offset.paced')}", "offset.new")
        offset = step("Where", "decides offset.new last.offset", "offset")
        whole = step("Add", f"{target} {offset}", "whole")
    step("Concat", f"{target} {offset}", "next_state", axis=1)
    step("Clip", f"{whole} alpha_min alpha_max", "alpha.held")
    step("Clip", "applied_alpha alpha_min alpha_max", "applied.bounded")
    step("Where", "applied.known applied.bounded last.target", "alpha.applied")  # the target of before is none here
    step("Where", f"{step('Or', 'decides begun', 'held')} alpha.held alpha.applied", "alpha")
    return nodes
