"""DLPack on the CPU backend, with torch as the other side: memory is shared, never copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cache_engine import EmbeddingCache, HbmPool

torch = pytest.importorskip("torch")


@pytest.fixture
def engine() -> tuple[HbmPool, EmbeddingCache, Any]:
    """A pool with one cache over a table that is a torch tensor."""
    pool = HbmPool(4, 64, ("emb",), min_pages=0)
    table = torch.arange(400, dtype=torch.int32).reshape(100, 4)
    emb = EmbeddingCache(pool, row_bytes=16, tables=[table])
    pool.set_goals({"emb": 4}, 0)
    pool.migrate(4)
    return pool, emb, table


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_ids_and_tables_are_tensors(engine: Any, dtype: Any) -> None:
    _, emb, table = engine
    keys = torch.tensor([5, 0, 7, 0, 5], dtype=dtype)[::2]
    answer = emb.lookup(keys, torch.zeros(3, dtype=dtype))
    assert torch.equal(torch.from_dlpack(answer.rows).view(torch.int32), table[[5, 7, 5]])
    assert emb.invalidate(keys) == 2
    emb.refill(keys)
    assert emb.advance_refill(wait=True) == 0
    assert torch.from_dlpack(emb.lookup(keys).hit).tolist() == [True] * 3


def test_a_table_that_is_a_tensor_is_read_where_it_lies(engine: Any) -> None:
    _, emb, table = engine
    table[9] = -1
    assert (emb.lookup(torch.tensor([9])).rows.view(np.int32) == -1).all()


def test_what_comes_back_is_the_memory_that_torch_sees(engine: Any) -> None:
    pool, emb, _ = engine
    answer = emb.lookup(torch.arange(4))
    for array in (answer.rows, answer.hit, answer.slots, pool.page(1)):
        tensor = torch.from_dlpack(array)
        assert tensor.data_ptr() == array.ctypes.data
    lease = emb.lease(torch.from_dlpack(answer.slots))
    assert pool.state.pins.sum() == 1
    lease.release()
    page = torch.from_dlpack(pool.page(1))
    page[:] = 7
    assert (pool.page(1) == 7).all()


def test_rows_go_into_the_tensor_given(engine: Any) -> None:
    _, emb, table = engine
    out = torch.zeros((2, 16), dtype=torch.uint8)
    assert emb.lookup(torch.tensor([3, 4]), out=out).rows is out
    assert torch.equal(out.view(torch.int32), table[3:5])
    with pytest.raises(ValueError, match=r"uint8 array of shape \(2, 16\)"):
        emb.lookup(torch.tensor([3, 4]), out=out.T)


class OnGpu:
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("never asked for")


def test_memory_of_a_gpu_is_refused_by_a_pool_on_the_host(engine: Any) -> None:
    _, emb, _ = engine
    with pytest.raises(ValueError, match="ids are in a GPU's memory"):
        emb.lookup(OnGpu())
    with pytest.raises(ValueError, match="tables are in a GPU's memory"):
        emb.lookup(torch.tensor([1]), OnGpu())
    with pytest.raises(ValueError, match="out is in a GPU's memory"):
        emb.lookup(torch.tensor([1]), out=OnGpu())
    with pytest.raises(ValueError, match="table 0 is in a GPU's memory"):
        EmbeddingCache(HbmPool(4, 64), row_bytes=16, tables=[OnGpu()])


@pytest.mark.parametrize("wrong", [[1.5], [[1]], [True]])
def test_wrong_tensors_are_refused_as_wrong_arrays_are(engine: Any, wrong: Any) -> None:
    _, emb, _ = engine
    with pytest.raises((TypeError, ValueError), match="ids must be"):
        emb.lookup(torch.tensor(wrong))
    assert emb.stats().requested == 0
