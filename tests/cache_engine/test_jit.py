"""The decorators of kernels: what they refuse, what they leave out, when cached code is stale."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from cache_engine import jit
from cache_engine.jit import inner, kernel

REPOSITORY = Path(jit.__file__).resolve().parent.parent


@inner
def _twice(x: float) -> float:
    return 2 * x


@kernel
def _sum_of_twice(values: np.ndarray) -> float:
    total = 0.0
    for i in range(values.size):
        total += _twice(values[i])
    return total


@kernel
def _spin(flags: np.ndarray, limit: int) -> int:
    n = 0
    while flags[0] == 0 and n < limit:
        n += 1
        flags[1] = n & 1
    return n


def test_kernels_call_inner_kernels() -> None:
    assert _sum_of_twice(np.arange(4.0)) == 12.0


def test_a_kernel_that_allocates_is_refused() -> None:
    """Reference counts are left out: an array made in a kernel could never be freed."""

    @kernel
    def allocate(n: int) -> int:
        return int(np.zeros(n).size)

    with pytest.raises(numba.core.errors.NumbaError):
        allocate(3)


def test_a_kernel_releases_the_gil() -> None:
    flags = np.zeros(2, np.int64)
    _spin(flags, 1)
    flags[0] = 0
    thread = threading.Thread(target=_spin, args=(flags, 20_000_000_000))
    thread.start()
    time.sleep(0.02)
    flags[0] = 1
    thread.join(20)
    assert not thread.is_alive(), "the main thread ran while the kernel did"


def test_where_nothing_can_be_cached_kernels_still_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a read-only installation of a user without a home."""

    def nowhere(*_: Any) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("numba.core.dispatcher.FunctionCache", nowhere)

    @kernel
    def add(a: int, b: int) -> int:
        return a + b

    assert add(1, 2) == 3


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_cached_code_that_is_damaged_is_made_anew(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "program.py").write_text(
        "from cache_engine.jit import kernel\n@kernel\ndef add(a, b):\n    return a + b\n"
        "print(add(1, 2), sum(add.stats.cache_hits.values()))\n"
    )

    def run() -> str:
        command = [sys.executable, "-c", "import sys; sys.path[:0] = sys.argv[1:]; import program"]
        done = subprocess.run([*command, str(tmp_path), str(REPOSITORY)], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert [run(), run()] == ["3 0", "3 1"]
    (file,) = (tmp_path / "__pycache__").glob(f"*.{suffix}")
    file.write_bytes(file.read_bytes()[:20])
    assert [run(), run()] == ["3 0", "3 1"]


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    @kernel
    def add(a: int, b: int) -> int:
        return a + b + 0

    monkeypatch.setattr(add._cache._cache_file, "_save_data", full)  # type: ignore[attr-defined]
    assert add(1, 2) == 3


PROGRAM = """
import numpy as np
from cache_engine.hashing import reduce_range
from cache_engine.jit import kernel
import helper
@kernel
def answer(x):
    return helper.step(x)
print(answer(1), sum(answer.stats.cache_hits.values()))
"""


def test_an_edit_of_what_a_kernel_calls_compiles_it_anew(tmp_path: Path) -> None:
    """numba alone looks at the kernel's own file, and would go on running the old code of the others."""
    shutil.copytree(
        REPOSITORY / "cache_engine", tmp_path / "cache_engine", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(step: str) -> str:
        (tmp_path / "helper.py").write_text(
            f"from cache_engine.jit import inner\n@inner\ndef step(x):\n    return {step}\n"
        )
        command = [sys.executable, "-c", "import program"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    assert run("x + 1") == "2 0"
    assert run("x + 1") == "2 1", "the second run takes it from the disk"
    assert run("x + 10") == "11 0"
    engine = tmp_path / "cache_engine" / "stats.py"
    engine.write_text(engine.read_text() + "\n# changed\n")
    assert run("x + 10") == "11 0"
