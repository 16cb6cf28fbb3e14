from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.suite.records import RunRecord, check_row, packed, record_of, unpacked
from eval.suite.suite import Suite


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50))
def test_packed_numbers_are_the_same_again(values: list[float]) -> None:
    np.testing.assert_array_equal(unpacked(packed(values)), np.array(values, np.float64))


@pytest.mark.parametrize(
    "text",
    [
        "%",
        "AAAA",
        base64.b64encode(zlib.compress(b"1234567")).decode(),
        base64.b64encode(zlib.compress(bytes(8 * ((1 << 20) + 1)))).decode(),
        base64.b64encode(zlib.compress(bytes(80))[:-6]).decode(),
    ],
)
def test_what_holds_no_numbers_or_too_many_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (base64 has words of its own)
        unpacked(text)


def test_a_stored_run_is_the_run(suite: Suite) -> None:
    cell = suite.cells[2]
    swept = suite.sweep(cell, 1)
    run = swept.runs[0.5]
    again = RunRecord.of(run).run()
    assert again.p99_ms == run.p99_ms
    np.testing.assert_array_equal(again.alpha, run.alpha)
    np.testing.assert_array_equal(again.settled_p99_ms, run.settled_p99_ms)
    assert np.isfinite(again.onset_p99_ms)
    assert np.isnan(RunRecord.of(suite.sweep(suite.cells[0], 1).runs[0.5]).run().onset_p99_ms)  # Steady has no bursts


def changed(row: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps(row | {"result": row["result"] | fields}).encode()


def test_what_no_run_has_written_is_named(suite: Suite) -> None:
    rows = {row["kind"]: row for row in suite.store.rows.values()}
    for row in rows.values():
        assert check_row(json.dumps(row).encode()) == row
        assert type(record_of(row)).__name__.lower().startswith(row["kind"][:3])
    run, statics, capacity = rows["run"], rows["statics"], rows["capacity"]
    for line, said in (
        (b"garbage", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no table"),
        (json.dumps(run | {"kind": "walk"}).encode(), "kind: input should be"),
        (json.dumps(run | {"hash": "12"}).encode(), "hash: string should match"),
        (json.dumps(run | {"colour": 1}).encode(), "colour: extra inputs"),
        (changed(run, p99_ms="12"), "p99_ms: input should be a valid number"),
        (changed(run, slo=1.5), "slo: input should be less than or equal to 1"),
        (changed(run, p99_ms=0), "p99_ms: input should be greater than 0"),
        (changed(run, p99_ms=None), "p99_ms: input should be a valid number"),
        (changed(run, alpha=packed([0.5])), "arrays of one run differ in length"),
        (changed(run, alpha="!"), "base64"),
        (changed(statics, alphas=[0.1]), "shorter|longer"),
        (changed(statics, spans=[]), "spans: tuple should have at least 1 item"),
        (changed(statics, step=0), "step: input should be greater than"),
        (changed(capacity, tried=[[1]]), "tried.0.1: field required"),
    ):
        with pytest.raises(ValueError, match=said):
            check_row(line)


def test_references_and_optima_are_checked_when_they_are_read(suite: Suite) -> None:
    statics = next(row for row in suite.store.rows.values() if row["kind"] == "statics")
    known, optimum = statics["result"]["known"], statics["result"]["optimum"]
    times = [*known["times_ns"], known["times_ns"][-1] + 1]
    for line, said in (
        (changed(statics, known=known | {"times_ns": times}), "as many times as alphas"),
        (changed(statics, known=known | {"run": known["run"] | {"alpha": packed([0.5])}}), "arrays of one run"),
        (changed(statics, optimum=optimum | {"alpha": packed([0.5])}), "arrays of one run differ in length"),
        (json.dumps(statics | {"kind": "reference", "result": known | {"times_ns": times}}).encode(), "as many times"),
    ):
        with pytest.raises(ValueError, match=said):
            check_row(line)


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0, float("inf")])
def test_a_static_without_a_latency_is_no_static(suite: Suite, value: float) -> None:
    statics = next(row for row in suite.store.rows.values() if row["kind"] == "statics")
    first, *rest = statics["result"]["runs"]
    spans = len(statics["result"]["spans"])
    for fields in ({"settled_p99_ms": packed([value] * spans)}, {"opening_p99_ms": None}):
        with pytest.raises(ValueError, match="P99 of the opening or of a segment is no latency"):
            check_row(changed(statics, runs=[first | fields, *rest]))
