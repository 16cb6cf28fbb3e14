"""What one run on a cluster costs, part by part, in CPU time of one thread, and the memory that it takes."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from envs.serving.cluster import CLUSTER_SAMPLED_SLOTS, ClusterSim
from envs.serving.node import ServedTrace
from envs.serving.replay import replay_cluster
from eval.command import contestant, fitting_bundle
from eval.comparison import SEEDS_FROM
from eval.results import Row
from eval.routing import stretch
from eval.suite.families import scenario_of
from eval.timed_kernels import LINE_BYTES, arithmetic, chase, serve_placed
from helm_rl.control.protocol import Controller
from helm_rl.control.static import StaticAlpha
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate

ALPHA = 0.5
ARITHMETIC_STEPS = 200_000_000
LOADED_BYTES, LOADS = 64 << 20, 500_000
COMPILED_SHARE = 0.005
MOST_ROUNDS = 10
WAIT_S = 600.0
"""Most that two processes wait for each other."""

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Cost:
    """One run, of which `share` of the load's length was served; CPU seconds, the fastest of some rounds each.

    arrivals_s: drawing the load and making it ready; setup_s: making the nodes; loop_s: serving, all that is compiled;
    python_s: the rest of it, which is Python once per interval for each node; placed_s, alone_s: serving again without
    a router, in the order of arrival, and one node after the other (NaN: not measured); load_ns: of one load from
    LOADED_BYTES that waits for the one before it, timed before and after the run: it tells what else the machine did;
    node_bytes: of a node's state; peak_bytes: of the process.
    """

    nodes: int
    share: float
    requests: int
    arrivals_s: float
    setup_s: float
    loop_s: float
    python_s: float
    placed_s: float
    alone_s: float
    load_ns: float
    node_bytes: int
    peak_bytes: int


class _Timed(ClusterSim):
    """A cluster that takes the time of its compiled loop."""

    loop_s = 0.0

    def reset(self, alpha: float | Sequence[float] = ALPHA, start_ns: int | None = None) -> None:
        if self.loop_s > 0:  # as it is made it is at its start: a run of the suite is not charged for that again
            super().reset(alpha, start_ns)

    def _serve_until(self, until_ns: int) -> None:
        begun = time.thread_time()
        super()._serve_until(until_ns)
        self.loop_s += time.thread_time() - begun


def load_of(nodes: int, share: float) -> Scenario:
    """Return the suite's load of a cluster, all its times so much shorter: as many requests a second for less long."""
    whole = stretch(scenario_of("decoder", "burst"), 1, nodes)
    times = ("start_s", "seconds", "ramp_s")
    phases = [
        phase.model_copy(update={name: share * getattr(phase, name) for name in times}) for phase in whole.load.phase
    ]
    load = whole.load.model_copy(update={"phase": tuple(phases)})
    return whole.model_copy(update={"seconds": share * whole.seconds, "warm_s": share * whole.warm_s, "load": load})


def prepare() -> Row:
    """Load all that is measured, compiled; return nothing.

    Where it has to be compiled first, that takes memory: it should be in another process than a measurement.
    """
    cluster, _ = _run(load_of(2, COMPILED_SHARE))
    serve_without_router(cluster, cluster.node_of.copy())
    arithmetic(1)
    _load_ns()
    return {}


def measure(nodes: int, share: float, parts: bool, least_s: float = 0.0) -> Row:
    """Measure one size in this process, which has measured no other; return the fields of `Cost`.

    parts: also serve without a router; least_s: rounds are repeated until they took so long.
    """
    prepare()
    scenario = load_of(nodes, share)
    load_ns = [_load_ns()]
    cluster, took_s = _run(scenario)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rounds = [took_s]
    while sum(map(sum, rounds)) < least_s and len(rounds) < MOST_ROUNDS:
        rounds.append(_run(scenario)[1])
    load_ns.append(_load_ns())
    arrivals_s, setup_s, loop_s, python_s = (min(column) for column in zip(*rounds, strict=True))
    placed_s = alone_s = float("nan")
    if parts:
        placed = cluster.node_of.copy()
        again = [serve_without_router(cluster, placed) for _ in rounds]
        placed_s, alone_s = (min(column) for column in zip(*again, strict=True))
    found = Cost(
        nodes=nodes,
        share=share,
        requests=len(cluster.trace),
        arrivals_s=arrivals_s,
        setup_s=setup_s,
        loop_s=loop_s,
        python_s=python_s,
        placed_s=placed_s,
        alone_s=alone_s,
        load_ns=float(np.mean(load_ns)),
        node_bytes=cluster.nodes[0].state_bytes,
        peak_bytes=peak_bytes,
    )
    return asdict(found)


