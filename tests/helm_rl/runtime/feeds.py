"""Counters as a server would give them, for tests of what is made of them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from helm_rl import latency
from helm_rl.checkpoint import BoundsSection, BundleConfig, save_bundle
from helm_rl.control.protocol import FloatArray
from helm_rl.metrics import WindowStats
from helm_rl.runtime.counters import Counters, Latencies
from tests.helm_rl import policies

SECOND = 1_000_000_000
EDGES_MS = latency.sketch_edges_ms()


def histogram(*latency_ms: float) -> Latencies:
    """Return the histogram of these latencies in the sketch's own bins."""
    counts = np.zeros(latency.SKETCH_BINS)
    for one in latency_ms:
        latency.count(counts, one)
    return Latencies(EDGES_MS, counts)


def steady(k: float, **changes: Any) -> Counters:
    """Return the counters after k seconds of 100 requests of 20 ms a second, all of which the server can give."""
    at = EDGES_MS.searchsorted(20.0)
    requests = np.zeros(latency.SKETCH_BINS)
    requests[at] = 100.0 * k
    everything: dict[str, Any] = {
        "arrivals": 100.0 * k,
        "returning": 40.0 * k,
        "shed": 0.0,
        "history_tokens": 50_000.0 * k,
        "history_tokens_hit": 30_000.0 * k,
        "rows": 8_000.0 * k,
        "rows_hit": 6_000.0 * k,
        "link_busy_s": 0.25 * k,
        "compute_busy_s": 0.5 * k,
        "clock_s": float(k),
        "latency": Latencies(EDGES_MS, requests),
        "queue": 4.0,
        "queue_bound": 512.0,
        "alpha": 0.5,
        "backlog_pages": 8.0,
        "pages": 256.0,
        "emb_margin_ms": 0.1,
        "kv_margin_ms": 0.2,
        "kv_margin_link_ms": 0.05,
        "revision": 0.0,
    }
    return Counters(**(everything | changes))


def spoilt(counters: Counters, **changes: Any) -> Counters:
    """Return counters with some of them replaced."""
    return dataclasses.replace(counters, **changes)


class FakeClock:
    """A clock that moves only while the loop waits, and then nothing else is `busy`; sets the event after `end_s`."""

    def __init__(self, end_s: float = 1e9) -> None:
        self.time_ns = 5_000 * SECOND
        self.end_ns = self.time_ns + round(end_s * SECOND)
        self.busy: Callable[[], bool] = lambda: False

    def now_ns(self) -> int:
        return self.time_ns

    def wait(self, event: threading.Event, seconds: float) -> bool:
        while self.busy():
            time.sleep(0.0001)
        if self.time_ns + round(seconds * 1e9) > self.end_ns:
            event.set()
        else:
            self.time_ns += max(0, round(seconds * 1e9))
        return event.is_set()


class Recorded:
    """A controller that asks for what it is told to, and notes all that it is shown."""

    def __init__(self, *targets: float | Exception) -> None:
        self.targets = list(targets)
        self.observations: list[FloatArray] = []
        self.alphas: list[float] = []
        self.windows: list[WindowStats] = []
        self.ticks: list[tuple[int, float, int]] = []
        self.resumed: list[float] = []
        self.resets = 0
        self.found_at: set[int] = set()  # ticks at which a burst is found

    def reset(self, seed: int) -> None:
        self.resets += 1

    def resume(self, applied_alpha: float) -> None:
        self.resumed.append(applied_alpha)

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        self.observations.append(observation)
        self.alphas.append(applied_alpha)
        target = self.targets[0] if len(self.targets) == 1 else self.targets.pop(0)
        if isinstance(target, Exception):
            raise target
        return target

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        self.ticks.append((arrivals, p99_ms, now_ns))
        return len(self.ticks) in self.found_at

    def feedback(self, window: WindowStats) -> None:
        self.windows.append(window)


def make_bundle_at(path: Path, interval_s: float, seed: int = 0, overwrite: bool = False) -> BundleConfig:
    """Write a bundle of random weights for this interval, whose alpha may go from .15 to .85."""
    tensors = policies.net_tensors(policies.network(seed))
    return save_bundle(
        path,
        {name: array for name, array in tensors.items() if name.startswith(("normaliser.", "actor."))},
        network=policies.NETWORK,
        observation=policies.OBSERVATION,
        bounds=BoundsSection(alpha_min=0.15, alpha_max=0.85, rate_per_s=0.06, interval_s=(interval_s,)),
        environment=policies.ENVIRONMENT,
        training=policies.training(),
        card="# A card\n",
        overwrite=overwrite,
    )


class Serving:
    """A server that counts 100 requests of 20 ms a second, and applies at once what it is asked for."""

    period_s = 0.01

    def __init__(self) -> None:
        self.begun_s = time.monotonic()
        self.alpha = 0.5
        self.targets: list[tuple[float, int]] = []

    def read(self) -> Counters:
        return steady(time.monotonic() - self.begun_s, alpha=self.alpha)

    def apply(self, alpha: float, revision: int) -> float:
        self.targets.append((alpha, revision))
        self.alpha = alpha
        return alpha
