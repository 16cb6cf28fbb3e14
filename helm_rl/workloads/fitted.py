"""A fitted scenario as a TOML file that says what was measured, and as a table beside what it generates."""

from __future__ import annotations

import json
from typing import Any

from helm_rl.workloads.fit import Fit, distances, label
from helm_rl.workloads.wording import TextTable

_KINDS = {
    "visitors": "Users are visitors: each comes for one visit, of several requests, and is not seen again.",
    "regulars": "Users are regulars: they come again and again, some more often than others.",
    "returners": "Users are returners: all alike, they come again and again, for visits of several requests.",
    "strangers": "Users are strangers: no one comes twice.",
}
# Fields of [load] that are written in any case, and what they are.
_FIELDS = {
    "rate": "requests/s",
    "requests_per_visit": "mean",
    "think_s": "mean seconds between two requests of a visit",
    "think_sigma": "standard deviation of the logarithm of that pause; 0: exponential",
    "history_mean": "tokens of a user's history before the trace",
    "new_tokens_mean": "tokens that a request appends",
    "rate_cv": "the rate varies by factors with this standard deviation over mean,",
    "rate_cv_s": "each for so many seconds in the mean",
}


def table(found: Fit) -> TextTable:
    """Lay out each statistic: measured, generated, relative difference."""
    rows = []
    for name, (measured, generated, difference) in distances(found).items():
        rows.append([label(name, found.measured), f"{measured:,.4g}", f"{generated:,.4g}", f"{difference:+.1%}"])
    return TextTable("measured and generated", ["", "measured", "generated", "difference"], rows)


def toml(found: Fit, source: str) -> str:
    """Return the scenario as the text of a TOML file; source: name of the trace's file."""
    scenario, load = found.scenario, found.scenario.load
    lines = [f"# Fitted to {_comment(source)} by `helm-rl trace fit`: measured there, and of traces of this scenario:"]
    for name, measured, generated, difference in table(found).rows:
        lines.append(f"#   {name}: {measured}, {generated} ({difference})")
    lines += [f"# Not matched: {note}." for note in found.notes]
    lines += [
        "# Chosen, not measured: the SLO, and all of [model] and [hardware].",
        f"name = {_string(scenario.name)}",
        f"slo_ms = {_real(scenario.slo_ms)}",
        f"seconds = {_real(scenario.seconds)}",
        f"warm_s = {_real(scenario.warm_s)}",
        f"seed = {scenario.seed}",
        "",
        "[model]",
        f'profile = "{scenario.model.profile}"',
        "",
        "[hardware]",
        f'profile = "{scenario.hardware.profile}"',
        f'link = "{scenario.hardware.link}"',
        "",
        "[load]",
        f"# {_KINDS[found.kind]}",
    ]
    for name, field in type(load).model_fields.items():
        value = getattr(load, name)
        if value != field.default or (name in _FIELDS and not (name == "history_mean" and load.history_quantiles)):
            lines.append(f"{name} = {_value(value)}" + (f" # {_FIELDS[name]}" if name in _FIELDS else ""))
            if name == "history_quantiles":
                lines.insert(-1, "# tokens of users' histories before the trace: least, percentiles 1 to 99, most")
    return "\n".join(lines) + "\n"


def _string(text: str) -> str:
    """Return a TOML string: JSON's, whose escapes above U+FFFF are no TOML's, and DEL escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    return "[" + ", ".join(map(_real, value)) + "]" if isinstance(value, tuple) else _real(value)


def _real(value: float) -> str:
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e5 else repr(value)


def _comment(text: str) -> str:
    """Keep a file's name on its line: TOML allows no control characters in comments."""
    return "".join(character if character.isprintable() else "?" for character in text)
