"""`runs.json` of a suite: every controller on every draw, for machines and for `helm-rl eval compare`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eval.suite.summary import Summary
from helm_rl import __version__
from helm_rl.errors import UserError
from helm_rl.files import write_text
from helm_rl.scenario import scenario_hash

RUNS = "runs.json"
MEASURES = ("p99_ms", "p50_ms", "windowed_p99_ms", "slo", "throughput", "ratio_gap", "flat_gap", "regret")
MOST_BYTES = 64 << 20

_Value = Annotated[float, Field(allow_inf_nan=False)] | None


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Measured(_Part):
    """A controller in a cell: its title, and a value for each draw of each of MEASURES (null: there is none)."""

    title: str
    identity: str
    values: dict[str, tuple[_Value, ...]]


class Cell(_Part):
    """A cell: the hash of its scenario, those of its draws' traces, and its controllers."""

    scenario: str
    slo_ms: Annotated[float, Field(gt=0)]
    traces: Annotated[tuple[str, ...], Field(min_length=1)]
    controllers: dict[str, Measured]

    @model_validator(mode="after")
    def _agree(self) -> Cell:
        for key, measured in self.controllers.items():
            if set(measured.values) != set(MEASURES):
                raise ValueError(f"{key} has the values {', '.join(measured.values)}, not {', '.join(MEASURES)}")
            if any(len(values) != len(self.traces) for values in measured.values.values()):
                raise ValueError(f"{key} has not a value for each of the {len(self.traces)} traces")
            if any(value is not None and value <= 0 for value in measured.values["p99_ms"]):
                raise ValueError(f"{key} has a p99_ms that is no latency")
        return self


class Runs(_Part):
    """All cells of a suite, by name."""

    helm_rl: str
    cells: Annotated[dict[str, Cell], Field(min_length=1)]


@dataclass(frozen=True)
class Read:
    """A suite that was read, and the folder it lies in."""

    folder: Path
    runs: Runs


def write_runs(path: Path, summary: Summary) -> None:
    """Write every controller on every draw."""
    cells = {}
    for cell in summary.cells:
        comparison = cell.comparison
        controllers = {}
        for row in comparison.rows:
            values = {name: comparison.estimate(row.key, name).per_seed for name in MEASURES}
            finite = {name: tuple(v if math.isfinite(v) else None for v in found) for name, found in values.items()}
            controllers[row.key] = Measured(title=row.title, identity=getattr(row, "identity", ""), values=finite)
        cells[cell.name] = Cell(
            scenario=scenario_hash(cell.cell.scenario),
            slo_ms=cell.cell.scenario.slo_ms,
            traces=tuple(result.trace_hash for result in comparison.results),
            controllers=controllers,
        )
    write_text(path, Runs(helm_rl=__version__, cells=cells).model_dump_json(indent=1) + "\n")


def read_runs(folder: Path) -> Read:
    """Read a suite's runs; UserError, which names the field, if the folder has none."""
    path = folder / RUNS
    if not path.is_file():
        raise UserError(f"{folder}: there is no {RUNS} in it; name the output folder of a finished helm-rl eval suite")
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise UserError(f"{path}: holds {size} bytes, too many for the runs of a suite")
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is no JSON; name the output folder of helm-rl eval suite") from None
    try:
        return Read(folder, Runs.model_validate_json(text, strict=True))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "document"
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: {field}: {message[0].lower()}{message[1:]}") from None
