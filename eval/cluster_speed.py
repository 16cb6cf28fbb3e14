"""How fast a cluster is simulated: requests/s over its number of nodes, on two threads, and an hour in a process of
its own.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from helm_rl.figures import Figure
from helm_rl.files import atomic_file
from helm_rl.scenario import Scenario, load_scenario

if TYPE_CHECKING:
    from envs.serving.cluster import ClusterSim

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
CLUSTER = 32
RATE = 100.0
"""Requests/s of a node."""
PER_VISIT = 5.0
"""Requests of a visit, so that there are histories to be found."""
WARM_S = 20.0
LEAST_REQUESTS = 100_000
THREADED_NODES = 8
ARITHMETIC_STEPS = 200_000_000
HOUR_S = 3600.0
_STEP_NS = 1_000_000_000

GOAL_GROWTH = 2.0
GOAL_TWO_CORES = 1.7
GOAL_HOUR_S = 600.0
GOAL_HOUR_GB = 3.0


def cluster_load(nodes: int, seconds: float) -> Scenario:
    """Return Steady for `nodes` nodes at RATE each, with visits of PER_VISIT requests."""
    steady = load_scenario("steady").model_dump()
    steady["hardware"]["nodes"] = nodes
    load = {"rate": RATE * nodes, "users": steady["load"]["users"] * nodes, "requests_per_visit": PER_VISIT}
    return Scenario.model_validate(steady | {"seconds": seconds, "warm_s": WARM_S, "load": steady["load"] | load})


def measure_growth(nodes: Sequence[int], repeats: int, advance: Callable[[], None]) -> list[float]:
    """Return the us of one thread's CPU time per request for each number of nodes, the fastest of `repeats`."""
    costs_us = []
    for count in nodes:
        cluster = _cluster(count, max(WARM_S, LEAST_REQUESTS / (RATE * count)))
        best = min(_cost_us(cluster) for _ in range(repeats))
        costs_us.append(best)
        advance()
    return costs_us


def growth_figures(nodes: Sequence[int], costs_us: Sequence[float]) -> dict[str, Figure]:
    """Return the figures of `measure_growth`."""
    cost = dict(zip(nodes, costs_us, strict=True))
    figures = {
        f"env.requests_per_s.cluster{CLUSTER}": Figure(1e6 / cost[CLUSTER], "1/s", "higher"),
        "env.cost_growth_1_to_128": Figure(cost[128] / cost[1], "", "lower", GOAL_GROWTH),
    }
    return figures | {f"env.cost_us.{count}_nodes": Figure(each, "us", "lower") for count, each in cost.items()}


def measure_two_cores(repeats: int, advance: Callable[[], None]) -> tuple[float, float]:
    """Return how many times as much two threads do in a second as one: two clusters against one, and arithmetic.

    The latter says what the machine, and what else runs on it, lets two threads do.
    """
    from eval.timed_kernels import arithmetic

    clusters = [_cluster(THREADED_NODES, WARM_S * 2) for _ in range(2)]

    def serve(count: int) -> float:
        for cluster in clusters[:count]:
            _warm(cluster)
        return _wall_s([functools.partial(_serve_rest, cluster) for cluster in clusters[:count]])

    def compute(count: int) -> float:
        return _wall_s([functools.partial(arithmetic, ARITHMETIC_STEPS)] * count)

    for cluster in clusters:  # compiles, and warms up
        _serve_rest(cluster)
    arithmetic(1)
    times_s: list[list[float]] = []
    for _ in range(repeats):
        times_s.append([serve(1), serve(2), compute(1), compute(2)])
        advance()
    serve_one, serve_two, compute_one, compute_two = (min(column) for column in zip(*times_s, strict=True))
    return 2 * serve_one / serve_two, 2 * compute_one / compute_two


def two_cores_figures(served: float, arithmetic: float) -> dict[str, Figure]:
    """Return the figures of `measure_two_cores`."""
    return {
        "env.two_cores": Figure(served, "", "higher", GOAL_TWO_CORES),
        "env.two_cores.arithmetic": Figure(arithmetic, "", "higher"),
    }


def measure_hour() -> dict[str, Figure]:
    """Generate and serve an hour of 32 nodes in a process of its own; return its seconds and its peak memory."""
    code = "from eval.cluster_speed import _serve_hour; _serve_hour()"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=root)
    found = json.loads(done.stdout)
    return {
        "env.hour_s": Figure(found["seconds"], "s", "lower", GOAL_HOUR_S),
        "env.hour_gb": Figure(found["gb"], "GB", "lower", GOAL_HOUR_GB),
        "env.hour_requests": Figure(found["requests"], "", "higher"),
        "env.hour_generate_s": Figure(found["generate_s"], "s", "lower"),
    }


def plot_growth(nodes: Sequence[int], costs_us: Sequence[float], path: Path) -> None:
    """Draw the cost of a request over the number of nodes."""
    from matplotlib.figure import Figure as Plot

    plot = Plot(figsize=(6, 3.6), layout="constrained")
    axes = plot.subplots()
    axes.plot(nodes, costs_us, "o-", color="#0072b2")
    axes.axhline(GOAL_GROWTH * costs_us[0], color="#7a7a7a", linestyle="--", linewidth=1)
    axes.annotate(
        "twice the cost on one node", (nodes[0], GOAL_GROWTH * costs_us[0]), xytext=(0, 4), textcoords="offset points"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes, 100 requests/s each")
    axes.set_ylabel("us of CPU time per request")
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_file(path) as aside:
        plot.savefig(aside, format=path.suffix[1:].lower(), dpi=150)


def _cluster(nodes: int, seconds: float) -> ClusterSim:
    from envs.serving.cluster import CLUSTER_SAMPLED_SLOTS, ClusterSim
    from helm_rl.workloads.generate import generate

    scenario = cluster_load(nodes, seconds)
    # One node alone would be simulated with a larger sample: that is not what is compared.
    return ClusterSim(scenario, generate(scenario), max_sampled_slots=CLUSTER_SAMPLED_SLOTS)


def _warm(cluster: ClusterSim) -> None:
    cluster.reset()
    cluster.run(max(0, cluster.now_ns))


def _serve_rest(cluster: ClusterSim) -> None:
    while cluster.now_ns < cluster.end_ns:
        cluster.run(cluster.now_ns + _STEP_NS)


def _cost_us(cluster: ClusterSim) -> float:
    """Serve the measured part; return the CPU time per request, Python once a second included."""
    _warm(cluster)
    requests = int((cluster.trace.arrival_ns >= 0).sum())
    begun = time.thread_time()
    _serve_rest(cluster)
    return (time.thread_time() - begun) / requests * 1e6


def _wall_s(works: Sequence[Callable[[], object]]) -> float:
    """Do each on a thread of its own; return the wall time until the last is done."""
    threads = [threading.Thread(target=work) for work in works]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def _serve_hour() -> None:
    """Generate and serve the hour, and print what it took."""
    import resource

    from envs.serving.cluster import ClusterSim
    from helm_rl.workloads.generate import generate

    begun = time.perf_counter()
    scenario = cluster_load(CLUSTER, HOUR_S)
    trace = generate(scenario)
    generated = time.perf_counter()
    cluster = ClusterSim(scenario, trace)
    _serve_rest(cluster)
    cluster.drain()
    found = {
        "seconds": time.perf_counter() - begun,
        "generate_s": generated - begun,
        "gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024e-9,
        "requests": len(trace),
    }
    print(json.dumps(found))
