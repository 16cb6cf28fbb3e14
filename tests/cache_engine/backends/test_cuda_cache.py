"""Pool and embedding cache on backend "cuda" through their public interface, on a device that lives on the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_engine import refill
from cache_engine.backends import transfer
from tests.cache_engine.backends.host_device import kernel_names
from tests.cache_engine.backends.local_device import World
from tests.cache_engine.backends.public_twins import ROWS, Operation, PublicTwins

ids = st.lists(st.integers(0, ROWS - 1), max_size=40)
table = st.integers(0, 2)
tables = table | st.lists(table, min_size=40, max_size=40)
operations = st.one_of(
    st.tuples(st.just("lookup"), ids, tables, st.booleans(), st.booleans()),
    st.tuples(st.just("lookup"), ids, tables),
    st.tuples(st.just("broken_lookup"), ids, table),
    st.tuples(
        st.just("update"), st.lists(st.integers(0, ROWS - 1), unique=True, max_size=20), table, st.integers(0, 255)
    ),
    st.tuples(st.just("refill"), ids, tables, st.booleans()),
    st.tuples(st.just("advance"), st.booleans()),
    st.tuples(st.just("goal"), st.integers(0, 6)),
    st.tuples(st.just("migrate"), st.integers(0, 6)),
    st.tuples(st.just("end_lease"), st.integers(0, 9)),
    st.tuples(st.just("stats")),
)


@pytest.mark.parametrize("gather", ["zero-copy", "staging"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    program=st.lists(operations, min_size=8, max_size=30),
    row_bytes=st.sampled_from([16, 12, 7]),
    max_pages=st.integers(2, 6),
    order=st.sampled_from(["forward", "reverse", "random"]),
    seed=st.integers(0, 99),
)
def test_any_sequence_of_calls_leaves_both_backends_the_same(
    library: Path,
    all_kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
    gather: str,
    program: list[Operation],
    row_bytes: int,
    max_pages: int,
    order: str,
    seed: int,
) -> None:
    with monkeypatch.context() as patch:
        # Copies of five rows, so that a batch has many.
        for module in (refill, transfer):
            patch.setattr(module, "CHUNK_BYTES", 5 * row_bytes)
        world = World(library, kernel_names(all_kernels), order, seed)
        twins = PublicTwins(world.device(), row_bytes=row_bytes, gather=gather, max_pages=max_pages)
        twins.goal(6)
        twins.migrate(6)
        for operation in program:
            if gather == "zero-copy" and operation[0] == "broken_lookup":
                continue  # kernels read memory, which does not fail
            twins.apply(operation)
            twins.check()
        twins.close()
        assert not world.mapped
        world.check()
