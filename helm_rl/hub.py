"""A bundle as a folder in the Hugging Face Hub's style: its files, and a card whose metadata the Hub reads.

The folder is written, not uploaded; it is still a bundle, so what is downloaded again serves as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helm_rl.checkpoint import CARD_FILE, CONFIG_FILE, LAYER_FILES, MAX_JSON_BYTES, POLICY_FILE, Bundle
from helm_rl.errors import UserError
from helm_rl.files import atomic_folder, refuse_existing

ATTRIBUTES_FILE = ".gitattributes"
ATTRIBUTES = "*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
"""Weights are kept as large files there."""
TASK = "reinforcement-learning"

METRICS = {
    "p99_ms": "P99 latency, ms",
    "windowed_p99_ms": "mean P99 latency of 10 s, ms",
    "slo": "share of requests within the SLO",
    "regret": "P99 over that of the best schedule known, less 1",
    "ratio_gap": "distance of alpha to the best one, settled",
    "throughput": "requests served per second",
}
"""Figures of `helm-rl eval p99 --json` that a card tells, and what each is."""
_EVALUATION = "## Evaluation"
_UNCHECKED = (
    "Which bundle was measured there, the file of these figures does not say: that it was this one is unchecked."
)
_POLICY_FIGURE = re.compile(rf"default\.(?P<pattern>.+)\.single\.policy\.(?P<metric>{'|'.join(METRICS)})")


@dataclass(frozen=True)
class Metric:
    """One row of a card. data: the load that was served; kind: its name in METRICS."""

    data: str
    kind: str
    name: str
    value: float


@dataclass(frozen=True)
class Measured:
    """The metrics of one file of figures, the command that wrote it, and what was measured.

    files: the sha256 (hex) of each file of the policy; None where the file of figures does not say.
    """

    command: str
    metrics: list[Metric]
    files: Mapping[str, str] | None


def read_figures(path: Path) -> Measured:
    """Read the policy's figures of a file that `helm-rl eval p99 --policy BUNDLE --json` wrote.

    Raises:
        UserError: The file is missing or too large, is no such file, or has no figure of a policy.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; 'helm-rl eval p99 --policy BUNDLE --json FILE' writes one")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise UserError(f"{path}: {path.stat().st_size} bytes, more than the {MAX_JSON_BYTES} that it could need")
    try:
        document = json.loads(path.read_bytes())
        command, rows = document["command"], document["figures"]
        values = {name: row["value"] for name, row in rows.items()}
        files = document.get("bundles", {}).get("policy")
        if files is not None and not all(isinstance(text, str) for text in files.values()):
            raise TypeError("a hash is text")
        "".join((str(command), *values)).encode("utf-8")  # JSON may hold halves of characters, which no file can
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: not a file of figures, as 'helm-rl eval p99 --json' writes them") from None
    metrics = []
    for name, value in values.items():
        found = _POLICY_FIGURE.fullmatch(name)
        if found is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if -1e300 < value < 1e300:  # NaN is not; a number of more digits than a float's was not measured
            kind = found["metric"]
            metrics.append(Metric(found["pattern"], kind, METRICS[kind], float(value)))
    if not metrics or not isinstance(command, str):
        raise UserError(
            f"{path}: has no figure of a policy; 'helm-rl eval p99 --policy BUNDLE --json FILE' writes them"
        )
    metrics.sort(key=lambda metric: (metric.data, list(METRICS).index(metric.kind)))
    return Measured(command, metrics, files)


def check_measured(figures: Sequence[Measured], bundle: Bundle) -> None:
    """Raise UserError if one of them was measured with other weights, or other layers above them, than the bundle's."""
    ours = bundle.config.files
    for measured in figures:
        theirs = ours if measured.files is None else measured.files
        for name in sorted({*ours, *theirs}, key=lambda name: (name != POLICY_FILE, name)):
            if ours.get(name) != theirs.get(name):
                there, here = (f"{each[name][:12]}..." if name in each else "none" for each in (theirs, ours))
                raise UserError(
                    f"the figures of '{measured.command}' are another bundle's: its {name} had the sha256 {there}, "
                    f"and that of {bundle.path} has {here}; measure this one"
                )


