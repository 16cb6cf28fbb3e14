"""Counters out of Prometheus text, by a mapping of signals to metrics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from helm_rl.runtime.counters import MONOTONE, Cause, Counters, Latencies, StaleTelemetry
from helm_rl.runtime.mapping import Mapping, Signal

MOST_LINES = 20_000
_MOST_LINE, _MOST_CHARACTERS = 4_096, 1 << 20
"""Of lines that the mapping names, of characters in one and in all: what the parser reads in a second at the most."""
_ADDED_UP = (*MONOTONE, "queue", "backlog_pages", "pages", "queue_bound")
_BEFORE_NAME_ENDS = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")

Sample = tuple[dict[str, str], float]  # labels and value


def reader(mapping: Mapping) -> Callable[[str], Counters]:
    """Return a function that makes counters of the texts of one server.

    It raises StaleTelemetry: MISSING where a signal of the mapping is not there, MALFORMED where what is there cannot
    be read, or is there twice, or the text breaks off. Other metrics may be what they like.
    """
    scraped = {name: signal for name, signal in mapping.signals.items() if signal.metric is not None}
    constants = {name: signal.value for name, signal in mapping.signals.items() if signal.metric is None}
    metrics = {name: f"{signal.metric}{'_bucket' if name == 'latency' else ''}" for name, signal in scraped.items()}
    wanted = set(metrics.values())
    unseen = {name for name, signal in scraped.items() if signal.optional}

    def read(text: str) -> Counters:
        samples = samples_of(text, wanted)
        values: dict[str, Any] = dict(constants)
        for name, signal in scraped.items():
            chosen = [one for one in samples.get(metrics[name], ()) if signal.labels.items() <= one[0].items()]
            if chosen:
                unseen.discard(name)
                values[name] = _histogram(chosen, signal) if name == "latency" else _value(chosen, name, signal)
            elif name not in unseen:
                labels = f" with {signal.labels}" if signal.labels else ""
                raise StaleTelemetry(f"there is no {metrics[name]}{labels}", Cause.MISSING)
        return Counters(**values)

    return read


def samples_of(text: str, wanted: Collection[str]) -> dict[str, list[Sample]]:
    """Parse the lines of the metrics that are wanted, and no others; StaleTelemetry (MALFORMED) if they cannot be."""
    if text and not text.endswith("\n"):  # nothing else shows that an answer without a length broke off
        raise StaleTelemetry("the metrics break off within a line", Cause.MALFORMED)
    lines, characters = [], 0
    for line in text.split("\n"):
        name = _BEFORE_NAME_ENDS.match(line)
        if name is not None and name[0] in wanted:
            lines.append(line)
            characters += len(line)
            if len(line) > _MOST_LINE or len(lines) > MOST_LINES or characters > _MOST_CHARACTERS:
                raise StaleTelemetry(f"{name[0]}: more, or longer, lines than can be", Cause.MALFORMED)
    found: dict[str, list[Sample]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                found[sample.name].append((sample.labels, float(sample.value)))
    except (ValueError, OverflowError, IndexError) as error:  # IndexError: of lines that end too early
        raise StaleTelemetry(f"the metrics cannot be read: {error}"[:300], Cause.MALFORMED) from None
    for metric, samples in found.items():
        if len({frozenset(labels.items()) for labels, _ in samples}) < len(samples):  # they would be added up
            raise StaleTelemetry(f"there are two of {metric} with the same labels", Cause.MALFORMED)
    return found


def _value(chosen: list[Sample], name: str, signal: Signal) -> float:
    if len(chosen) > 1 and name not in _ADDED_UP:
        raise StaleTelemetry(f"there are {len(chosen)} of {signal.metric}: name one by its labels", Cause.MALFORMED)
    return signal.scale * sum(value for _, value in chosen)


def _histogram(chosen: list[Sample], signal: Signal) -> Latencies:
    """Return what lies in each bucket: the text has what lies in it and all below."""
    below: dict[float, float] = defaultdict(float)
    edges_of: dict[frozenset[tuple[str, str]], set[float]] = defaultdict(set)  # of those that are added up
    for labels, value in chosen:
        try:
            edge = float(labels["le"])
        except (KeyError, ValueError):
            raise StaleTelemetry(f"{signal.metric}_bucket has no edge, le", Cause.MALFORMED) from None
        below[edge] += value
        edges_of[frozenset(labels.items() - {("le", labels["le"])})].add(edge)
    if any(len(edges) < len(below) for edges in edges_of.values()):
        raise StaleTelemetry(
            f"there are {signal.metric}_bucket with different edges: name one by its labels", Cause.MALFORMED
        )
    edges = np.array(sorted(below))
    counts = np.array([below[edge] for edge in edges])
    return Latencies(edges * signal.scale, np.diff(counts, prepend=0.0))
