"""The whole controller's decision, timed call by call beside its network in torch, onnxruntime and NumPy."""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eval.decision_peers import HELM, PEERS, SHOWN, Call, Contest
from helm_rl.figures import Figure
from helm_rl.memory import resident_bytes

CALLS = 100_000
"""Of each contender."""
ROUND = 250
"""Calls of one contender before the next one's turn."""
REMEMBERED = 1_000_000
"""Decisions over which memory must not grow."""
P50_GOAL_US, P99_GOAL_US = 8.0, 32.0
GROWTH_GOAL_BYTES = 1 << 16
"""One byte kept in sixteen decisions would show."""

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Measured:
    """times_ns: of each contender's calls; left_out: a sentence for each that could not be timed."""

    times_ns: dict[str, Times]
    busy_ns: Times | None
    network_us: float
    multiply_adds: int
    growth_bytes: float
    left_out: list[str]


def measure(advance: Callable[[str], None]) -> Measured:
    """Time all contenders on one core; `advance` is called with the name of each of three parts, before it."""
    import torch

    advance("decisions")
    left_out: list[str] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _one_core() as other:
            contest = Contest()
            calls = contest.calls(left_out)
            contest.check(calls)
            times = interleaved(calls)
            advance("decisions beside a busy core")
            busy = None
            if other is None:
                left_out.append("there is no other core to keep busy: decision.p999_us.busy is left out")
            else:
                with _busy(other):
                    busy = interleaved({HELM: calls[HELM]})[HELM]
            network_us = _network_us(contest)
            advance("memory")
            growth = growth_bytes(calls["feedback"])
    finally:
        torch.set_num_threads(threads)
    return Measured(times, busy, network_us, contest.multiply_adds, growth, left_out)


def figures_of(measured: Measured) -> dict[str, Figure]:
    """Return the figures; those of peers that could not be timed are not among them."""
    figures: dict[str, Figure] = {}
    for name, times in measured.times_ns.items():
        ending = "" if name == HELM else f".{name}"
        goals = (P50_GOAL_US, P99_GOAL_US, None) if name == HELM else (None, None, None)
        for quantile, goal in zip(("p50", "p99", "p999"), goals, strict=True):
            figures[f"decision.{quantile}_us{ending}"] = Figure(_us(times, quantile), "us", "lower", goal)
    if measured.busy_ns is not None:
        figures["decision.p999_us.busy"] = Figure(_us(measured.busy_ns, "p999"), "us", "lower")
    p50 = {name: _us(times, "p50") for name, times in measured.times_ns.items()}
    for peer in ("torch", "onnxruntime", "numpy"):
        best = min((p50[name] for name in PEERS if name.startswith(peer) and name in p50), default=None)
        if best is not None:
            goal = 1.0 if peer == "onnxruntime" else None
            figures[f"decision.ratio_vs_{peer}"] = Figure(best / p50[HELM], "", "higher", goal)
    figures["decision.network_us"] = Figure(measured.network_us, "us", "lower")
    figures["decision.memory_growth_bytes"] = Figure(measured.growth_bytes, "bytes", "lower", GROWTH_GOAL_BYTES)
    return figures


def limits(measured: Measured) -> str:
    """Return a sentence on what a decision's time goes into."""
    p50 = {name: _us(times, "p50") for name, times in measured.times_ns.items()}
    call = p50["empty_call"] - p50["clock"]
    rest = p50["kernel"] - p50["empty_call"] - measured.network_us
    gflop_per_s = 2e-3 * measured.multiply_adds / measured.network_us
    return (
        f"Of the {p50[HELM]:.2f} us of a decision, {p50['clock']:.2f} are the clock, {call:.2f} any compiled call, "
        f"{measured.network_us:.2f} normaliser and network ({measured.multiply_adds:,} multiply-adds, "
        f"so {gflop_per_s:.1f} GFLOP/s, tanh included), {rest:.2f} checks, offset, "
        f"recovery and bounds, {p50[HELM] - p50['kernel']:.2f} Python around the call."
    )


def interleaved(calls: dict[str, Call], seed: int = 1) -> dict[str, Times]:
    """Return the times of CALLS calls of each (ns), timed one by one, in rounds of ROUND in an order drawn anew.

    So what the machine does meanwhile befalls all alike.
    """
    rounds = math.ceil(CALLS / ROUND)
    times: dict[str, Times] = {name: np.zeros(rounds * ROUND, np.int64) for name in calls}
    order, rng = list(calls), random.Random(seed)
    for name in order:  # compiles, and warms up
        _timed(calls[name], np.zeros(ROUND, np.int64))
    for at in range(rounds):
        rng.shuffle(order)
        for name in order:
            _timed(calls[name], times[name][at * ROUND : (at + 1) * ROUND])
    return times


def _timed(call: Call, times: Times) -> None:
    clock = time.perf_counter_ns
    for i in range(times.size):
        shown = i % SHOWN
        begun = clock()
        call(shown)
        times[i] = clock() - begun


def growth_bytes(call: Call) -> float:
    """Return by how much the process's memory grows over REMEMBERED calls; NaN: not known.

    As many calls before them fill what is remembered of blocks that are over, which has its bounds.
    """
    for i in range(REMEMBERED):
        call(i % SHOWN)
    before = resident_bytes()
    for i in range(REMEMBERED):
        call(i % SHOWN)
    return resident_bytes() - before


@contextlib.contextmanager
def _one_core() -> Iterator[int | None]:
    """Keep to one core meanwhile, where the system can; yields another one, None where there is none."""
    if not hasattr(os, "sched_getaffinity"):
        yield None
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    try:
        yield cores[0] if len(cores) > 1 else None
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def _busy(core: int) -> Iterator[None]:
    """Keep a core busy meanwhile with copies of memory; what does it ends with this process, however that ends."""
    work = (
        f"import os; os.sched_setaffinity(0, {{{core}}}); parent, data = os.getppid(), bytearray(1 << 24)\n"
        "while os.getppid() == parent: bytes(data)"
    )
    with subprocess.Popen([sys.executable, "-c", work]) as process:
        try:
            time.sleep(0.3)  # until it is at work
            yield
        finally:
            process.kill()


def _us(times: Times, quantile: str) -> float:
    return float(np.percentile(times, {"p50": 50.0, "p99": 99.0, "p999": 99.9}[quantile]) * 1e-3)


def _network_us(contest: Contest) -> float:
    """Return the time of normaliser and network in a compiled loop, the median of 2,000 means over 50."""
    from eval.timed_kernels import networks

    state, observation, count = contest.helm.base.state, contest.observations[0], 50
    networks(state, observation, 1)
    times = np.zeros(2_000, np.int64)
    _timed(lambda i: networks(state, observation, count), times)
    return float(np.median(times)) / count * 1e-3
