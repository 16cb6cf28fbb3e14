"""How fast a KuaiRand log becomes a trace, and in how much memory, beside polars' bare read of the same file.

The file is made here, with the columns and the shape of the real one: rows sorted by user, then time; about 5 rows a
request; .7 % of them repeats. Each measurement runs in a process of its own, on one core.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from helm_rl.errors import UserError
from helm_rl.figures import Figure

ROWS = 20_000_000
GOAL_ROWS_PER_S = 1e6
GOAL_RATIO = 2.0
GOAL_GIB = 1.5

_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
_START_MS = 1_649_347_200_000  # 2022-04-08, Beijing
_DAYS = 14
_ROWS_AT_A_TIME = 1 << 20
_REPEATS = 0.007
_BYTES_PER_ROW = 150  # of disk, at most: 90 of the log, and the sorted runs and the trace that it becomes

# Run in a process of its own: argv has what to run, the files, and how often.
_WORKER = """
import json, os, resource, sys, time
what, source, target = sys.argv[1:4]
core = max(os.sched_getaffinity(0))
os.sched_setaffinity(0, {core})
os.environ["POLARS_MAX_THREADS"] = "1"
if what == "polars":
    import polars
    def work(path):
        return polars.read_csv(path).height
else:
    from pathlib import Path
    from helm_rl.workloads.convert import write_trace
    from helm_rl.workloads.readers import ReadOptions
    def work(path):
        return write_trace((Path(path),), "kuairand", ReadOptions(), Path(target))[1]
work(sys.argv[4])  # compiles, and loads what is loaded late
begun = time.perf_counter(), time.process_time()
count = work(source)
seconds, cpu_s = time.perf_counter() - begun[0], time.process_time() - begun[1]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"count": count, "seconds": seconds, "cpu_s": cpu_s, "peak_bytes": peak}))
"""


def measure(
    rows: int = ROWS, folder: Path | None = None, advance: Callable[[str], None] = lambda _: None
) -> dict[str, Figure]:
    """Make a log of `rows` rows in a temporary folder below `folder`, and convert it; `advance` is told what comes.

    Raises UserError if the folder has not the room, or a measurement fails.
    """
    within = folder or Path(tempfile.gettempdir())
    needed, free = rows * _BYTES_PER_ROW, shutil.disk_usage(within).free
    if needed > free:
        raise UserError(
            f"a log of {rows:,} rows and its trace take {needed / 2**30:,.1f} GiB in {within}, "
            f"and {free / 2**30:,.1f} GiB are free there; measure fewer --rows, or set TMPDIR to another folder"
        )
    with tempfile.TemporaryDirectory(prefix="helm-rl-bench-", dir=folder) as place:
        source, small = Path(place) / "log_standard.csv", Path(place) / "small.csv"
        advance(f"making a log of {rows:,} rows")
        write_log(source, rows)
        write_log(small, min(rows, 50_000))
        advance("converting it")
        ours = _run("convert", source, Path(place) / "trace.parquet", small)
        advance("reading it with polars")
        theirs = _run("polars", source, Path(place) / "none", small)
    seconds, other_s = float(ours["seconds"]), float(theirs["seconds"])
    return {
        "trace.rows_per_s.kuairand": Figure(rows / seconds, "rows/s", "higher", GOAL_ROWS_PER_S),
        "trace.ratio_vs_polars": Figure(seconds / other_s, "", "lower", GOAL_RATIO),
        "trace.peak_gib.kuairand": Figure(float(ours["peak_bytes"]) / 2**30, "GiB", "lower", GOAL_GIB),
        "trace.rows_per_s.kuairand.polars": Figure(rows / other_s, "rows/s", "higher"),
        "trace.peak_gib.kuairand.polars": Figure(float(theirs["peak_bytes"]) / 2**30, "GiB", "lower"),
        "trace.cpu_s_per_million.kuairand": Figure(float(ours["cpu_s"]) / rows * 1e6, "s", "lower"),
        "trace.cpu_s_per_million.kuairand.polars": Figure(float(theirs["cpu_s"]) / rows * 1e6, "s", "lower"),
    }


def write_log(path: Path, rows: int, seed: int = 1) -> None:
    """Write `rows` rows in KuaiRand's 19 columns: rows / 12,000 users, items by a Zipf law of exponent 1.05."""
    import pyarrow as pa
    from pyarrow import csv

    rng = np.random.default_rng(seed)
    users = max(10, rows // 12_000)
    names = _HEADER.split(",")
    options = csv.WriteOptions(include_header=False, quoting_style="none")
    with path.open("wb") as file:
        file.write((_HEADER + "\n").encode())
        for first in range(0, rows, _ROWS_AT_A_TIME):
            n = min(_ROWS_AT_A_TIME, rows - first)
            columns = _columns(rng, first, n, rows, users)
            csv.write_csv(pa.table([columns[name] for name in names], names=names), file, options)


def _columns(rng: np.random.Generator, first: int, n: int, rows: int, users: int) -> dict[str, np.ndarray]:
    """Return n rows from row `first` on: user by user, each one's rows in order of time."""
    per_user = -(-rows // users)
    user = (np.arange(first, first + n) // per_user).astype(np.int64)
    # A request every so often, with 5 rows in the mean; its place in the user's own sequence gives the time.
    within = np.arange(first, first + n) % per_user
    opens = rng.random(n) < 0.2
    span_ms = _DAYS * 86_400_000
    at = within / per_user * span_ms
    time_ms = _START_MS + at.astype(np.int64) + rng.integers(0, 3_600_000, size=n)
    start = np.maximum.accumulate(np.where(opens | (within == 0), np.arange(n), 0))
    time_ms = time_ms[start]
    # A Zipf law over 32M items by inverting its integral, from rank 200 on: no video is a twentieth of all rows.
    low, high, power = 200.0, 32_000_200.0, -0.05
    video = ((low**power + rng.random(n) * (high**power - low**power)) ** (1 / power) - low).astype(np.int64)
    repeat = np.flatnonzero(rng.random(n) < _REPEATS)
    repeat = repeat[(repeat > 0) & (start[repeat] == start[repeat - 1])]
    video[repeat] = video[repeat - 1]
    flag = {name: (rng.random(n) < share).astype(np.int8) for name, share in (("is_click", 0.38), ("is_like", 0.02))}
    rare = (rng.random(n) < 0.003).astype(np.int8)
    date = 20220408 + (time_ms - _START_MS) // 86_400_000
    return {
        "user_id": user,
        "video_id": video,
        "date": date,
        "hourmin": (time_ms - _START_MS) // 3_600_000 % 24 * 100,
        "time_ms": time_ms,
        **flag,
        "is_follow": rare,
        "is_comment": rare,
        "is_forward": rare,
        "is_hate": np.zeros(n, np.int8),
        "long_view": flag["is_click"],
        "play_time_ms": rng.integers(0, 60_000, size=n),
        "duration_ms": rng.integers(5_000, 300_000, size=n),
        "profile_stay_time": np.zeros(n, np.int8),
        "comment_stay_time": np.zeros(n, np.int8),
        "is_profile_enter": rare,
        "is_rand": np.zeros(n, np.int8),
        "tab": rng.integers(0, 15, size=n),
    }


def _run(what: str, source: Path, target: Path, small: Path) -> dict[str, float]:
    command = [sys.executable, "-c", _WORKER, what, str(source), str(target), str(small)]
    environment = os.environ | {"POLARS_MAX_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1:] or ["no word of it"]
        raise UserError(f"the measurement of {what} failed: {last[0]}")
    found: dict[str, float] = json.loads(result.stdout)
    return found
