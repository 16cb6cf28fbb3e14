"""Figures that machines can read: the JSON behind every `helm-rl bench` and `helm-rl eval` table."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from helm_rl.files import write_text


@dataclass(frozen=True)
class Figure:
    """One measured number.

    value: the measurement; goal: what it is held against, None where there is no goal; better: which way is good.
    """

    value: float
    unit: str
    better: Literal["lower", "higher"]
    goal: float | None = None


def write_figures(
    path: Path,
    figures: dict[str, Figure],
    accelerator: str | None = None,
    bundles: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Write `{"figures": ..., "machine": ..., "command": ...}`; values that are not finite become null.

    `accelerator` names the GPU that was measured, if one was; it is part of the machine. `bundles` says which bundle
    each controller in the figures' names is, by the sha256 of its files (hex); it becomes a key of its own.
    Names are lower case and dotted, and stay the same from release to release.
    """
    rows = {name: asdict(figure) for name, figure in sorted(figures.items())}
    for row in rows.values():
        if not math.isfinite(row["value"]):
            row["value"] = None
    hardware = machine() | ({} if accelerator is None else {"accelerator": accelerator})
    document = {"figures": rows, "machine": hardware, "command": command()}
    if bundles:
        document["bundles"] = {name: dict(files) for name, files in sorted(bundles.items())}
    write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def machine() -> dict[str, str | int]:
    """Processor, cores that this process may use, Python: what a timing depends on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def command() -> str:
    """Return the command line that runs now, without the path of the program."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
