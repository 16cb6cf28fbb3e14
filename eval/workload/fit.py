"""Scenarios fitted to real logs: what each log has, beside what traces of its scenario have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helm_rl.figures import Figure
from helm_rl.workloads.fit import distances, fit
from helm_rl.workloads.readers import read_trace

LOGS = {
    "azure": "azure_llm_2023/AzureLLMInferenceTrace_conv.csv",
    "mooncake": "mooncake/conversation_trace.jsonl",
    "ragpulse": "ragpulse/0_trace.jsonl",
    "twitter": "twitter_cluster52/twitter_cluster52_head.csv",
}
_UNITS = {"rate_per_s": "1/s", "pause_p50_s": "s", "pause_p90_s": "s", "short_pause_p50_s": "s"}


def measure(
    folder: Path, advance: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, Figure], dict[str, tuple[str, ...]]]:
    """Fit the logs that are in `folder`; `advance` is told what comes next.

    Returns the figures, and, by log, what could not be matched; a log that is not there has no entry.
    """
    figures: dict[str, Figure] = {}
    notes: dict[str, tuple[str, ...]] = {}
    for log, place in LOGS.items():
        if not (folder / place).is_file():
            continue
        advance(f"fitting {log}")
        found = fit(read_trace(folder / place), log)
        notes[log] = found.notes
        for statistic, (measured, generated, difference) in distances(found).items():
            name, unit = f"trace.fit.{log}.{statistic}", _UNITS.get(statistic, "")
            figures[name] = Figure(abs(difference), "", "lower")
            figures[f"{name}.measured"] = Figure(measured, unit, "higher")
            figures[f"{name}.generated"] = Figure(generated, unit, "higher")
    return figures, notes
