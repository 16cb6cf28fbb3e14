"""The views of metrics over HTTP: those of a control process, or of a server by a mapping of its signals."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections import Counter, defaultdict, deque

from helm_rl.runtime.adapters.http import MOST_BYTES, Endpoint, exchange
from helm_rl.runtime.adapters.prometheus import Sample, reader, samples_of
from helm_rl.runtime.counters import Cause, Counters, StaleTelemetry
from helm_rl.runtime.mapping import Mapping, load_mapping, mapping_names
from helm_rl.runtime.meter import Meter
from helm_rl.watch.frame import HISTORY, Events, Frame, Row, by_cause, count, duration, number, safe, share

_MOST_TIMEOUT_S = 5.0
_MOVED = 0.02  # of alpha, which is news
_STILL_S = 5.0  # without an interval a control process does not work
_MOST_NEWS = 8  # of one look
_SLO_MS = 100.0  # for a meter of which nothing is shown that depends on it
_CONTROL = re.compile(r"^helm_rl_intervals_total[ {]", re.MULTILINE)
_DECISIONS, _DECIDING_S = "helm_rl_decision_seconds_count", "helm_rl_decision_seconds_sum"
_PLAIN = (
    "helm_rl_alpha_asked",
    "helm_rl_alpha_applied",
    "helm_rl_reading_age_seconds",
    "helm_rl_interval_seconds",
    "helm_rl_slo_ms",
    "helm_rl_requests_per_second",
    "helm_rl_p99_ms",
    "helm_rl_slow_ratio",
    "helm_rl_kv_hit_ratio",
    "helm_rl_emb_hit_ratio",
    "helm_rl_intervals_total",
    "helm_rl_intervals_missed_total",
    "helm_rl_decisions_total",
    "helm_rl_bursts_total",
    "helm_rl_targets_unapplied_total",
    "helm_rl_restarts_total",
    _DECISIONS,
    _DECIDING_S,
)
_FALLBACKS, _REFUSED = "helm_rl_fallbacks_total", "helm_rl_readings_refused_total"
_OWN, _RELOADS = "helm_rl_controller_fallbacks_total", "helm_rl_bundle_reloads_total"
_MASKED, _BUNDLE = "helm_rl_masked", "helm_rl_bundle_info"
CONTROL_METRICS = frozenset((*_PLAIN, _FALLBACKS, _REFUSED, _OWN, _RELOADS, _MASKED, _BUNDLE))
"""Samples of a control process that its view reads."""


class MetricsSource:
    """Asks for the metrics at a URL, and shows a control process, or a server that follows one of the mappings.

    Args:
        url: http://HOST:PORT; without a path /metrics is asked for.
        interval_s: between looks.
        mapping: which metric of the server each signal is; None: told by what is there.
        slo_ms: the latency that a server's requests are to stay under; None: not known.

    Raises:
        UserError: the URL or the mapping is none.
    """

    def __init__(self, url: str, interval_s: float, mapping: str | None, slo_ms: float | None) -> None:
        self._url = safe(url)
        self._endpoint = Endpoint.parse(url, "/metrics")
        self._timeout_s = min(max(interval_s, 1.0), _MOST_TIMEOUT_S)
        names = mapping_names() if mapping is None else [mapping]
        self._servers = [_Server(load_mapping(name), interval_s, slo_ms) for name in names]
        self._control = None if mapping is not None else _Control()
        self._events = Events()
        self._view: _Control | _Server | None = None
        self._gone_s: float | None = None  # since when it does not answer
        self._wrong = ""

    def look(self) -> Frame:
        """Ask once."""
        try:
            text = self._text()
            self._view = self._take(text)
        except StaleTelemetry as error:
            return self._nothing(error)
        if self._gone_s is not None:
            self._events.add(f"answers again, after {duration(time.time() - self._gone_s)}")
        self._gone_s, self._wrong = None, ""
        view = self._view
        title = f"{view.what} {self._url}"
        return Frame(title, view.state, view.warn, tuple(view.rows()), self._events.all(), view.whole)

    def _text(self) -> str:
        data = exchange("GET", self._endpoint, None, self._timeout_s, MOST_BYTES)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise StaleTelemetry("the metrics are not UTF-8 text", Cause.MALFORMED) from None

    def _take(self, text: str) -> _Control | _Server:
        """Let the view read the text whose metrics these are; StaleTelemetry if there is none."""
        if self._control is not None and _CONTROL.search(text):
            self._control.take(text, self._events)
            return self._control
        wrong: StaleTelemetry | None = None
        for server in self._servers:
            try:
                server.take(text, self._events)
            except StaleTelemetry as error:
                # What says what is wrong best: of the one that it was, or whose first signal is there at least.
                if wrong is None or server is self._view or error.cause is not Cause.MISSING:
                    wrong = error
                continue
            return server
        if len(self._servers) > 1 and wrong is not None and wrong.cause is Cause.MISSING and self._view is None:
            names = ", ".join(server.name for server in self._servers)
            raise StaleTelemetry(
                f"answers, but neither a control process nor a server that one of the mappings {names} describes; "
                "name another by --mapping",
                Cause.MISSING,
            )
        assert wrong is not None
        raise wrong

    def _nothing(self, error: StaleTelemetry) -> Frame:
        now_s = time.time()
        if self._gone_s is None:
            self._gone_s = now_s
        if str(error) != self._wrong:
            self._wrong = str(error)
            self._events.add(f"{error.cause}: {error}", warn=True)
        state = f"nothing to be had for {duration(now_s - self._gone_s)}: {error}"
        view = self._view
        if view is None:
            return Frame(f"metrics of {self._url}", state, True, (), self._events.all(), whole=False)
        view.gap()
        return Frame(f"{view.what} {self._url}", state, True, tuple(view.rows()), self._events.all(), whole=False)


class _Curves:
    """The last values of several figures."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))

    def add(self, **values: float | None) -> None:
        for name, value in values.items():
            self._values[name].append(math.nan if value is None else value)

    def gap(self) -> None:
        for values in self._values.values():
            values.append(math.nan)

    def of(self, name: str) -> tuple[float, ...]:
        return tuple(self._values[name])