def write_hub_folder(path: Path, bundle: Bundle, figures: Sequence[Measured] = (), overwrite: bool = False) -> None:
    """Write the folder `path`, whole or not at all.

    Raises:
        UserError: `path` exists, and `overwrite` is False or it holds something else; or it is the bundle; or the
            figures are known to be another bundle's.
    """
    check_hub_output(path, bundle.path, overwrite)
    check_measured(figures, bundle)
    text = (bundle.path / CARD_FILE).read_text(encoding="utf-8", errors="replace")
    with atomic_folder(path) as aside:
        for name in (CONFIG_FILE, *bundle.config.files):
            (aside / name).write_bytes((bundle.path / name).read_bytes())
        (aside / ATTRIBUTES_FILE).write_text(ATTRIBUTES)
        (aside / CARD_FILE).write_text(hub_card(text, bundle, path.name, figures), encoding="utf-8")


def check_hub_output(path: Path, source: Path, overwrite: bool) -> None:
    """Raise UserError unless the folder can be written; for before the work as well as after it."""
    refuse_existing(path, overwrite)
    if source.resolve() in (path.resolve(), *path.resolve().parents):
        raise UserError(f"--hub {path}: is the bundle that is read, or lies in it; name another folder")
    ours = {POLICY_FILE, CARD_FILE, CONFIG_FILE, ATTRIBUTES_FILE, *LAYER_FILES}
    if path.exists() and (not path.is_dir() or not {file.name for file in path.iterdir()} <= ours):
        raise UserError(
            f"{path} exists and holds more than a bundle, so --overwrite leaves it alone; name another folder"
        )


def hub_card(text: str, bundle: Bundle, name: str, figures: Sequence[Measured] = ()) -> str:
    """Return the card: metadata in YAML, then the bundle's own text, then which commands measured what.

    text: of the bundle's card; metadata and measurements that it already has are replaced.
    """
    environment = bundle.config.environment.env_id
    metrics = [metric for measured in figures for metric in measured.metrics] + _validation(bundle)
    metadata: dict[str, Any] = {
        "library_name": "helm-rl",
        "pipeline_tag": TASK,
        "tags": [TASK, "helm-rl", environment, "gpu-memory", "recommender-systems"],
    }
    if metrics:
        results = [
            {
                "task": {"type": TASK, "name": "Split of GPU memory between embedding and KV cache"},
                "dataset": {"type": environment, "name": data},
                "metrics": [
                    {"type": metric.kind, "name": metric.name, "value": metric.value, "verified": False}
                    for metric in metrics
                    if metric.data == data
                ],
            }
            for data in dict.fromkeys(metric.data for metric in metrics)
        ]
        metadata["model-index"] = [{"name": name, "results": results}]
    own = re.sub(r"\A---\n.*?\n---\n+", "", text, flags=re.DOTALL).partition(f"\n{_EVALUATION}\n")[0]
    lines = ["---", *_yaml(metadata), "---", "", own.rstrip("\n"), ""]
    if figures:
        lines += [_EVALUATION, ""]
        for measured in figures:
            lines += [f"By `{measured.command}`:", "", "| load | figure | value |", "|---|---|---|"]
            lines += [f"| {metric.data} | {metric.name} | {metric.value:.6g} |" for metric in measured.metrics]
            lines += ["", *([_UNCHECKED, ""] if measured.files is None else [])]
    return "\n".join(lines)


def _validation(bundle: Bundle) -> list[Metric]:
    found = bundle.config.training.validation
    if found.best is None:
        return []
    name = "P99 over that of the best schedule known, less 1, on the arrivals that chose the policy"
    return [Metric(data, "validation_p99_regret", name, regret) for data, regret in found.regrets[found.best].items()]


def _yaml(value: Any, indent: str = "") -> list[str]:
    """Return the lines of a dict or list in YAML's block style; scalars are quoted as in JSON, which YAML reads."""
    lines = []
    rows = value.items() if isinstance(value, dict) else ((None, each) for each in value)
    for key, inner in rows:
        head = f"{indent}- " if key is None else f"{indent}{key}:"
        if not isinstance(inner, dict | list):
            lines.append(f"{head.rstrip()} {_quoted(inner)}")
        elif key is None:
            first, *rest = _yaml(inner, f"{indent}  ")
            lines += [f"{head}{first.lstrip()}", *rest]
        else:
            lines += [head, *_yaml(inner, f"{indent}  ")]
    return lines


def _quoted(value: Any) -> str:
    """Return a scalar; what JSON leaves as it is and YAML forbids is escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)
