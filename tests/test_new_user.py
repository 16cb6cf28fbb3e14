"""A new user's path, as the README has it: from a clone to a policy trained and judged on a log of one's own."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEADING = "## Your own log, in five commands"
MOST_CPU_S = 180.0
"""Of all processes together. Nine tenths of it compile: a clone has no kernels that anybody compiled before."""


def section(readme: str) -> str:
    return readme.partition(f"{HEADING}\n")[2].partition("\n## ")[0]


def commands(text: str) -> list[str]:
    """Return the lines of the section that are to be typed."""
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def short(text: str) -> list[str]:
    """Return what the section says to add to the fourth command and to the fifth for a first look."""
    found = re.search(r"add\s+`([^`]*)`\s+to\s+the\s+fourth\s+command,\s+and\s+`([^`]*)`\s+to\s+the\s+fifth", text)
    assert found is not None
    return [found[1], found[2]]


def log(seed: int) -> Iterator[str]:
    """Yield lines of a log of 40 seconds: 40 requests a second, half of them of users who came shortly before."""
    draw = random.Random(seed)
    yield "ts,uid,vid"
    at_s, came = 0.0, [0]
    while at_s < 40.0:
        at_s += draw.expovariate(40.0)
        user = draw.choice(came[-200:]) if draw.random() < 0.5 else draw.randrange(20_000)
        came.append(user)
        for _ in range(draw.randint(1, 3)):
            yield f"{1_700_000_000_000 + int(1e3 * at_s)},{user},{int(draw.paretovariate(1.05)) % 1_000_000}"


def install_from_here(checkout: Path) -> None:
    """Make the .venv of `make install` without a network: the packages are those of the Python that runs this test.

    helm-rl itself is built and installed from the clone, so that nothing of this checkout is seen; as a wheel, for what
    an editable install needs to be built comes over the network. What the network would have brought, and the minutes
    that it takes, are left out.
    """
    subprocess.run([sys.executable, "-m", "venv", ".venv"], cwd=checkout, check=True)
    python = checkout / ".venv" / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    # A folder that is named like this is searched last, and its own .pth files, one of which is ours, are not read.
    (site / "packages_of_the_test.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-index"]
    options = ["--no-deps", "--no-build-isolation", "--ignore-installed"]
    subprocess.run([*pip, *options, "."], cwd=checkout, check=True)
    (checkout / ".venv" / ".installed").touch()


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="no git checkout")
def test_from_a_clone_to_a_policy_judged_on_ones_own_log_in_five_commands(tmp_path: Path) -> None:
    hidden = ("PYTHONPATH", "NUMBA_CACHE_DIR", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    checkout = tmp_path / "helm-rl"
    begun_s, begun_cpu_s = time.monotonic(), cpu_s()
    took: list[str] = []

    def run(command: str, folder: Path) -> str:
        before_s, before_cpu_s = time.monotonic(), cpu_s()
        done = subprocess.run(
            ["sh", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        took.append(
            f"{time.monotonic() - before_s:6.1f} s, of the processors {cpu_s() - before_cpu_s:5.1f} s: {command}"
        )
        return done.stdout

    clone = commands(section((ROOT / "README.md").read_text()))[0]
    run(clone.replace("REPOSITORY", shlex.quote(str(ROOT))), tmp_path)
    text = section((checkout / "README.md").read_text())
    (same, install, convert, train, judge), (less_training, less_judging) = commands(text), short(text)
    assert same == clone
    (checkout / "own.csv").write_text("\n".join(log(seed=1)) + "\n")
    install_from_here(checkout)
    assert "pip install" not in run(install, checkout)  # it finds that all is there
    (checkout / "elsewhere").mkdir()
    ask = "../.venv/bin/python -c 'import helm_rl, train; print(helm_rl.__file__, train.__file__)'"
    where = run(ask, checkout / "elsewhere")
    assert all(Path(file).is_relative_to(checkout) for file in where.split())

    assert "own.toml: scenario own" in run(convert, checkout)
    assert run(f"{train} {less_training}", checkout).endswith("bundle: own-bundle\n")
    judged = run(f"{judge} {less_judging} --json own.json", checkout)

    print(
        "\n".join(
            [*took, f"{time.monotonic() - begun_s:6.1f} s, of the processors {cpu_s() - begun_cpu_s:5.1f} s in all"]
        )
    )
    rows = json.loads((checkout / "own.json").read_text())["figures"]
    figures = {name: each["value"] for name, each in rows.items()}
    p99_ms = figures["default.own.single.policy.p99_ms"]
    assert 0 < p99_ms < 10_000
    assert p99_ms >= 0.9 * figures["default.own.single.hindsight_static.p99_ms"]
    assert "policy" in judged
    config = json.loads((checkout / "own-bundle" / "config.json").read_text())
    assert [each["name"] for each in config["environment"]["scenarios"]] == ["own"]
    assert config["training"]["steps"] == 128
    assert cpu_s() - begun_cpu_s < MOST_CPU_S


def test_the_readme_has_five_commands_and_says_how_to_make_them_short() -> None:
    text = section((ROOT / "README.md").read_text())
    found = commands(text)
    assert len(found) == 5
    assert [re.findall(r"git clone|make|trace convert|train base|eval p99", line) for line in found] == [
        ["git clone"],
        ["make"],
        ["trace convert"],
        ["train base"],
        ["eval p99"],
    ]
    assert all(each.startswith("--") for each in short(text))
