"""What a control process tells of itself: Prometheus metrics, and a line of JSON for each thing that happens."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from helm_rl.observation import OBSERVATION_NAMES
from helm_rl.runtime.counters import Cause
from helm_rl.runtime.loop import ControlLoop, Status, Step

_DECISION_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)


class Monitor:
    """Follows one loop: `watch` is for its `watch`, `attach` comes before it starts.

    Attributes:
        registry: the metrics, whose names all begin with helm_rl_.
        reloads: of bundles, by their result, ok or bad.
        bundle: labels that tell which one is in charge.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.reloads: Counter[str] = Counter(ok=0, bad=0)
        self.bundle: dict[str, str] = {}
        self._log = logger
        self._loop: ControlLoop | None = None
        self._decision = Histogram(
            "helm_rl_decision_seconds",
            "Observation and decision of an interval, fallbacks included.",
            buckets=_DECISION_BUCKETS_S,
            registry=self.registry,
        )
        self._cause: Cause | None = None
        self._held = self._missed = self._unapplied = 0
        self._masked: tuple[str, ...] | None = None
        self.registry.register(self)

    def attach(self, loop: ControlLoop) -> None:
        """Follow this loop."""
        self._loop = loop

    def say(self, event: str, fields: Mapping[str, Any], level: int = logging.INFO) -> None:
        """Write one line."""
        self._log.log(level, event, extra={"fields": fields})

    def watch(self, step: Step) -> None:
        """Count an interval, and say what has changed with it."""
        assert self._loop is not None
        status = self._loop.status
        self._decision.observe(step.decide_s)
        if step.cause is not None and step.cause is not self._cause:
            self.say(
                "fallback",
                {"cause": step.cause, "detail": step.detail, "alpha": step.applied},
                logging.WARNING,
            )
        if step.cause is None and self._cause is not None:
            self.say("recovered", {"intervals": self._held, "alpha": step.applied})
            self._held = 0
        self._held += step.cause is not None
        self._cause = step.cause
        if status.missed > self._missed:
            self.say("missed", {"intervals": status.missed - self._missed}, logging.WARNING)
            self._missed = status.missed
        if status.unapplied > self._unapplied:
            targets = status.unapplied - self._unapplied
            self.say("unapplied", {"targets": targets, "detail": step.unapplied}, logging.WARNING)
            self._unapplied = status.unapplied
        if status.decisions and status.masked != self._masked:
            self.say("masked", {"features": list(status.masked)})
            self._masked = status.masked

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; Prometheus' client calls it at each scrape."""
        loop = self._loop
        if loop is None:
            return
        status = loop.status
        gauges = {
            "alpha_asked": ("Share of the pool that was last asked for.", status.asked),
            "alpha_applied": ("Share that is applied, as far as is known.", status.applied),
            "reading_age_seconds": ("Age of the newest counters at the last decision.", status.age_s),
            "interval_seconds": ("Between decisions.", loop.interval_s),
            "slo_ms": ("Latency that requests are to stay under.", loop.slo_ms),
            **_measured(status),
        }
        for name, (help, value) in gauges.items():
            yield GaugeMetricFamily(f"helm_rl_{name}", help, value=value)
        counters = {
            "intervals": ("Intervals, with a decision or a fallback.", status.intervals),
            "intervals_missed": ("Intervals in which the loop was too late for either.", status.missed),
            "decisions": ("Targets asked for.", status.decisions),
            "bursts": ("Bursts that the bundle's own detector has found.", status.bursts),
            "targets_unapplied": ("Targets that the server did not take.", status.unapplied),
            "restarts": ("Times that the server's counters began anew.", status.restarts),
        }
        for name, (help, number) in counters.items():
            yield CounterMetricFamily(f"helm_rl_{name}", help, value=number)
        fallbacks = CounterMetricFamily(
            "helm_rl_fallbacks", "Intervals that left alpha as it is, or clipped it.", labels=["cause"]
        )
        refused = CounterMetricFamily("helm_rl_readings_refused", "Readings of counters not taken.", labels=["cause"])
        for cause in Cause:
            fallbacks.add_metric([cause], status.fallbacks[cause])
            refused.add_metric([cause], status.refused[cause])
        yield fallbacks
        yield refused
        own = CounterMetricFamily("helm_rl_controller_fallbacks", "Those of the controller itself.", labels=["cause"])
        for name, number in loop.controller_fallbacks().items():
            own.add_metric([name], number)
        yield own
        masked = GaugeMetricFamily("helm_rl_masked", "Features that the server cannot give.", labels=["feature"])
        for feature in OBSERVATION_NAMES:
            masked.add_metric([feature], feature in status.masked)
        yield masked
        reloads = CounterMetricFamily("helm_rl_bundle_reloads", "Bundles loaded anew.", labels=["result"])
        for result, number in self.reloads.items():
            reloads.add_metric([result], number)
        yield reloads
        info = GaugeMetricFamily("helm_rl_bundle_info", "The bundle in charge.", labels=list(self.bundle))
        info.add_metric(list(self.bundle.values()), 1)
        yield info


def _measured(status: Status) -> dict[str, tuple[str, float]]:
    """Return gauges of the window that was decided upon last: those that the server gives, none after a fallback."""
    window = status.window
    if window is None or window.length_ns <= 0:
        return {}
    found = {"requests_per_second": ("Arrivals, while it lasted.", 1e9 * window.arrivals / window.length_ns)}
    if "p99_over_slo" not in status.masked and math.isfinite(window.p99_ms):
        found["p99_ms"] = ("Latency of the slowest hundredth, as the observation has it.", window.p99_ms)
    if "slo_violation_rate" not in status.masked and window.completed:
        found["slow_ratio"] = ("Share of requests that took longer than the SLO.", window.slow / window.completed)
    if "kv_hit_rate" not in status.masked and window.history_tokens:
        found["kv_hit_ratio"] = ("Share of history tokens.", window.history_tokens_hit / window.history_tokens)
    if "emb_hit_rate" not in status.masked and window.rows:
        found["emb_hit_ratio"] = ("Share of embedding rows.", window.rows_hit / window.rows)
    return found
