"""What `make gpu-check` asks of the HSTU, on the host first: the pool on a stand-in for a GPU, the network on a CPU."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_engine.backends import transfer
from cache_engine.backends.device import CupyDevice, kernel_source
from tests.cache_engine.backends.fake_cupy import FakeCupy
from tests.cache_engine.backends.local_device import compile_library
from tests.helm_rl.models import test_hstu_gpu


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine's kernels as a library for the host, beside their text."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ (Debian: apt-get install g++)")
    source = tmp_path_factory.mktemp("source") / "all.cu"
    source.write_text(kernel_source())
    compile_library(compiler, source, source.with_name("kernels.so"))
    return source


@pytest.fixture
def device(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CupyDevice]:
    """A device of a CuPy that is none."""
    fake = FakeCupy(kernels.with_name("kernels.so"), kernels)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    # Loaded lazily from a real CuPy, as soon as hypothesis looks at what modules there are.
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupyx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(transfer, "TRIAL_BYTES", 4096)
    monkeypatch.setattr(test_hstu_gpu, "PLACE", "cpu")
    monkeypatch.setattr(test_hstu_gpu, "EXAMPLES", 6)
    monkeypatch.setattr(test_hstu_gpu, "LEAST", 1)
    with torch.inference_mode():
        yield CupyDevice()


@pytest.mark.parametrize(
    ("test", "arguments"),
    [
        (test_hstu_gpu.test_scores_are_those_of_the_cpu, {}),
        (test_hstu_gpu.test_pages_are_used_where_they_lie, {"dtype": torch.float32}),
        (test_hstu_gpu.test_pages_are_used_where_they_lie, {"dtype": torch.bfloat16}),
        (test_hstu_gpu.test_no_cache_changes_a_score, {}),
    ],
)
def test_rehearse(device: CupyDevice, test: Callable[..., Any], arguments: dict[str, Any]) -> None:
    test(device, **arguments)
