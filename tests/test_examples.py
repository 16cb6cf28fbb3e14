"""The examples run, and say what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=EXAMPLES, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_controller_of_ones_own_takes_twenty_lines() -> None:
    code = [line for line in (EXAMPLES / "own_controller.py").read_text().splitlines() if line.strip()]
    assert len(code) <= 20


@pytest.mark.parametrize(("name", "line"), [("evaluate_controller.py", "HotUsers"), ("own_load.py", "alpha 0.5")])
def test_an_example_runs(name: str, line: str) -> None:
    out = run(name)
    found = [float(each) for each in re.findall(rf"^{line}.*P99 +([\d.]+) ms", out, flags=re.MULTILINE)]
    assert found
    assert all(0 < p99_ms < 250 for p99_ms in found)