class _Control:
    """A control process, by its own metrics."""

    what = "control process"
    whole = True

    def __init__(self) -> None:
        self.state, self.warn = "", False
        self._now: dict[str, float] = {}
        self._by: dict[str, dict[str, float]] = {}
        self._masked: list[str] = []
        self._bundle: dict[str, str] = {}
        self._curves = _Curves()
        self._interval_at_s = time.monotonic()

    def take(self, text: str, events: Events) -> None:
        found = samples_of(text, CONTROL_METRICS)
        before, before_by, bundle = self._now, self._by, self._bundle
        self._now = {name: found[name][0][1] for name in _PLAIN if name in found and math.isfinite(found[name][0][1])}
        self._by = {
            name: _labelled(found.get(name, []), label)
            for name, label in ((_FALLBACKS, "cause"), (_REFUSED, "cause"), (_OWN, "cause"), (_RELOADS, "result"))
        }
        self._masked = [labels.get("feature", "?") for labels, value in found.get(_MASKED, []) if value > 0][:32]
        self._bundle = found[_BUNDLE][0][0] if found.get(_BUNDLE) else {}
        now = self._now
        self._curves.add(
            applied=now.get("helm_rl_alpha_applied"),
            p99=now.get("helm_rl_p99_ms"),
            kv=now.get("helm_rl_kv_hit_ratio"),
            emb=now.get("helm_rl_emb_hit_ratio"),
            rate=now.get("helm_rl_requests_per_second"),
        )
        held = self._tell(before, before_by, bundle, events) if before else {}
        still_s = self._still_s(before)
        if held:
            self.state, self.warn = f"alpha is left as it is: {by_cause(held)}", True
        elif still_s > max(_STILL_S, 3 * now.get("helm_rl_interval_seconds", 1.0)):
            self.state, self.warn = f"no interval for {duration(still_s)}", True
        elif self._grown(before, "helm_rl_decisions_total") > 0:
            self.state, self.warn = "decides", False
        elif not self.state:  # between two intervals nothing happens, and what was said last holds
            self.state = "answers"

    def _still_s(self, before: dict[str, float]) -> float:
        """Return for how long there has been no interval."""
        if not before or self._grown(before, "helm_rl_intervals_total") != 0:
            self._interval_at_s = time.monotonic()
        return time.monotonic() - self._interval_at_s

    def _grown(self, before: dict[str, float], name: str) -> float:
        return self._now.get(name, 0.0) - before.get(name, 0.0)

    def _tell(
        self, before: dict[str, float], before_by: dict[str, dict[str, float]], bundle: dict[str, str], events: Events
    ) -> dict[str, float]:
        """Note what has happened since the last look; return the intervals that were held, by cause."""
        if self._grown(before, "helm_rl_intervals_total") < 0:
            events.add("the process has started anew", warn=True)
            return {}
        news: list[tuple[str, bool]] = []
        words = {
            "helm_rl_bursts_total": ("bursts found", False),
            "helm_rl_intervals_missed_total": ("intervals missed", True),
            "helm_rl_targets_unapplied_total": ("targets not taken by the server", True),
            "helm_rl_restarts_total": ("times that the server's counters began anew", True),
        }
        for name, (word, warn) in words.items():
            if (grown := self._grown(before, name)) > 0:
                news.append((f"{count(grown)} {word}", warn))
        held = _more(before_by[_FALLBACKS], self._by[_FALLBACKS])
        if held:
            news.append((f"fallbacks: {by_cause(held)}", True))
        for result, grown in sorted(_more(before_by[_RELOADS], self._by[_RELOADS]).items()):
            news.append((f"{count(grown)} bundles loaded anew: {safe(result)[:40]}", result != "ok"))
        if own := _more(before_by[_OWN], self._by[_OWN]):
            news.append((f"fallbacks of the controller itself: {by_cause(own)}", True))
        if self._bundle != bundle:
            news.append((f"another bundle is in charge: {self._bundle_name()}", False))
        old, new = before.get("helm_rl_alpha_asked"), self._now.get("helm_rl_alpha_asked")
        if old is not None and new is not None and abs(new - old) > _MOVED:
            news.append((f"alpha asked for {number(old, 3)} -> {number(new, 3)}", False))
        for text, warn in news[:_MOST_NEWS]:
            events.add(text, warn=warn)
        return {cause: n for cause, n in held.items() if cause != Cause.OUT_OF_RANGE}

    def gap(self) -> None:
        self._curves.gap()

    def _bundle_name(self) -> str:
        sha256, layers = (safe(self._bundle.get(name, "-")) for name in ("policy_sha256", "layers"))
        return f"{sha256[:12]}, {layers[:60]}"

    def rows(self) -> list[Row]:
        now, curves = self._now, self._curves
        slo_ms, p99_ms = now.get("helm_rl_slo_ms"), now.get("helm_rl_p99_ms")
        age_s, interval_s = now.get("helm_rl_reading_age_seconds"), now.get("helm_rl_interval_seconds")
        missed, unapplied = now.get("helm_rl_intervals_missed_total"), now.get("helm_rl_targets_unapplied_total")
        applied, decided = now.get("helm_rl_alpha_applied"), now.get(_DECISIONS)
        took_us = 1e6 * now.get(_DECIDING_S, math.nan) / decided if decided else None
        fallbacks = by_cause(self._by.get(_FALLBACKS, {}))
        reloads = self._by.get(_RELOADS, {})
        bad = reloads.get("bad", 0.0)
        return [
            Row("alpha applied", number(applied, 3), curves.of("applied"), 0.0, 1.0, brief=True),
            Row("alpha asked for", number(now.get("helm_rl_alpha_asked"), 3)),
            _p99_row(p99_ms, slo_ms, curves),
            Row("KV hits", share(now.get("helm_rl_kv_hit_ratio")), curves.of("kv"), 0.0, 1.0, brief=True),
            Row("EMB hits", share(now.get("helm_rl_emb_hit_ratio")), curves.of("emb"), 0.0, 1.0, brief=True),
            Row("requests/s", number(now.get("helm_rl_requests_per_second")), curves.of("rate"), 0.0, brief=True),
            Row("over the SLO", share(now.get("helm_rl_slow_ratio"))),
            Row("intervals", f"{count(now.get('helm_rl_intervals_total'))} of {number(interval_s)} s"),
            Row("missed", count(missed), warn=bool(missed), brief=True),
            Row(
                "decisions",
                f"{count(now.get('helm_rl_decisions_total'))}, {number(took_us, 3)} us in the mean with fallbacks",
            ),
            Row("bursts found", count(now.get("helm_rl_bursts_total"))),
            Row("fallbacks", fallbacks or "none", warn=bool(fallbacks), brief=True),
            Row("readings refused", by_cause(self._by.get(_REFUSED, {})) or "none"),
            Row("of the controller", by_cause(self._by.get(_OWN, {})) or "none"),
            Row("targets not taken", count(unapplied), warn=bool(unapplied)),
            Row("age of counters", "-" if age_s is None else f"{age_s:.3g} s"),
            Row("masked signals", ", ".join(safe(name)[:40] for name in self._masked) or "none"),
            Row("bundle", self._bundle_name()),
            Row("bundles loaded anew", f"{count(reloads.get('ok', 0.0))} good, {count(bad)} bad", warn=bad > 0),
        ]


