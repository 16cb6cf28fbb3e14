"""The file of what a residual adapter has learnt: network, what its guard has seen, and which policy it belongs to."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from helm_rl import __version__
from helm_rl.checkpoint import Section, read_document
from helm_rl.control.guard import FEATURES, ExpectedState, GuardSettings, GuardState
from helm_rl.control.residual import Learnt, ResidualSettings
from helm_rl.errors import UserError
from helm_rl.files import write_text
from helm_rl.observation import SIZE

_Count = Annotated[int, Field(ge=0, lt=2**31)]


class ResidualOrigin(Section):
    """Where an adapter learnt.

    policy_sha256: of the base policy's weights, as its bundle has it; scenario: name, and the sha256 (hex) of its
    fields; intervals: for how many it learnt; measured: what was measured, by the names of the figures.
    """

    policy_sha256: str
    scenario: str
    scenario_hash: str
    intervals: _Count
    measured: dict[str, float]
    helm_rl_version: str = __version__


class _Settings(Section):
    bound: float
    stride: float
    pace: float
    hidden: int
    learning_rate: float
    rate_gain: float
    pull: float


class _GuardSettings(Section):
    sample_s: float
    block_s: float
    settle_s: float
    agree: float
    patience: int
    harm: float
    widen: int
    rest_s: float
    memory: int


class _Expected(Section):
    weights: list[float]
    inverse: list[list[float]]
    seen: _Count


class _Guard(Section):
    claimed: list[float]
    observed: list[float]
    acting: list[tuple[float, float]]
    control: list[tuple[float, float]]
    cost: _Expected
    p99: _Expected
    reach: int = Field(ge=1, le=1_000)
    since: _Count
    samples: _Count
    tripped: _Count
    left: _Count


class _Document(Section):
    format_version: Literal[2] = 2
    kind: Literal["residual_adapter"] = "residual_adapter"
    settings: _Settings
    guard_settings: _GuardSettings
    weights: list[list[list[float]]]
    biases: list[list[float]]
    guard: _Guard
    origin: ResidualOrigin


@dataclass(frozen=True)
class SavedResidual:
    """What an adapter has learnt, and where."""

    learnt: Learnt
    origin: ResidualOrigin


def save_residual(path: Path, saved: SavedResidual) -> None:
    """Write what an adapter has learnt as JSON, whole or not at all; floats come back bit for bit."""
    fields = dataclasses.asdict(saved.learnt)
    document = _Document.model_validate({**fields, "origin": saved.origin})
    write_text(path, document.model_dump_json() + "\n")


def load_residual(path: Path, policy_sha256: str) -> SavedResidual:
    """Read what `save_residual` wrote.

    Args:
        path: the file.
        policy_sha256: of the weights of the base policy that the adapter is to sit on.

    Raises:
        UserError: the file is missing or not such a one, the format is newer, a field is missing, left over, of
            another size or out of its range, or the adapter learnt above another policy.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; a residual adapter is what 'helm-rl train residual --output' writes")
    document = read_document(_Document, path)
    try:
        settings = ResidualSettings(**document.settings.model_dump())
        guard_settings = GuardSettings(**document.guard_settings.model_dump())
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    learnt_above = document.origin.policy_sha256
    if learnt_above != policy_sha256:
        raise UserError(
            f"{path}: learnt above the policy {learnt_above[:12]}..., and this one is {policy_sha256[:12]}...; let it "
            "learn above this one with: helm-rl train residual"
        )
    widths = (SIZE + 1, settings.hidden, settings.hidden, 1)
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        weight = document.weights[number] if number < len(document.weights) else []
        bias = document.biases[number] if number < len(document.biases) else []
        if len(weight) != inputs or any(len(row) != outputs for row in weight) or len(bias) != outputs:
            raise UserError(f"{path}: layer {number} of the network has not {inputs} inputs and {outputs} outputs")
    if len(document.weights) != len(widths) - 1 or len(document.biases) != len(widths) - 1:
        raise UserError(f"{path}: weights, biases: expected {len(widths) - 1} layers")
    guard = document.guard
    for name, one in (("cost", guard.cost), ("p99", guard.p99)):
        rows = [one.weights, *one.inverse]
        if len(rows) != FEATURES + 1 or any(len(row) != FEATURES for row in rows):
            raise UserError(f"{path}: guard.{name}: expected weights and an inverse of {FEATURES} features")
    if len(guard.claimed) != len(guard.observed):
        raise UserError(f"{path}: guard: claimed and observed are of one length in what an adapter writes")
    fields = guard.model_dump()
    state = GuardState(**{**fields, "cost": ExpectedState(**fields["cost"]), "p99": ExpectedState(**fields["p99"])})
    learnt = Learnt(settings, guard_settings, document.weights, document.biases, state)
    return SavedResidual(learnt, document.origin)