def serve_without_router(cluster: ClusterSim, placed: npt.NDArray[np.int16]) -> tuple[float, float]:
    """Serve again what a cluster has served, each request on the node that `placed` [n] has: by arrival, node by node.

    Returns the CPU seconds of both. The nodes do the same work; node by node each is served while the processor's
    caches hold it and no other. They are left as they are at the end, their queues not yet empty.
    """
    if placed.min() < 0:
        raise ValueError("a request has no node: a cluster forgets where its requests were when it is reset")
    by_arrival = np.arange(placed.size)
    by_node = np.argsort(placed, kind="stable")
    took_s = []
    for order in (by_arrival, by_node):
        cluster.reset(ALPHA)
        begun = time.thread_time()
        serve_placed(cluster.state, order, placed)
        took_s.append(time.thread_time() - begun)
    return took_s[0], took_s[1]


def measure_policy(nodes: int, share: float, policy: str) -> Row:
    """Run a static and a shipped policy by turns; return the CPU seconds of each, the fastest of two."""
    prepare()
    scenario = load_of(nodes, share)
    make = contestant(fitting_bundle(Path(policy), scenario), scenario, ()).make  # a cluster's nodes have no layers
    took_s = [[sum(_run(scenario, one)[1]) for one in (_static, make)] for _ in range(3)]
    static_s, policy_s = (min(column) for column in zip(*took_s[1:], strict=True))  # the first compiles
    return {"static_s": static_s, "policy_s": policy_s}


def measure_beside(nodes: int, share: float, rounds: int, start: Any) -> Row:
    """Serve, and compute without memory, at the same time as others do; return the CPU seconds of each, the fastest.

    start: a barrier that all of them wait at.
    """
    prepare()
    scenario = load_of(nodes, share)
    cluster = ClusterSim(scenario, generate(scenario, SEEDS_FROM), ALPHA)

    def serve() -> None:
        cluster.run(cluster.end_ns)

    took_s: dict[str, list[float]] = {"serve_s": [], "arithmetic_s": []}
    for _ in range(rounds):
        for name, work in (("serve_s", serve), ("arithmetic_s", partial(arithmetic, ARITHMETIC_STEPS))):
            cluster.reset(ALPHA)
            start.wait(WAIT_S)
            took_s[name].append(_timed_s(work)[1])
    return {name: min(each) for name, each in took_s.items()}


def _static() -> Controller:
    return StaticAlpha(ALPHA)


def _load_ns() -> float:
    """Return the CPU time of one dependent load from memory that the caches of one core do not hold."""
    lines = LOADED_BYTES // LINE_BYTES
    order = np.random.default_rng(9).permutation(lines) * (LINE_BYTES // 8)
    memory = np.zeros(LOADED_BYTES // 8, np.int64)
    memory[order] = np.roll(order, -1)
    chase(memory, 0, 1)
    return _timed_s(lambda: chase(memory, 0, LOADS))[1] / LOADS * 1e9


def _timed_s(work: Callable[[], _Made]) -> tuple[_Made, float]:
    """Return what a call returns, and the CPU seconds that this thread took for it."""
    begun = time.thread_time()
    made = work()
    return made, time.thread_time() - begun


def _run(
    scenario: Scenario, make: Callable[[], Controller] = _static
) -> tuple[_Timed, tuple[float, float, float, float]]:
    """Draw a load and serve it; return the cluster, and the CPU seconds as `Cost` has them."""

    def arrivals() -> ServedTrace:
        return ServedTrace(scenario, generate(scenario, SEEDS_FROM))

    served, arrivals_s = _timed_s(arrivals)
    slots = CLUSTER_SAMPLED_SLOTS  # also of one node alone, which would have a larger sample
    cluster, setup_s = _timed_s(lambda: _Timed(scenario, served.trace, ALPHA, max_sampled_slots=slots, served=served))
    begun = time.thread_time()
    replay_cluster(scenario, served.trace, make, alpha0=ALPHA, cluster=cluster)
    whole_s = time.thread_time() - begun
    return cluster, (arrivals_s, setup_s, cluster.loop_s, whole_s - cluster.loop_s)
