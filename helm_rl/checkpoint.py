"""What is kept of a training: bundles, which serve, and training states, which resume. Nothing here is unpickled.

A bundle is a folder of `policy.safetensors`, `config.json` and a model card, `README.md`; where the base policy has
layers above it, of `residual.json` and `detector.json`, too. A run's training state is `training_state.json` and the
tensor file that it names. Both are read strictly: what is missing, left over, of another shape or from a newer format
is an error, and sizes are looked at before anything is read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from helm_rl.errors import UserError
from helm_rl.files import atomic_file, atomic_folder, refuse_existing, write_text

Tensors = dict[str, npt.NDArray[Any]]
Shapes = dict[str, tuple[type[np.generic], tuple[int, ...]]]

CONFIG_FILE = "config.json"
POLICY_FILE = "policy.safetensors"
RESIDUAL_FILE = "residual.json"
DETECTOR_FILE = "detector.json"
LAYER_FILES = (RESIDUAL_FILE, DETECTOR_FILE)
"""Files of the layers above the base policy, which a bundle may have; helm_rl.control.layers reads them."""
CARD_FILE = "README.md"
STATE_FILE = "training_state.json"
MAX_JSON_BYTES = 4 << 20
MAX_TENSOR_BYTES = 1 << 30

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "I64": np.int64,
    "U8": np.uint8,
}  # all that we write; anything else in a file is foreign


class Section(BaseModel):
    """A part of a document: no field may be left over, and every number is finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ObservationSection(Section):
    """What the policy reads: the schema's version, hash and ordered names."""

    schema_version: int
    schema_hash: str
    names: tuple[str, ...]


class BoundsSection(Section):
    """What an action of 1 means, and within what: alpha's limits and its rate per second, as a scenario may have them.

    interval_s: the seconds between decisions that the policy was trained for, each value once, ascending.
    """

    alpha_min: float = Field(ge=0, le=1)
    alpha_max: float = Field(ge=0, le=1)
    rate_per_s: float = Field(gt=0, le=100)
    interval_s: tuple[Annotated[float, Field(gt=0, le=10)], ...] = Field(min_length=1, max_length=1024)


class NetworkSection(Section):
    """The actor's architecture, and the constants of the normaliser before it."""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, max_length=8)
    activation: Literal["tanh"] = "tanh"
    action_size: int = Field(ge=1, le=64)
    observation_clip: float = Field(gt=0)
    epsilon: float = Field(ge=0)


class SourceSection(Section):
    """A scenario or a trace that a policy was trained on: its name, or its path as given, and its sha256 in hex."""

    name: str
    sha256: str


class EnvironmentSection(Section):
    """What a run trained on. `observation` and `bounds` are None, and `scenarios` is empty, for foreign environments.

    traces: none where they were generated from the scenarios.
    """

    env_id: str
    observation_size: int = Field(ge=1)
    action_size: int = Field(ge=1)
    observation: ObservationSection | None = None
    bounds: BoundsSection | None = None
    scenarios: tuple[SourceSection, ...] = ()
    traces: tuple[SourceSection, ...] = ()


class ValidationSection(Section):
    """What held-out arrivals said while a policy was trained.

    reference_ms: P99 of the best schedule known on each set of arrivals, by its name; regrets: after so many
    iterations, the P99 of the policy without noise over that, less 1; best: the iterations after which the mean regret
    was least, whose policy is the one that is kept; None before the first look.
    """

    reference_ms: dict[str, Annotated[float, Field(gt=0)]] = {}
    regrets: dict[int, dict[str, float]] = {}
    best: int | None = None

    @model_validator(mode="after")
    def _agree(self) -> ValidationSection:
        for iterations, regrets in self.regrets.items():
            if not regrets or regrets.keys() != self.reference_ms.keys():
                raise ValueError(f"the look after {iterations} iterations is not at the arrivals of reference_ms")
        if (self.best is None) == bool(self.regrets) or (self.best is not None and self.best not in self.regrets):
            raise ValueError(f"best is {self.best}, which is none of the looks {sorted(self.regrets)}")
        return self


