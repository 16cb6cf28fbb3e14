"""The live node on a GPU: every score is that of the whole request from the tables, through resizes."""

from __future__ import annotations

import time

import pytest

# Machines with a GPU may lack them.
pytest.importorskip("gymnasium")
pytest.importorskip("pydantic")

from cache_engine.backends.device import CudaUnavailableError, CupyDevice
from envs.serving.live import LiveNode
from tests.envs.serving.test_live import returning, small, until

pytestmark = pytest.mark.gpu


def test_every_score_is_that_of_the_whole_request_from_the_tables() -> None:
    try:
        CupyDevice()
    except CudaUnavailableError as e:
        pytest.skip(str(e))
    node = LiveNode(
        small(hardware__max_batch=4), returning(300, 10, grow=8), backend="cuda", table_rows=1 << 12, verify=True
    )
    try:
        node.reset(0.5, 0)
        for alpha in (0.9, 0.1, 0.9, 0.2, 0.8, 0.5):
            node.set_target(alpha)
            time.sleep(0.2)
        until(lambda: node.totals.requests == 300)
        node._shut_down()
        totals = node.totals
        assert totals.scores_verified == 300 * 8
        assert totals.wrong_scores == totals.wrong_bytes == totals.shed == 0
        assert totals.pages_moved > 200
        assert node.times.prefix.sum() > 0
        assert (node.times.compute_ns > 0).all()
    finally:
        node.close()
