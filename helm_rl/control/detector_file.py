"""The file of a calibrated burst detector: its settings, the recovery rule fitted with them, and their origin."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from helm_rl import __version__
from helm_rl.checkpoint import Section, read_document
from helm_rl.control.burst import BurstSettings
from helm_rl.control.recovery import RecoveryRule
from helm_rl.errors import UserError
from helm_rl.files import write_text


class _Settings(Section):
    tick_s: float
    factor: float
    threshold: float
    memory_s: float
    p99_sigmas: float
    p99_memory_s: float
    least_s: float
    calm_s: float
    p99_hold_s: float
    normal_after_s: float


class _Rule(Section):
    alpha_cold: float
    alpha_hot: float


class Origin(Section):
    """What a detector was calibrated on.

    scenario: its name, and the sha256 (hex) of its fields; false_alarm_s: the mean time between false alarms that was
    asked for; measured: what was measured, by the names of the figures.
    """

    scenario: str
    scenario_hash: str
    false_alarm_s: float = Field(gt=0)
    measured: dict[str, float]
    helm_rl_version: str = __version__


class _Document(Section):
    format_version: Literal[1] = 1
    kind: Literal["burst_detector"] = "burst_detector"
    settings: _Settings
    rule: _Rule | None = None
    origin: Origin


@dataclass(frozen=True)
class Detector:
    """A calibrated detector. rule: None where none was fitted."""

    settings: BurstSettings
    rule: RecoveryRule | None
    origin: Origin


def save_detector(path: Path, detector: Detector) -> None:
    """Write a detector as JSON, whole or not at all."""
    rule = None if detector.rule is None else _Rule(**dataclasses.asdict(detector.rule))
    settings = _Settings(**dataclasses.asdict(detector.settings))
    document = _Document(settings=settings, rule=rule, origin=detector.origin)
    write_text(path, document.model_dump_json(indent=2) + "\n")


def load_detector(path: Path) -> Detector:
    """Read what `save_detector` wrote.

    Raises:
        UserError: the file is missing or not such a one, the format is newer, or a field is missing, left over or out
            of its range.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; a burst detector is what 'helm-rl train burst' writes")
    document = read_document(_Document, path)
    try:
        settings = BurstSettings(**document.settings.model_dump())
        rule = None if document.rule is None else RecoveryRule(**document.rule.model_dump())
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return Detector(settings, rule, document.origin)
