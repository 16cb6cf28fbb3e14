"""A trace of two: when requests come is that of one, who asks for what is that of the other, both in their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.workloads.trace import BASE, ROW_GROUP, Trace, TraceMeta, TracePhase, TraceWriter


@dataclass
class _Stream:
    """The requests of a trace file, taken a few at a time."""

    parts: Iterator[Trace]
    part: Trace | None = None
    at: int = 0

    def ready(self) -> int:
        """Return how many requests of the part at hand are left, 0 at the end."""
        while self.part is None or self.at == len(self.part):
            self.part, self.at = next(self.parts, None), 0
            if self.part is None:
                return 0
        return len(self.part) - self.at


def join(arrivals: Path, contents: Path, target: Path, warm_s: float | None, strict: bool) -> tuple[TraceMeta, int]:
    """Write to `target` the k-th request of `contents` at the k-th arrival of `arrivals`, while both last.

    strict: both must last equally long.

    Memory: the dictionaries of `contents`, and a row group of each. Returns the meta data and how many requests. Raises
    UserError as Trace.slices does, if warm_s leaves nothing to measure, and where a strict join would leave some out.
    """
    when, who = _Stream(Trace.slices(arrivals, ROW_GROUP)), _Stream(Trace.slices(contents, ROW_GROUP))
    first, second = Trace.read_meta(arrivals), Trace.read_meta(contents)
    total = min(first[1], second[1])
    if strict and first[1] != second[1]:
        longer, what = (first, "arrivals") if first[1] > second[1] else (second, "requests")
        raise UserError(
            f"{longer[0].name} has {longer[1] - total} {what} beyond the end of the other log, which has {total}"
        )
    count = latest_ns = 0
    with TraceWriter(target, Trace.read_tables(contents)) as writer:
        while (n := min(when.ready(), who.ready())) > 0:
            assert when.part is not None
            assert who.part is not None
            here, there = slice(when.at, when.at + n), slice(who.at, who.at + n)
            arrival_ns = when.part.arrival_ns[here]
            columns: dict[str, npt.NDArray[Any]] = {
                "arrival_ns": arrival_ns,
                "user": who.part.user[there],
                "tenant": who.part.tenant[there],
                "phase": np.zeros(n, dtype=np.int32),
                "history_tokens": who.part.history_tokens[there],
                "new_tokens": who.part.new_tokens[there],
            }
            offsets = who.part.item_offsets[there.start : there.stop + 1]
            values = who.part.item_values[int(offsets[0]) : int(offsets[-1])]
            when.at, who.at = here.stop, there.stop
            count, latest_ns = count + n, int(arrival_ns[-1])
            writer.append(columns, offsets - offsets[0], values, done=count / total)
        meta = _meta(first, second, count, latest_ns, warm_s)
        writer.finish(meta)
    return meta, count


def _meta(
    first: tuple[TraceMeta, int], second: tuple[TraceMeta, int], count: int, latest_ns: int, warm_s: float | None
) -> TraceMeta:
    when, who = first[0], second[0]
    end_ns = latest_ns + 1
    from_ns = min(60_000_000_000, end_ns // 10) if warm_s is None else round(warm_s * 1e9)
    if from_ns >= end_ns:
        raise UserError(f"warm-s = {warm_s or 0:g} leaves nothing to measure of a trace of {end_ns / 1e9:g} s")
    dropped = {f"{meta.name}: {cause}": rows for meta in (when, who) for cause, rows in meta.dropped.items()}
    for (meta, requests), what in ((first, "arrivals"), (second, "requests")):
        if requests > count:
            dropped[f"{meta.name}: {what} beyond the end of the other log"] = requests - count
    steps = [
        f"arrivals of {when.name} ({when.source}), users and items of {who.name} ({who.source}), both in their order",
        *(f"{meta.name}: {step}" for meta in (when, who) for step in meta.steps),
    ]
    return who.model_copy(
        update={
            "name": f"{when.name}+{who.name}",
            "source": f"{when.source}+{who.source}",
            "origin_ns": when.origin_ns,
            "measure_from_ns": from_ns,
            "phases": (TracePhase(label=BASE, start_ns=0, end_ns=end_ns),),
            "seed": when.seed if who.seed is None else who.seed,
            "steps": tuple(steps),
            "dropped": dropped,
        }
    )
