from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import eval

SCRIPT = """
import sys, time
from pathlib import Path

import eval.map.run as run
from eval.executor import Executor
from eval.map.grid import Grid
from eval.map.store import Store


def asleep(grid, setting):
    print("at work", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    run.prepare = asleep
    grid = Grid(("decoder-0.2b",), ("remote-ps",), (0.0,), (1500.0,), (0.5,))
    run.run(grid, 1, Executor(), Store(Path(sys.argv[1]), grid.options()))
"""


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(str(eval.__file__)).parents[1])}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "map")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        process.send_signal(signal.SIGKILL)
        # The output ends when nobody has it any more: neither the worker at work, nor the idle one.
        assert process.communicate(timeout=20)[0] == ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
