"""A scenario fitted to a trace: a load whose generated traces come near the statistics that were measured.

They come near in rate, dispersion, exponent of the items' popularity, returns and pauses of users, and histories, which
are a lognormal or, where that is far off, follow percentiles. Items are named one for each new token. What is off by
more than 10 % is noted.

Fields that a statistic gives at once are set to it. Of the others (how long visits and pauses are, how soon users come
back, how long histories were before) a trace shows only a part, cut off at both its ends, so they are adjusted until
traces generated over the same span show what was measured. Three ways in which users may come are tried, and the
nearest one is taken: as visitors, who come for a visit of several requests and are not seen again; as regulars, of whom
some come more often than others, for one request each time; or as returners, who are all alike and come for visits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.scenario import LoadSection, Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.inspect import (
    RETURN_NS,
    clock_step_s,
    covered_ns,
    dispersion,
    gaps_to_previous,
    quantile,
    suits,
)
from helm_rl.workloads.popularity import fit_zipf
from helm_rl.workloads.trace import Trace

WINDOWS_S = (0.1, 1.0, 10.0, 60.0, 600.0)
_LEAST_REQUESTS = 200
_MOST_TRIED = 30_000  # requests of a trace generated on the way
_HISTORIES_TRIED = 10_000  # of those in which histories are looked at, each of whose requests draws more
_MOST_ITEMS = 5_000_000  # references of a generated trace
_SHOWN = 3  # traces whose mean statistics are shown
_MOST_CHANGES = 100_000  # of the rate while a trace lasts, generated on the way
_ROUNDS = 8
_AVERAGED = 4
_Z90 = 1.2815515655446004  # of the normal law
_MOST_USERS = 10**10
_MOST_RATE = 1e7
_LEAST_CV = 1e-3  # less makes no difference
_SEED = 1  # of the traces generated on the way; what is shown in the end has another
_NOTED = 0.1  # relative difference
_FAR = 0.05  # mean difference between logarithms of percentiles of histories, above which a lognormal is far off

_NAMES = {
    "rate_per_s": "rate, requests/s",
    "zipf_exponent": "Zipf exponent of items",
    "top_items_share": "share of the top 1 % of items",
    "items": "items named",
    "users": "users",
    "returning": "requests by a user seen before",
    "hot_user_ratio": "hot-user ratio (60 s)",
    "pause_p50_s": "pause until a user returns, p50, s",
    "pause_p90_s": "pause until a user returns, p90, s",
    "short_pause_p50_s": "pauses of at most 60 s, p50, s",
    "history_mean": "history, mean, tokens",
    "history_p50": "history, p50, tokens",
    "history_p90": "history, p90, tokens",
    "history_log_sd": "history, sd of its logarithm",
    "new_tokens_mean": "new tokens per request of a user seen before",
}

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """What is compared; None where the trace does not have it."""

    rate_per_s: float
    dispersion: dict[str, float]  # by window in s
    zipf_exponent: float | None
    zipf_fits: bool
    top_items_share: float | None  # of the most popular 1 % of the items named
    items: int | None  # distinct
    users: int  # distinct
    returning: float  # share of requests by a user seen before
    hot_user_ratio: float  # of the measured requests, as `summarise` has it
    pause_p50_s: float | None  # between a user's requests
    pause_p90_s: float | None
    short_pause_p50_s: float | None  # of pauses of at most 60 s
    history_mean: float
    history_p50: float
    history_p90: float
    history_log_sd: float
    history_percentiles: tuple[float, ...]  # of ranks 0 to 100 %
    new_tokens_mean: float | None  # of requests by a user seen before; of all, where there are none


@dataclass(frozen=True)
class Fit:
    """A fitted scenario, beside what was measured and what a trace generated from it has."""

    scenario: Scenario
    measured: Statistics
    generated: Statistics
    kind: str  # how users come: "visitors", "regulars", "returners" or "strangers"
    notes: tuple[str, ...]  # what could not be matched, and why


def measure(trace: Trace, step_s: float = 0.0, items: bool = True) -> Statistics:
    """Return the statistics of a trace.

    step_s: times are taken as a clock of this step would tell them, and windows that do not suit it are left out of the
    index of dispersion; items: whether to look at the items, which takes the longest.
    """
    step_ns = max(1, round(step_s * 1e9))
    gap_ns = gaps_to_previous(trace.arrival_ns // step_ns * step_ns, trace.user)
    again = gap_ns >= 0
    least_s = max(0.001, step_s / 2)  # a pause of no step is not none
    pauses = np.maximum(gap_ns[again] / 1e9, least_s)
    short = pauses[pauses <= RETURN_NS / 1e9]
    named, references = np.unique(trace.item_values if items else trace.item_values[:0], return_counts=True)
    law = fit_zipf(references)
    top = np.sort(references)[::-1][: -(-references.size // 100)]
    history = trace.history_tokens
    measured = trace.arrival_ns >= trace.meta.measure_from_ns
    windows = tuple(window for window in WINDOWS_S if suits(window, step_s))
    appended = trace.new_tokens[again] if again.any() else trace.new_tokens
    return Statistics(
        rate_per_s=len(trace) / (covered_ns(trace) / 1e9),
        dispersion=dispersion(trace, windows),
        zipf_exponent=None if law is None else law.exponent,
        zipf_fits=law is not None and law.fits,
        top_items_share=float(top.sum() / references.sum()) if references.size else None,
        items=named.size or None,
        users=int(np.unique(trace.user).size),
        returning=float(again.mean()),
        hot_user_ratio=float((again & (gap_ns <= RETURN_NS))[measured].mean()) if measured.any() else 0.0,
        pause_p50_s=quantile(pauses, 0.5) if pauses.size else None,
        pause_p90_s=quantile(pauses, 0.9) if pauses.size else None,
        short_pause_p50_s=quantile(short, 0.5) if short.size else None,
        history_mean=float(history.mean()),
        history_p50=quantile(history, 0.5),
        history_p90=quantile(history, 0.9),
        history_log_sd=round(float(np.log(np.maximum(history, 1)).std()), 9),  # rounding makes no spread of none
        history_percentiles=tuple(np.quantile(history, np.linspace(0, 1, 101), method="inverted_cdf").tolist()),
        new_tokens_mean=float(appended.mean()) if trace.new_tokens.any() else None,
    )


def fit(trace: Trace, name: str, slo_ms: float = 100.0, doing: Callable[[str], None] = lambda _: None) -> Fit:
    """Fit a scenario to a trace.

    Args:
        trace: recorded or generated; its phases are not told apart.
        name: of the scenario.
        slo_ms: of the scenario; a trace tells nothing about it.
        doing: told, in a few words, what is done next.

    Raises:
        UserError: the trace has too few requests to measure anything.
    """
    if len(trace) < _LEAST_REQUESTS:
        raise UserError(f"trace {trace.meta.name} has {len(trace)} requests; a fit needs at least {_LEAST_REQUESTS}")
    _check_span_and_users(trace)
    doing("measuring")
    step_s = clock_step_s(trace)
    measured = measure(trace, step_s)
    notes = list(_missing(trace, measured, step_s))
    warm_s = (trace.meta.measure_from_ns - trace.meta.phases[0].start_ns) / 1e9
    span_s = covered_ns(trace) / 1e9
    load: dict[str, Any] = {"rate": measured.rate_per_s, "requests_per_visit": 1.0, "users": _MOST_USERS}
    load |= _content(trace, measured, notes)
    base = Scenario(name=name, slo_ms=slo_ms, seconds=span_s - warm_s, warm_s=warm_s, load=LoadSection(**load))
    tries = _Tries(base, measured, step_s, doing)
    kind, base = tries.users(base)
    base = tries.histories(kind, base)
    try:
        base = _as_written(tries.variation(base))
        doing("generating a trace to compare")
        generated = _mean([measure(generate(base, _SEED + 1 + i), step_s) for i in range(_SHOWN)])
    except UserError as error:  # about a scenario that nobody has seen
        raise UserError(
            f"trace {trace.meta.name}, of {len(trace)} requests by {measured.users} users, cannot be fitted; what came "
            f"nearest cannot be generated: {error}"
        ) from None
    found = Fit(base, measured, generated, kind, tuple(notes))
    return replace(found, notes=(*notes, *_differences(trace, found)))


def label(name: str, measured: Statistics) -> str:
    """Return what a statistic of `distances` is, in words."""
    if name == "new_tokens_mean" and measured.returning == 0:
        return "new tokens per request"
    return _NAMES.get(name) or f"dispersion in windows of {name.removeprefix('dispersion_').removesuffix('_s')} s"


def _differences(trace: Trace, found: Fit) -> Iterator[str]:
    """Say of each statistic that is off by more than _NOTED by how much, and why; those of one cause together."""
    off: dict[str, list[str]] = {}
    for name, (_, _, difference) in distances(found).items():
        if abs(difference) > _NOTED:
            off.setdefault(_cause(name, trace, found), []).append(f"{label(name, found.measured)} ({difference:+.0%})")
    for cause, statistics in off.items():
        yield f"{'; '.join(statistics)}: {cause}"


def _cause(name: str, trace: Trace, found: Fit) -> str:
    """Say why generated traces may differ in a statistic."""
    if name == "rate_per_s":
        return "chance; the rate asked is the one measured, but the trace is short for how much it varies"
    if name.startswith("dispersion_"):
        return "a generated rate varies at random with one mean time between changes, on top of what visits do"
    if name in ("zipf_exponent", "top_items_share", "items"):
        if trace.meta.content == "blocks":
            return (
                f"the items of the trace are content blocks of {trace.meta.block_tokens} tokens, and a generated trace "
                "names an item for each new token"
            )
        if not found.measured.zipf_fits:
            return "no Zipf law fits the popularity of items, and generated items follow one"
        return "the exponent is fitted to the items named often, the number of items to all, and a law has no more"
    if name.startswith("history_"):
        law = "by percentiles" if found.scenario.load.history_quantiles else "as a lognormal"
        return f"histories before the trace are generated {law}, whoever the user is and however often he comes"
    if name == "new_tokens_mean":
        return "what requests append is bounded, from 1 token to what bounds the trace"
    if found.kind == "visitors" and "pause" in name:
        return "generated pauses within a visit follow one lognormal law"
    return f"of the ways in which users may come, as {found.kind} is the nearest, and it has no more to adjust"


def _check_span_and_users(trace: Trace) -> None:
    """Raise UserError where there is no rate, nothing measured, or nobody but one."""
    span_s = (trace.end_ns - trace.meta.phases[0].start_ns) / 1e9
    if len(trace) / span_s > _MOST_RATE:
        raise UserError(
            f"trace {trace.meta.name} has {len(trace)} requests in {span_s:g} s; a scenario's rate is at most "
            f"{_MOST_RATE:.0e}/s, so there is nothing to fit"
        )
    if trace.meta.measure_from_ns >= trace.end_ns:
        raise UserError(f"trace {trace.meta.name} is warm-up alone: its measured part begins where it ends")
    if (trace.user == trace.user[0]).all():
        raise UserError(
            f"trace {trace.meta.name} has {len(trace)} requests, all by one user; a fit needs at least 2 users to tell "
            "how they come (trace convert can give every request, or session, a user of its own)"
        )


def distances(fit: Fit) -> dict[str, tuple[float, float, float]]:
    """Return measured value, generated value and relative difference of each statistic that both have, by its name."""
    found: dict[str, tuple[float, float]] = {}
    for field in fields(Statistics):
        left, right = getattr(fit.measured, field.name), getattr(fit.generated, field.name)
        if field.name == "dispersion":
            found |= {f"dispersion_{window}_s": (left[window], right[window]) for window in left if window in right}
        elif field.name not in ("zipf_fits", "history_percentiles") and None not in (left, right):
            found[field.name] = (float(left), float(right))
    return {
        name: (left, right, (right - left) / left if left else (0.0 if right == left else math.inf))
        for name, (left, right) in found.items()
    }


def _mean(several: list[Statistics]) -> Statistics:
    """Return the mean of each statistic, over those that have it."""

    def mean(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: mean([value[key] for value in values if key in value]) for key in values[0]}
        there = [value for value in values if value is not None]
        if not there or isinstance(there[0], bool):
            return all(there) if there else None
        if isinstance(there[0], tuple):
            return tuple(np.mean(there, axis=0).tolist())
        return float(np.mean(there))

    return Statistics(
        **{field.name: mean([getattr(one, field.name) for one in several]) for field in fields(Statistics)}
    )


def _missing(trace: Trace, measured: Statistics, step_s: float) -> list[str]:
    """Say what the trace lacks, and what is therefore chosen."""
    notes = []
    if measured.items is None:
        notes.append("the trace names no item: their popularity and number are defaults, not measured")
    if measured.items is not None and measured.zipf_exponent is None:
        notes.append("too few items are named often enough to fit a law: the exponent is a default, not measured")
    if measured.zipf_exponent is not None and not measured.zipf_fits:
        notes.append("no Zipf law fits the popularity of items: the exponent is the nearest")
    if measured.returning == 0:
        notes.append("no user comes twice: the trace knows no users, or each request was given one of its own")
    if step_s > 0:
        notes.append(
            f"arrivals come in steps of {step_s:g} s: times within a step, and rates over it, are not known; pauses of "
            "less than a step are taken as half a step"
        )
    if not measured.dispersion:
        notes.append("the trace is too short to tell how the rate varies: arrivals are Poisson's")
    if len(trace.meta.phases) > 1:
        notes.append("the trace has phases: they were not told apart, so the load is a constant one with their mean")
    span_s = (trace.end_ns - trace.meta.phases[0].start_ns) / 1e9
    if span_s >= 6 * 3600:
        notes.append("the course of the rate over the day is not fitted; [load] day can be set by hand")
    return notes


def _content(trace: Trace, measured: Statistics, notes: list[str]) -> dict[str, Any]:
    """Return the fields of items and of what requests append."""
    load: dict[str, Any] = {}
    limit = int(trace.history_tokens.max())
    appended = 1.0 if measured.new_tokens_mean is None else max(1.0, measured.new_tokens_mean)
    most = max(1.0, min(10_000.0, limit, _MOST_ITEMS / len(trace)))
    if appended > most:
        notes.append(
            f"requests append {appended:,.0f} tokens in the mean: {most:,.0f} are generated, to bound the trace"
        )
        appended = most
    if measured.new_tokens_mean is None or measured.new_tokens_mean < 1:
        notes.append("requests append less than 1 token in the mean: a generated one appends at least 1")
    load["new_tokens_mean"] = appended
    load["history_max"] = max(2, min(1 << 24, limit))
    load["history_mean"] = min(max(1.0, measured.history_mean), 0.95 * load["history_max"])
    if limit > load["history_max"]:
        notes.append(f"histories of up to {limit:,} tokens are generated up to {load['history_max']:,}")
    if measured.items is not None:
        exponent = measured.zipf_exponent
        load["zipf_items"] = LoadSection.model_fields["zipf_items"].default if exponent is None else exponent
        load["items"] = catalogue(load["zipf_items"], trace.item_values.size, measured.items)
    return load


def catalogue(exponent: float, references: int, distinct: int) -> int:
    """Return how many items a Zipf law has of which `references` draws name `distinct` in the mean; by bisection."""

    def named(items: float) -> float:
        # Ranks in stretches of equal logarithm, each by its middle: exact where a stretch is one rank.
        edges = np.unique(np.rint(np.geomspace(1, items + 1, 4000)))
        width = np.diff(edges)
        rank = (edges[:-1] + edges[1:] - 1) / 2
        weight = rank**-exponent
        return float((width * -np.expm1(-references * weight / (width * weight).sum())).sum())

    low, high = math.log(max(1, distinct)), math.log(1e12)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if named(math.exp(middle)) < distinct else (low, middle)
    found = round(math.exp(high))  # at least one too many where every item is named
    return min((max(1, found - 1), found), key=lambda items: abs(named(items) - distinct))


class _Tries:
    """Adjusts a scenario until its traces have what was measured."""

    def __init__(self, base: Scenario, measured: Statistics, step_s: float, doing: Callable[[str], None]) -> None:
        self.measured = measured
        self.step_s = step_s
        self.doing = doing
        self.expected = base.load.rate * (base.seconds + base.warm_s)
        self.thinned = min(1.0, _MOST_TRIED / self.expected)

    def users(self, base: Scenario) -> tuple[str, Scenario]:
        """Return how users come, and the scenario in which they do."""
        if self.measured.returning == 0:
            return "strangers", base
        tried = [
            ("visitors", self._visitors(base)),
            ("regulars", self._regulars(base)),
            ("returners", self._returners(base)),
        ]
        kind, (_, best) = min(tried, key=lambda found: found[1][0])
        return kind, best

    def histories(self, kind: str, base: Scenario) -> Scenario:
        """Adjust the histories that users, who come in that way, have before the trace."""
        target = self.measured
        mean, sigma = target.history_mean, min(4.0, target.history_log_sd)
        limit = base.load.history_max
        best, least = base, math.inf
        # Users who come back must all be there; of visitors fewer will do.
        share = 1.0 if kind in ("regulars", "returners") else min(1.0, _HISTORIES_TRIED / self.expected)
        for round_ in range(_ROUNDS):
            self.doing(f"histories, round {round_ + 1}")
            tried = _with(base, history_mean=min(max(1.0, mean), 0.95 * limit), history_sigma=min(max(0.0, sigma), 4.0))
            try:
                found = self._measure(tried, share)
            except UserError:  # so few users that there may be no request
                break
            off = abs(math.log(found.history_mean / target.history_mean)) + abs(
                found.history_log_sd - target.history_log_sd
            )
            if off < least:
                best, least = tried, off
            mean = tried.load.history_mean * target.history_mean / found.history_mean
            sigma = tried.load.history_sigma + 0.7 * (target.history_log_sd - found.history_log_sd)
        return self._percentiles(share, best)

    def _percentiles(self, share: float, base: Scenario) -> Scenario:
        """Give users the histories before the trace that show the percentiles measured, if `base` is far from them."""
        plain = {name: LoadSection.model_fields[name].default for name in ("history_mean", "history_sigma")}
        wanted = np.array(self.measured.history_percentiles)
        percentiles, best, least = wanted, base, math.inf
        for round_ in range(1 + _ROUNDS // 2):
            tried = base  # first, as it is
            if round_ > 0:
                self.doing(f"percentiles of histories, round {round_}")
                percentiles = np.maximum.accumulate(np.clip(np.rint(percentiles), 1, base.load.history_max))
                tried = _with(base, **plain, history_quantiles=tuple(percentiles.tolist()))
            try:
                found = np.array(self._measure(tried, share).history_percentiles)
            except UserError:  # so few users that there may be no request
                break
            off = float(np.abs(np.log(np.maximum(found, 1) / np.maximum(wanted, 1))).mean())
            if round_ == 0:
                if off < _FAR:
                    break
                off *= 2  # a law of two numbers is worth that much
            else:
                percentiles = percentiles * np.maximum(wanted, 1) / np.maximum(found, 1)
            if off < least:
                best, least = tried, off
        return best

    def variation(self, base: Scenario) -> Scenario:
        """Let the rate vary so that the index of dispersion is the one measured, at each window as far as may be."""
        windows = np.array([float(window) for window in self.measured.dispersion])
        if windows.size == 0:
            return base
        target = np.array(list(self.measured.dispersion.values()))
        self.doing("variation of the rate")
        own = self._dispersion(base, windows)
        span_s = base.seconds + base.warm_s
        if (target <= 1.05 * own).all():
            return base
        best = min(
            ((_mismatch(own, target, excess, windows, hold), excess, hold) for hold in _holds(windows, span_s)
             for excess in [_excess(own, target, windows, hold)]),
        )  # fmt: skip
        _, excess, hold = best
        chosen, least = base, _off(own, target)
        for round_ in range(_ROUNDS):
            if excess <= 0:
                break
            self.doing(f"variation of the rate, round {round_ + 1}")
            cv = min(10.0, max(_LEAST_CV, math.sqrt(excess / (2 * base.load.rate * hold))))
            tried = _with(base, rate_cv=cv, rate_cv_s=hold)
            found = self._dispersion(tried, windows)
            off = _off(found, target)
            if off < least:
                chosen, least = tried, off
            share = _share(windows, hold)
            # Where the variation counts most, by the share of it that a window sees.
            gained = float((share * np.maximum(found - own, 0.05 * own)).sum())
            excess *= min(3.0, max(0.3, float((share * (target - own)).sum()) / gained))
        return chosen

    def _visitors(self, base: Scenario) -> tuple[float, Scenario]:
        target, (middle, spread) = self.measured, _pause_law(self.measured)
        per_visit = 1 / max(1e-4, 1 - target.returning)
        log_think, sigma = middle + spread**2 / 2, spread
        best, least = base, math.inf
        for round_ in range(_ROUNDS):
            self.doing(f"users as visitors, round {round_ + 1}")
            sigma = min(max(sigma, 0.01), 4.0)
            tried = _with(
                base,
                requests_per_visit=min(max(1.0, per_visit), 10_000.0),
                think_s=min(max(math.exp(log_think), 1e-3), 86_400.0),
                think_sigma=sigma,
            )
            try:
                found = self._measure(tried, self.thinned, new_tokens_mean=1.0)
            except UserError:  # visits so long that most of them would lie past the end
                break
            off = self._off_users(found)
            if off < least:
                best, least = tried, off
            if found.pause_p50_s is None:
                break
            per_visit = 1 + (tried.load.requests_per_visit - 1) * _ratio(
                _odds(target.returning), _odds(found.returning)
            )
            found_middle, found_spread = _pause_law(found)
            change = 0.7 * (spread - found_spread)
            # The mean pause, and not its logarithm's, is the field: a wider law has a larger one.
            log_think += middle - found_middle + ((sigma + change) ** 2 - sigma**2) / 2
            sigma += change
        return least, best

    def _regulars(self, base: Scenario) -> tuple[float, Scenario]:
        target = self.measured
        users, skew = float(target.users), 0.5
        best, least = base, math.inf
        for round_ in range(_ROUNDS):
            self.doing(f"users as regulars, round {round_ + 1}")
            tried = _with(
                base,
                requests_per_visit=1.0,
                users=int(min(max(2.0, users), _MOST_USERS)),
                zipf_users=min(max(0.0, skew), 3.0),
            )
            try:
                found = self._measure(tried, share=1.0, new_tokens_mean=1.0)
            except UserError:  # so few users that there may be no request
                break
            off = self._off_users(found)
            if off < least:
                best, least = tried, off
            users *= _ratio(target.users, found.users) ** 1.5
            if found.pause_p50_s is not None:
                skew += 0.3 * (_pause_law(found)[0] - _pause_law(target)[0])  # frequent users come back sooner
        return least, best

    def _returners(self, base: Scenario) -> tuple[float, Scenario]:
        target = self.measured
        if target.short_pause_p50_s is None:
            return math.inf, base
        users, per_visit = 1.2 * target.users, 1 + _odds(target.hot_user_ratio)
        think_s = target.short_pause_p50_s / math.log(2)
        best, least = base, math.inf
        for round_ in range(_ROUNDS):
            self.doing(f"users as returners, round {round_ + 1}")
            tried = _with(
                base,
                users=int(min(max(2.0, users), _MOST_USERS)),
                requests_per_visit=min(max(1.0, per_visit), 10_000.0),
                think_s=min(max(think_s, 1e-3), 86_400.0),
            )
            try:
                found = self._measure(tried, share=1.0, new_tokens_mean=1.0)
            except UserError:  # so few users that there may be no request
                break
            off = self._off_users(found)
            if off < least:
                best, least = tried, off
            users *= _ratio(target.users, found.users) ** 1.5
            odds = _ratio(_odds(target.hot_user_ratio), _odds(found.hot_user_ratio))
            per_visit = 1 + max(1e-3, tried.load.requests_per_visit - 1) * odds
            if found.short_pause_p50_s is not None:
                think_s *= _ratio(target.short_pause_p50_s, found.short_pause_p50_s)
        return least, best

    def _off_users(self, found: Statistics) -> float:
        target = self.measured
        off = abs(math.log(_ratio(_odds(found.returning), _odds(target.returning))))
        if found.pause_p50_s is None:
            return off + 10.0
        for mine, theirs in zip(_pause_law(found), _pause_law(target), strict=True):
            off += abs(mine - theirs)
        # A share of a percent more or less is no matter where there are hardly any.
        hot = (found.hot_user_ratio + 0.01) / (target.hot_user_ratio + 0.01)
        return off + abs(math.log(hot))

    def _measure(self, scenario: Scenario, share: float, **load: Any) -> Statistics:
        """Measure a trace of a share of the requests; it shows the same of visits, which do not depend on one another.

        load: other fields of its load; what a request appends matters to histories alone, so items can be few.
        """
        tried = _with(scenario, rate=scenario.load.rate * share, **load)
        return measure(generate(tried, _SEED), self.step_s, items=False)

    def _dispersion(self, scenario: Scenario, windows: FloatArray) -> FloatArray:
        """Return the mean index of dispersion over a few traces: one trace has few of the longest windows."""
        tried = _with(scenario, new_tokens_mean=1.0)
        found = [dispersion(generate(tried, _SEED + i), tuple(windows.tolist())) for i in range(_AVERAGED)]
        return np.array([np.mean([one[f"{window:g}"] for one in found]) for window in windows])


def _written(value: Any) -> Any:
    """Return a value of a scenario with the digits that its file has: 6 of a fraction, all of a large number."""
    return float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e5 else value


def _as_written(scenario: Scenario) -> Scenario:
    """Return the scenario that its file will be read as, so that it is this one that is compared."""
    load = {name: _written(value) for name, value in scenario.load.model_dump().items()}
    if not scenario.load.history_quantiles and load["history_mean"] > 0.95 * scenario.load.history_max:  # rounded up
        load["history_mean"] = _written(scenario.load.history_mean * (1 - 1e-5))
    times = {"seconds": _written(scenario.seconds), "warm_s": _written(scenario.warm_s)}
    return _with(scenario, **load).model_copy(update=times)


def _with(scenario: Scenario, **load: Any) -> Scenario:
    changed = LoadSection.model_validate(scenario.load.model_dump() | load)
    return scenario.model_copy(update={"load": changed})


def _pause_law(found: Statistics) -> tuple[float, float]:
    """Return mean and standard deviation of the logarithm of the lognormal law that has the quantiles of the pauses."""
    assert found.pause_p50_s is not None
    assert found.pause_p90_s is not None
    middle = math.log(found.pause_p50_s)
    return middle, max(0.01, (math.log(found.pause_p90_s) - middle) / _Z90)


def _odds(share: float) -> float:
    return share / max(1e-6, 1 - share)


def _ratio(above: float, below: float) -> float:
    return min(10.0, max(0.1, above / max(1e-9, below)))


def _holds(windows: FloatArray, span_s: float) -> list[float]:
    """Return times for which a rate may hold: windows tell them apart, and changes can be generated."""
    least = max(windows[0] / 4, span_s / _MOST_CHANGES)
    return np.geomspace(least, max(least, windows[-1] * 4), 24).tolist()


def _share(windows: FloatArray, hold: float) -> FloatArray:
    """Return how much of a rate's variation the windows see: 1 for those far longer than it holds."""
    return 1 - hold / windows * -np.expm1(-windows / hold)


def _excess(own: FloatArray, target: FloatArray, windows: FloatArray, hold: float) -> float:
    """Return the dispersion that the variation should add to very long windows: least squares of the relative error."""
    share = _share(windows, hold)
    return max(0.0, float((share * (target - own) / target**2).sum() / (share**2 / target**2).sum()))


def _mismatch(own: FloatArray, target: FloatArray, excess: float, windows: FloatArray, hold: float) -> float:
    return _off(own + excess * _share(windows, hold), target)


def _off(found: FloatArray, target: FloatArray) -> float:
    return float(np.abs(np.log(found / target)).sum())
