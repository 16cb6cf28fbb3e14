"""Faults of a server as its control process meets them: what each does to an answer, and what it must be counted as."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from helm_rl.runtime.counters import Cause

HUGE_BYTES = 8 << 20

Values = dict[str, str]
"""Of each sample in a text of metrics, by name and labels."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    cause: what each answer with it is to be counted as; None: it is one of targets, each of which counts as not
        applied.
    answers: how many in a row have it. Of what could be a server that began anew, one: a second would be believed.
    """

    name: str
    cause: Cause | None
    answers: int = 2


FAULTS = (
    Fault("nan", Cause.NOT_FINITE),
    Fault("infinite", Cause.NOT_FINITE),
    Fault("negative", Cause.ABSURD),
    Fault("leap", Cause.ABSURD, 1),
    Fault("backwards", Cause.BACKWARDS, 1),
    Fault("reset", Cause.BACKWARDS, 1),  # the server's counters begin anew, and stay so
    Fault("missing", Cause.MISSING),
    Fault("frozen", Cause.STALE),  # an old answer again
    Fault("garbage", Cause.MALFORMED),
    Fault("huge", Cause.MALFORMED, 1),
    Fault("cut_off", Cause.MALFORMED),
    Fault("error", Cause.UNREACHABLE),
    Fault("redirect", Cause.UNREACHABLE),
    Fault("hung_up", Cause.UNREACHABLE),
    Fault("late", Cause.LATE),
    Fault("dripping", Cause.LATE),
    Fault("target_error", None),
    Fault("target_nan", None),
    Fault("target_late", None),
)
KILL, BAD_BUNDLE, GOOD_BUNDLE = "kill", "bad_bundle", "good_bundle"
EVENTS = (BAD_BUNDLE, GOOD_BUNDLE, KILL)
"""What happens to the process itself, in the order of a cycle."""


def tampered(fault: str, values: Values) -> Values:
    """Return what a fault of the counters themselves makes of an answer."""
    changed = dict(values)

    def change(key: str, by: Callable[[float], float]) -> None:
        changed[key] = repr(by(float(values[key])))

    if fault == "nan":
        changed["helm_rl_engine_rows_total"] = "NaN"
    elif fault == "infinite":
        changed["helm_rl_engine_arrivals_total"] = "+Inf"
    elif fault == "negative":
        change("helm_rl_engine_history_tokens_total", lambda value: -1.0 - value)
    elif fault == "leap":
        change("helm_rl_engine_arrivals_total", lambda value: value + 1e15)
    elif fault == "backwards":
        change("helm_rl_engine_arrivals_total", lambda value: 0.5 * value)
    elif fault == "missing":
        del changed["helm_rl_engine_history_tokens_hit_total"]
    return changed


def beats(gap: int) -> Iterator[str | None]:
    """Yield for each answer what is to happen with it: a fault's name, an event's, or None; cycles without end.

    gap: undisturbed answers after each fault and event.
    """
    quiet: list[str | None] = [None] * gap
    while True:
        for fault in FAULTS:
            yield from itertools.chain(quiet, [fault.name] * fault.answers)
        for event in EVENTS:
            yield from itertools.chain(quiet, [event])
        yield from quiet
        yield END


END = "end"
"""The beat that ends a cycle."""