class TrainingSection(Section):
    """How a policy came to be.

    method: what made the policy; statistics: the last values of the training's charts, None where undefined; stopped:
    why it ended before its last iteration, None where it did not.
    """

    method: str = "Trained offline with PPO in helm-rl's serving simulator"
    arguments: dict[str, JsonValue]
    commands: list[str]
    seed: int
    iterations: int = Field(ge=0, lt=2**53)
    steps: int = Field(ge=0, lt=2**53)
    episodes: int = Field(ge=0, lt=2**53)
    seconds: float = Field(ge=0)
    statistics: dict[str, float | None]
    validation: ValidationSection = ValidationSection()
    stopped: str | None = None
    helm_rl_version: str

    @model_validator(mode="after")
    def _agree(self) -> TrainingSection:
        looks = self.validation.regrets
        if looks and not (min(looks) >= 1 and max(looks) <= self.iterations <= self.steps):
            raise ValueError(
                f"looks after {sorted(looks)} iterations do not go with {self.iterations} in all and {self.steps} steps"
            )
        return self


class BundleConfig(Section):
    """`config.json` of a bundle. files: the sha256 of each data file, hex."""

    format_version: Literal[1] = 1
    kind: Literal["base"] = "base"
    network: NetworkSection
    observation: ObservationSection
    bounds: BoundsSection
    environment: EnvironmentSection
    training: TrainingSection
    files: dict[str, str]


class TensorFile(Section):
    """The tensors that belong to a training state: file name within the run's folder, sha256 in hex."""

    name: str = Field(pattern=r"^training_state-[0-9]+\.safetensors$")
    sha256: str


class TrainingState(Section):
    """`training_state.json`: everything that resuming needs beside the tensors."""

    format_version: Literal[1] = 1
    network: NetworkSection
    environment: EnvironmentSection
    training: TrainingSection
    wandb_id: str | None = None
    tensors: TensorFile


@dataclass(frozen=True)
class Bundle:
    """A checked bundle.

    tensors: `normaliser.{mean,var,count}` float64, `actor.<i>.{weight,bias}` float32; layers: those of LAYER_FILES that
    it has, of which only the hash was checked.
    """

    path: Path
    config: BundleConfig
    tensors: Tensors
    layers: tuple[str, ...]


def policy_sha256(tensors: Tensors) -> str:
    """Return the sha256 (hex) of a policy's weights, as its bundle has it."""
    return hashlib.sha256(safetensors.numpy.save(tensors)).hexdigest()


def policy_tensors(network: NetworkSection, observation_size: int) -> Shapes:
    """Return name -> (dtype, shape) of every tensor that a policy of this architecture has, no more and no less."""
    expected: Shapes = {
        "normaliser.mean": (np.float64, (observation_size,)),
        "normaliser.var": (np.float64, (observation_size,)),
        "normaliser.count": (np.float64, ()),
    }
    widths = (observation_size, *network.hidden, network.action_size)
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        expected[f"actor.{2 * i}.weight"] = (np.float32, (outputs, inputs))
        expected[f"actor.{2 * i}.bias"] = (np.float32, (outputs,))
    return expected


