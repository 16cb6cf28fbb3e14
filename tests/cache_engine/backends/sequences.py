"""Sequences of calls for `PublicTwins`, made by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.cache_engine.backends.public_twins import ROWS

ids = st.lists(st.integers(0, ROWS - 1), max_size=40)
table = st.integers(0, 2)
tables = table | st.lists(table, min_size=40, max_size=40)
rows = st.lists(st.integers(0, ROWS - 1), unique=True, max_size=20)

operations = st.one_of(
    st.tuples(st.just("lookup"), ids, tables, st.booleans(), st.booleans()),
    st.tuples(st.just("lookup"), ids, tables),
    st.tuples(st.just("broken_lookup"), ids, table),
    st.tuples(st.just("update"), rows, table, st.integers(0, 255)),
    st.tuples(st.just("refill"), ids, tables, st.booleans()),
    st.tuples(st.just("advance"), st.booleans()),
    st.tuples(st.just("goal"), st.integers(0, 6)),
    st.tuples(st.just("migrate"), st.integers(0, 6), st.sampled_from([None, True, False])),
    st.tuples(st.just("end_lease"), st.integers(0, 9)),
    st.tuples(st.just("stats")),
)
programs = st.lists(operations, min_size=8, max_size=30)
