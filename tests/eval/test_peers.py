"""The peers at work on a small node, beside what a static there does."""

from __future__ import annotations

import numpy as np

from envs.serving.replay import replay
from eval.peers import PEERS, peer_contestants
from helm_rl.workloads.generate import generate
from tests.envs.worlds import QUICK, scenario


def test_every_peer_steers_within_its_bounds() -> None:
    world = scenario(**{**QUICK, "control__alpha_min": 0.2, "control__alpha_max": 0.8, "seconds": 8.0})
    load = generate(world, 1)
    peers = peer_contestants(world)
    assert {peer.key for peer in peers} == PEERS
    assert len(peers) == 7
    moved = {}
    for peer in peers:
        run = replay(world, load, peer.make(), alpha0=0.5)
        assert np.all((run.target >= 0.2) & (run.target <= 0.8))
        moved[peer.key] = float(np.abs(np.diff(run.target)).sum())
    # Six seconds of a small load are too few requests for a climber's first step.
    assert all(distance > 0 for key, distance in moved.items() if key != "hill_climbing"), moved
