"""The kernels through NVIDIA's compiler: no errors, no warnings, no spills."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cache_engine.backends.device import kernel_source
from tests.cache_engine.backends.host_device import kernel_names

# 65,536 registers of a multiprocessor for its 2,048 threads, twice: below this, half of them fit at least.
MOST_REGISTERS = 64


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_every_kernel_compiles_without_spills(architecture: str, tmp_path: Path, all_kernels: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc (part of NVIDIA's CUDA toolkit)")
    cubin = tmp_path / "kernels.cubin"
    command = [nvcc, "-std=c++17", f"-arch={architecture}", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings"]
    done = subprocess.run([*command, "-o", cubin, all_kernels], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert cubin.read_bytes()[:4] == b"\x7fELF"
    told = re.findall(
        r"Compiling entry function '(\w+)'.*?\n(?:.*?Function properties.*?\n)?"
        r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n.*?Used (\d+) registers",
        done.stdout + done.stderr,
    )
    assert sorted(name for name, *_ in told) == sorted(kernel_names(all_kernels))
    for name, *figures in told:
        stack, stores, loads, registers = map(int, figures)
        assert (stack, stores, loads) == (0, 0, 0), name
        assert registers <= MOST_REGISTERS, name


def test_the_source_includes_nothing() -> None:
    assert "#include" not in kernel_source()