class _Server:
    """A server, by the mapping that a control process would read it with."""

    def __init__(self, mapping: Mapping, interval_s: float, slo_ms: float | None) -> None:
        self.name = mapping.name
        self.what = f"server ({mapping.name})"
        self.state, self.warn = "", False
        self.whole = False
        self._read = reader(mapping)
        self._interval_s, self._slo_ms = interval_s, slo_ms
        self._meter: Meter | None = None
        self._alpha: float | None = None
        self._counters: Counters | None = None
        self._refused: Counter[str] = Counter()
        self._curves = _Curves()
        self._found: dict[str, float | None] = {}

    def take(self, text: str, events: Events) -> None:
        """Measure what has happened since the last text; StaleTelemetry where it is not that of such a server."""
        counters = self._read(text)
        if self._slo_ms is None:
            # Shed requests count as a hundred SLOs in every figure.
            counters = dataclasses.replace(counters, shed=None, slow=None)
        if self._meter is None:
            self._meter = Meter(self._slo_ms or _SLO_MS, self._interval_s)
        restarts = self._meter.restarts
        cause = self._meter.take(counters, time.monotonic_ns())
        if self._meter.restarts > restarts:
            events.add("its counters began anew", warn=True)
        if cause is not None:
            if cause is not Cause.BASELINE:
                self._refused[cause] += 1
                events.add(f"a reading is refused: {cause}", warn=True)
            first = cause is Cause.BASELINE
            self.state, self.warn = ("answers, the first time" if first else f"not believed: {cause}"), not first
            self._curves.gap()
            return
        self._measure(counters)
        if counters.alpha is not None and self._alpha is not None and abs(counters.alpha - self._alpha) > _MOVED:
            events.add(f"alpha {number(self._alpha, 3)} -> {number(counters.alpha, 3)}")
        self._alpha = counters.alpha
        self.state, self.warn, self.whole = "serves", False, True

    def _measure(self, counters: Counters) -> None:
        assert self._meter is not None
        window = self._meter.window(0.0 if counters.alpha is None else counters.alpha, 0.0, 0.0)
        self._counters = counters
        has_p99 = counters.latency is not None or counters.p99_ms is not None
        knows_slow = self._slo_ms is not None and window.completed > 0
        known_kv = counters.history_tokens_hit is not None and window.history_tokens > 0
        known_emb = counters.rows_hit is not None and window.rows > 0
        self._found = {
            "alpha": counters.alpha,
            "p99": window.p99_ms if has_p99 and math.isfinite(window.p99_ms) else None,
            "kv": window.history_tokens_hit / window.history_tokens if known_kv else None,
            "emb": window.rows_hit / window.rows if known_emb else None,
            "rate": 1e9 * window.arrivals / window.length_ns if window.length_ns > 0 else None,
            "slow": window.slow / window.completed if knows_slow else None,
            "link": None if counters.link_busy_s is None else _ratio(window.link_busy_ns, window.length_ns),
            "compute": None if counters.compute_busy_s is None else _ratio(window.compute_busy_ns, window.length_ns),
        }
        self._curves.add(**self._found)

    def gap(self) -> None:
        self._curves.gap()

    def rows(self) -> list[Row]:
        found, curves, counters = self._found, self._curves, self._counters
        rows = [
            Row("alpha", number(found.get("alpha"), 3), curves.of("alpha"), 0.0, 1.0, brief=True),
            _p99_row(found.get("p99"), self._slo_ms, curves),
            Row("KV hits", share(found.get("kv")), curves.of("kv"), 0.0, 1.0, brief=True),
            Row("EMB hits", share(found.get("emb")), curves.of("emb"), 0.0, 1.0, brief=True),
            Row("requests/s", number(found.get("rate")), curves.of("rate"), 0.0, brief=True),
            Row("link busy", share(found.get("link")), curves.of("link"), 0.0, 1.0),
            Row("compute busy", share(found.get("compute")), curves.of("compute"), 0.0, 1.0),
        ]
        if self._slo_ms is not None:
            rows.append(Row("over the SLO", share(found.get("slow")), curves.of("slow"), 0.0))
        if counters is not None:
            rows.append(Row("queue", f"{count(counters.queue)} of {count(counters.queue_bound)}", brief=True))
            if counters.backlog_pages is not None:
                rows.append(Row("pages to move", f"{count(counters.backlog_pages)} of {count(counters.pages)}"))
        if refused := by_cause({str(cause): float(n) for cause, n in self._refused.items()}):
            rows.append(Row("readings refused", refused, warn=True, brief=True))
        return rows


def _p99_row(p99_ms: float | None, slo_ms: float | None, curves: _Curves) -> Row:
    slow = p99_ms is not None and slo_ms is not None and p99_ms > slo_ms
    of = "" if slo_ms is None else f", SLO {number(slo_ms)}"
    return Row("P99 ms", number(p99_ms) + of, curves.of("p99"), warn=slow, brief=True)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _labelled(samples: list[Sample], label: str) -> dict[str, float]:
    return {labels.get(label, "?"): value for labels, value in samples if math.isfinite(value)}


def _more(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """Return by how much each count has grown."""
    return {name: n - before.get(name, 0.0) for name, n in now.items() if n > before.get(name, 0.0)}
