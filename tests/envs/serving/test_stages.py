"""The stages of the loop run alone: all of them, and never past the end of the trace."""

from __future__ import annotations

from envs.serving.node import NodeSim
from envs.serving.stages import stage_seconds
from helm_rl.workloads.generate import generate
from tests.envs.worlds import QUICK, scenario


def test_stages_of_the_whole_trace() -> None:
    small = scenario(seconds=4, warm_s=1, **QUICK)
    made = generate(small)
    node = NodeSim(small, made)
    node.drain()
    served = node.simulated_lookups
    seconds = stage_seconds(node, 10 * len(made))  # asked for more requests than there are
    assert set(seconds) == {"rows", "lookups", "kv"}
    # The first run of each, which compiles it, is no measurement: it made lookups seem to take no time at all.
    assert all(value > 1e-6 for value in seconds.values())
    # The stages make the very lookups that the loop makes: nothing is shed here, and prefixes are the same.
    assert node.simulated_lookups == served
