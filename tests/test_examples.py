"""The examples run, and say what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.envs.worlds import QUICK, scenario

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


@pytest.mark.slow
def test_a_script_in_cleanrls_manner_learns_through_gym_make(tmp_path: Path) -> None:
    """On a small load in which the less alpha is the better; the script is told it by a file, as by anybody."""
    load = tmp_path / "small.toml"
    given = scenario(**QUICK).model_dump(mode="json", exclude_defaults=True)
    load.write_text(toml(given))
    size = ["--num-envs", "2", "--num-steps", "64", "--total-timesteps", "1024", "--episode-s", "8", "--gamma", "0.9"]
    out = run("cleanrl_ppo.py", "--scenario", str(load), *size)
    found = re.findall(r"^steps (\d+), episodic return (-[\d.]+), \d+ steps/s$", out, flags=re.MULTILINE)
    assert [int(steps) for steps, _ in found] == [128 * k for k in range(1, 9)]
    returns = [float(each) for _, each in found]
    assert sum(returns[-2:]) / 2 > sum(returns[:2]) / 2 + 2.0
    source = (EXAMPLES / "cleanrl_ppo.py").read_text()
    assert not re.findall(r"^(?:import|from) (?:envs|helm_rl|train|eval|cache_engine)", source, flags=re.MULTILINE)


def toml(document: dict[str, Any]) -> str:
    """Write numbers, text and one level of tables."""
    plain = [f"{name} = {value!r}" for name, value in document.items() if not isinstance(value, dict)]
    tables = [f"[{name}]\n{toml(value)}" for name, value in document.items() if isinstance(value, dict)]
    return "\n".join(plain + tables)
