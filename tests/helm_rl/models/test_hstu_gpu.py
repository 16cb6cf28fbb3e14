"""The HSTU on a GPU, its keys and values in the pages of a pool there; needs torch and hypothesis beside CuPy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from cache_engine import HbmPool, KvCache
from cache_engine.backends.device import CupyDevice
from helm_rl.models.hstu import Hstu, HstuShape, Request, page_blocks
from tests.cache_engine.backends.real_device import real_device
from tests.helm_rl.models.test_hstu import SHAPE, Served, random

pytestmark = pytest.mark.gpu
EXAMPLES, LEAST = 15, 20
PLACE = "cuda"


@pytest.fixture
def device() -> Iterator[CupyDevice]:
    """The GPU."""
    made = real_device()
    if not torch.cuda.is_available():
        pytest.fail("there is a GPU, and torch was built without CUDA")
    with torch.inference_mode():
        yield made


def test_scores_are_those_of_the_cpu(device: CupyDevice) -> None:
    history, candidates = random(23, 6), random(5, 6, seed=1)
    scores = []
    for place in ("cpu", PLACE):
        network = Hstu(SHAPE, seed=3).to(place)
        values = torch.cat([history, candidates]).to(place)
        scores.append(network(values, [Request(0, 23, 5, network.new_blocks(6, 4))]).cpu())
    assert torch.allclose(*scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_used_where_they_lie(device: CupyDevice, dtype: torch.dtype) -> None:
    shape = HstuShape(layers=2, d_model=32, heads=2, head_dim=16, features=2, row_values=8, most_tokens=64)
    pool = HbmPool(8, 16 * shape.kv_bytes(dtype), backend="cuda", device=device)
    kv = KvCache(pool, token_bytes=shape.kv_bytes(dtype))
    pages = page_blocks(pool, shape, dtype)
    start = torch.from_dlpack(pool.storage).data_ptr()
    for page, block in enumerate(pages):
        assert block[0][0].data_ptr() - start == page * pool.page_bytes
        assert block[0][0].device.type == PLACE
    network = Hstu(shape, seed=1).to(PLACE, dtype)
    pool.set_target(0.2, 0)
    pool.migrate(8)
    assert kv.extend(7, 40)
    values = random(44, 8).to(PLACE, dtype)
    scores = network(values, [network.request(pages, kv.pages(7).tolist(), 0, 40, 4)])
    again = network(values[36:], [network.request(pages, kv.pages(7).tolist(), 36, 40, 4)])
    assert torch.allclose(scores.float(), again.float(), atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0)
    assert scores.float().std() > 0.01
    assert torch.from_dlpack(pool.page(int(kv.pages(7)[0]))).any()


def test_no_cache_changes_a_score(device: CupyDevice) -> None:
    """As on the CPU, on the streams as they are."""

    class OnGpu(Served):
        place = PLACE

    OnGpu.device = device
    Served.counts.clear()
    run_state_machine_as_test(
        OnGpu,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        ),
    )
    found = Served.counts
    assert min(found[name] for name in ("hits", "moved", "evicted")) >= LEAST, found
