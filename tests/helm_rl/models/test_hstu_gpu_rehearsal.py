"""What `make gpu-check` asks of the HSTU, on the host first: the pool on a stand-in for a GPU, the network on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_engine.backends.device import CupyDevice
from tests.cache_engine.backends.fake_cupy import install_fake_cupy
from tests.helm_rl.models import test_hstu_gpu


@pytest.fixture
def device(library: Path, all_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CupyDevice]:
    """A device of a CuPy that is none."""
    install_fake_cupy(monkeypatch, library, all_kernels)
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
