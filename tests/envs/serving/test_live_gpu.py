"""The live node on a GPU: every score is that of the whole request from the tables, through resizes."""

from __future__ import annotations

import pytest

# Machines with a GPU may lack them.
pytest.importorskip("gymnasium")
pytest.importorskip("pydantic")

from envs.serving.live import LiveNode
from tests.cache_engine.backends.real_device import real_device
from tests.envs.serving.test_live import returning, serve_through_resizes, small

pytestmark = pytest.mark.gpu


def test_every_score_is_that_of_the_whole_request_from_the_tables() -> None:
    real_device()
    node = LiveNode(
        small(hardware__max_batch=4), returning(300, 10, grow=8), backend="cuda", table_rows=1 << 12, verify=True
    )
    try:
        serve_through_resizes(node)
        assert node.times.prefix.sum() > 0
        assert (node.times.compute_ns > 0).all()
    finally:
        node.close()