def save_bundle(
    path: Path,
    tensors: Tensors,
    *,
    network: NetworkSection,
    observation: ObservationSection,
    bounds: BoundsSection,
    environment: EnvironmentSection,
    training: TrainingSection,
    card: str,
    layers: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> BundleConfig:
    """Write a bundle as the new folder `path`, whole or not at all; return its config.

    layers: contents of those of LAYER_FILES that it has.

    Raises:
        UserError: A tensor is missing, left over, of another dtype or shape, or not finite; `path` exists and
            `overwrite` is False, or what stands there is no bundle and so must not be replaced by one.
    """
    _check_tensors("the policy to save", tensors, policy_tensors(network, len(observation.names)))
    _check_policy_values("the policy to save", tensors)
    check_bundle_output(path, overwrite)
    data = {POLICY_FILE: safetensors.numpy.save(tensors), **(layers or {})}
    assert data.keys() <= {POLICY_FILE, *LAYER_FILES}
    config = BundleConfig(
        network=network,
        observation=observation,
        bounds=bounds,
        environment=environment,
        training=training,
        files={name: hashlib.sha256(content).hexdigest() for name, content in data.items()},
    )
    with atomic_folder(path) as aside:
        for name, content in data.items():
            (aside / name).write_bytes(content)
        (aside / CARD_FILE).write_text(card, encoding="utf-8")
        (aside / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return config


def check_bundle_output(path: Path, overwrite: bool = False) -> None:
    """Raise UserError if `path` exists and may not be replaced by a bundle; for before the work as well as after it."""
    refuse_existing(path, overwrite)
    if path.exists() and not _is_bundle(path):
        raise UserError(f"{path} exists and is not a bundle, so --overwrite leaves it alone; name another output")


def _is_bundle(path: Path) -> bool:
    """Tell whether a folder holds a bundle's files and nothing else, so that replacing it loses nothing else."""
    names = {file.name for file in path.iterdir()} if path.is_dir() else {"a file, not a folder"}
    return names <= {POLICY_FILE, CARD_FILE, CONFIG_FILE, *LAYER_FILES} and names != {CARD_FILE}


def load_bundle(path: Path) -> Bundle:
    """Read and check a bundle folder.

    Raises:
        UserError: A file is missing or unreadable, a field or tensor is missing, left over or wrong, the format
            is newer, the policy file is not the one the config was written with, or the observation schema is
            not ours.
    """
    from helm_rl.observation import OBSERVATION_NAMES, SCHEMA_VERSION, schema_hash

    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such bundle folder; a bundle is what 'helm-rl export' writes")
    file = path / CONFIG_FILE
    config = read_document(BundleConfig, file)
    ours = (SCHEMA_VERSION, schema_hash(), tuple(OBSERVATION_NAMES))
    theirs = (config.observation.schema_version, config.observation.schema_hash, config.observation.names)
    if theirs != ours:
        raise UserError(
            f"{file}: observation: the policy reads schema v{theirs[0]} ({theirs[1][:12]}...), this helm-rl "
            f"makes v{ours[0]} ({ours[1][:12]}...); export it again with the version that trained it, or train "
            "anew"
        )
    if list(config.bounds.interval_s) != sorted(set(config.bounds.interval_s)):
        raise UserError(f"{file}: bounds.interval_s: {config.bounds.interval_s} do not ascend")
    if config.bounds.alpha_min >= config.bounds.alpha_max:
        raise UserError(f"{file}: bounds: alpha_min {config.bounds.alpha_min} is not below alpha_max")
    if config.network.action_size != 1:
        raise UserError(f"{file}: network.action_size: {config.network.action_size}, but alpha is one number")
    if not {POLICY_FILE} <= set(config.files) <= {POLICY_FILE, *LAYER_FILES}:
        raise UserError(
            f"{file}: files: names {sorted(config.files)}, but a bundle has {POLICY_FILE}, and of layers at the most "
            f"{' and '.join(LAYER_FILES)}"
        )
    policy = path / POLICY_FILE
    tensors = read_tensors(policy, config.files[POLICY_FILE])
    _check_tensors(str(policy), tensors, policy_tensors(config.network, len(config.observation.names)))
    _check_policy_values(str(policy), tensors)
    if (tensors["normaliser.var"] + config.network.epsilon <= 0).any():
        raise UserError(f"{file}: network.epsilon: must be above 0, for the normaliser has a feature of no variance")
    layers = tuple(name for name in LAYER_FILES if name in config.files)
    for name in layers:
        read_recorded(path / name, config.files[name], MAX_JSON_BYTES)
    return Bundle(path, config, tensors, layers)


def save_training_state(
    run: Path,
    tensors: Tensors,
    *,
    network: NetworkSection,
    environment: EnvironmentSection,
    training: TrainingSection,
    wandb_id: str | None = None,
) -> None:
    """Write the state of a run after `training.iterations` iterations into the folder `run`.

    The tensors go to a file of their own name first and `training_state.json`, which names it, comes last: a
    crash anywhere between leaves the previous state whole. Older tensor files are then removed.
    """
    data = safetensors.numpy.save(tensors)
    name = f"training_state-{training.iterations}.safetensors"
    with atomic_file(run / name) as aside:
        aside.write_bytes(data)
    state = TrainingState(
        network=network,
        environment=environment,
        training=training,
        wandb_id=wandb_id,
        tensors=TensorFile(name=name, sha256=hashlib.sha256(data).hexdigest()),
    )
    write_text(run / STATE_FILE, state.model_dump_json(indent=2) + "\n")
    for old in run.glob("training_state-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)


def load_training_state(run: Path) -> tuple[TrainingState, Tensors]:
    """Read the state of a run.

    Raises:
        UserError: The folder or a file is missing, a field is missing, left over or wrong, the format is newer,
            or the tensor file is not the one that the state was written with.
    """
    run = Path(run)
    if not run.is_dir():
        raise UserError(f"{run}: no such run folder; a run is what 'helm-rl train base' makes under runs/")
    if not (run / STATE_FILE).is_file():
        raise UserError(f"{run}: not a training run: there is no {STATE_FILE} in it")
    state = read_document(TrainingState, run / STATE_FILE)
    return state, read_tensors(run / state.tensors.name, state.tensors.sha256)


def read_tensors(file: Path, sha256: str) -> Tensors:
    """Read a safetensors file whose sha256 is known.

    Raises:
        UserError: The file is missing, too large, not the one with this hash, not safetensors, or holds a dtype
            that we never write.
    """
    data = read_recorded(file, sha256, MAX_TENSOR_BYTES)
    try:
        entries = dict(safetensors.deserialize(data))
    except safetensors.SafetensorError as error:
        raise UserError(f"{file}: not a safetensors file: {error}") from None
    tensors: Tensors = {}
    for name, entry in entries.items():
        if entry["dtype"] not in _DTYPES:
            raise UserError(f"{file}: tensor '{name}' has dtype {entry['dtype']}; expected one of {sorted(_DTYPES)}")
        # A copy: the buffer is read-only, and views of it would keep the whole file alive.
        flat = np.frombuffer(entry["data"], dtype=_DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"]).copy()
    return tensors


def read_recorded(file: Path, sha256: str, most_bytes: int) -> bytes:
    """Read a file whose sha256 (hex) was recorded.

    Raises:
        UserError: The file is missing, larger than it could be, or not the one with this hash.
    """
    data = _read(file, most_bytes)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise UserError(f"{file}: its sha256 is {found[:12]}..., not {sha256[:12]}... as recorded: damaged or replaced")
    return data


def _read(file: Path, most_bytes: int) -> bytes:
    if not file.is_file():
        raise UserError(f"{file}: no such file; the folder is incomplete")
    size = file.stat().st_size
    if size > most_bytes:
        raise UserError(f"{file}: {size} bytes, more than the {most_bytes} that it could need")
    return file.read_bytes()


_Model = TypeVar("_Model", bound=BaseModel)


def read_document(model: type[_Model], file: Path) -> _Model:
    """Read `file` as JSON of this model; every failure is a UserError that names the file and the field."""
    content = _read(file, MAX_JSON_BYTES)
    try:
        document = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text (byte {error.start}); expected JSON") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise UserError(f"{file}: JSON, but none of ours: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(document).__name__}")
    # The version comes before the fields: a newer format may have any.
    version, newest = document.get("format_version"), model.model_fields["format_version"].default
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UserError(f"{file}: format_version: expected a number from 1 to {newest}, found {version!r}")
    if version > newest:
        raise UserError(
            f"{file}: format_version: {version} is newer than {newest}, the newest that this helm-rl reads; upgrade it"
        )
    try:
        # Strict, but in JSON mode, where a list may be a tuple: "1" is no number.
        return model.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "document"
        raise UserError(f"{file}: {field}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def _check_tensors(where: str, found: Tensors, expected: Shapes) -> None:
    """Raise UserError unless the tensors are exactly the expected ones."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise UserError(f"{where}: tensor '{missing[0]}' is missing ({len(missing)} missing in all)")
    if extra:
        raise UserError(f"{where}: tensor '{extra[0]}' does not belong there ({len(extra)} such in all)")
    for name, (dtype, shape) in expected.items():
        array = found[name]
        if array.dtype != dtype or array.shape != shape:
            raise UserError(
                f"{where}: tensor '{name}' is {array.dtype} {list(array.shape)}, "
                f"expected {np.dtype(dtype)} {list(shape)}"
            )


def _check_policy_values(where: str, tensors: Tensors) -> None:
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise UserError(f"{where}: tensor '{name}' holds values that are not finite")
    if (tensors["normaliser.var"] < 0).any():
        raise UserError(f"{where}: tensor 'normaliser.var' holds a negative variance")
