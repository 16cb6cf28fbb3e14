"""Small scenarios and hand-made traces: a pool of 256 pages, a few seconds of load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import Trace, TraceMeta, TracePhase

SMALL: dict[str, Any] = {
    "name": "small",
    "slo_ms": 100,
    "seconds": 20,
    "warm_s": 4,
    "seed": 1,
    "model": {"features_per_token": 4, "candidates": 64},
    "hardware": {"pool_gib": 0.5, "link_gb_s": 0.1},
    "control": {"interval_s": 0.5, "migrate_pages_per_s": 200},
    "load": {
        "rate": 60,
        "requests_per_visit": 3,
        "think_s": 1.0,
        "users": 400,
        "items": 20_000_000,
        "history_mean": 300,
        "history_max": 1024,
    },
}

# The same number of pages, with a quarter of the rows to fill at every start.
QUICK = {"hardware__pool_gib": 1 / 16, "hardware__page_kib": 256}


def scenario(**changes: Any) -> Scenario:
    """Return the small scenario with `section__field=value` put in place."""
    fields = {name: dict(value) if isinstance(value, dict) else value for name, value in SMALL.items()}
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            fields.setdefault(section, {})[field] = value
        else:
            fields[section] = value
    return Scenario.model_validate(fields)


def trace(
    arrival_ms: Sequence[float],
    user: Sequence[int] | None = None,
    history: Sequence[int] | int = 100,
    new: Sequence[int] | int = 1,
    *,
    items: Sequence[int] | None = None,
    phase: Sequence[int] | None = None,
    tenant: Sequence[int] | None = None,
    hot: Sequence[tuple[float, int]] = ((0.0, 0),),
    measure_from_ms: float = 0.0,
    catalogue: int = 20_000_000,
    **meta: Any,
) -> Trace:
    """Return a trace with these columns; `hot` has (hot_fraction, hot_items) of each phase.

    Users default to a new one for each request. `items` is item_values, of codes below `catalogue`; by
    default code 0 throughout.
    """
    n = len(arrival_ms)
    users = np.arange(n) if user is None else np.array(user)
    tokens = np.broadcast_to(np.array(history, np.int32), n).copy()
    fresh = np.broadcast_to(np.array(new, np.int32), n).copy()
    content = meta.setdefault("content", "law")
    per_request = -(-tokens.astype(np.int64) // meta["block_tokens"]) if content == "blocks" else fresh
    offsets = np.concatenate([[0], np.cumsum(per_request)]).astype(np.int64)
    if content == "law":
        meta.setdefault("zipf_items", 1.05)
        meta.setdefault("law_items", catalogue)
    end_ns = round(max(arrival_ms, default=0) * 1e6) + 10_000_000_000
    start_ns = min(0, round(min(arrival_ms, default=0) * 1e6))
    made = Trace(
        arrival_ns=np.rint(np.array(arrival_ms) * 1e6).astype(np.int64),
        user=users.astype(np.int64),
        tenant=np.zeros(n, np.int32) if tenant is None else np.array(tenant, np.int32),
        phase=np.zeros(n, np.int32) if phase is None else np.array(phase, np.int32),
        history_tokens=tokens,
        new_tokens=fresh,
        item_offsets=offsets,
        item_values=np.zeros(offsets[-1], np.int64) if items is None else np.array(items, np.int64),
        meta=TraceMeta(
            **{
                "name": "made",
                "source": "test",
                "origin_ns": 0,
                "measure_from_ns": round(measure_from_ms * 1e6),
                "users": int(users.max(initial=0)) + 1,
                "items": catalogue,
                "phases": tuple(
                    TracePhase(label=f"phase {k}", start_ns=start_ns, end_ns=end_ns, hot_fraction=f, hot_items=m)
                    for k, (f, m) in enumerate(hot)
                ),
                **meta,
            }
        ),
    )
    if n:
        made.validate()
    return made
