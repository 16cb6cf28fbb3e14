"""What is stored of a suite: results as plain JSON, their fields and bounds checked when they are read."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import fields
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eval.reference import PROGRAMMED, Reference
from eval.results import Row
from eval.segments import Measured, Run, Span
from eval.statistics import Floats
from eval.sweep import Sweep, curves_of
from helm_rl.control.schedule import ScheduledAlpha
from helm_rl.errors import UserError

MOST_VALUES = 1 << 20
"""Of a stored array: 11 days of intervals."""

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Ms = Annotated[float, Field(ge=0, le=1e9)]
_P99Ms = Annotated[float, Field(gt=0, le=1e9)]
"""Ratios and logarithms are taken of it."""
_Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_Time = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def packed(values: npt.ArrayLike) -> str:
    """Return numbers as text: float64, deflated, in base64."""
    return base64.b64encode(zlib.compress(np.asarray(values, dtype="<f8").tobytes(), 6)).decode("ascii")


def unpacked(text: str) -> Floats:
    """Return the numbers that `packed` made text of; ValueError if it did not."""
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(base64.b64decode(text, validate=True), 8 * MOST_VALUES)
    except zlib.error as error:
        raise ValueError(f"no packed numbers: {error}") from None
    if inflate.unconsumed_tail or not inflate.eof or len(data) % 8:
        raise ValueError(f"no packed numbers, or more than {MOST_VALUES}")
    return np.frombuffer(data, dtype="<f8").astype(np.float64)


class RunRecord(_Part):
    """A `Run` without its survival curve, which no summary reads; arrays are packed."""

    p99_ms: _P99Ms
    p50_ms: _Ms
    windowed_p99_ms: _Ms
    slo: _Share
    throughput_per_s: _Ms
    shed: _Count
    opening_p99_ms: _Ms | None
    onset_p99_ms: _Ms | None
    decide_us: _Ms | None
    segment_p99_ms: str
    transition_p99_ms: str
    settled_p99_ms: str
    time_s: str
    alpha: str
    target: str
    window_s: str
    window_p99_ms: str

    @staticmethod
    def of(run: Run) -> RunRecord:
        """Return the record of a run."""
        found: dict[str, Any] = {}
        for name in RunRecord.model_fields:
            value = getattr(run, name)
            if isinstance(value, np.ndarray):
                found[name] = packed(value)
            elif isinstance(value, int):
                found[name] = value
            else:
                found[name] = float(value) if np.isfinite(value) else None
        return RunRecord(**found)

    def run(self) -> Run:
        """Return the run; ValueError if its arrays do not go together."""
        values: dict[str, Any] = {}
        for field in fields(Run):
            value = getattr(self, field.name, np.empty(0))
            values[field.name] = unpacked(value) if isinstance(value, str) else float("nan") if value is None else value
        run = Run(**values)
        segments = {run.segment_p99_ms.size, run.transition_p99_ms.size, run.settled_p99_ms.size}
        paths = {run.time_s.size, run.alpha.size, run.target.size}
        if len(segments) > 1 or len(paths) > 1 or run.window_s.size != run.window_p99_ms.size:
            raise ValueError("arrays of one run differ in length")
        return run


class ReferenceRecord(_Part):
    """The best schedule known of one draw."""

    times_ns: Annotated[tuple[_Time, ...], Field(min_length=1)]
    alphas: tuple[_Share, ...]
    alpha0: _Share
    winner: str
    replays: _Ms
    piece_s: _Ms
    run: RunRecord

    @staticmethod
    def of(found: Reference) -> ReferenceRecord:
        """Return the record of a reference."""
        return ReferenceRecord(
            times_ns=tuple(found.schedule.times_ns.tolist()),
            alphas=tuple(found.schedule.alphas.tolist()),
            alpha0=found.alpha0,
            winner=found.winner,
            replays=found.replays,
            piece_s=found.piece_s,
            run=RunRecord.of(found.run),
        )

    def reference(self) -> Reference:
        """Return the reference."""
        run = self.run.run()
        schedule = ScheduledAlpha(list(self.times_ns), list(self.alphas))
        programmed = run if self.winner == PROGRAMMED else None
        return Reference(schedule, self.alpha0, run, self.winner, programmed, (), self.replays, self.piece_s)


class StaticsRecord(_Part):
    """All statics of one draw, the per-segment optimum, and the best of both (known); alphas: of the statics."""

    trace_hash: _Hash
    first: _Count
    opening: _Count
    requests: _Count
    start_ns: _Time
    end_ns: _Time
    sparse: _Count
    spans: Annotated[tuple[tuple[str, _Time, _Time, _Count, _Count, _Count], ...], Field(min_length=1)]
    alphas: Annotated[tuple[_Share, ...], Field(min_length=1)]
    runs: tuple[RunRecord, ...]
    optimum: RunRecord
    known: ReferenceRecord
    step: Annotated[float, Field(ge=0.005, le=0.2)]

    @staticmethod
    def of(trace_hash: str, swept: Sweep, optimum: Run, known: Reference, step: float) -> StaticsRecord:
        """Return the record of a sweep, and of what `best_known` makes of it."""
        part = swept.part
        return StaticsRecord(
            trace_hash=trace_hash,
            first=part.first,
            opening=part.opening,
            requests=part.requests,
            start_ns=part.start_ns,
            end_ns=part.end_ns,
            sparse=part.sparse,
            spans=tuple(
                (span.label, span.start_ns, span.end_ns, span.first, span.middle, span.last) for span in part.spans
            ),
            alphas=tuple(swept.runs),
            runs=tuple(RunRecord.of(run) for run in swept.runs.values()),
            optimum=RunRecord.of(optimum),
            known=ReferenceRecord.of(known),
            step=step,
        )

    def sweep(self) -> Sweep:
        """Return the sweep; ValueError if its runs and alphas do not go together."""
        spans = tuple(Span(*span) for span in self.spans)
        part = Measured(self.first, self.opening, self.requests, self.start_ns, self.end_ns, spans, self.sparse)
        runs = {alpha: record.run() for alpha, record in zip(self.alphas, self.runs, strict=True)}
        if list(runs) != sorted(self.alphas) or any(run.settled_p99_ms.size != len(spans) for run in runs.values()):
            raise ValueError("statics and their alphas, or segments, do not go together")
        for run in runs.values():
            if not all(0 < value_ms < np.inf for value_ms in (run.opening_p99_ms, *run.settled_p99_ms)):
                raise ValueError("a static's P99 of the opening or of a segment is no latency")
        return curves_of(part, runs, self.step)


class AlphaRecord(_Part):
    """A static that was chosen on arrivals that are not evaluated, and its P99 there."""

    alpha: _Share
    p99_ms: _Ms


class RegimesRecord(_Part):
    """What a rule for two regimes needs, as eval.routing.Alphas."""

    whole: _Share
    cold: _Share
    hot: _Share
    threshold: _Share


class PaceRecord(_Part):
    """The multiple of a load at which the best static is as near its limit as in the other families."""

    multiple: Annotated[float, Field(gt=0, le=1e3)]


class CapacityRecord(_Part):
    """A capacity; above: None where no load that was tried breaks the SLO."""

    multiple: _Ms
    above: _Ms | None
    tried: tuple[tuple[_Finite, _Ms | None], ...]


class ServedRecord(_Part):
    """What one replay on a cluster measured."""

    p99_ms: _P99Ms
    p50_ms: _Ms
    slo: _Share
    throughput_per_s: _Ms
    shed: _Share
    imbalance: _Ms | None
    burst_p99_ms: tuple[_Ms, ...]


Kind = Literal["alpha", "regimes", "pace", "statics", "reference", "run", "capacity", "served"]
RECORDS: dict[Kind, type[_Part]] = {
    "alpha": AlphaRecord,
    "regimes": RegimesRecord,
    "pace": PaceRecord,
    "statics": StaticsRecord,
    "reference": ReferenceRecord,
    "run": RunRecord,
    "capacity": CapacityRecord,
    "served": ServedRecord,
}


class _Envelope(_Part):
    key: Annotated[str, Field(min_length=1, max_length=500)]
    seed: Annotated[int, Field(ge=0, lt=1 << 53)]
    kind: Kind
    hash: _Hash
    settings: dict[str, Any]
    result: dict[str, Any]
    cpu_s: Annotated[float, Field(ge=0)]


def check_row(line: bytes) -> Row:
    """Return the row that a line holds; ValueError, which names the field, if it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    if not isinstance(row, dict):
        raise ValueError("no table")
    try:
        envelope = _Envelope.model_validate(row, strict=True)
        record = record_of(row)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = "".join(f"{part}: " for part in [".".join(map(str, first["loc"]))] if part)
        raise ValueError(f"{field}{first['msg'][0].lower()}{first['msg'][1:]}") from None
    if isinstance(record, RunRecord):
        record.run()
    elif isinstance(record, ReferenceRecord):
        _check_reference(record)
    elif isinstance(record, StaticsRecord):
        record.sweep()
        record.optimum.run()
        _check_reference(record.known)
    return envelope.model_dump()


def _check_reference(record: ReferenceRecord) -> None:
    try:
        record.reference()
    except UserError as error:  # its schedule
        raise ValueError(str(error)) from None


def record_of(row: Row) -> _Part:
    """Return the record in a row."""
    # In JSON mode, where a list may be a tuple.
    return RECORDS[row["kind"]].model_validate_json(json.dumps(row["result"]), strict=True)
