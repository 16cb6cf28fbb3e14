"""What a line of a map's results must be: fields and bounds of a setting's row, and of a cell's on one seed."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from eval.map.grid import ALPHA_MAX, ALPHA_MIN, MOST_SEEDS
from eval.results import Row

_Key = Annotated[str, Field(min_length=1)]
_Rate = Annotated[float, Field(gt=0, le=1e6)]
_Ms = Annotated[float, Field(ge=1e-6, le=1e9)]  # so that the ratio of any two is finite
_Alpha = Annotated[float, Field(ge=ALPHA_MIN, le=ALPHA_MAX)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Flat = Annotated[tuple[tuple[_Share, _Share], ...], Field(min_length=1)]
_Seconds = Annotated[float, Field(ge=-1e4, le=1e4)]
_RampSeconds = Annotated[float, Field(ge=0, le=1e4)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Static(_Part):
    alpha: _Alpha
    flat: _Flat
    p99_ms: _Ms


class _Setting(_Part):
    key: _Key
    rate: _Rate | None
    slo_ms: _Ms
    deployable: dict[str, _Static]

    @model_validator(mode="after")
    def _has_every_load(self, info: ValidationInfo) -> _Setting:
        missing = [load for load in info.context or () if load not in self.deployable]
        if self.rate is not None and missing:
            raise ValueError(f"deployable.{missing[0]} is missing")
        return self


class _Shift(_Part):
    before: _Alpha
    during: _Alpha
    after: _Alpha
    go_s: _Seconds
    go_ramp_s: _RampSeconds
    return_s: _Seconds
    return_ramp_s: _RampSeconds


class _Cell(_Part):
    key: _Key
    seed: Annotated[int, Field(ge=1, le=MOST_SEEDS)]
    rate: _Rate
    pace: Annotated[float, Field(gt=0, le=1)]
    requests: Annotated[int, Field(ge=1)]
    hindsight: _Alpha
    hindsight_ms: _Ms
    deployable: _Alpha
    deployable_ms: _Ms
    burst: _Alpha
    burst_flat: _Flat
    bound_ms: _Ms
    reference_ms: _Ms
    shift: _Shift | None
    plays: Annotated[float, Field(ge=0)]
    cpu_s: Annotated[float, Field(ge=0)]


class _LaterCell(_Cell):
    """A seed after the first, on which the shift and the static of the first were tried."""

    known_static_ms: _Ms
    known_ms: _Ms


def check_row(line: bytes, loads: Collection[str]) -> Row:
    """Return the row that a line holds; ValueError, which names the field, if it is none.

    loads: those of which a setting that is in reach must have a deployable static.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    if not isinstance(row, dict):
        raise ValueError("no table")
    model: type[_Part] = _Setting if "seed" not in row else _Cell if row["seed"] == 1 else _LaterCell
    try:
        model.model_validate_json(line, strict=True, context=loads)  # in JSON mode, where a list may be a tuple
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = "".join(f"{part}: " for part in [".".join(map(str, first["loc"]))] if part)
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{field}{message[0].lower()}{message[1:]}") from None
    return row
