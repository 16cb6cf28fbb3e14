"""What is to be watched at a path or a URL."""

from __future__ import annotations

import stat
from pathlib import Path

from helm_rl.errors import UserError
from helm_rl.watch.frame import Source


def source_of(target: str, interval_s: float, mapping: str | None, slo_ms: float | None, wait: bool) -> Source:
    """Return what watches a training run's folder, a control process's log, or the metrics at a URL.

    wait: what is not there yet may come. Raises UserError where nothing could be watched, and says what could.
    """
    if "://" in target:
        from helm_rl.watch.metrics import MetricsSource  # compiles kernels, which a run has no use for

        return MetricsSource(target, interval_s, mapping, slo_ms)
    if mapping is not None or slo_ms is not None:
        raise UserError(f"--mapping and --slo-ms are for a URL, http://HOST:PORT, and {target} is none")
    from helm_rl.watch.log import LogSource
    from helm_rl.watch.run import RunSource

    path = Path(target)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not wait or not path.parent.is_dir():
            raise UserError(
                f"{target}: no such run folder or log, and no URL, which would be http://HOST:PORT"
            ) from None
        # A name with an ending such as .log or .jsonl is that of a log: runs have none.
        return LogSource(path) if path.suffix else RunSource(path)
    if stat.S_ISDIR(mode):
        return RunSource(path)
    if stat.S_ISREG(mode):
        return LogSource(path)
    raise UserError(f"{target} is neither a folder nor a file")
