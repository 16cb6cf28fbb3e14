"""A hardware profile in a TOML file, as `helm-rl calibrate hardware` writes it."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helm_rl.errors import UserError
from helm_rl.files import write_text
from helm_rl.profiles.hardware import HardwareProfile
from helm_rl.toml_file import line_of, read_toml

_Speed = Annotated[float, Field(gt=0, le=1e6)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Cost = Annotated[float, Field(ge=0, le=1e6)]


class _Document(BaseModel):
    """The fields of `HardwareProfile`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    peak_tflop_s: _Speed
    linear_efficiency: _Share
    pair_efficiency: _Share
    batch_ms: _Cost
    request_ms: _Cost
    local_gb_s: _Speed
    pcie_gb_s: _Speed
    onboard_ms: _Cost
    hbm_gib: _Speed
    source: Annotated[str, Field(max_length=10_000)]
    extrapolated: list[str] = []


def save_hardware(path: Path, profile: HardwareProfile) -> None:
    """Write a profile, whole or not at all."""
    lines = [f"{name} = {_toml(value)}" for name, value in dataclasses.asdict(profile).items()]
    write_text(path, "\n".join(lines) + "\n")


def _toml(value: object) -> str:
    """Return a number, text or list of text as TOML, which reads JSON as the same, but for what JSON escapes in two
    halves (characters past 16 bits, as in the name of a file) and for DEL.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def load_hardware(path: Path) -> HardwareProfile:
    """Read a profile.

    Raises:
        UserError: the file is missing or none such, or a field is missing, left over or out of its range.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; a hardware profile is what 'helm-rl calibrate hardware' writes")
    return _load(path, path.stat().st_mtime_ns)


@functools.lru_cache(64)
def _load(path: Path, mtime_ns: int) -> HardwareProfile:
    text, document = read_toml(path, "a hardware profile", "peak_tflop_s")
    try:
        found = _Document.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        line = line_of(text, first["loc"])
        field = ".".join(map(str, first["loc"]))
        where = f"{path}, line {line}" if line else f"{path}"
        raise UserError(f"{where}: {field}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
    return HardwareProfile(**{**found.model_dump(), "extrapolated": tuple(found.extrapolated)})
